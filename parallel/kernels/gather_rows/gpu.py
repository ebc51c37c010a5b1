"""Gather of rows from host memory by loads of a GPU, in Triton.

Each program copies one row. Its threads start at the 128-byte line in which the
row begins; threads before the row load nothing. Every load of a warp is thus
aligned to one line, regardless of the row's start (the circular shift of Min et
al., arXiv 2103.03330, section 4.3; `caatnet.studies.alignment.predictor` counts
the saved requests).

Shape legend: N = rows of the table, F = features, n = ids.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls

# 4-byte elements of a 128-byte line, and threads of a warp.
_LINE = 32
# Elements that a program loads concurrently: 8 for each of 128 threads.
_MAX_TILE_ELEMENTS = 1024


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Returns why a table is not supported, or None: `api.Kernels.refusal`."""
  if dtype != jnp.float32:
    return f"dtype {dtype}: float32"
  if num_rows * width >= 2**31:
    return f"{num_rows} x {width} elements: places are int32"
  return None


def gather(
  stored: jax.Array, ids: jax.Array, width: int, interpret: bool = False
) -> jax.Array:
  """Gathers rows: `api.Kernels.gather`.

  The table is flat, ``[N * F]``, and aligned to a 128-byte line.
  """
  span = min(_MAX_TILE_ELEMENTS, pl.next_power_of_2(width + _LINE - 1))
  return pl.pallas_call(
    functools.partial(_copy, width=width, span=span),
    grid=(ids.shape[0],),
    out_shape=calls.output_type((ids.shape[0], width), stored.dtype, ids),
    name="gather_rows",
    compiler_params=pltriton.CompilerParams(
      num_warps=min(4, max(1, span // _LINE))
    ),
    interpret=interpret,
  )(ids, stored)


def _copy(ids_ref, flat_ref, out_ref, *, width, span):
  row = pl.program_id(0)
  start = ids_ref[row] * width
  # Thread 0 loads the first element of the line in which the row begins.
  column = jnp.arange(span) - start % _LINE
  for _ in range(0, width + _LINE - 1, span):
    inside = (column >= 0) & (column < width)
    place = jnp.where(inside, start + column, 0)
    values = pltriton.load(flat_ref.at[place], mask=inside, other=0)
    # Masked elements get a column past the row, which the interpreter drops.
    place = jnp.where(inside, column, width)
    pltriton.store(out_ref.at[row, place], values, mask=inside)
    column += span
