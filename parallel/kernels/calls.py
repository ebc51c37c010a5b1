"""Functions that the Pallas kernels in these folders share.

They cover ``pallas_call`` for TPUs, types of results and operands under
``jax.shard_map``, addresses of other devices, block sizes, and the flattening
of arrays to rows.
"""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

# Kernels with a barrier semaphore, one for each axis of a mesh.
BARRIERS = ("ring_partial_all_reduce", "schedule_all_reduce")

# Bytes of VMEM that the blocks of one grid step may take. A kernel on a v5e may
# use 16 MB by default; the other half is left to the compiler's temporaries.
VMEM_BYTES = 8 << 20


class Sends(NamedTuple):
  """What a kernel sends to other devices.

  Attributes:
    axis_name: The mesh axis that it sends over.
    messages: The most messages that any device sends.
    elements: Elements in one message.
    dtype: Dtype of these elements.
  """

  axis_name: str
  messages: int
  elements: int
  dtype: Any

  @property
  def metadata(self) -> dict[str, str]:
    """Text of the custom call.

    A ledger sees a kernel in a program as one opaque custom call.
    `parallel.xla` reads this and counts the messages as permutes.
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
  sends: Sends | None = None,
  detect_races: bool = False,
  vmem_limit_bytes: int | None = None,
  **options: Any,
) -> Callable[..., Any]:
  """Returns the ``pallas_call`` of a TPU kernel.

  `jax.vmap` would make a dim of the grid of what it maps, and XLA may split
  that dim over the two cores of a chip. Both would run a kernel that sends at
  once, on one set of barriers and message buffers. So such a kernel is called
  once per lane, one call after another. So is an interpreted one: jax's
  interpreter does not know whether that dim is parallel.

  Args:
    kernel: The body.
    *semantics: One of "parallel" and "arbitrary" for each grid dim. Steps of a
      "parallel" dim are independent, so that chips with two cores may split
      them; steps of an "arbitrary" dim run one after another.
    name: The kernel's name in the program.
    interpret: Run on any machine, in the interpreter for TPU kernels.
    sends: What it sends; None for a kernel without remote copies.
    detect_races: Whether the interpreter looks for races.
    vmem_limit_bytes: VMEM that it may use; None for the platform's default.
    **options: Further keywords of ``pallas_call``.
  """
  params = {}
  if sends is not None:
    # Others wait for the messages, so XLA must not drop the call.
    params = {
      "collective_id": barrier(name, sends.axis_name),
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
  if interpret or sends is not None:
    return jax.custom_batching.sequential_vmap(call)
  return call


def barrier(kernel: str, axis_name: str) -> int:
  """Returns the number of a kernel's barrier semaphore on an axis.

  A device that is done with a kernel goes on to the next one, which may send
  over another axis, to devices that still wait in the first. With one number
  for both, its signal would be taken for one of the first kernel's.

  Args:
    kernel: One of ``BARRIERS``.
    axis_name: The mesh axis that it sends over.
  """
  axes = jax.sharding.get_abstract_mesh().axis_names
  return axes.index(axis_name) * len(BARRIERS) + BARRIERS.index(kernel)


def shaped(shape: tuple[int, ...], dtype: Any, like: jax.Array):
  """Returns the type of a result that varies over the mesh axes of ``like``.

  Under ``check_vma=True`` a ``pallas_call`` does not infer over which mesh axes
  its results vary, so each result has to name them.
  """
  return jax.ShapeDtypeStruct(
    shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type
  )


def position(
  axis_name: str,
) -> tuple[jax.Array, Callable[[Any, Any], dict[str, Any]]]:
  """Returns this device's mesh coordinates and a way to address other devices.

  The coordinates are an operand of the kernel, and not ``axis_index`` calls in
  it, for two reasons. Under ``check_vma=True`` Mosaic cannot find a device's
  coordinates along the axes that the kernel does not send over, and the
  interpreter refuses an ``axis_index`` beside constants.

  Args:
    axis_name: The mesh axis along which the kernel sends.

  Returns:
    The coordinates, int32 ``[axes of size > 1, axis_name first]``, to be passed
    in SMEM; and a function ``(ref of the coordinates, number) -> device_id``
    that addresses the device with this number along ``axis_name`` and the same
    coordinates along all other axes.
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
  """Casts operands to vary over the union of the mesh axes they vary over.

  A ``pallas_call`` and a ``custom_vjp`` around it want operands of one varying
  type. The cast moves no data; its transpose is a ``psum`` over the added axes.
  """
  each = [jax.typeof(x).manual_axis_type.varying for x in operands]
  names = frozenset().union(*each)

  def cast(x, own):
    missing = tuple(sorted(names - own))
    return lax.pcast(x, missing, to="varying") if missing else x

  return list(map(cast, operands, each))


def unchecked(
  f: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
  """Calls a kernel of a library, which does not say how its result varies.

  Under ``check_vma=True`` the type of each result of a ``pallas_call`` has to
  name the mesh axes over which it varies, and jax's own kernels name none. So
  the check is off in the call, and the result is cast to vary over the axes of
  the operands: that is true of any function of them without collectives. In the
  program this is nothing.

  Args:
    f: A function of ``operands``, without collectives.
    *operands: What f takes, of one rank.
  """
  axes = jax.sharding.get_abstract_mesh().manual_axes
  if not axes:
    return f(*operands)
  operands = same_axes(*operands)
  varying = jax.typeof(operands[0]).manual_axis_type.varying
  # No axis is left to map over; each device goes on with what it has.
  whole = jax.sharding.PartitionSpec()
  out = jax.shard_map(
    f, in_specs=(whole,) * len(operands), out_specs=whole, axis_names=set(),
    check_vma=False,
  )(*operands)
  return lax.pcast(out, tuple(sorted(varying)), to="varying")


def rows_per_block(num_rows: int, row_bytes: int) -> int:
  """Returns how many whole rows a grid step takes; 0 if too few fit VMEM.

  Args:
    num_rows: Rows in all.
    row_bytes: VMEM bytes that one row takes in all operands, results and
      temporaries.

  Returns:
    The largest power of two that fits, or ``num_rows`` if that is smaller.
  """
  fitting = VMEM_BYTES // row_bytes
  # A TPU tile is 8 rows of 4-byte elements or 16 rows of 2-byte elements. So a
  # block has whole tiles of either, or all rows: Mosaic takes no others.
  if fitting < min(16, num_rows):
    return 0
  return min(num_rows, max(16, 1 << (fitting.bit_length() - 1)))


def leading(x: jax.Array) -> int:
  """Returns the product of all dims but the last."""
  return math.prod(x.shape[:-1])


def as_rows(*arrays: jax.Array) -> list[jax.Array]:
  """Flattens each array ``[..., n]`` to ``[rows, n]``."""
  return [x.reshape(leading(x), x.shape[-1]) for x in arrays]


def as_arrays(
  rows: Iterable[jax.Array], like: Sequence[jax.Array]
) -> list[jax.Array]:
  """Gives rows the shapes of ``like``; the inverse of `as_rows`.

  Kernels are not given arrays without channels, so ``rows`` has none for them.
  They are returned as they are in ``like``.
  """
  rows = iter(rows)
  return [next(rows).reshape(x.shape) if x.shape[-1] else x for x in like]


def spans(parts: Sequence[Any]) -> list[tuple[int, int]]:
  """Returns where the parts of a row lie in the concatenated row.

  Returns:
    One ``(first channel, width)`` for each part, in their order.
  """
  found, start = [], 0
  for part in parts:
    found.append((start, part.shape[-1]))
    start += part.shape[-1]
  return found


def scaled(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
  """Multiplies float32 values as if the product were taken in ``dtype``.

  Args:
    x: float32, holding values of ``dtype``.
    scale: A factor that ``dtype`` represents exactly.
    dtype: The dtype that the product is rounded to.

  Returns:
    The rounded product, float32.
  """
  return x if scale == 1.0 else (x * scale).astype(dtype).astype(x.dtype)
