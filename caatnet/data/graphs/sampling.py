"""Sampling of node neighbourhoods as trees of a static shape.

A tree has the node as its root, ``fanouts[0]`` positions for its neighbours,
``fanouts[1]`` positions for the neighbours of each of these, and so on. Its T
positions are ordered by level, and children of one position are consecutive.
Shapes are independent of the graph, so a program that reads trees is compiled
once.

If a node has more neighbours than the fanout, every subset of this size has
equal probability (Floyd's algorithm: Bentley and Floyd, CACM 1987). If it has
fewer, all of them come first, and the other positions are padding with the
node's id. Padding follows from the degrees: child j of a position with degree d
is valid if j < min(d, fanout), and padding has degree 0. Features of repeated
ids are fetched once.

Random numbers are a function of seed, example, position and draw (SplitMix64:
Steele, Lea and Flood, OOPSLA 2014), not of a generator's state. So trees do not
depend on the number of threads or on the order of sampling. A random number
below n is the product of n and 32 random bits, shifted right by 32 bits; its
bias is below n / 2^32.

`reference` is the specification in numpy. `compiled` is equivalent code in
numba (the extra ``graphs``). It releases Python's global interpreter lock, so
threads sample parts of a batch in parallel. numba's own thread pool is not
used: two Python threads cannot share it, and one batch may be sampled while
another is evaluated.
"""

from collections.abc import Callable
from concurrent import futures
import functools
import importlib.util
import math
import os

import numpy as np

from caatnet.data.graphs.csr import Graph

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SAMPLERS = ("auto", "compiled", "reference")
# Examples per task of a thread.
_EXAMPLES_PER_TASK = 64


def num_tree_positions(fanouts: tuple[int, ...]) -> int:
  """Returns T, the number of positions of a tree.

  Example:
    >>> num_tree_positions((10, 5))  # 1 + 10 + 10 * 5
    61
  """
  return sum(math.prod(fanouts[:level]) for level in range(len(fanouts) + 1))


def check_fanouts(fanouts: tuple[int, ...]) -> None:
  """Raises ValueError for empty fanouts and for fanouts below 1."""
  if not fanouts or min(fanouts) < 1:
    raise ValueError(f"fanouts={fanouts} must be integers of at least 1")


class Sampler:
  """Sampler of trees from a graph.

  Attributes:
    graph: The graph.
    fanouts: Number of sampled neighbours per node of each level.
    implementation: "compiled" or "reference".
    threads: Threads of the compiled sampler.
  """

  def __init__(
    self,
    graph: Graph,
    fanouts: tuple[int, ...],
    seed: int,
    threads: int = 0,
    implementation: str = "auto",
  ) -> None:
    """Creates a sampler.

    Args:
      graph: The graph.
      fanouts: Number of sampled neighbours per node of each level; at least 1.
      seed: Determines the trees, together with the number of the example.
      threads: Threads of the compiled sampler; 0 for one per core.
      implementation: "compiled", "reference", or "auto" for "compiled" if numba
        is installed.

    Raises:
      ValueError: If a fanout is below 1, or "compiled" is requested without
        numba.
    """
    check_fanouts(fanouts)
    there = importlib.util.find_spec("numba") is not None
    if implementation == "auto":
      implementation = "compiled" if there else "reference"
    if implementation not in SAMPLERS:
      raise ValueError(
        f"sampler={implementation!r} must be 'auto', 'compiled' or 'reference'"
      )
    if implementation == "compiled" and not there:
      raise ValueError(
        "sampler='compiled' needs numba: pip install \"caatnet[graphs]\""
      )
    self.graph, self.fanouts = graph, tuple(fanouts)
    self.implementation = implementation
    self._key = _mix_bits(np.array([seed], np.uint64))[0]
    self.threads = threads or os.cpu_count() or 1
    self._pool = futures.ThreadPoolExecutor(self.threads)

  def sample(
    self, nodes: np.ndarray, first: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Samples a tree for each node.

    Args:
      nodes: Roots, int ``[B]``.
      first: The index of the first example among all examples of a run.

    Returns:
      Ids and degrees of all positions, int32 ``[B, T]`` each.

    Raises:
      ValueError: If a root is not a node of the graph.
    """
    nodes = np.asarray(nodes, np.int32)
    if len(nodes) and (
      nodes.min() < 0 or nodes.max() >= self.graph.num_nodes
    ):
      raise ValueError(
        f"nodes lie in [{nodes.min()}, {nodes.max()}]; they must lie in [0, "
        f"{self.graph.num_nodes - 1}]"
      )
    shape = len(nodes), num_tree_positions(self.fanouts)
    ids, degrees = np.empty(shape, np.int32), np.zeros(shape, np.int32)
    ids[:, 0] = nodes
    numbers = np.arange(first, first + len(nodes), dtype=np.uint64)
    graph = self.graph
    if self.implementation == "reference":
      reference(graph.indptr, graph.indices, self.fanouts, self._key, numbers,
                ids, degrees)
      return ids, degrees
    part = functools.partial(
      compiled(), np.asarray(graph.indptr), np.asarray(graph.indices),
      np.array(self.fanouts, np.int64), self._key,
    )
    # Parts write to disjoint rows of ids and degrees, without locks.
    done = [
      self._pool.submit(part, numbers[s], ids[s], degrees[s])
      for s in (
        slice(i, i + _EXAMPLES_PER_TASK) for i in range(
          0, len(nodes), _EXAMPLES_PER_TASK
        )
      )
    ]
    for one in done:
      one.result()
    return ids, degrees


def reference(
  indptr: np.ndarray,
  indices: np.ndarray,
  fanouts: tuple[int, ...],
  key: np.uint64,
  numbers: np.ndarray,
  ids: np.ndarray,
  degrees: np.ndarray,
) -> None:
  """Samples trees into ``ids`` and ``degrees``; `compiled` does the same.

  Args:
    indptr: int64 ``[N + 1]``.
    indices: int32 ``[E]``.
    fanouts: Number of sampled neighbours per node of each level.
    key: Random key of the run.
    numbers: Indices of the examples, uint64 ``[B]``.
    ids: int32 ``[B, T]`` with the roots in the first column; filled here.
    degrees: int32 ``[B, T]`` of zeros; filled here.
  """
  example = _mix_bits(key + numbers * np.uint64(_GOLDEN))  # [B]
  counts = np.ones((len(ids), 1), bool)  # False for positions of padding
  start, width = 0, 1
  for fanout in fanouts:
    places = np.arange(start, start + width)
    parents = ids[:, places]  # [B, P]
    begin = indptr[parents]  # padding has degree 0, hence no valid children
    degree = (indptr[parents + 1] - begin) * counts
    degrees[:, places] = degree
    place = _mix_bits(
      example[:, None] + places.astype(np.uint64) + np.uint64(1)
    )
    chosen = np.full((*parents.shape, fanout), -1, np.int64)
    for j in range(fanout):
      # Floyd's algorithm draws from 0 to `last`, and takes `last` if the drawn
      # number has been taken before.
      last = degree - fanout + j
      bits = _mix_bits(place + np.uint64((j + 1) * _GOLDEN % 2**64))
      draw = (
        (bits >> np.uint64(32)) * np.maximum(last + 1, 1).astype(np.uint64)
        >> np.uint64(32)
      ).astype(np.int64)
      taken = (chosen[..., :j] == draw[..., None]).any(axis=-1)
      draw = np.where(taken, last, draw)
      chosen[..., j] = np.where(degree > fanout, draw, j)
    counts = np.arange(fanout) < degree[..., None]  # [B, P, fanout]
    where = np.where(counts, begin[..., None] + chosen, 0)
    found = indices[where] if len(indices) else np.zeros_like(where)
    # Padding has the parent's id.
    children = np.where(counts, found, parents[..., None])
    start, width = start + width, width * fanout
    ids[:, start : start + width] = children.reshape(len(ids), width)
    counts = counts.reshape(len(ids), width)
  # Leaves have degrees, but no children.
  places = slice(start, start + width)
  parents = ids[:, places]
  degrees[:, places] = (indptr[parents + 1] - indptr[parents]) * counts


def _mix_bits(x: np.ndarray) -> np.ndarray:
  """Applies SplitMix64's finalizer, a permutation of 64-bit integers."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
  return x ^ (x >> np.uint64(31))


@functools.cache
def compiled() -> Callable[..., None]:
  """Returns `reference` compiled by numba; ``fanouts`` is an int64 array."""
  import numba

  first, second = np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
  golden, one = np.uint64(_GOLDEN), np.uint64(1)
  s27, s30, s31, s32 = (np.uint64(n) for n in (27, 30, 31, 32))

  @numba.njit(inline="always")
  def mixed(x):
    x = (x ^ (x >> s30)) * first
    x = (x ^ (x >> s27)) * second
    return x ^ (x >> s31)

  @numba.njit(nogil=True)
  def sample(indptr, indices, fanouts, key, numbers, ids, degrees):
    for row in range(len(numbers)):
      example = mixed(key + numbers[row] * golden)
      start, width = 0, 1
      degrees[row, 0] = indptr[ids[row, 0] + 1] - indptr[ids[row, 0]]
      for fanout in fanouts:
        below = start + width
        for p in range(width):
          parent = ids[row, start + p]
          degree = np.int64(degrees[row, start + p])
          begin = indptr[parent]
          child = below + p * fanout
          count = min(degree, fanout)
          if degree <= fanout:
            for j in range(count):
              ids[row, child + j] = indices[begin + j]
          else:
            place = mixed(example + np.uint64(start + p) + one)
            for j in range(fanout):
              last = degree - fanout + j
              bits = mixed(place + np.uint64(j + 1) * golden)
              draw = np.int64((bits >> s32) * np.uint64(last + 1) >> s32)
              for i in range(j):  # degrees temporarily hold the draws
                if degrees[row, child + i] == draw:
                  draw = last
                  break
              degrees[row, child + j] = draw
            for j in range(fanout):
              ids[row, child + j] = indices[begin + degrees[row, child + j]]
          for j in range(count):
            node = ids[row, child + j]
            degrees[row, child + j] = indptr[node + 1] - indptr[node]
          for j in range(count, fanout):
            ids[row, child + j] = parent
            degrees[row, child + j] = 0
        start, width = below, width * fanout

  return sample
