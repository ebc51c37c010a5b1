"""Residual add and RMSNorm in one pass over memory, for GPUs, in Triton.

A program holds one row at a time in registers. The parts of a row are padded to
powers of two, the only sizes that Triton supports. The formula of the
derivative is in ``tpu.py``.

The kernels use Triton instead of Mosaic GPU because the op streams rows and has
no matrix products: Mosaic's asynchronous copies and tensor cores have no
advantage here, and Triton has masked loads of any width.

In each program all loads precede the first store. The compiler cannot exclude
that operands and results alias, so that a load after a store waits for it.

Shape legend: N = rows (tokens), H = channels of a whole row.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.reference import NormOptions

# Maximum channels of a row. The largest program has 32 warps of 32 threads,
# which share 65,536 registers: a thread then has 32 channels and 64 registers,
# which two float32 copies of the row fill.
_MAX_WIDTH = 32768
# Programs of the backward pass, two for each of the 132 multiprocessors of an
# H100 or H200. Each processes many rows and writes a partial sum of the gain's
# cotangent, H float32 values. At 8192 x 8192 these sums are 5.6% of all bytes
# for 512 programs, 2.9% for 264; fewer programs would leave processors idle.
_BACKWARD_PROGRAMS = 264
# Maximum bytes of a row for which the backward pass prefetches the next row:
# 8,192 channels of bfloat16. Two longer rows would not fit in the registers.
_MAX_PREFETCH_BYTES = 16384


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Returns why a stream is not supported, or None: `api.Kernels.refusal`."""
  if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"dtype {dtype}: float32, bfloat16 or float16"
  if num_rows < 1:
    return "no rows"
  if width > _MAX_WIDTH:
    return f"width {width} > {_MAX_WIDTH}: a row must fit the registers"
  return None


def pallas_options(
  spans: Sequence[tuple[int, int]], interpret: bool, fewer: bool = False
) -> dict[str, Any]:
  """Returns the ``pallas_call`` keywords for programs that hold whole rows.

  Args:
    spans: ``(first channel, width)`` of each part of a row.
    interpret: Whether to run in the interpreter, on any machine.
    fewer: Whether to round the number of warps down to a power of two, so that
      each thread has more registers, instead of up.
  """
  channels = sum(pl.next_power_of_2(width) for _, width in spans)
  # 16 channels per thread, 512 per warp. For a part that is half of a row, a
  # thread has 8 channels: in bfloat16 one load of 16 bytes, the widest load.
  warps = max(1, channels // 512)
  up = pl.next_power_of_2(warps)
  warps = up // 2 if fewer and up > warps else up
  return {
    "compiler_params": pltriton.CompilerParams(num_warps=min(32, warps)),
    "interpret": interpret,
  }


def forward(
  parts: Sequence[jax.Array],
  updates: Sequence[jax.Array],
  gain: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array]:
  """Adds an update and normalises: `api.Kernels.forward`."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  width = sum(x.shape[1] for x in parts)
  new_parts = parts if updates else []
  *new, normed = pl.pallas_call(
    functools.partial(
      _forward, num=len(parts), add=bool(updates), scale=options.scale,
      eps=options.eps,
    ),
    grid=(num_rows,),
    out_shape=[
      *(calls.output_type(x.shape, dtype, x) for x in new_parts),
      calls.output_type((num_rows, width), dtype, parts[0]),
    ],
    name="add_norm",
    **pallas_options(calls.spans(parts), options.interpret),
  )(*parts, *updates, gain.astype(jnp.float32))
  return new or list(parts), normed


def _forward(*refs, num, add, scale, eps):
  x_refs, d_refs = refs[:num], refs[num : 2 * num] if add else ()
  gain_ref, *new_refs, normed_ref = refs[num + len(d_refs) :]
  row, dtype = pl.program_id(0), normed_ref.dtype
  spans = calls.spans(x_refs)
  # All loads precede the first store: later loads would wait for it.
  gains = [read_float32(gain_ref, span, whole=True) for span in spans]
  wide = [
    read_float32(r, span, row) for r, span in zip(x_refs, spans, strict=True)
  ]
  ds = [read_float32(r, spans[i], row) for i, r in enumerate(d_refs)]
  for i, d in enumerate(ds):
    if i + 1 == num:
      d = calls.scaled(d, scale, dtype)
    # Rounded before the norm: statistics describe the new stream.
    new = (wide[i] + d).astype(dtype)
    store(new_refs[i], spans[i], new, row)
    wide[i] = new.astype(jnp.float32)
  write_normed(normed_ref, wide, spans, gains, row, eps)


def backward(
  parts: Sequence[jax.Array],
  gain: jax.Array,
  d_parts: Sequence[jax.Array],
  d_normed: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Returns the cotangents of operands: `api.Kernels.backward`."""
  num_rows, dtype = parts[0].shape[0], parts[0].dtype
  width = sum(x.shape[1] for x in parts)
  programs = min(num_rows, _BACKWARD_PROGRAMS)
  # With a scale, the last update has a separate cotangent.
  results = [*parts, *(parts[-1:] if options.scale != 1.0 else [])]
  *d_x, d_gain = pl.pallas_call(
    functools.partial(
      _backward, num=len(parts), scale=options.scale, eps=options.eps
    ),
    grid=(programs,),
    out_shape=[
      *(calls.output_type(x.shape, dtype, d_normed) for x in results),
      calls.output_type((programs, width), jnp.float32, d_normed),
    ],
    name="add_norm_backward",
    # Long rows get fewer warps: with 32 warps a thread has 64 registers, of
    # which its addresses and counters would take a third.
    **pallas_options(
      calls.spans(_split_long_rows(parts, width)), options.interpret,
      fewer=not _is_prefetched(parts[0], width),
    ),
  )(*parts, *d_parts, d_normed, gain.astype(jnp.float32))
  return d_x[: len(parts)], d_x[-1], jnp.sum(d_gain, axis=0)


def _backward(*refs, num, scale, eps):
  x_refs, g_refs = refs[:num], refs[num : 2 * num]
  d_normed_ref, gain_ref, *out_refs, d_gain_ref = refs[2 * num :]
  num_rows, width = d_normed_ref.shape
  x_refs, g_refs, new_refs, last_refs = (
    _split_long_rows(r, width) for r in (
      x_refs, g_refs, out_refs[:num], out_refs[num:]
    )
  )
  spans = calls.spans(x_refs)
  first, programs = pl.program_id(0), d_gain_ref.shape[0]
  dtype = d_normed_ref.dtype

  def operands(row):
    """Loads a row of the stream and of both cotangents, in parts.

    Returns zeros past the last row, to which the prefetch may extend.
    """
    part = functools.partial(read, exists=row < num_rows)
    return (
      [part(ref, span, row) for ref, span in zip(x_refs, spans, strict=True)],
      [part(d_normed_ref, span, row, whole=True) for span in spans],
      [part(ref, span, row) for ref, span in zip(g_refs, spans, strict=True)],
    )

  # If two rows fit in registers, the next row is prefetched.
  ahead = _is_prefetched(d_normed_ref, width)

  def one_row(turn, carried):
    here, d_gains = carried
    # The rows of a program have a stride of `programs`, so that concurrent
    # programs load adjacent rows.
    row = first + turn * programs
    following = operands(row + programs) if ahead else ()
    here = here or operands(row)
    # Loaded in every iteration: holding the gain would need one register per
    # channel, and all programs load the same gain, which is cached.
    gains = [read_float32(gain_ref, span, whole=True) for span in spans]
    xs, ds, gs = jax.tree.map(lambda x: x.astype(jnp.float32), here)
    rstd = _rstd(xs, width, eps)
    dot = _sum([
      d * gain * x for d, gain, x in zip(ds, gains, xs, strict=True)
    ])
    common = dot * (rstd * rstd * rstd) / width  # r^3 mean(x gain h)
    new = []
    for i, (x, d, g) in enumerate(zip(xs, ds, gs, strict=True)):
      new.append(d_gains[i] + d * (x * rstd))
      gs[i] = g + (d * gains[i] * rstd - x * common)
      store(new_refs[i], spans[i], gs[i].astype(dtype), row)
    # The last update was scaled: its cotangent is scaled before rounding.
    for i, last_ref in enumerate(last_refs, len(spans) - len(last_refs)):
      store(last_ref, spans[i], (gs[i] * scale).astype(dtype), row)
    return following, new

  # Rows first, first + programs, ... below num_rows; at least one.
  turns = (num_rows - first + programs - 1) // programs
  zeros = [jnp.zeros(pl.next_power_of_2(n), jnp.float32) for _, n in spans]
  start = operands(first) if ahead else ()
  _, totals = lax.fori_loop(0, turns, one_row, (start, zeros))
  for span, total in zip(spans, totals, strict=True):
    store(d_gain_ref, span, total, first, whole=True)


def _is_prefetched(ref: Any, width: int) -> bool:
  return width * ref.dtype.itemsize <= _MAX_PREFETCH_BYTES


def _split_long_rows(refs: Sequence[Any], width: int) -> list[Any]:
  """Splits refs to long rows, to pad less: 9216 channels to 8192 and 1024.

  ``width`` is the number of channels of a row in all ``refs`` together.
  """
  pieces = []
  for ref in refs:
    num_rows, channels = ref.shape
    most = 1 << (channels.bit_length() - 1)  # a power of two
    if most == channels or _is_prefetched(ref, width):
      pieces.append(ref)
    else:
      pieces.append(_ChannelRange(ref, 0, (num_rows, most)))
      pieces.append(_ChannelRange(ref, most, (num_rows, channels - most)))
  return pieces


@dataclasses.dataclass(frozen=True)
class _ChannelRange:
  """Range of a part's channels, indexed like a ref: Triton cannot nest refs.

  Attributes:
    part: Ref to the part of all rows.
    first: First channel of the range.
    shape: Number of rows, and of channels of the range.
  """

  part: Any
  first: int
  shape: tuple[int, int]
  at = property(lambda self: self)

  def __getitem__(self, index: tuple[Any, jax.Array]) -> Any:
    row, channels = index
    return self.part.at[row, channels + self.first]


def read(
  ref: Any,
  span: tuple[int, int],
  *row: Any,
  whole: bool = False,
  share: int = 1,
  exists: jax.Array | bool = True,
) -> jax.Array:
  """Loads one part of a row, padded with zeros to a power of two.

  Zeros change neither the sums of squares nor the dot products over a row.

  Args:
    ref: Array of this part, or of whole rows if ``whole`` is set.
    span: ``(first channel in the whole row, width)`` of the part.
    *row: Index of the row, one number for each dim of ``ref`` except the last.
    whole: Whether ``ref`` has whole rows.
    share: Number of adjacent channels that share one element of ``ref``: the
      block of a codec if ``ref`` holds scales.
    exists: Whether the row exists; if not, zeros are returned.
  """
  index, mask = _index_and_mask(span, row, whole, share)
  if exists is not True:
    mask = mask & exists
  return pltriton.load(ref.at[index], mask=mask, other=0)


def read_float32(*args: Any, **options: Any) -> jax.Array:
  """Loads like `read` and casts to float32."""
  return read(*args, **options).astype(jnp.float32)


def store(
  ref: Any,
  span: tuple[int, int],
  value: jax.Array,
  *row: Any,
  whole: bool = False,
) -> None:
  """Stores one part of a row; the inverse of `read`.

  Args:
    ref: Array of this part, or of whole rows if ``whole`` is set.
    span: ``(first channel in the whole row, width)`` of the part.
    value: The part, padded to a power of two; the padding is not written.
    *row: Index of the row, one number for each dim of ``ref`` except the last.
    whole: Whether ``ref`` has whole rows.
  """
  index, mask = _index_and_mask(span, row, whole)
  pltriton.store(ref.at[index], value, mask=mask)


def _index_and_mask(span, row, whole, share=1):
  """Returns the index of a part's padded channels, and a mask of the part.

  Arguments are those of `read`.
  """
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
  """Normalises a row, and stores its concatenated parts.

  Args:
    normed_ref: Destination, ``[N, H]``.
    wide: Parts of the row, float32, padded with zeros to powers of two.
    spans: ``(first channel, width)`` of each part.
    gains: Parts of the gain, padded like ``wide``.
    row: Number of the row.
    eps: Constant added to the mean square.
  """
  rstd = _rstd(wide, normed_ref.shape[1], eps)
  for x, span, gain in zip(wide, spans, gains, strict=True):
    y = (x * rstd * gain).astype(normed_ref.dtype)
    store(normed_ref, span, y, row, whole=True)


def _rstd(wide: Sequence[jax.Array], width: int, eps: float) -> jax.Array:
  """Returns ``1 / sqrt(mean(x^2) + eps)`` of a row, ``[]``.

  ``wide`` are the parts of the row in float32; ``width`` its channels, without
  padding.
  """
  return lax.rsqrt(_sum([x * x for x in wide]) / width + eps)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
  """Sums all elements of all parts of a row.

  A sum over threads requires a barrier. Parts of equal padded size are first
  added element by element, so that two halves of a row need one barrier instead
  of two.
  """
  sizes = {x.shape for x in parts}
  return sum(
    jnp.sum(sum(x for x in parts if x.shape == size)) for size in sizes
  )
