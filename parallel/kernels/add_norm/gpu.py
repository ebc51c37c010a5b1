"""Residual add and RMSNorm in one pass over memory, for GPUs, in Triton.

A program has one row in registers, its parts padded to powers of two. Triton
and not Mosaic GPU: the op streams rows and multiplies no matrices, so that
there is nothing for Mosaic's asynchronous copies and tensor cores to gain, and
Triton has masked loads of any width. Mathematics as in ``tpu.py``.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls

# A row's float32 values must fit the registers of 32 warps, a few times.
_MAX_WIDTH = 32768
# Programs of the backward: each sums the gain's cotangent over its rows.
_PROGRAMS = 512


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Why the kernel does not take a stream; None: it does."""
  if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"dtype {dtype}: float32, bfloat16 or float16"
  if num_rows < 1:
    return "no rows"
  if width > _MAX_WIDTH:
    return f"width {width} > {_MAX_WIDTH}: a row must fit the registers"
  return None


def params(width: int, interpret: bool) -> dict[str, Any]:
  """Keywords of a ``pallas_call`` whose programs have a row each."""
  warps = min(32, max(1, pl.next_power_of_2(width) // 256))
  return {
    "compiler_params": pltriton.CompilerParams(num_warps=warps),
    "interpret": interpret,
  }


def forward(
  parts: Sequence[jax.Array],
  updates: Sequence[jax.Array],
  gain: jax.Array,
  scale: float,
  eps: float,
  interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
  """See ``tpu.forward``."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  width = sum(x.shape[1] for x in parts)
  new_parts = parts if updates else []
  *new, normed = pl.pallas_call(
    functools.partial(
      _forward, num=len(parts), add=bool(updates), scale=scale, eps=eps
    ),
    grid=(num_rows,),
    out_shape=[
      *(calls.shaped(x.shape, dtype, x) for x in new_parts),
      calls.shaped((num_rows, width), dtype, parts[0]),
    ],
    name="add_norm",
    **params(width, interpret),
  )(*parts, *updates, gain.astype(jnp.float32))
  return new or list(parts), normed


def _forward(*refs, num, add, scale, eps):
  x_refs, d_refs = refs[:num], refs[num : 2 * num] if add else ()
  gain_ref, *new_refs, normed_ref = refs[num + len(d_refs) :]
  row, dtype = pl.program_id(0), normed_ref.dtype
  spans = calls.spans(x_refs)
  wide = [load(r, span, row) for r, span in zip(x_refs, spans, strict=True)]
  for i, d_ref in enumerate(d_refs):
    d = load(d_ref, spans[i], row)
    if i + 1 == num:
      d = calls.scaled(d, scale, dtype)
    new = (wide[i] + d).astype(dtype)
    store(new_refs[i], spans[i], new, row)
    wide[i] = new.astype(jnp.float32)
  write_normed(normed_ref, wide, spans, gain_ref, row, eps)


def backward(
  parts: Sequence[jax.Array],
  gain: jax.Array,
  d_parts: Sequence[jax.Array],
  d_normed: jax.Array,
  scale: float,
  eps: float,
  interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """See ``tpu.backward``."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  width = sum(x.shape[1] for x in parts)
  programs = min(num_rows, _PROGRAMS)
  results = [*parts, *(parts[-1:] if scale != 1.0 else [])]
  *d_x, d_gain = pl.pallas_call(
    functools.partial(_backward, num=len(parts), scale=scale, eps=eps),
    grid=(programs,),
    out_shape=[
      *(calls.shaped(x.shape, dtype, d_normed) for x in results),
      calls.shaped((programs, width), jnp.float32, d_normed),
    ],
    name="add_norm_backward",
    **params(width, interpret),
  )(*parts, *d_parts, d_normed, gain.astype(jnp.float32))
  return d_x[: len(parts)], d_x[-1], jnp.sum(d_gain, axis=0)


def _backward(*refs, num, scale, eps):
  x_refs, g_refs = refs[:num], refs[num : 2 * num]
  d_normed_ref, gain_ref, *out_refs, d_gain_ref = refs[2 * num :]
  num_rows, width = d_normed_ref.shape
  spans = calls.spans(x_refs)
  gains = [load(gain_ref, span, whole=True) for span in spans]
  first, programs = pl.program_id(0), d_gain_ref.shape[0]

  def one_row(turn, d_gains):
    row = first + turn * programs
    wide = [load(r, span, row) for r, span in zip(x_refs, spans, strict=True)]
    ds = [load(d_normed_ref, span, row, whole=True) for span in spans]
    rstd = _rstd(wide, width, eps)
    dot = sum(
      jnp.sum(d * gain * x)
      for d, gain, x in zip(ds, gains, wide, strict=True)
    )
    common = dot * (rstd * rstd * rstd) / width
    new = []
    for i, (x, d, span) in enumerate(zip(wide, ds, spans, strict=True)):
      new.append(d_gains[i] + d * (x * rstd))
      g = load(g_refs[i], span, row)
      g = g + (d * gains[i] * rstd - x * common)
      store(out_refs[i], span, g.astype(out_refs[i].dtype), row)
    if scale != 1.0:
      store(out_refs[num], span, (g * scale).astype(out_refs[num].dtype), row)
    return tuple(new)

  turns = (num_rows - first + programs - 1) // programs
  zeros = tuple(jnp.zeros_like(gain) for gain in gains)
  totals = lax.fori_loop(0, turns, one_row, zeros)
  for span, total in zip(spans, totals, strict=True):
    store(d_gain_ref, span, total, first, whole=True)


def load(
  ref: Any,
  span: tuple[int, int],
  *row: Any,
  whole: bool = False,
  share: int = 1,
) -> jax.Array:
  """A row's part in float32, zeros up to a power of two.

  Args:
    ref: A part, or, with ``whole``, an array of whole rows.
    span: Which part.
    *row: Which row: one number for each dim before the last.
    whole: See ``ref``.
    share: Channels that have one element of ``ref`` together.
  """
  index, mask = _where(span, row, whole, share)
  values = pltriton.load(ref.at[index], mask=mask, other=0.0)
  return values.astype(jnp.float32)


def store(
  ref: Any,
  span: tuple[int, int],
  value: jax.Array,
  *row: Any,
  whole: bool = False,
) -> None:
  """The inverse of `load`."""
  index, mask = _where(span, row, whole)
  pltriton.store(ref.at[index], value, mask=mask)


def _where(span, row, whole, share=1):
  start, width = span
  channel = jnp.arange(pl.next_power_of_2(width))
  columns = channel + start if whole else channel
  columns = columns if share == 1 else columns // share
  return (*row, columns), channel < width


def write_normed(
  normed_ref: Any,
  wide: Sequence[jax.Array],
  spans: Sequence[tuple[int, int]],
  gain_ref: Any,
  row: jax.Array,
  eps: float,
) -> None:
  """Normalises a row in parts, side by side into a whole one."""
  rstd = _rstd(wide, normed_ref.shape[1], eps)
  for x, span in zip(wide, spans, strict=True):
    y = x * rstd * load(gain_ref, span, whole=True)
    store(normed_ref, span, y.astype(normed_ref.dtype), row, whole=True)


def _rstd(wide: Sequence[jax.Array], width: int, eps: float) -> jax.Array:
  squares = sum(jnp.sum(x * x) for x in wide)
  return lax.rsqrt(squares / width + eps)
