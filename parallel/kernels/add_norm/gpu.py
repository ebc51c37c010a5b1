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
# Programs of the backward: each sums the gain's cotangent over its rows. Two
# for each of the 132 multiprocessors of an H100 or H200.
_PROGRAMS = 264
# A row of these bytes or fewer is read while the one before is worked on.
_AHEAD_BYTES = 16384


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Why the kernel does not take a stream; None: it does."""
  if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"dtype {dtype}: float32, bfloat16 or float16"
  if num_rows < 1:
    return "no rows"
  if width > _MAX_WIDTH:
    return f"width {width} > {_MAX_WIDTH}: a row must fit the registers"
  return None


def params(
  spans: Sequence[tuple[int, int]], interpret: bool
) -> dict[str, Any]:
  """Keywords of a ``pallas_call`` whose programs have a row each.

  A thread has 16 channels, so that it reads a part of half a row in bfloat16
  in words of 16 bytes, the largest that there are.

  Args:
    spans: Of the row's parts.
    interpret: Run on any machine.
  """
  channels = sum(pl.next_power_of_2(width) for _, width in spans)
  warps = pl.next_power_of_2(max(1, channels // 512))
  return {
    "compiler_params": pltriton.CompilerParams(num_warps=min(32, warps)),
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
    **params(calls.spans(parts), interpret),
  )(*parts, *updates, gain.astype(jnp.float32))
  return new or list(parts), normed


def _forward(*refs, num, add, scale, eps):
  x_refs, d_refs = refs[:num], refs[num : 2 * num] if add else ()
  gain_ref, *new_refs, normed_ref = refs[num + len(d_refs) :]
  row, dtype = pl.program_id(0), normed_ref.dtype
  spans = calls.spans(x_refs)
  # All reads come before the first write, which they would have to wait for.
  gains = [load(gain_ref, span, whole=True) for span in spans]
  wide = [load(r, span, row) for r, span in zip(x_refs, spans, strict=True)]
  ds = [load(r, spans[i], row) for i, r in enumerate(d_refs)]
  for i, d in enumerate(ds):
    if i + 1 == num:
      d = calls.scaled(d, scale, dtype)
    new = (wide[i] + d).astype(dtype)
    store(new_refs[i], spans[i], new, row)
    wide[i] = new.astype(jnp.float32)
  write_normed(normed_ref, wide, spans, gains, row, eps)


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
    **params(calls.spans(parts), interpret),
  )(*parts, *d_parts, d_normed, gain.astype(jnp.float32))
  return d_x[: len(parts)], d_x[-1], jnp.sum(d_gain, axis=0)


def _backward(*refs, num, scale, eps):
  x_refs, g_refs = refs[:num], refs[num : 2 * num]
  d_normed_ref, gain_ref, *out_refs, d_gain_ref = refs[2 * num :]
  num_rows, width = d_normed_ref.shape
  spans = calls.spans(x_refs)
  first, programs = pl.program_id(0), d_gain_ref.shape[0]

  def operands(row):
    """Parts of stream, normed row's cotangent and stream's cotangent."""
    part = functools.partial(read, exists=row < num_rows)
    return (
      [part(ref, span, row) for ref, span in zip(x_refs, spans, strict=True)],
      [part(d_normed_ref, span, row, whole=True) for span in spans],
      [part(ref, span, row) for ref, span in zip(g_refs, spans, strict=True)],
    )

  # Where registers hold two rows, the next one is on its way from memory while
  # one is worked on.
  ahead = width * d_normed_ref.dtype.itemsize <= _AHEAD_BYTES

  def one_row(turn, carried):
    here, d_gains = carried
    row = first + turn * programs
    following = operands(row + programs) if ahead else ()
    here = here or operands(row)
    gains = [load(gain_ref, span, whole=True) for span in spans]
    xs, ds, gs = jax.tree.map(lambda x: x.astype(jnp.float32), here)
    rstd = _rstd(xs, width, eps)
    dot = _sum([
      d * gain * x for d, gain, x in zip(ds, gains, xs, strict=True)
    ])
    common = dot * (rstd * rstd * rstd) / width
    new = []
    for i, (x, d, g) in enumerate(zip(xs, ds, gs, strict=True)):
      new.append(d_gains[i] + d * (x * rstd))
      g = g + (d * gains[i] * rstd - x * common)
      store(out_refs[i], spans[i], g.astype(out_refs[i].dtype), row)
    if scale != 1.0:
      last = out_refs[num]
      store(last, spans[-1], (g * scale).astype(last.dtype), row)
    return following, new

  turns = (num_rows - first + programs - 1) // programs
  zeros = [jnp.zeros(pl.next_power_of_2(n), jnp.float32) for _, n in spans]
  start = operands(first) if ahead else ()
  _, totals = lax.fori_loop(0, turns, one_row, (start, zeros))
  for span, total in zip(spans, totals, strict=True):
    store(d_gain_ref, span, total, first, whole=True)


def read(
  ref: Any,
  span: tuple[int, int],
  *row: Any,
  whole: bool = False,
  share: int = 1,
  exists: jax.Array | bool = True,
) -> jax.Array:
  """A row's part, zeros up to a power of two.

  Args:
    ref: A part, or, with ``whole``, an array of whole rows.
    span: Which part.
    *row: Which row: one number for each dim before the last.
    whole: See ``ref``.
    share: Channels that have one element of ``ref`` together.
    exists: Zeros if false.
  """
  index, mask = _where(span, row, whole, share)
  if exists is not True:
    mask = mask & exists
  return pltriton.load(ref.at[index], mask=mask, other=0)


def load(*args: Any, **options: Any) -> jax.Array:
  """`read` in float32."""
  return read(*args, **options).astype(jnp.float32)


def store(
  ref: Any,
  span: tuple[int, int],
  value: jax.Array,
  *row: Any,
  whole: bool = False,
) -> None:
  """The inverse of `read`."""
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
  gains: Sequence[jax.Array],
  row: jax.Array,
  eps: float,
) -> None:
  """Normalises a row in parts, side by side into a whole one."""
  rstd = _rstd(wide, normed_ref.shape[1], eps)
  for x, span, gain in zip(wide, spans, gains, strict=True):
    y = (x * rstd * gain).astype(normed_ref.dtype)
    store(normed_ref, span, y, row, whole=True)


def _rstd(wide: Sequence[jax.Array], width: int, eps: float) -> jax.Array:
  return lax.rsqrt(_sum([x * x for x in wide]) / width + eps)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
  """Of all elements; threads meet once for parts of one size."""
  sizes = {x.shape for x in parts}
  return sum(
    jnp.sum(sum(x for x in parts if x.shape == size)) for size in sizes
  )
