"""Loops of `cpu`, compiled, or read from numba's cache, at import.

Shape legend: S = sequences, K = kv heads, G = query heads of a kv head, D =
head width, N = pages, P = pages in a table, L = lanes.
"""

import math

import numba
import numpy as np

from parallel.kernels import cpu_calls as calls


@calls.loop
def _attend(q, keys, values, key_scales, value_scales, table, start, stop, out):
  """Attends from the queries of one sequence and kv head to its positions.

  Args:
    q: Scaled queries, float32 ``[G, D]``.
    keys: Keys or their codes, ``[N, page, D]``.
    values: Values or their codes, ``[N, page, D]``.
    key_scales: Scales of codes, float32 ``[N, page]``; ``[0, 0]`` for floats.
    value_scales: As ``key_scales``.
    table: int32 ``[P]``.
    start: First position that the queries attend to.
    stop: Position after the last one, greater than ``start``.
    out: Result, float32 ``[G, D]``.
  """
  (num_queries, width), size = q.shape, keys.shape[1]
  coded = key_scales.shape[0] > 0
  first = start // size * size  # of the first page
  scores = np.empty((num_queries, stop - first), np.float32)
  for g in range(num_queries):
    query, row = q[g], scores[g]
    largest = np.float32(-np.inf)
    for begin in range(first, stop, size):
      page = table[begin // size]
      block = keys[page]
      for i in range(max(start - begin, 0), min(stop - begin, size)):
        key, score = block[i], np.float32(0)
        for d in range(width):
          score += query[d] * np.float32(key[d])
        if coded:
          score *= key_scales[page, i]
        row[begin - first + i] = score
        largest = max(largest, score)
    total = np.float32(0)
    for place in range(start - first, stop - first):
      row[place] = math.exp(row[place] - largest)
      total += row[place]
    sums = out[g]
    sums[:] = 0
    for begin in range(first, stop, size):
      page = table[begin // size]
      block = values[page]
      for i in range(max(start - begin, 0), min(stop - begin, size)):
        value, weight = block[i], row[begin - first + i]
        if coded:
          weight *= value_scales[page, i]
        for d in range(width):
          sums[d] += weight * np.float32(value[d])
    for d in range(width):
      sums[d] /= total


@calls.loop
def _run(frame, dtype, coded):
  """Runs a piece of the tasks, each a sequence and a kv head.

  Operands: first task ``[1]``; q ``[..., S, K, G, D]``; keys and values ``[...,
  K, N, page, D]``; tables ``[..., S, P]``; start and stop ``[..., S]``; for
  codes the scales of keys and values, ``[..., K, N, 1, page]``. All have the
  same leading dims. The result is ``[..., tasks, G, D]``.
  """
  ins, outs = calls.operands(frame), calls.results(frame)
  lanes, num_tasks = calls.leading(outs, 0, 3), calls.dim(outs, 0, 3)
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


@numba.cfunc(calls.KERNEL, cache=True)
def _floats(frame):
  if not calls.answered(frame):
    _run(frame, numba.float32, False)
  return 0


@numba.cfunc(calls.KERNEL, cache=True)
def _codes(frame):
  if not calls.answered(frame):
    _run(frame, numba.int8, True)
  return 0


FLOATS = calls.registered("paged_attention_floats", _floats)
CODES = calls.registered("paged_attention_codes", _codes)
