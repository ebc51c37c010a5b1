"""Conversion between stored shards and whole parameters, for checkpoints.

Checkpoints hold whole parameters of logical shape, so that a run can resume
with another partition and another number of stages. Tensors are converted one
at a time, since a device may hold a whole tensor during its conversion.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from caatnet.program import Layout, Leaf, Program


def to_whole(program: Program, stored: Any) -> Any:
  """Converts stored shards to whole arrays of logical shape.

  Args:
    program: The model on a mesh, which defines the stored layout.
    stored: A training state or a part of it; leaves are arrays, or shapes with
      shardings.

  Returns:
    The same tree with whole arrays instead of arrays that are partitioned or
    cut over stages (parameters, and arrays with their layout such as moments).
    Whole arrays are sharded over devices along dims whose size is a multiple of
    the number of devices, if such dims exist.
  """
  if not _needs_conversion(program):
    return stored
  leaf_of = program.make_leaf_lookup()

  def convert(path, x):
    leaf = leaf_of(path)
    if leaf is None:  # belongs to no parameter, for example a step count
      return x
    lead = len(x.shape) - leaf.num_stored_dims
    sharding = _whole_sharding(program, x.sharding.spec[:lead], leaf)
    if isinstance(x, jax.Array):  # moments may be in host memory
      x = jax.device_put(x, x.sharding.with_memory_kind("device"))
    return _convert(x, program.layout, _restore, leaf, lead, sharding)

  return jax.tree.map_with_path(convert, stored)


def to_stored(program: Program, whole: Any, shardings: Any) -> Any:
  """Converts whole arrays to stored shards; the inverse of `to_whole`.

  Args:
    program: The model on a mesh, which defines the stored layout.
    whole: A training state or a part of it, with whole arrays.
    shardings: Tree of the same structure with the shardings of the result.
  """
  if not _needs_conversion(program):
    return whole
  leaf_of = program.make_leaf_lookup()

  def convert(path, x, sharding):
    leaf = leaf_of(path)
    if leaf is None:
      return x
    lead = len(x.shape) - len(leaf.shape)
    return _convert(x, program.layout, _store, leaf, lead, sharding)

  return jax.tree.map_with_path(convert, whole, shardings)


def _needs_conversion(program: Program) -> bool:
  """Returns whether parameters are stored partitioned or cut over stages."""
  layout = program.layout
  return layout.shards is not None or layout.stages is not None


def _restore(
  layout: Layout, leaf: Leaf, lead: int, x: jax.Array
) -> jax.Array:
  """Joins a parameter's stored shards; the parameter's dims begin at ``lead``.

  Dims of ``x`` before it, such as that of workers, are not joined.
  """
  dim, stages = leaf.parameter.stage_dim, layout.stages
  if layout.shards is not None and leaf.tensor is not None:
    x = layout.shards.restore(x, leaf.tensor)
  if stages is None or dim is None:
    return x
  # A fragment of Streaming DiLoCo has some layers, equally many in each stage.
  rows = x.shape[lead] * x.shape[lead + 1 + dim]
  return stages.restore(x, dim, min(rows, leaf.shape[dim]), lead)


def _store(layout: Layout, leaf: Leaf, lead: int, x: jax.Array) -> jax.Array:
  """Cuts a whole parameter into stored shards; the inverse of `_restore`.

  The first ``lead`` dims of ``x``, such as that of workers, are not cut.
  """
  dim, stages = leaf.parameter.stage_dim, layout.stages
  if stages is not None and dim is not None:
    x = stages.store(x, dim, lead)
  if layout.shards is not None and leaf.tensor is not None:
    x = layout.shards.store(x, leaf.tensor)
  return x


def _whole_sharding(
  program: Program, lead: tuple[Any, ...], leaf: Leaf
) -> NamedSharding:
  """Returns the sharding of a whole parameter.

  The whole parameters of a large model do not fit into each device. So the
  array is cut over all data-parallel devices along its first suitable dim,
  whose size is a multiple of their number, and over stages along ``stage_dim``
  if possible. ``lead`` is the spec of the dims before the parameter's dims.
  """
  layout, p = program.layout, leaf.parameter
  cut: list[Any] = [*p.spec, *[None] * len(leaf.shape)][: len(leaf.shape)]
  if layout.shards is not None and leaf.tensor is not None:
    own = layout.shards.of_tensor(leaf.tensor)
    num_devices = math.prod(axis.devices for axis in own.axes)
    fitting = [
      i for i in range(p.num_lead, len(leaf.shape))
      if leaf.shape[i] % num_devices == 0
    ]
    if fitting:
      cut[fitting[0]] = own.names
  if layout.stages is not None and p.stage_dim is not None:
    axis = layout.stages.axis
    if cut[p.stage_dim] is None and (
      leaf.shape[p.stage_dim] % axis.devices == 0
    ):
      cut[p.stage_dim] = axis.name
  return NamedSharding(layout.mesh, P(*lead, *cut))


def _convert(
  x: Any,
  layout: Layout,
  convert: Callable[[Layout, Leaf, int, jax.Array], jax.Array],
  leaf: Leaf,
  lead: int,
  sharding: NamedSharding,
) -> Any:
  """Runs ``convert`` (`_restore` or `_store`) on an array or on its shape.

  The result has the given sharding.
  """
  if isinstance(x, jax.Array):
    # One program at a time: XLA:CPU has one thread per device for all programs,
    # so the collectives of concurrent programs can deadlock.
    return jax.block_until_ready(
      _compiled(convert, layout, leaf, lead, sharding)(x)
    )
  shape = jax.eval_shape(functools.partial(convert, layout, leaf, lead), x)
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


@functools.cache
def _compiled(
  convert: Callable[[Layout, Leaf, int, jax.Array], jax.Array],
  layout: Layout,
  leaf: Leaf,
  lead: int,
  sharding: NamedSharding,
) -> Callable[[jax.Array], jax.Array]:
  """Returns ``convert`` jitted, with results that have ``sharding``."""
  return jax.jit(
    functools.partial(convert, layout, leaf, lead), out_shardings=sharding
  )
