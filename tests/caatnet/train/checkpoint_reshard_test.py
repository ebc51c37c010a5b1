"""Shapes and shardings of whole parameters, from those of stored ones."""

import math

import chex
import jax
import pytest

from caatnet.train.checkpoint.reshard import to_whole
from tests.caatnet.train import stages_test

STREAMING = (
  "parallel.worker=2 outer.algorithm=streaming outer.fragment_layers=4 "
  "outer.overlap=(2,) outer.pieces=2 model.num_layers=8"
)
STAGES = "parallel.stage=2 pipeline.schedule=looped pipeline.chunks=2"


@pytest.mark.parametrize(("common", "cut"), [
  ("", "parallel.stage=3"),
  ("parallel.data=2", f"{STAGES} zero.scheme=zero3"),
  ("parallel.data=2", "parallel.stage=1 zero.scheme=zero2"),
  (STREAMING, STAGES),
], ids=str)
def test_whole_state_has_the_shapes_of_a_run_in_one_piece(common, cut):
  ours, alone = (
    stages_test.make(f"{common} {other}", {})
    for other in (cut, stages_test.ALONE)
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(
    to_whole(ours.program, ours.abstract_state()), alone.abstract_state()
  )


def test_whole_parameters_are_cut_over_devices_that_their_sizes_divide():
  """Over data ranks in one dim, and over stages in theirs if it is free."""
  program = stages_test.make(
    f"{STAGES} parallel.data=2 zero.scheme=zero3 model.vocab_size=258",
    {"data": 2, "stage": 2, "tensor": 2},
  ).program
  layout, tensor = program.layout, program.layout.tensor.name
  shardings = layout.shardings(layout.add_worker_dim(program.specs))
  whole = to_whole(program, jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct((1, *x.shape), x.dtype, sharding=s),
    program.stored_shapes, shardings,
  ))

  def check(path, x, leaf):
    p = leaf.parameter
    fits = [size % 2 == 0 for size in leaf.shape]
    parts = 1 + any(fits[p.num_lead :])
    for_data = fits.index(True, p.num_lead) if parts > 1 else None
    if p.stage_dim is not None and p.stage_dim != for_data:
      parts *= 1 + fits[p.stage_dim]
    parts *= 1 + (tensor in p.spec)
    found = math.prod(x.sharding.shard_shape(x.shape))
    assert found * parts == math.prod(x.shape), path

  jax.tree.map_with_path(check, whole, program.leaves)
