"""Step times of many orders at once, and plans compared with brute force."""

import numpy as np
import pytest

from caatnet.benchmarks.planner import planner, planner_regret
from parallel.plans.hardware import link_matrix
from parallel.plans.planner import plan
from parallel.plans.planner.latency import EXECUTIONS, TimingAssumptions
from parallel.plans.planner.message_costs import Grid
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.planner.steps import all_orders, steps_s
from parallel.plans.workload import TrainingStep, Transformer

MODEL = Transformer(1024, 1024, 8, 8, 8, 2816)


def _problem(batch_size, links, execution):
  step = TrainingStep(MODEL, batch_size, 512)
  return Problem(step, links, TimingAssumptions(execution=execution))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("c", [
  Configuration(3, 2, 1, 4), Configuration(1, 2, 3, 4),
  Configuration(3, 1, 2, 6, "interleaved_1f1b", 2, route="one_shot"),
  Configuration(2, 3, 1, 2, "zb_h1", scheme="zero1"),
  Configuration(1, 2, 3, 4, remat="full"),
  Configuration(3, 2, 1, 4, remat="full"),
], ids=str)
def test_batched_predictions_equal_single_ones(c, execution):
  """Includes rotated rings: any order, not only the enumerated ones."""
  links = link_matrix.slow_down_devices(
    planner.draw_links(1, 6), {1: 1.3, 4: 3.0}
  )
  problem = _problem(24, links, execution)
  rng = np.random.default_rng(0)
  orders = np.array([rng.permutation(6).reshape(c.grid) for _ in range(12)])
  inputs = problem.step, problem.links, problem.timing
  found = steps_s(c, *inputs, orders)
  assert found == pytest.approx(
    [problem.predict(c, order).total for order in orders]
  )
  turned = np.roll(np.roll(orders, 1, 2), 1, 3)
  assert steps_s(c, *inputs, turned) == pytest.approx(found)


@pytest.mark.parametrize(("grid", "count"), [
  (Grid(4, 1, 1), 24), (Grid(2, 2, 1), 12), (Grid(1, 2, 2), 6),
], ids=str)
def test_enumerated_orders_are_distinct_up_to_rotation(grid, count):
  orders = all_orders(grid)
  assert len({order.tobytes() for order in orders}) == len(orders) == count
  with pytest.raises(ValueError, match="9 devices have too many orders"):
    all_orders(Grid(9, 1, 1))


@pytest.mark.parametrize(("execution", "size", "seed"), [
  ("events", 5, 2003), ("lockstep", 6, 2005),
])
def test_plan_is_close_to_the_brute_force_optimum(execution, size, seed):
  """Within 2%; on the benchmark's 24 clusters, plans are optimal."""
  problem = _problem(8, planner.draw_links(seed, size), execution)
  choices = Choices(
    ("1f1b", "gpipe", "interleaved_1f1b"), schemes=("ddp", "zero1"),
    remats=("none",), offload=False,
  )
  row = planner_regret.regret(problem, choices)
  assert -1e-9 <= row["regret"] < 0.02
  own = plan.plan(problem, choices, count=1).best[0]
  assert row["plan, s"] == own.latency.total
