"""Properties of measured costs of copies and chunks."""

import types

import pytest

from caatnet.inference.decoder import Capacity
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.measured import MeasuredCosts
from caatnet.serving.engine.simulator import CopyTimes, Simulator


def test_copy_times_are_fitted_by_calls_and_pages():
  costs = MeasuredCosts()
  assert costs.copy_s("out", 3, 9) == 0
  for num_runs, num_pages in ((1, 1), (1, 8), (3, 4), (2, 16)):
    seconds = 5e-3 * num_runs + 1e-3 * num_pages
    costs.add_copy("out", num_runs, num_pages, seconds)
    costs.add_copy("in", num_runs, num_pages, 1.0)
  assert costs.copy_s("out", 3, 9) == pytest.approx(24e-3)
  alike = MeasuredCosts()
  alike.add_copy("in", 1, 4, 8e-3)
  alike.add_copy("in", 2, 8, 2e-3)  # faster, although it copies more pages
  assert alike.copy_s("in", 1, 6) > 0


def test_cost_of_a_chunk_excludes_the_cost_of_the_step():
  costs = MeasuredCosts()
  assert costs.prefill_s(0, 100) == 0
  for _ in range(3):
    costs.add_step(10e-3, 0)
    costs.add_step(10e-3 + 64 * 2e-4, 64)
  assert costs.prefill_s(0, 100) == pytest.approx(100 * 2e-4)


COPIES = CopyTimes(1000, 2, 1e-3, 1e6, 2e6, 1e7)


class Times:
  """Steps take 1 s, 1 ms per decode and 0.5 s per token of a chunk."""

  def step_s(self, contexts, chunks):
    return 1 + len(contexts) / 1000 + sum(n for _, n in chunks) / 2


class Measured:
  """Executor that measures the steps and copies of a simulator."""

  def __init__(self, num_pages, paged=True, states=()):
    self._simulator = Simulator(Times(), COPIES)
    self.steps, self._last_s = [], 0
    self.now, self.copy = self._simulator.now, self._simulator.copy
    self.costs = MeasuredCosts()
    self.host = self.host_states = types.SimpleNamespace(num_pages=num_pages)
    self.decoder = types.SimpleNamespace(
      capacity=Capacity(batch=4, context=24, page_size=4, chunk=16), cache=(),
      cache_shape=types.SimpleNamespace(
        num_pages=13, paged=paged, states=states
      ),
    )

  def submit(self, step):
    self.steps.append(step)
    self._simulator.submit(step)

  def wait(self, until_s):
    events = self._simulator.wait(until_s)
    for event in events:
      if event.step is not None:
        read = sum(chunk.length for chunk in event.step.chunks)
        self.costs.add_step(event.time_s - self._last_s, read)
      self._last_s = event.time_s
    return events


@pytest.mark.parametrize(
  ("num_pages", "states"), [(4, ()), (20, ()), (20, ("state",))]
)
def test_calibration_recovers_the_costs_of_an_executor(num_pages, states):
  """The simulator copies a state in the time of a run of one page."""
  executor = Measured(num_pages, states=states)
  calibrate(executor)
  for kind in ("in", "out"):
    assert executor.costs.copy_s(kind, 3, 9) == pytest.approx(
      COPIES.seconds(kind, 3, 9)
    )
  assert executor.costs.prefill_s(0, 10) == pytest.approx(5, rel=1e-3)
  # Without a chunk, with a quarter of the longest and with the longest one,
  # and decodes in the middle of the context.
  assert {
    (len(step.decodes), *(chunk.length for chunk in step.chunks))
    for step in executor.steps
  } == {(4,), (3, 4), (3, 16)}
  assert {p for step in executor.steps for p in step.positions} == {12}
  assert {p for step in executor.steps for p in step.tables.ravel()} == set(
    range(13)
  )


def test_calibration_measures_copies_of_states():
  executor = Measured(2, paged=False, states=("state",))
  calibrate(executor)
  for kind in ("in", "out"):
    assert executor.costs.copy_s(kind, 1, 1) == pytest.approx(
      COPIES.seconds(kind, 1, 1)
    )
  # Without room on the host, nothing is copied.
  executor = Measured(0)
  calibrate(executor)
  assert executor.costs.copy_s("out", 1, 1) == 0


def test_copies_of_which_runs_would_save_time_are_timed_by_their_pages():
  costs = MeasuredCosts()
  for num_runs, num_pages, seconds in ((1, 1, 10e-3), (4, 2, 1e-3)):
    costs.add_copy("in", num_runs, num_pages, seconds)
  assert costs.copy_s("in", 7, 6) == pytest.approx(6 * 11e-3 / 3)


@pytest.mark.parametrize("num_read", [0, 64])
def test_only_recent_steps_and_copies_are_averaged(num_read):
  """The last 64 of each kind; others were measured under another load."""
  costs = MeasuredCosts()
  for seconds in (100.0, 1.0):
    for _ in range(64):
      costs.add_step(seconds if num_read else 3 - seconds, num_read)
      costs.add_copy("out", 2, 3, seconds)
      costs.add_copy("out", 1, 3, seconds)
  if num_read:
    costs.add_step(0.5, 0)
    assert costs.prefill_s(0, 128) == pytest.approx(1.0)
  else:
    costs.add_step(4.0, 10)
    assert costs.prefill_s(0, 5) == pytest.approx(1.0)
  assert costs.copy_s("out", 1, 3) == pytest.approx(1.0)
