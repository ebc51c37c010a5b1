"""Checkpoints of partitioned runs: whole parameters for any other scheme."""

import chex
import jax
import numpy as np
import pytest

from caatnet.train import loop
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.records import read_metrics
from tests.caatnet.train import linear_model as toy
from tests.caatnet.train.linear_model_test import StopAt
from tests.caatnet.train.zero_test import LEVELS, linear_levels, make


def test_run_moves_between_schemes_and_meshes(tmp_path):
  """First losses after a restore equal those of a run that did not move.

  A secondary copy is made of the restored weights (DeepSpeed #7606).
  """
  def of_scheme(scheme, devices, moments="device"):
    return toy.make(
      scheme=scheme, levels=linear_levels(devices), moments=moments
    )

  loop.train(of_scheme("ddp", LEVELS), tmp_path / "stays", quiet=True)
  moves = [
    ("frontier3", ("node", "gpu")), ("hpz", ("gpu",), "pinned_host"),
    ("hsdp", ("gcd",)),
  ]
  for last, move in zip((2, 4, 6), moves, strict=True):
    experiment = of_scheme(*move)
    run = loop.Run(experiment, tmp_path / "moves", "", None, True)
    try:
      run.loop(StopAt(run, last))
    finally:
      run.close()
  stays, moved = (
    [(r["step"], r["loss"]) for r in read_metrics(tmp_path / name)
     if "loss" in r]
    for name in ("stays", "moves")
  )
  assert [s for s, _ in stays] == [s for s, _ in moved] == [1, 2, 3, 4, 5, 6]
  np.testing.assert_allclose(
    [x for _, x in moved], [x for _, x in stays], rtol=2e-6
  )


@pytest.fixture(scope="module")
def params():
  return make("ddp").init_state().params


# Shards are stored at the optimizer's depth: none, some or all levels.
@pytest.mark.parametrize("scheme", ["ddp", "hsdp", "zero3"])
def test_stored_parameters_are_restored_bitwise(scheme, params):
  program = make(scheme).program
  shardings = program.layout.shardings(
    program.layout.add_worker_dim(program.specs)
  )
  again = to_whole(program, to_stored(program, params, shardings))
  chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(params))


def test_conversions_run_one_after_another():
  """Concurrent conversions of several parameters could deadlock on CPUs."""
  program = make("zero3", "model.width=192 model.vocab_size=4099").program
  shapes, specs = program.stored_shapes, program.specs
  shardings = program.layout.shardings(program.layout.add_worker_dim(specs))
  stored = jax.tree.map(
    lambda x, s: jax.device_put(np.ones((1, *x.shape), x.dtype), s),
    shapes, shardings,
  )
  for _ in range(3):  # the first one compiles
    whole = to_whole(program, stored)
    assert all(x.is_ready() for x in jax.tree.leaves(whole))
