"""Sum over ranks, residual add and RMSNorm in one pass, for TPUs.

A grid step holds the same rows of the stream and of all ranks' partial sums in
VMEM, where int8 codes are decoded, one block of channels at a time.
``add_norm`` has the backward pass.

Shape legend: N = rows (tokens), r = ranks, K = shared channels, P = private
channels, H = K + P.
"""

from collections.abc import Sequence
import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.reference import NormOptions
from parallel.kernels.add_norm.tpu import write_normed

# Lanes of a TPU's vector register; blocks of channels are multiples of it.
_LANES = 128


def refusal(
  num_rows: int,
  shared: int,
  private: int,
  dtype: jnp.dtype,
  ranks: int,
  sent: jnp.dtype,
  block: int | None,
) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`."""
  allowed = (jnp.float32, jnp.bfloat16)
  for found in (dtype, *((sent,) if block is None else ())):
    if found not in allowed:
      return f"dtype {found}: float32 or bfloat16"
  if num_rows < 1 or not shared:
    return "nothing to sum"
  if block is not None and block % _LANES:
    return f"{block} channels per scale: a multiple of {_LANES}"
  if not _block_rows(num_rows, shared, private, dtype, ranks, sent, block):
    return (
      f"{ranks} x {shared} + {private} channels: 16 rows do not fit "
      f"{calls.MAX_BLOCK_VMEM_BYTES >> 20} MB"
    )
  return None


def _block_rows(num_rows, shared, private, dtype, ranks, sent, block) -> int:
  """Returns the number of rows per grid step; 0 if too few fit in VMEM.

  Arguments are those of `refusal`.
  """
  # Four arrays: old stream, new stream, normalised rows, private update. Each
  # is double-buffered: the next block is loaded while one is processed. About
  # three more are float32 temporaries.
  row_bytes = (shared + private) * (8 * jnp.dtype(dtype).itemsize + 12)
  row_bytes += 2 * ranks * shared * jnp.dtype(sent).itemsize
  if block is not None:
    # In VMEM a row of scales is padded to a multiple of 128 lanes.
    row_bytes += 2 * ranks * 4 * _LANES * -(-shared // (block * _LANES))
  return calls.rows_per_block(num_rows, row_bytes)


def forward(
  parts: Sequence[jax.Array],
  partial: jax.Array,
  scales: jax.Array | None,
  d_private: jax.Array | None,
  gain: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array]:
  """Sums, adds and normalises: `api.Kernels.forward`."""
  ranks, num_rows, shared = partial.shape
  dtype = parts[0].dtype
  widths = [x.shape[1] for x in parts]
  width = sum(widths)
  block = None if scales is None else shared // scales.shape[-1]
  rows = _block_rows(
    num_rows, shared, width - shared, dtype, ranks, partial.dtype, block
  )
  streams = [pl.BlockSpec((rows, w), lambda i: (i, 0)) for w in widths]
  whole = pl.BlockSpec((rows, width), lambda i: (i, 0))
  extra = [x for x in (scales, d_private) if x is not None]
  *new, normed = calls.tpu_call(
    functools.partial(
      _forward, block=block, num_parts=len(parts), scale=options.scale,
      eps=options.eps,
    ),
    "parallel",
    grid=(pl.cdiv(num_rows, rows),),
    in_specs=[
      pl.BlockSpec((1, width), lambda i: (0, 0)),
      *streams,
      pl.BlockSpec((ranks, rows, shared), lambda i: (0, i, 0)),
      *(
        [pl.BlockSpec((ranks, rows, scales.shape[-1]), lambda i: (0, i, 0))]
        if scales is not None
        else []
      ),
      *streams[1:],
    ],
    out_specs=[*streams, whole],
    out_shape=[
      *(calls.output_type(x.shape, dtype, gain) for x in parts),
      calls.output_type((num_rows, width), dtype, gain),
    ],
    name="reduce_add_norm",
    interpret=options.interpret,
  )(gain[None], *parts, partial, *extra)
  return new, normed


def _forward(gain_ref, *refs, block, num_parts, scale, eps):
  parts, refs = refs[:num_parts], refs[num_parts:]
  partial_ref, *refs = refs
  scale_ref = None
  if block is not None:
    scale_ref, *refs = refs
  if num_parts > 1:
    d_private_ref, *refs = refs
  *new_refs, normed_ref = refs
  dtype, shared = parts[0].dtype, parts[0].shape[1]
  # Codes are decoded block by block, so that one column of the scales applies
  # to a whole tile. Without codes all shared channels are one block.
  step = block or shared
  for start in range(0, shared, step):
    here = pl.ds(start, step)
    total = jnp.zeros((parts[0].shape[0], step), jnp.float32)
    for rank in range(partial_ref.shape[0]):
      part = partial_ref[rank, :, here].astype(jnp.float32)
      if scale_ref is not None:
        part = part * scale_ref[rank, :, pl.ds(start // step, 1)]  # [rows, 1]
      total = total + part
    # As in the reference, the sum over ranks is rounded before it is added.
    update = total.astype(dtype).astype(jnp.float32)
    old = parts[0][:, here].astype(jnp.float32)
    new_refs[0][:, here] = (old + update).astype(dtype)
  if num_parts > 1:
    d = d_private_ref[...].astype(jnp.float32)
    d = calls.scaled(d, scale, dtype)
    new_refs[1][...] = (parts[1][...].astype(jnp.float32) + d).astype(dtype)
  # Reads the rounded values back: statistics describe the new stream.
  wide = [ref[...].astype(jnp.float32) for ref in new_refs]
  write_normed(normed_ref, wide, gain_ref, eps)
