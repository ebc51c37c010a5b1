"""What all Pallas calls here share."""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

# Of the 16 MB that a v5e kernel may use; the compiler's own temporaries take
# the rest.
VMEM_BYTES = 8 << 20


def tpu_params(interpret: bool, *semantics: str) -> dict[str, Any]:
  """Keywords of a TPU ``pallas_call``; ``semantics`` one per grid dim."""
  return {
    "compiler_params": pltpu.CompilerParams(dimension_semantics=semantics),
    "interpret": pltpu.InterpretParams() if interpret else False,
  }


def shaped(shape: tuple[int, ...], dtype: Any, like: jax.Array):
  """A result's shape, varying over the mesh axes that ``like`` varies over."""
  return jax.ShapeDtypeStruct(
    shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type
  )


def sends(
  axis_name: str,
  messages: int,
  elements: int,
  dtype: Any,
  results: Sequence[jax.ShapeDtypeStruct],
) -> dict[str, str]:
  """``metadata`` of a ``pallas_call`` that sends: for who counts bytes.

  Args:
    axis_name: The mesh axis that it sends over.
    messages: That a device sends, at most.
    elements: Of a message.
    dtype: Of its elements.
    results: Of the call; under ``jax.vmap`` a program has more, and sends so
      many times as much.
  """
  return {
    "results": str(sum(math.prod(x.shape) for x in results)),
    "sends_over": axis_name,
    "messages": str(messages),
    "elements": str(elements),
    "dtype": jnp.dtype(dtype).name,
  }


def position(
  axis_name: str,
) -> tuple[jax.Array, Callable[[Any, Any], dict[str, Any]]]:
  """Where this device is on the mesh, and how its kernel calls others.

  Under checked varying axes Mosaic does not find the numbers along other axes
  itself, nor does the interpreter take an ``axis_index`` beside constants.

  Args:
    axis_name: The axis along which the kernel sends.

  Returns:
    int32 ``[axes]``, for SMEM: this device's numbers, along that axis first.
    ``(ref of them, number) -> device_id``: of another device along the axis.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  others = [n for n, size in sizes.items() if n != axis_name and size > 1]
  alone = [n for n, size in sizes.items() if n != axis_name and size == 1]
  numbers = same_axes(*map(lax.axis_index, (axis_name, *others)))

  def device_id(position_ref, number):
    along = {n: position_ref[1 + i] for i, n in enumerate(others)}
    return {axis_name: number} | along | dict.fromkeys(alone, 0)

  return jnp.stack(numbers), device_id


def same_axes(*operands: jax.Array) -> list[jax.Array]:
  """Casts operands to vary over the same mesh axes, as kernels ask for."""
  each = [jax.typeof(x).manual_axis_type.varying for x in operands]
  names = frozenset().union(*each)

  def cast(x, own):
    missing = tuple(sorted(names - own))
    return lax.pcast(x, missing, to="varying") if missing else x

  return list(map(cast, operands, each))


def rows_per_block(num_rows: int, row_bytes: int) -> int:
  """Rows that fit VMEM: a power of two from 16 on, or all; 0: too few.

  Sixteen rows of two-byte elements are one tile of a TPU's registers.
  """
  fitting = VMEM_BYTES // row_bytes
  if fitting < min(16, num_rows):
    return 0
  return min(num_rows, 1 << (fitting.bit_length() - 1))


def leading(x: jax.Array) -> int:
  """Product of all dims but the last."""
  return math.prod(x.shape[:-1])


def as_rows(*arrays: jax.Array) -> list[jax.Array]:
  """``[..., n] -> [rows, n]``."""
  return [x.reshape(leading(x), x.shape[-1]) for x in arrays]


def as_arrays(
  rows: Iterable[jax.Array], like: Sequence[jax.Array]
) -> list[jax.Array]:
  """The inverse of `as_rows`; arrays of no channels have no rows there."""
  rows = iter(rows)
  return [next(rows).reshape(x.shape) if x.shape[-1] else x for x in like]


def spans(parts: Sequence[Any]) -> list[tuple[int, int]]:
  """(first channel in the whole row, width) of the parts of a row."""
  found, start = [], 0
  for part in parts:
    found.append((start, part.shape[-1]))
    start += part.shape[-1]
  return found


def scaled(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
  """float32 ``x * scale``, rounded as a product in ``dtype`` is."""
  return x if scale == 1.0 else (x * scale).astype(dtype).astype(x.dtype)
