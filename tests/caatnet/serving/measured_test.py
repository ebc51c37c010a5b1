"""What is measured is what a scheduler is told."""

import time

import pytest

from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.serving.calibration import calibrate
from caatnet.serving.device import DecoderExecutor, Drawn
from caatnet.serving.engine import Engine
from caatnet.serving.host import Host
from caatnet.serving.measured import MeasuredCosts
from caatnet.serving.pages import Pages
from caatnet.serving.policies import registry
from caatnet.serving.requests import Request
from caatnet.serving.scheduler import Limits, Scheduler
from tests.caatnet.serving.device_test import NUM_PAGES, PAGE_SIZE, subject


def test_times_of_copies_are_told_apart_by_calls_and_pages():
  costs = MeasuredCosts()
  assert costs.copy_s("out", 3, 9) == 0
  for num_runs, num_pages in ((1, 1), (1, 8), (3, 4), (2, 16)):
    seconds = 5e-3 * num_runs + 1e-3 * num_pages
    costs.add_copy("out", num_runs, num_pages, seconds)
    costs.add_copy("in", num_runs, num_pages, 1.0)
  assert costs.copy_s("out", 3, 9) == pytest.approx(24e-3)
  alike = MeasuredCosts()
  alike.add_copy("in", 1, 4, 8e-3)
  alike.add_copy("in", 2, 8, 2e-3)  # faster, though there was more to copy
  assert alike.copy_s("in", 1, 6) > 0


def test_a_chunk_costs_what_steps_without_one_do_not():
  costs = MeasuredCosts()
  assert costs.prefill_s(0, 100) == 0
  for _ in range(3):
    costs.add_step(10e-3, 0)
    costs.add_step(10e-3 + 64 * 2e-4, 64)
  assert costs.prefill_s(0, 100) == pytest.approx(100 * 2e-4)


class Slow(DecoderExecutor):
  """Either its copies or its chunks take a tenth of a second more."""

  def __init__(self, decoder, what):
    super().__init__(decoder, 20)
    self._what = what

  def _receive(self, step, *args):
    time.sleep(0.1 * (self._what == "chunks" and bool(step.chunks)))
    return super()._receive(step, *args)

  def copy(self, copy):
    time.sleep(0.1 * (self._what == "copies"))
    super().copy(copy)


@pytest.mark.parametrize("slow", ["copies", "chunks"])
def test_the_first_choice_is_made_by_what_was_measured(slow):
  # One of its own: others have left NaN in theirs.
  decoder, _ = subject.__wrapped__(1.0, 1, 1)
  executor = Slow(decoder, slow)
  calibrate(executor)
  pages = Pages(NUM_PAGES, PAGE_SIZE)
  scheduler = Scheduler(
    Limits(slots=1, preempt="cost"), registry.make("strict_priority", pages),
    pages, Host(20, PAGE_SIZE, reserve=False), executor.costs,
  )
  engine = Engine(scheduler, executor)
  for number, priority in enumerate((1.0, 0.0)):
    drawing = Drawing((1, 2, 3, 4, 5), Stops(4))
    scheduler.add(Request(
      number, drawing.prompt, 4, priority=priority, payload=Drawn(drawing)
    ))
    engine.turn()  # the second one takes the first one's place
  (decision,) = scheduler.counts.decisions
  assert decision.able
  assert decision.swapped == (slow == "chunks")
  executor.close()
