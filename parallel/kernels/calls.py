"""Functions shared by the kernels of all ops.

They build ``pallas_call`` for TPUs, set the types of operands and results in
``jax.shard_map``, compute device ids of remote copies and block sizes, and
flatten arrays to rows.
"""

from collections.abc import Callable, Iterable, Sequence
import math
import os
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

# Kernels that use a barrier semaphore; each has a separate one per mesh axis.
BARRIER_KERNELS = ("ring_partial_all_reduce", "schedule_all_reduce")

# VMEM bytes available to the blocks of one grid step. A kernel on a v5e may use
# 16 MB by default; the other half is reserved for the compiler's temporaries.
MAX_BLOCK_VMEM_BYTES = 8 << 20


class KernelSends(NamedTuple):
  """Messages of a kernel to other devices.

  Attributes:
    axis_name: Mesh axis over which the kernel sends.
    messages: Maximum over the devices of the number of messages that one sends.
    elements: Number of elements in one message.
    dtype: Dtype of the elements.
  """

  axis_name: str
  messages: int
  elements: int
  dtype: Any

  @property
  def metadata(self) -> dict[str, str]:
    """Metadata of the custom call, by which ledgers count the messages.

    In a program, a kernel is an opaque custom call. `parallel.ledger` reads its
    metadata and counts the messages as permutes.
    """
    return {
      "sends_over": self.axis_name,
      "messages": str(self.messages),
      "elements": str(self.elements),
      "dtype": jnp.dtype(self.dtype).name,
    }


def tpu_call(
  kernel: Callable[..., None],
  *semantics: str,
  name: str,
  interpret: bool,
  sends: KernelSends | None = None,
  detect_races: bool = False,
  vmem_limit_bytes: int | None = None,
  **options: Any,
) -> Callable[..., Any]:
  """Returns the ``pallas_call`` of a TPU kernel.

  `jax.vmap` adds a grid dim for the mapped dim, which XLA may split over the
  two cores of a chip. Both cores would then run a sending kernel concurrently,
  with one set of barriers and message buffers. A sending kernel is therefore
  called once per mapped index, sequentially. So is an interpreted kernel: jax's
  interpreter has no information on whether the added dim is parallel.

  Args:
    kernel: Body of the kernel.
    *semantics: "parallel" or "arbitrary" for each grid dim. Steps of a
      "parallel" dim are independent, so that chips with two cores may split
      them; steps of an "arbitrary" dim run sequentially.
    name: Name of the kernel in the program.
    interpret: Whether to use the interpreter of TPU kernels, on any machine.
    sends: Messages to other devices; None for a kernel without remote copies.
    detect_races: Whether the interpreter detects races.
    vmem_limit_bytes: Limit of VMEM in bytes; None for the platform's default.
    **options: Further keywords of ``pallas_call``.
  """
  params = {}
  if sends is not None:
    # XLA must not eliminate the call as dead code: other devices wait for its
    # messages.
    params = {
      "collective_id": barrier_id(name, sends.axis_name),
      "has_side_effects": True,
    }
  call = pl.pallas_call(
    kernel,
    name=name,
    metadata=None if sends is None else sends.metadata,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=semantics, vmem_limit_bytes=vmem_limit_bytes,
      **params,
    ),
    interpret=(
      pltpu.InterpretParams(detect_races=detect_races) if interpret else False
    ),
    **options,
  )
  # Interpreted and sending kernels are called per lane; Pallas vmaps others.
  if interpret or sends is not None:
    return jax.custom_batching.sequential_vmap(call)
  return call


def barrier_id(kernel: str, axis_name: str) -> int:
  """Returns the number of a kernel's barrier semaphore on an axis.

  A device that has completed one kernel may start the next one, over another
  axis, and signal devices that still wait in the first. If both kernels used
  the same semaphore, the signal would be counted in the first kernel.

  Args:
    kernel: One of ``BARRIER_KERNELS``.
    axis_name: Mesh axis over which the kernel sends.
  """
  axes = jax.sharding.get_abstract_mesh().axis_names
  # Distinct for every pair (axis, kernel).
  return axes.index(axis_name) * len(
    BARRIER_KERNELS
  ) + BARRIER_KERNELS.index(kernel)


def output_type(shape: tuple[int, ...], dtype: Any, like: jax.Array):
  """Returns the type of a result that varies over the mesh axes of ``like``.

  With ``check_vma=True``, ``pallas_call`` does not infer the mesh axes over
  which its results vary; every result type must name them.
  """
  return jax.ShapeDtypeStruct(
    shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type
  )


def device_addressing(
  axis_name: str,
) -> tuple[jax.Array, Callable[[Any, Any], dict[str, Any]]]:
  """Returns this device's mesh coordinates and a function for device ids.

  The coordinates are an operand of the kernel instead of ``axis_index`` calls
  in its body, for two reasons. With ``check_vma=True`` Mosaic cannot determine
  a device's coordinates along axes that the kernel does not send over, and the
  interpreter rejects operations on an ``axis_index`` and a constant.

  Args:
    axis_name: Mesh axis along which the kernel sends.

  Returns:
    The coordinates, int32 ``[axes]``, of ``axis_name`` and of all other axes of
    size > 1, to be passed in SMEM; and a function ``(ref of the coordinates,
    number) -> device_id`` that returns the device with this number along
    ``axis_name`` and this device's coordinates along all other axes.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  others = [n for n, size in sizes.items() if n != axis_name and size > 1]
  alone = [n for n, size in sizes.items() if n != axis_name and size == 1]
  # Cast to one varying type, so that they can be stacked.
  numbers = unify_varying_axes(*map(lax.axis_index, (axis_name, *others)))

  def device_id(position_ref, number):
    along = {n: position_ref[1 + i] for i, n in enumerate(others)}
    return {axis_name: number} | along | dict.fromkeys(alone, 0)

  return jnp.stack(numbers), device_id


def compiles_loops() -> bool:
  """Returns whether numba (extra `serve`) can compile kernels for CPUs."""
  if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
    return False  # without the import, which takes 0.2 s
  try:
    import numba
  except ImportError:  # not installed, or not for this version of numpy
    return False
  return not numba.config.DISABLE_JIT


def unify_varying_axes(*operands: jax.Array) -> list[jax.Array]:
  """Casts operands to vary over the union of their varying mesh axes.

  A ``pallas_call`` and its ``custom_vjp`` require operands of one varying type.
  The cast moves no data; its transpose is a ``psum`` over the added axes.
  """
  each = [jax.typeof(x).manual_axis_type.varying for x in operands]
  names = frozenset().union(*each)

  def cast(x, own):
    missing = tuple(sorted(names - own))
    return lax.pcast(x, missing, to="varying") if missing else x

  return list(map(cast, operands, each))


def call_unchecked(
  f: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
  """Calls a library kernel whose result types do not name their varying axes.

  With ``check_vma=True`` the type of every result of a ``pallas_call`` must
  name the mesh axes over which it varies; jax's own kernels name none. The
  check is disabled in the call, and the result is cast to vary over the axes of
  the operands, which is correct for any function without collectives. Neither
  adds operations to the program.

  Args:
    f: Function of ``operands`` without collectives.
    *operands: Arguments of f on one rank.
  """
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if not axes:
    return f(*operands)
  operands = unify_varying_axes(*operands)
  varying = jax.typeof(operands[0]).manual_axis_type.varying
  # An empty set of manual axes: every device keeps its local operands.
  whole = jax.sharding.PartitionSpec()
  out = jax.shard_map(
    f, in_specs=(whole,) * len(operands), out_specs=whole, axis_names=set(),
    check_vma=False,
  )(*operands)
  return lax.pcast(out, tuple(sorted(varying)), to="varying")


def rows_per_block(num_rows: int, row_bytes: int) -> int:
  """Returns the number of whole rows per grid step; 0 if too few fit in VMEM.

  Args:
    num_rows: Total number of rows.
    row_bytes: VMEM bytes of one row in all operands, results and temporaries.

  Returns:
    The largest power of two that fits, or ``num_rows`` if that is smaller.

  Example:
    >>> rows_per_block(10_000, row_bytes=4096 * 10)  # 8 MiB: 204 rows fit
    128
  """
  fitting = MAX_BLOCK_VMEM_BYTES // row_bytes
  # Mosaic requires blocks of whole tiles, or of all rows. A TPU tile has 8 rows
  # of 4-byte elements or 16 rows of 2-byte elements; 16 is a multiple of both.
  if fitting < min(16, num_rows):
    return 0
  return min(num_rows, max(16, 1 << (fitting.bit_length() - 1)))


def leading_size(x: jax.Array) -> int:
  """Returns the product of all dims but the last."""
  return math.prod(x.shape[:-1])


def as_rows(*arrays: jax.Array) -> list[jax.Array]:
  """Flattens each array ``[..., n]`` to ``[rows, n]``."""
  return [x.reshape(leading_size(x), x.shape[-1]) for x in arrays]


def as_arrays(
  rows: Iterable[jax.Array], like: Sequence[jax.Array]
) -> list[jax.Array]:
  """Reshapes rows to the shapes of ``like``; the inverse of `as_rows`.

  Arrays without channels (last dim 0) are never passed to kernels, so ``rows``
  lacks them; they are returned unchanged from ``like``.
  """
  rows = iter(rows)
  return [next(rows).reshape(x.shape) if x.shape[-1] else x for x in like]


def spans(parts: Sequence[Any]) -> list[tuple[int, int]]:
  """Returns the position of each part in a row that concatenates the parts.

  Returns:
    One ``(first channel, width)`` per part, in the order of the parts.
  """
  found, start = [], 0
  for part in parts:
    found.append((start, part.shape[-1]))
    start += part.shape[-1]
  return found


def scaled(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
  """Multiplies float32 values with the rounding of a product in ``dtype``.

  Args:
    x: float32, with values that ``dtype`` represents exactly.
    scale: Factor that ``dtype`` represents exactly.
    dtype: Dtype to which the product is rounded.

  Returns:
    The rounded product, float32.
  """
  return x if scale == 1.0 else (x * scale).astype(dtype).astype(x.dtype)
