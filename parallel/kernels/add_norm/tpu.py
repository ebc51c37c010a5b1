"""Residual add and RMSNorm in one pass over HBM, for TPUs.

A grid step has whole rows of all operands in VMEM. There the shared and the
private part are written side by side into the normalised row, so that XLA never
concatenates them in HBM. The backward reads the new stream that the forward
returned and computes the statistics again: whole rows are in VMEM anyway, so
this costs no bytes.

Derivative of one row: let x be the new stream, r = 1 / sqrt(mean(x^2) + eps),
and g and h the cotangents of the new stream and of the normalised row. Then

    dx = g + r gain h - x r^3 mean(x gain h);  d gain = sum over rows of r x h

Each grid step writes a partial sum of ``d gain`` over its own rows, and XLA
adds these up. A sum carried from step to step would force the steps into one
order, and a chip with two cores could not split them.

Shape legend: N = rows, K = shared channels, P = private channels, H = K + P.
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
  """Returns why the kernels do not take a stream: `api.Kernels.refusal`."""
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  if num_rows < 1:
    return "no rows"
  if not _block(num_rows, width, dtype):
    return f"width {width}: 16 rows do not fit {calls.VMEM_BYTES >> 20} MB"
  return None


def _block(num_rows: int, width: int, dtype: jnp.dtype) -> int:
  # The backward, which needs the most, moves five streams: x, its cotangent,
  # that of the normalised row, and two results. Each has two buffers, as the
  # next block loads while one is worked on. About three more are in float32.
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
  block = _block(num_rows, width, dtype)
  rows = [pl.BlockSpec((block, w), lambda i: (i, 0)) for w in widths]
  whole = pl.BlockSpec((block, width), lambda i: (i, 0))
  # Without an update the stream does not change, so it is not written again.
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
      *(calls.shaped(x.shape, dtype, x) for x in new_parts),
      calls.shaped((num_rows, width), dtype, parts[0]),
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
      # The sum of two bfloat16s in float32, once rounded, has the bits of
      # their sum in bfloat16, which is what the reference computes.
      new = wide[i] + d
      new_refs[i][...] = new.astype(new_refs[i].dtype)
    # Read back what was rounded: the statistics are those of the new stream.
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
  block = _block(num_rows, width, dtype)
  num_blocks = pl.cdiv(num_rows, block)
  rows = [pl.BlockSpec((block, w), lambda i: (i, 0)) for w in widths]
  # The last update's cotangent, scale times the stream's: one result less where
  # both are the same.
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
      # [num_blocks, 1, H], as a block's last two dims must be whole tiles or
      # the array's own.
      pl.BlockSpec((None, 1, width), lambda i: (i, 0, 0)),
    ],
    out_shape=[
      *(calls.shaped(x.shape, dtype, d_normed) for x in (*parts, *extra)),
      calls.shaped((num_blocks, 1, width), jnp.float32, d_normed),
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
  # The last block may reach past the end. What lies there is undefined and may
  # be NaN, so it is left out of the gain's sum over rows. Its own rows of dx
  # need no mask: Pallas does not write them.
  row = lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  inside = row < num_rows - pl.program_id(0) * block
  spans = [pl.ds(*span) for span in calls.spans(wide)]
  # Two loops over the parts: dx of any channel needs the mean over the whole
  # row. The second loop reads d_normed from VMEM again instead of keeping a
  # float32 copy.
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
  if scale != 1.0:  # d is still that of the last part, and not yet rounded
    out_refs[num][...] = (d * scale).astype(out_refs[num].dtype)


def write_normed(
  normed_ref: Any, wide: Sequence[jax.Array], gain_ref: Any, eps: float
) -> None:
  """Writes the normalised rows, their parts side by side.

  Args:
    normed_ref: Where to, ``[rows, H]``.
    wide: The parts of the rows, float32 ``[rows, K]`` and ``[rows, P]``.
    gain_ref: Gain of the norm, ``[1, H]``.
    eps: Added to the mean square.
  """
  rstd = _rstd(wide, eps)
  for x, span in zip(wide, calls.spans(wide), strict=True):
    here = pl.ds(*span)
    normed = x * rstd * gain_ref[:, here]
    normed_ref[:, here] = normed.astype(normed_ref.dtype)


def _rstd(wide: Sequence[jax.Array], eps: float) -> jax.Array:
  """Returns ``1 / sqrt(mean(x^2) + eps)`` of each row, ``[rows, 1]``."""
  squares = sum(jnp.sum(x * x, axis=-1, keepdims=True) for x in wide)
  return lax.rsqrt(squares / sum(x.shape[1] for x in wide) + eps)
