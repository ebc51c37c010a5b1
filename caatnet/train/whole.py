"""A training state whole, whatever partition stores it: for checkpoints.

One tensor at a time: on the way a device may hold a whole one.
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
  """Arrays as they are stored -> as they are without a partition.

  Args:
    program: How they are stored.
    stored: A training state or a part of it; arrays, or shapes with shardings.

  Returns:
    The same tree; each array of a partitioned parameter, or like one, is
    whole, and lies cut along a dim that divides, where there is one.
  """
  if program.layout.shards is None:
    return stored
  tensor_of = by_end_of_path(program.tensors)

  def convert(path, x):
    tensor = tensor_of(path)
    if tensor is None:
      return x
    sharding = _whole_sharding(program, x, tensor)
    if isinstance(x, jax.Array):  # it may wait in the host's memory
      x = jax.device_put(x, x.sharding.with_memory_kind("device"))
    return _convert(x, program.layout.shards.restore, tensor, sharding)

  return jax.tree.map_with_path(convert, stored)


def to_stored(program: Program, whole: Any, shardings: Any) -> Any:
  """The inverse of ``to_whole``, onto the given shardings."""
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
  num_lead = len(x.shape) - program.layout.partition.optimizer - 1
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
  return jax.jit(lambda x: convert(x, tensor), out_shardings=sharding)
