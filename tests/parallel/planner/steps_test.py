"""Steps in many orders at once, and plans against everything."""

import numpy as np
import pytest

from caatnet.benchmarks.planner import planner, planner_regret
from parallel.planner import plan
from parallel.planner.latency import EXECUTIONS, Setting, predict
from parallel.planner.message_costs import Grid
from parallel.planner.space import Choices, Configuration
from parallel.planner.steps import all_orders, steps_s
from parallel.planner.workload import Transformer

MODEL = Transformer(1024, 1024, 8, 8, 8, 128, 2816, 512)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("c", [
  Configuration(3, 2, 1, 4), Configuration(1, 2, 3, 4),
  Configuration(3, 1, 2, 6, "interleaved_1f1b", 2, route="one_shot"),
  Configuration(2, 3, 1, 2, "zb_h1", scheme="zero1"),
], ids=str)
def test_many_orders_take_what_each_is_predicted_to(c, execution):
  """Turned rings, too: any order, not only those that are enumerated."""
  setting = Setting(MODEL, 24, planner.drawn(1, 6), execution=execution)
  rng = np.random.default_rng(0)
  orders = np.array([rng.permutation(6).reshape(c.grid) for _ in range(12)])
  found = steps_s(c, setting, orders)
  assert found == pytest.approx(
    [predict(c, setting, order).total for order in orders]
  )
  turned = np.roll(np.roll(orders, 1, 2), 1, 3)
  assert steps_s(c, setting, turned) == pytest.approx(found)


@pytest.mark.parametrize(("grid", "count"), [
  (Grid(4, 1, 1), 24), (Grid(2, 2, 1), 12), (Grid(1, 2, 2), 6),
], ids=str)
def test_orders_differ_by_more_than_turned_rings(grid, count):
  orders = all_orders(grid)
  assert len({order.tobytes() for order in orders}) == len(orders) == count
  with pytest.raises(ValueError, match="9 devices have too many orders"):
    all_orders(Grid(9, 1, 1))


@pytest.mark.parametrize(("execution", "size", "seed"), [
  ("events", 4, 2001), ("events", 5, 2003), ("lockstep", 4, 2004),
  ("lockstep", 6, 2005),
])
def test_a_plan_loses_little_against_everything(execution, size, seed):
  """No more than 2%; on 24 clusters of a benchmark it loses nothing."""
  setting = Setting(MODEL, 8, planner.drawn(seed, size), execution=execution)
  choices = Choices(
    8, ("1f1b", "gpipe", "interleaved_1f1b"), schemes=("ddp", "zero1"),
    remats=("none",), offload=False,
  )
  row = planner_regret.regret(setting, choices)
  assert -1e-9 <= row["regret"] < 0.02
  own = plan.plan(setting, choices, count=1).best[0]
  assert row["plan, s"] == own.latency.total
