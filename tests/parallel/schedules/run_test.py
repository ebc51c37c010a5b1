"""A schedule that runs is the collective, on devices and on lanes."""

import collections
import re

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel import collectives
from parallel import topology as topologies
from parallel.axes import Axis, make_mesh
from parallel.schedules import run
from parallel.schedules.builders import BUILDERS, build
from parallel.schedules.schedule import COLLECTIVES

# n -> topology that every builder of the row accepts
GRIDS = {2: (2,), 4: (2, 2), 8: (2, 4), 16: (4, 4)}
ON_GRIDS = sorted(set(BUILDERS) - {"hdrm", "ring_2d"})


def places(n):
  """(builder, topology) for n ranks: all builders."""
  grid = topologies.torus(GRIDS[n])
  rows = [(name, grid) for name in ON_GRIDS]
  if n > 2:
    rows.append(("ring_2d", grid))
    rows.append(("hdrm", topologies.bigraph(n // 4, 4)))
  return rows


def definition(collective, x):
  """What every rank ends with: ``[N, ...] -> [N, ...]``."""
  n = len(x)
  if collective == "all_gather":
    return np.stack([np.concatenate(list(x))] * n)
  if collective == "reduce_scatter":
    return np.stack(np.split(x.sum(0), n))
  return np.stack([x.sum(0)] * n)


def chained(schedules, axis, dtype):
  """Runs schedules one after the other, in one program.

  Each starts from the input and nothing of the one before but its order in
  time (`collectives.after` says why).
  """

  def program(x):
    results, start = [], x
    for schedule in schedules:
      y = run.on_lanes(schedule, start.astype(dtype), axis)
      results.append(y)
      start = collectives.after(x, y.astype("float32"))
    return results

  spec = P("a")
  return jax.jit(
    jax.shard_map(
      program, mesh=make_mesh({"a": axis}), in_specs=spec, out_specs=spec
    )
  )


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
  ("n", "devices"), [(2, 2), (4, 4), (8, 8), (8, 4), (16, 1)]
)
def test_every_schedule_is_its_collective(n, devices, collective):
  """Bit-equal on integers; sizes that chunks do not divide."""
  rows = places(n)
  schedules = [build(name, where, collective) for name, where in rows]
  axis = Axis("a", n, devices)
  x = np.random.default_rng(n).integers(-9, 9, (n, n * 5, 3)).astype("i4")
  results = chained(schedules, axis, "int32")(x)
  expected = definition(collective, x)
  for (name, _), y in zip(rows, results, strict=True):
    np.testing.assert_array_equal(np.asarray(y), expected, err_msg=name)
