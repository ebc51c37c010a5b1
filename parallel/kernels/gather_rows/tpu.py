"""Gather of rows from host memory by the DMA of a TPU, block by block.

A grid step starts one copy from host memory to HBM for each of its ids, then
waits for all of them, so that the copies of a step overlap; no data passes
through VMEM. XLA then slices the rows out of their blocks.

Shape legend: n = ids, W = words of a row, padded.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.gather_rows.order import DMA_BLOCK, padded_width

# Maximum number of copies of a grid step, and of its ids in scalar memory.
_COPIES = 1024


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Returns why a table is not supported, or None: `api.Kernels.refusal`."""
  del num_rows, width
  if dtype != jnp.float32:
    return f"dtype {dtype}: float32"
  return None


def gather(
  stored: jax.Array, ids: jax.Array, width: int, interpret: bool = False
) -> jax.Array:
  """Gathers rows: `api.Kernels.gather`.

  The table consists of blocks, ``[blocks, 8, 256]``, in host memory.
  """
  words, whole = DMA_BLOCK[0] * DMA_BLOCK[1], padded_width(width)
  per_row = max(1, whole // words)  # blocks of a row
  per_block = max(1, words // whole)  # rows of a block
  count = ids.shape[0] * per_row
  # Block numbers, [n, per_row], then padded to whole grid steps with block 0.
  wanted = (ids // per_block)[:, None] * per_row + jnp.arange(per_row)[None]
  copies = min(_COPIES, count)
  wanted = jnp.pad(wanted.reshape(-1), (0, -count % copies))
  found = calls.tpu_call(
    functools.partial(_copy, copies=copies),
    "arbitrary",
    grid=(wanted.shape[0] // copies,),
    in_specs=[
      pl.BlockSpec((copies,), lambda i: (i,), memory_space=pltpu.SMEM),
      # The interpreter does not support the host memory space.
      pl.BlockSpec(memory_space=pl.ANY if interpret else pl.HOST),
    ],
    # HBM instead of pl.ANY: XLA would place a small result in VMEM, to which
    # host memory cannot be copied directly.
    out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
    out_shape=calls.output_type(
      (wanted.shape[0], *DMA_BLOCK), stored.dtype, ids
    ),
    scratch_shapes=[pltpu.SemaphoreType.DMA],
    name="gather_rows",
    interpret=interpret,
  )(wanted, stored)[:count]
  if per_block == 1:
    return found.reshape(-1, whole)[:, :width]
  rows = found.reshape(-1, per_block, whole)
  place = (ids % per_block)[:, None, None]
  return jnp.take_along_axis(rows, place, axis=1)[:, 0, :width]


def _copy(ids_ref, blocks_ref, out_ref, semaphore, *, copies):
  first = pl.program_id(0) * copies

  def copy(i):
    return pltpu.make_async_copy(
      blocks_ref.at[ids_ref[i]], out_ref.at[first + i], semaphore
    )

  def start(i, _):
    copy(i).start()
    return _

  def wait(i, _):
    copy(i).wait()
    return _

  lax.fori_loop(0, copies, start, 0)
  lax.fori_loop(0, copies, wait, 0)
