"""Tables of schedules: each algorithm as a sequence of single messages."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from configs.caatnet import tiny
from parallel.axes import Axis, make_mesh
from parallel.kernels.schedule_all_reduce import reference
from parallel.plans.schedules.builders import build
from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.schedules.table import _choose_round, table
from parallel.plans.topology import builders as topologies
from tests.parallel.plans.schedules.builders_test import ACCEPTED


def run(steps, x):
  """Executes a table: ``[n, chunks] -> [n, chunks]``."""
  for turn, sender_of in enumerate(reference.senders(steps)):
    new = x.copy()
    for device, sender in enumerate(sender_of):
      if sender >= 0:
        _, _, received, operation = steps[turn, device]
        old = x[device, received] if operation == reference.ADD else 0
        new[device, received] = old + x[sender, steps[turn, sender, 1]]
    x = new
  return x


@pytest.mark.quick
@pytest.mark.parametrize(
  ("name", "where"),
  [(name, x) for name, accepted in ACCEPTED.items() for x in accepted
   if x.num_ranks <= 9],
)
def test_table_of_every_schedule_computes_the_sum(name, where):
  schedule = build(name, where)
  steps = table(schedule)
  size = (schedule.num_ranks, schedule.num_chunks)
  x = np.random.default_rng(0).integers(1 << 20, size=size)
  np.testing.assert_array_equal(run(steps, x), [x.sum(0)] * len(x))
  sent = (steps[..., reference.SEND_TO] >= 0).sum()
  assert sent == schedule.num_transfers
  assert len(steps) >= len(schedule.rounds)


def test_only_all_reduces_have_tables():
  gather = build("ring", topologies.torus((4,)), "all_gather")
  with pytest.raises(ValueError, match="only an all_reduce can be converted"):
    table(gather)


def test_round_without_a_sequential_order_is_refused():
  """Each rank sends its chunk twice, and overwrites it in the same round."""
  everyone = tuple(
    Transfer(a, b, 0, "reduce", (a, b))
    for a in range(3) for b in range(3) if a != b
  )
  schedule = Schedule("all at once", "all_reduce", 3, 1, (everyone,))
  with pytest.raises(ValueError, match="all at once: round 0 has no order"):
    table(schedule)


@pytest.mark.parametrize("rows", [32, 5])
def test_model_uses_the_kernel_for_rows_of_whole_tiles(rows):
  """The kernel accepts whole tiles; permutes handle other sizes."""
  config = override(
    tiny.get_config("test"),
    "sync.route=schedule:ring parallel.tensor=4 kernels=interpret",
  )
  mesh = {"tensor": 4}
  route = experiments.build(config, mesh).program.model.config.syncs[0][0].route
  x = np.random.default_rng(1).integers(9, size=(4, rows, 8)).astype("f4")
  f = jax.jit(jax.shard_map(
    lambda x: route(x, "tensor"),
    mesh=make_mesh({"tensor": Axis("tensor", 4, 4)}),
    in_specs=P("tensor"), out_specs=P("tensor"),
  ))
  assert ("collective_permute" in f.lower(x).as_text()) == (rows == 5)
  np.testing.assert_array_equal(f(x), [x.sum(0)] * 4)


def test_chunk_is_sent_before_it_is_overwritten():
  """0 -> 1 -> 2 in one round is indivisible, since rank 1 forwards."""
  other = Transfer(3, 2, 1, "reduce", (3, 2))
  first = Transfer(0, 1, 0, "copy", (0, 1))
  second = Transfer(1, 2, 0, "copy", (1, 2))
  assert _choose_round([other, first, second]) == [other]
  assert _choose_round([first, second]) == [first, second]
  assert _choose_round([second, first]) == [second, first]
