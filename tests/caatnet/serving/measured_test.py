"""Properties of measured costs of copies and chunks."""

import pytest

from caatnet.serving.engine.measured import MeasuredCosts


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
