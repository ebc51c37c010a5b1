"""Gathers rows from the host's memory by a GPU's own reads, in Triton.

A program copies a row. Its lanes start at the 128-byte line in which the row
begins, and those before the row read nothing: so each read of a warp is of one
line, wherever rows begin (the circular shift of Min et al., arXiv 2103.03330,
section 4.3; `caatnet.studies.alignment.predictor` counts what it saves).

Shape legend: N = rows of the table, F = features, n = ids.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls

# Elements of 4 bytes in a line, and lanes of a warp.
_LINE = 32
# Elements that a program has on their way at once: 8 for each of 128 threads.
_SPAN = 1024


def refusal(num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
  """Returns why the kernel does not take a table: `api.Kernels.refusal`."""
  if dtype != jnp.float32:
    return f"dtype {dtype}: float32"
  if num_rows * width >= 2**31:
    return f"{num_rows} x {width} elements: places are int32"
  return None


def gather(
  stored: jax.Array, ids: jax.Array, width: int, interpret: bool = False
) -> jax.Array:
  """Gathers rows: `api.Kernels.gather`.

  The table is flat, ``[N * F]``, and begins at a line.
  """
  span = min(_SPAN, pl.next_power_of_2(width + _LINE - 1))
  return pl.pallas_call(
    functools.partial(_copy, width=width, span=span),
    grid=(ids.shape[0],),
    out_shape=calls.shaped((ids.shape[0], width), stored.dtype, ids),
    name="gather_rows",
    compiler_params=pltriton.CompilerParams(
      num_warps=min(4, max(1, span // _LINE))
    ),
    interpret=interpret,
  )(ids, stored)


def _copy(ids_ref, flat_ref, out_ref, *, width, span):
  row = pl.program_id(0)
  start = ids_ref[row] * width
  # Lane 0 reads the first element of the line in which the row begins.
  column = jnp.arange(span) - start % _LINE
  for _ in range(0, width + _LINE - 1, span):
    inside = (column >= 0) & (column < width)
    place = jnp.where(inside, start + column, 0)
    values = pltriton.load(flat_ref.at[place], mask=inside, other=0)
    # Past the row where the mask is off, which the interpreter leaves out.
    place = jnp.where(inside, column, width)
    pltriton.store(out_ref.at[row, place], values, mask=inside)
    column += span
