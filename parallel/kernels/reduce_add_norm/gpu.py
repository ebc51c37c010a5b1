"""Sum over ranks, residual add and RMSNorm in one pass, for GPUs, in Triton.

A program holds one row in registers, as in ``add_norm/gpu.py``, and sums the
partial rows of the ranks there, in order. int8 codes are decoded in registers.
The scale of a block is loaded once per channel; all loads except the first are
served by a cache. ``add_norm`` has the backward pass.
"""

from collections.abc import Sequence
import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.gpu import (
  pallas_options,
  read_float32,
  store,
  write_normed,
)
from parallel.kernels.add_norm.reference import NormOptions

# The sum over ranks is unrolled, so that the program size is proportional to
# their number.
_MAX_RANKS = 64


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
  del num_rows, private, dtype, sent, block
  if not shared:
    return "nothing to sum"
  if ranks > _MAX_RANKS:
    return f"{ranks} ranks > {_MAX_RANKS}"
  return None


def forward(
  parts: Sequence[jax.Array],
  partial: jax.Array,
  scales: jax.Array | None,
  d_private: jax.Array | None,
  gain: jax.Array,
  options: NormOptions,
) -> tuple[list[jax.Array], jax.Array]:
  """Sums, adds and normalises: `api.Kernels.forward`."""
  _, num_rows, shared = partial.shape
  dtype = parts[0].dtype
  width = sum(x.shape[1] for x in parts)
  extra = [x for x in (scales, d_private) if x is not None]
  *new, normed = pl.pallas_call(
    functools.partial(
      _forward, num=len(parts), scale=options.scale, eps=options.eps,
      block=None if scales is None else shared // scales.shape[-1],
    ),
    grid=(num_rows,),
    out_shape=[
      *(calls.output_type(x.shape, dtype, gain) for x in parts),
      calls.output_type((num_rows, width), dtype, gain),
    ],
    name="reduce_add_norm",
    **pallas_options(calls.spans(parts), options.interpret),
  )(gain, *parts, partial, *extra)
  return new, normed


def _forward(gain_ref, *refs, num, scale, eps, block):
  x_refs, (partial_ref, *refs) = refs[:num], refs[num:]
  if block is not None:
    scale_ref, *refs = refs
  d_refs, (*new_refs, normed_ref) = refs[: num - 1], refs[num - 1 :]
  row, dtype = pl.program_id(0), normed_ref.dtype
  spans = calls.spans(x_refs)
  # All loads precede the first store: later loads would wait for it.
  gains = [read_float32(gain_ref, span, whole=True) for span in spans]
  xs = [
    read_float32(r, span, row) for r, span in zip(x_refs, spans, strict=True)
  ]
  ds = [
    read_float32(r, span, row)
    for r, span in zip(d_refs, spans[1:], strict=True)
  ]
  # Added in float32 and in the order of the ranks, as in the reference.
  update = 0.0
  for rank in range(partial_ref.shape[0]):
    part = read_float32(partial_ref, spans[0], rank, row)
    if block is not None:
      part = part * read_float32(scale_ref, spans[0], rank, row, share=block)
    update = update + part
  # As in the reference, the sum over ranks is rounded before it is added.
  updates = [update.astype(dtype).astype(jnp.float32)]
  updates += [calls.scaled(d, scale, dtype) for d in ds]
  wide = []
  for new_ref, span, x, d in zip(new_refs, spans, xs, updates, strict=True):
    new = (x + d).astype(dtype)
    store(new_ref, span, new, row)
    wide.append(new.astype(jnp.float32))
  write_normed(normed_ref, wide, spans, gains, row, eps)
