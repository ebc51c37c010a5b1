"""Loops of `coded`; the import compiles them or reads them from numba's cache.

Shape legend: M = rows, H = channels, F = features, B = features per scale.
"""

import numba
import numpy as np

from parallel.kernels import coded
from parallel.kernels import cpu_calls as calls

# Features of a task (a strip of the matrix), which share one scale per row.
STRIP = coded.BLOCK
# Tasks that are computed together: their results of one row of x fit in a
# core's first-level cache.
_STRIPS_PER_GROUP = 8


@calls.compile_loop
def _add_strip_products(x, codes, scales, first, out):
  """Adds the products of x with strips of ``STRIP`` features to ``out``.

  Four channels are processed at a time, to load and store sums less often.

  Args:
    x: float32 ``[M, H]``; H is a multiple of 4.
    codes: int8 ``[H, F]``.
    scales: float32 ``[H, F / B]``; B is `STRIP`, or at least F.
    first: Index of the first strip.
    out: float32 ``[strips, M, STRIP]``, updated.
  """
  (rows, channels), features = x.shape, codes.shape[1]
  for h in range(0, channels, 4):
    for i in range(len(out)):
      strip = first + i
      begin = strip * STRIP
      count = min(STRIP, features - begin)
      c0, c1 = codes[h, begin:], codes[h + 1, begin:]
      c2, c3 = codes[h + 2, begin:], codes[h + 3, begin:]
      for m in range(rows):
        x0, x1 = x[m, h] * scales[h, strip], x[m, h + 1] * scales[h + 1, strip]
        x2 = x[m, h + 2] * scales[h + 2, strip]
        x3 = x[m, h + 3] * scales[h + 3, strip]
        sums = out[i, m]
        for j in range(count):
          sums[j] += (
            x0 * np.float32(c0[j]) + x1 * np.float32(c1[j])
            + x2 * np.float32(c2[j]) + x3 * np.float32(c3[j])
          )


def _product(frame):
  """Multiplies x by consecutive strips of the matrix; returns 0.

  A strip is `STRIP` consecutive features of the matrix, and a task is the
  product of x and one strip.

  Args:
    frame: Address of the call frame of XLA's foreign function interface
      (`cpu_calls`). Its operands are the number of the first task, equal to
      that of its strip, int32 ``[1]``; x, float32 ``[M, H]``; codes, int8 ``[H,
      F]``; and scales, float32 ``[H, F / B]``. The result, which is written, is
      float32 ``[tasks, M, STRIP]``, with zeros for features after the last one.
  """
  if calls.answer_version_query(frame):
    return 0
  ins, outs = calls.operands_address(frame), calls.results_address(frame)
  rows, channels = calls.dim(ins, 1, 2), calls.dim(ins, 1, 1)
  num_tasks = calls.dim(outs, 0, 3)
  first = calls.array(ins, 0, numba.int32, (1,))[0]
  x = calls.array(ins, 1, numba.float32, (rows, channels))
  codes = calls.array(ins, 2, numba.int8, (channels, calls.dim(ins, 2, 1)))
  scales = calls.array(ins, 3, numba.float32, (channels, calls.dim(ins, 3, 1)))
  out = calls.array(outs, 0, numba.float32, (num_tasks, rows, STRIP))
  out[:] = 0
  for task in range(0, num_tasks, _STRIPS_PER_GROUP):
    _add_strip_products(
      x, codes, scales, first + task, out[task : task + _STRIPS_PER_GROUP]
    )
  return 0


PRODUCT_KERNEL = calls.register_kernel("coded_product", _product)
