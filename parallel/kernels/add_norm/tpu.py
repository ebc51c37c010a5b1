"""Residual add and RMSNorm in one pass over HBM, for TPUs.

A grid step holds whole rows of all operands in VMEM. The shared and the private
part are written to adjacent channels of the normalised row, so that XLA never
concatenates them in HBM. The backward pass reads the new stream that the
forward pass returned and recomputes the statistics: since whole rows are in
VMEM, this moves no additional bytes.

Derivative of one row: let x be the new stream, r = 1 / sqrt(mean(x^2) + eps),
and g and h the cotangents of the new stream and of the normalised row. Then

    dx = g + r gain h - x r^3 mean(x gain h);  d gain = sum over rows of r x h

Each grid step writes a partial sum of ``d gain`` over its rows; XLA sums these.
Accumulating one sum over all steps would make the steps sequential, so that a
chip with two cores could not split them.

Shape legend: N = rows (tokens), K = shared channels, P = private channels,
H = K + P.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.reference import NormOptions


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Returns why a stream is not supported, or None: `api.Kernels.refusal`."""
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  if num_rows < 1:
    return "no rows"
  if not _block_rows(num_rows, width, dtype):
    return (
      f"width {width}: 16 rows do not fit {calls.MAX_BLOCK_VMEM_BYTES >> 20} MB"
    )
  return None


def _block_rows(num_rows: int, width: int, dtype: jnp.dtype) -> int:
  """Returns the number of rows per grid step; 0 if too few fit in VMEM.

  ``width`` is the number of channels of a row (token).
  """
  # The backward pass needs the most VMEM: five arrays (x, its cotangent, the
  # cotangent of the normalised row, two results), each double-buffered since
  # the next block is loaded while one is processed, and about three float32
  # temporaries.
  row_bytes = width * (10 * jnp.dtype(dtype).itemsize + 12)
  return calls.rows_per_block(num_rows, row_bytes)


def forward(
  parts: Sequence[jax.Array],
  updates: Sequence[jax.Array],
  gain: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array]:
  """Adds an update and normalises: `api.Kernels.forward`."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  widths = [x.shape[1] for x in parts]
  width = sum(widths)
  block = _block_rows(num_rows, width, dtype)
  rows = [pl.BlockSpec((block, w), lambda i: (i, 0)) for w in widths]
  whole = pl.BlockSpec((block, width), lambda i: (i, 0))
  # Without an update the stream is unchanged and not written.
  new_parts = parts if updates else []
  *new, normed = calls.tpu_call(
    functools.partial(
      _forward, num=len(parts), add=bool(updates), scale=options.scale,
      eps=options.eps,
    ),
    "parallel",
    grid=(pl.cdiv(num_rows, block),),
    in_specs=[
      *rows,
      *(rows if updates else []),
      pl.BlockSpec((1, width), lambda i: (0, 0)),
    ],
    out_specs=[*(rows if updates else []), whole],
    out_shape=[
      *(calls.output_type(x.shape, dtype, x) for x in new_parts),
      calls.output_type((num_rows, width), dtype, parts[0]),
    ],
    name="add_norm",
    interpret=options.interpret,
  )(*parts, *updates, gain.astype(jnp.float32)[None])
  return new or list(parts), normed


def _forward(*refs, num, add, scale, eps):
  x_refs, d_refs = refs[:num], refs[num : 2 * num] if add else ()
  gain_ref, *new_refs, normed_ref = refs[num + len(d_refs) :]
  wide = [ref[...].astype(jnp.float32) for ref in x_refs]
  if d_refs:
    for i, d_ref in enumerate(d_refs):
      d = d_ref[...].astype(jnp.float32)
      if i + 1 == num:
        d = calls.scaled(d, scale, d_ref.dtype)
      # The sum of two bfloat16 numbers in float32, rounded once, is bitwise
      # equal to their sum in bfloat16, which the reference computes.
      new = wide[i] + d
      new_refs[i][...] = new.astype(new_refs[i].dtype)
    # Reads the rounded values back: statistics describe the new stream.
    wide = [ref[...].astype(jnp.float32) for ref in new_refs]
  write_normed(normed_ref, wide, gain_ref, eps)


def backward(
  parts: Sequence[jax.Array],
  gain: jax.Array,
  d_parts: Sequence[jax.Array],
  d_normed: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Returns the cotangents of operands: `api.Kernels.backward`."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  widths = [x.shape[1] for x in parts]
  width = sum(widths)
  block = _block_rows(num_rows, width, dtype)
  num_blocks = pl.cdiv(num_rows, block)
  rows = [pl.BlockSpec((block, w), lambda i: (i, 0)) for w in widths]
  # Cotangent of the last update, scale times the stream's; omitted if they are
  # equal.
  extra = parts[-1:] if options.scale != 1.0 else []
  *d_x, d_gain = calls.tpu_call(
    functools.partial(
      _backward, num=len(parts), scale=options.scale, eps=options.eps,
      num_rows=num_rows,
    ),
    "parallel",
    grid=(num_blocks,),
    in_specs=[
      *rows,
      *rows,
      pl.BlockSpec((block, width), lambda i: (i, 0)),
      pl.BlockSpec((1, width), lambda i: (0, 0)),
    ],
    out_specs=[
      *rows,
      *(rows[-1:] if extra else []),
      # [num_blocks, 1, H]: the last two dims of a block must be whole tiles, or
      # equal to the dims of the array.
      pl.BlockSpec((None, 1, width), lambda i: (i, 0, 0)),
    ],
    out_shape=[
      *(calls.output_type(x.shape, dtype, d_normed) for x in (*parts, *extra)),
      calls.output_type((num_blocks, 1, width), jnp.float32, d_normed),
    ],
    name="add_norm_backward",
    interpret=options.interpret,
  )(*parts, *d_parts, d_normed, gain.astype(jnp.float32)[None])
  return d_x[: len(parts)], d_x[-1], jnp.sum(d_gain, axis=(0, 1))


def _backward(*refs, num, scale, eps, num_rows):
  x_refs, g_refs = refs[:num], refs[num : 2 * num]
  d_normed_ref, gain_ref, *out_refs, d_gain_ref = refs[2 * num :]
  wide = [ref[...].astype(jnp.float32) for ref in x_refs]
  rstd = _rstd(wide, eps)
  width = gain_ref.shape[1]
  block = rstd.shape[0]
  # The last block may extend past the last row. Values there are undefined,
  # possibly NaN, and are excluded from the gain's sum over rows. dx needs no
  # mask: Pallas does not write rows past the end.
  row = lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  inside = row < num_rows - pl.program_id(0) * block
  spans = [pl.ds(*span) for span in calls.spans(wide)]
  # Two loops over the parts, since dx of any channel depends on the mean over
  # the whole row. The second loop reloads d_normed from VMEM instead of keeping
  # a float32 copy.
  dot = jnp.zeros_like(rstd)  # [block, 1]
  for x, here in zip(wide, spans, strict=True):
    d = d_normed_ref[:, here].astype(jnp.float32)
    dot += jnp.sum(d * gain_ref[:, here] * x, axis=-1, keepdims=True)
    d_gain_ref[:, here] = jnp.sum(
      jnp.where(inside, d * (x * rstd), 0.0), axis=0, keepdims=True
    )
  common = dot * (rstd * rstd * rstd) / width
  for i, (x, here) in enumerate(zip(wide, spans, strict=True)):
    d = d_normed_ref[:, here].astype(jnp.float32)
    d = d * gain_ref[:, here] * rstd - x * common
    d = g_refs[i][...].astype(jnp.float32) + d
    out_refs[i][...] = d.astype(out_refs[i].dtype)
  if scale != 1.0:  # d is the unrounded cotangent of the last part
    out_refs[num][...] = (d * scale).astype(out_refs[num].dtype)


def write_normed(
  normed_ref: Any, wide: Sequence[jax.Array], gain_ref: Any, eps: float
) -> None:
  """Normalises rows, and writes their concatenated parts.

  Args:
    normed_ref: Destination, ``[rows, H]``.
    wide: Parts of the rows, float32 ``[rows, K]`` and ``[rows, P]``.
    gain_ref: Gain of the norm, ``[1, H]``.
    eps: Constant added to the mean square.
  """
  rstd = _rstd(wide, eps)
  for x, span in zip(wide, calls.spans(wide), strict=True):
    here = pl.ds(*span)
    normed = x * rstd * gain_ref[:, here]
    normed_ref[:, here] = normed.astype(normed_ref.dtype)


def _rstd(wide: Sequence[jax.Array], eps: float) -> jax.Array:
  """Returns ``1 / sqrt(mean(x^2) + eps)`` of each row, ``[rows, 1]``.

  ``wide`` are the parts of the rows, as in `write_normed`.
  """
  squares = sum(jnp.sum(x * x, axis=-1, keepdims=True) for x in wide)
  return lax.rsqrt(squares / sum(x.shape[1] for x in wide) + eps)
