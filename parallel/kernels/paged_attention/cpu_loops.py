"""Loops of `cpu`; the import compiles them or reads them from numba's cache.

Shape legend: S = sequences, K = kv heads, G = query heads of a kv head, D =
head width, N = pages, P = pages in a table, L = lanes (ranks on one device).
"""

import math

import numba
import numpy as np

from parallel.kernels import cpu_calls as calls


@calls.compile_loop
def _scores(query, block, first, stop, scores):
  """Computes products of a query with rows of a page.

  Four rows are processed at a time, since their sums are independent.

  Args:
    query: float32 ``[D]``.
    block: Keys of a page or their codes, ``[page, D]``.
    first: First row.
    stop: Row after the last one.
    scores: Result, float32 ``[stop - first]``.
  """
  width, i = len(query), first
  while i + 4 <= stop:
    k0, k1, k2, k3 = block[i], block[i + 1], block[i + 2], block[i + 3]
    s0 = s1 = s2 = s3 = np.float32(0)
    for d in range(width):
      q = query[d]
      s0 += q * np.float32(k0[d])
      s1 += q * np.float32(k1[d])
      s2 += q * np.float32(k2[d])
      s3 += q * np.float32(k3[d])
    scores[i - first], scores[i - first + 1] = s0, s1
    scores[i - first + 2], scores[i - first + 3] = s2, s3
    i += 4
  while i < stop:
    key, s0 = block[i], np.float32(0)
    for d in range(width):
      s0 += query[d] * np.float32(key[d])
    scores[i - first] = s0
    i += 1


@calls.compile_loop
def _add_weighted_rows(weights, block, first, stop, sums):
  """Adds the rows of a page with their weights, four rows at a time.

  Args:
    weights: float32 ``[stop - first]``.
    block: Values of a page or their codes, ``[page, D]``.
    first: First row.
    stop: Row after the last one.
    sums: float32 ``[D]``, updated.
  """
  width, i = len(sums), first
  while i + 4 <= stop:
    v0, v1, v2, v3 = block[i], block[i + 1], block[i + 2], block[i + 3]
    w0, w1 = weights[i - first], weights[i - first + 1]
    w2, w3 = weights[i - first + 2], weights[i - first + 3]
    for d in range(width):
      sums[d] += (
        w0 * np.float32(v0[d]) + w1 * np.float32(v1[d])
        + w2 * np.float32(v2[d]) + w3 * np.float32(v3[d])
      )
    i += 4
  while i < stop:
    value, w0 = block[i], weights[i - first]
    for d in range(width):
      sums[d] += w0 * np.float32(value[d])
    i += 1


@calls.compile_loop
def _attend(q, keys, values, key_scales, value_scales, table, start, stop, out):
  """Attends from the queries of one sequence and kv head to its positions.

  Args:
    q: Scaled queries, float32 ``[G, D]``.
    keys: Keys or their codes, ``[N, page, D]``.
    values: Values or their codes, ``[N, page, D]``.
    key_scales: Scales of codes, float32 ``[N, page]``; ``[0, page]`` for
      floats.
    value_scales: Scales of values, like ``key_scales``.
    table: int32 ``[P]``.
    start: First position that the queries attend to.
    stop: Position after the last one, greater than ``start``.
    out: Result, float32 ``[G, D]``.
  """
  size, coded = keys.shape[1], key_scales.shape[0] > 0
  row = np.empty(stop - start, np.float32)
  pages = range(start // size, (stop + size - 1) // size)
  for g in range(len(q)):
    for number in pages:
      page, begin = table[number], number * size
      first, last = max(start - begin, 0), min(stop - begin, size)
      part = row[begin + first - start : begin + last - start]
      _scores(q[g], keys[page], first, last, part)
      if coded:
        for i in range(first, last):
          part[i - first] *= key_scales[page, i]
    largest, total = row.max(), np.float32(0)
    for i in range(len(row)):
      row[i] = math.exp(row[i] - largest)
      total += row[i]
    sums = out[g]
    sums[:] = 0
    for number in pages:
      page, begin = table[number], number * size
      first, last = max(start - begin, 0), min(stop - begin, size)
      part = row[begin + first - start : begin + last - start]
      if coded:
        for i in range(first, last):
          part[i - first] *= value_scales[page, i]
      _add_weighted_rows(part, values[page], first, last, sums)
    for d in range(len(sums)):
      sums[d] /= total


@calls.compile_loop
def _attend_tasks(frame, dtype, coded):
  """Computes attention of some tasks, each a pair of a sequence and a kv head.

  Operands in ``frame``: number of the first task ``[1]``; q ``[..., S, K, G,
  D]``; keys and values ``[..., K, N, page, D]``; tables ``[..., S, P]``; start
  and stop of the positions ``[..., S]``; if ``coded``, scales of keys and
  values ``[..., K, N, 1, page]``. The result is ``[..., tasks, G, D]``.
  """
  ins, outs = calls.operands_address(frame), calls.results_address(frame)
  lanes, num_tasks = calls.leading_size(outs, 0, 3), calls.dim(outs, 0, 3)
  seqs, heads = calls.dim(ins, 1, 4), calls.dim(ins, 1, 3)
  group, width = calls.dim(ins, 1, 2), calls.dim(ins, 1, 1)
  pages, size = calls.dim(ins, 2, 3), calls.dim(ins, 2, 2)
  first = calls.array(ins, 0, numba.int32, (1,))[0]
  q = calls.array(ins, 1, numba.float32, (lanes, seqs, heads, group, width))
  shape = (lanes, heads, pages, size, width)
  keys = calls.array(ins, 2, dtype, shape)
  values = calls.array(ins, 3, dtype, shape)
  tables = calls.array(
    ins, 4, numba.int32, (lanes, seqs, calls.dim(ins, 4, 1))
  )
  start = calls.array(ins, 5, numba.int32, (lanes, seqs))
  stop = calls.array(ins, 6, numba.int32, (lanes, seqs))
  # Arrays without elements may have any address.
  of_scales = (lanes, heads, pages if coded else 0, size)
  key_scales = calls.array(ins, 7 if coded else 1, numba.float32, of_scales)
  value_scales = calls.array(ins, 8 if coded else 1, numba.float32, of_scales)
  out = calls.array(outs, 0, numba.float32, (lanes, num_tasks, group, width))
  for lane in range(lanes):
    for task in range(num_tasks):
      s, k = divmod(first + task, heads)
      if start[lane, s] >= stop[lane, s]:
        out[lane, task] = 0
      else:
        _attend(
          q[lane, s, k], keys[lane, k], values[lane, k], key_scales[lane, k],
          value_scales[lane, k], tables[lane, s], start[lane, s],
          stop[lane, s], out[lane, task],
        )


def _attend_floats(frame):
  if not calls.answer_version_query(frame):
    _attend_tasks(frame, numba.float32, False)
  return 0


def _attend_codes(frame):
  if not calls.answer_version_query(frame):
    _attend_tasks(frame, numba.int8, True)
  return 0


FLOAT_KERNEL = calls.register_kernel("paged_attention_floats", _attend_floats)
CODE_KERNEL = calls.register_kernel("paged_attention_codes", _attend_codes)
