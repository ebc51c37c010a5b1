"""Converts between stored shards and whole parameters, for checkpoints.

Checkpoints hold whole parameters of logical shape, so that a run can go on with
another partition. The conversion takes one tensor at a time, since on the way a
device may hold all of that tensor.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from caatnet.program import Program, by_end_of_path
from parallel.zero.shards import Tensor


def to_whole(program: Program, stored: Any) -> Any:
  """Converts arrays as they are stored to what they are without a partition.

  Args:
    program: The model on a mesh, which says how arrays are stored.
    stored: A training state or a part of it; leaves are arrays, or shapes with
      shardings.

  Returns:
    The same tree, in which each array of a partitioned parameter, or like one,
    is whole. It is spread over devices along a dim that their number divides,
    if there is such a dim.
  """
  if program.layout.shards is None:
    return stored
  tensor_of = by_end_of_path(program.tensors)

  def convert(path, x):
    tensor = tensor_of(path)
    if tensor is None:  # belongs to no parameter, such as a count of steps
      return x
    sharding = _whole_sharding(program, x, tensor)
    if isinstance(x, jax.Array):  # offloaded moments lie in host memory
      x = jax.device_put(x, x.sharding.with_memory_kind("device"))
    return _convert(x, program.layout.shards.restore, tensor, sharding)

  return jax.tree.map_with_path(convert, stored)


def to_stored(program: Program, whole: Any, shardings: Any) -> Any:
  """Converts whole arrays to stored shards; the inverse of `to_whole`.

  Args:
    program: The model on a mesh, which says how arrays are stored.
    whole: A training state or a part of it, without a partition.
    shardings: A tree like it with the shardings of the result.
  """
  if program.layout.shards is None:
    return whole
  tensor_of = by_end_of_path(program.tensors)

  def convert(path, x, sharding):
    tensor = tensor_of(path)
    if tensor is None:
      return x
    return _convert(x, program.layout.shards.store, tensor, sharding)

  return jax.tree.map_with_path(convert, whole, shardings)


def _whole_sharding(program: Program, x: Any, tensor: Tensor) -> NamedSharding:
  """Returns where a tensor lies when it is whole.

  Replicated on all devices, whole parameters of a large model would not fit. So
  a tensor is cut over all data-parallel devices along its first dim that their
  number divides.
  """
  # Stored: [*lead, ranks of o levels, elements of a shard].
  num_lead = len(x.shape) - program.layout.partition.optimizer - 1
  # A spec may end before the last dim: what it leaves out is not cut.
  lead = [*x.sharding.spec, *[None] * num_lead][:num_lead]
  num_devices = math.prod(axis.devices for axis in program.layout.data)
  cut: list[Any] = [None] * len(tensor.shape)
  fitting = [i for i, n in enumerate(tensor.shape) if n % num_devices == 0]
  if fitting:
    cut[fitting[0]] = program.layout.shards.names
  return NamedSharding(program.layout.mesh, P(*lead, *cut))


def _convert(
  x: Any,
  convert: Callable[[jax.Array, Tensor], jax.Array],
  tensor: Tensor,
  sharding: NamedSharding,
) -> Any:
  """Converts an array; or, for a shape, tells the shape of the result."""
  if isinstance(x, jax.Array):
    return _compiled(convert, tensor, sharding)(x)
  shape = jax.eval_shape(lambda x: convert(x, tensor), x)
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


@functools.cache
def _compiled(
  convert: Callable[[jax.Array, Tensor], jax.Array],
  tensor: Tensor,
  sharding: NamedSharding,
) -> Callable[[jax.Array], jax.Array]:
  """Jits a conversion; XLA moves the elements to where the sharding says."""
  return jax.jit(lambda x: convert(x, tensor), out_shardings=sharding)
