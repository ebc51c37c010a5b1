"""Properties of prefetching: equal batches, positions and errors."""

import threading
import types

import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.train.prefetch import PrefetchIterator
from configs.graphs import tiny
from tests.caatnet.train import linear_model as toy


class Numbers:
  """Iterator over batches 0, 1, 2, ... that records the drawing threads."""

  def __init__(self):
    self.next, self.drawn, self.threads = 0, 0, set()

  def __next__(self):
    self.threads.add(threading.get_ident())
    if self.next == 9:
      raise ValueError("no batch 9")
    self.next, self.drawn = self.next + 1, self.drawn + 1
    return {"x": np.full((4, 2), self.next - 1)}

  def get_state(self):
    return {"next": self.next}

  def set_state(self, state):
    self.next = state["next"]


@pytest.fixture(scope="module")
def layout():
  config = tiny.get_config("data_parallel,test")
  return experiments.build(config, {}).program.layout


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_and_positions_do_not_depend_on_prefetching(layout, ahead):
  numbers = Numbers()
  batches = PrefetchIterator(layout, numbers, ahead)
  assert batches.get_state() == {"next": 0}
  for number in range(5):
    assert int(next(batches)["x"][0, 0, 0, 0]) == number
    # The position follows the batches taken, not the batches drawn.
    assert batches.get_state() == {"next": number + 1}
  batches.set_state({"next": 2})
  assert numbers.drawn == 5 + ahead
  assert batches.get_state() == {"next": 2}
  assert [int(next(batches)["x"][0, 0, 0, 0]) for _ in range(3)] == [2, 3, 4]
  assert batches.get_state() == {"next": 5}
  batches.close()
  if ahead:
    assert threading.get_ident() not in numbers.threads
    assert len(numbers.threads) == 1
    assert not numbers.threads & {t.ident for t in threading.enumerate()}


@pytest.mark.parametrize("ahead", [0, 2])
def test_error_is_raised_with_its_batch(layout, ahead):
  batches = PrefetchIterator(layout, Numbers(), ahead)
  for _ in range(9):
    next(batches)
  with pytest.raises(ValueError, match="no batch 9"):
    next(batches)
  batches.close()


def test_prefetching_counts_waiting_and_working(monkeypatch):
  """On a clock that advances by one second per reading."""
  ticks = iter(range(100))
  clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
  monkeypatch.setattr("caatnet.train.prefetch.time", clock)
  layout = toy.make().program.layout

  class Zeros:
    def __next__(self):
      return {"x": np.zeros((8, 2), "f4")}

    def get_state(self):
      return None

  batches = PrefetchIterator(layout, Zeros())
  assert iter(batches) is batches
  for number in (1, 2):
    next(batches)
    # Readings: start of waiting, start and end of drawing, end of waiting.
    assert (batches.waited_s, batches.worked_s) == (3.0 * number, number)
  batches.close()
