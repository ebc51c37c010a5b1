"""Outer loops between workers with partitioned training states."""

import chex
import jax
import numpy as np
import pytest

from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import put_batch
from caatnet.train.state import check_equal_start
from parallel.axes import Axis
from tests.caatnet.train.outer_loops_test import PLAIN, Runner
from tests.caatnet.train.zero_test import make


def last_params(scheme, outer, mesh, num_steps):
  """Returns whole parameters of two workers of 2 x 2 ranks after steps."""
  experiment = make(
    f"{scheme} zero.levels=node:2,gpu:2",
    "parallel.worker=2 parallel.data=4 train.accumulation=1 "
    f"outer.algorithm={outer}",
    mesh,
  )
  state = experiment.init_state()
  check_equal_start(experiment.program, state.params)
  draw = np.random.default_rng(0)
  programs = {}
  for number in range(num_steps):
    plan = experiment.outer.plan(number)
    if plan.variant not in programs:
      programs[plan.variant] = experiment.lower_step(plan).compile()
    batch = draw.integers(257, size=(16, 9))
    tokens = put_batch(experiment.program.layout, batch)
    numbers = jax.tree.map(np.int32, plan.numbers)
    state, _ = programs[plan.variant](state, tokens, numbers)
  return jax.device_get(to_whole(experiment.program, state).params)


SPREAD = {"worker": 2, "node": 2, "gpu": 2}


@pytest.mark.parametrize(
  ("name", "overrides"),
  [("streaming", f"{PLAIN} outer.sync_every=4 outer.overlap=(1,)"),
   ("dc_s3gd", "")],
)
def test_partitioned_workers_train_as_unpartitioned_ones(name, overrides):
  """Covers fragments of shards, and norms over shards."""
  def last(scheme, devices):
    runner = Runner(
      name, overrides, workers=2, devices=devices, scheme=scheme,
      levels=tuple(Axis(level, 2, devices) for level in ("node", "gpu")),
    ).run(8)
    return to_whole(runner.experiment.program, runner.state).params

  chex.assert_trees_all_close(last("zero3", 2), last("ddp", 1), atol=5e-6)


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
  "outer",
  ["sparseloco outer.sync_every=1 outer.chunk=8 outer.top_k=4",
   "diloco outer.sync_every=1 outer.codec=int4 outer.block=8 "
   "outer.error_feedback=True"],
)
def test_exchanged_values_do_not_depend_on_devices(outer):
  """Chunks, blocks and remaining errors lie within the shard of one rank.

  A few elements lie between two codes and may be rounded either way.
  """
  spread, lanes = (
    np.concatenate([x.ravel() for x in jax.tree.leaves(params)])
    for params in (last_params("zero3", outer, m, 2) for m in (SPREAD, {}))
  )
  assert np.mean(np.abs(spread - lanes) > 5e-6) < 1e-3
