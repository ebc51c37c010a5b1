"""Ring schedules on tori and meshes, one dim after another.

Two forms:

- *Bucket*: each dim gathers the data that the previous dims have gathered. In
  the reduce-scatter, the second dim handles only 1/d of the data, where d is
  the size of the first dim. Source: Jain and Sabharwal, "Optimal bucket
  algorithms for large MPI collectives on torus interconnects", ICS 2010.
- *2D ring*: a complete all-reduce along rows, then one along columns, as in
  MultiTree's published simulator.

In both forms the data are split into equal *flows*, one for each rotation of
the dims and each direction, so that all links work at once. On a mesh, the
last rank of a line sends to the first one back along the line.
"""

import math

from parallel.plans.schedules.schedule import (
  Collective,
  Schedule,
  Transfer,
  from_gather,
)
from parallel.plans.topology.graph import Topology


def bucket_gather(topology: Topology) -> Schedule:
  """Builds the bucket all-gather on a grid of any number of dims.

  Args:
    topology: Ring, torus or mesh that the schedule runs on.

  Returns:
    For n ranks, an all-gather of 2 n chunks per dim of more than one rank.

  Raises:
    ValueError: The topology is not a ring, torus or mesh, or has failed links.
  """
  dims = _dims("bucket", topology)
  n = topology.num_ranks
  flows = _dim_orders(dims)
  num_rounds = sum(size - 1 for size, _ in dims)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for flow, (order, direction) in enumerate(flows):
    held = [[rank] for rank in range(n)]  # owners of the slices each rank holds
    start = 0
    # The reduce-scatter reverses this gather and takes the dims in `order`, so
    # the gather starts with the last dim.
    for dim in reversed(order):
      size = dims[dim][0]
      # Around the ring, a rank first sends everything it holds, and then what
      # it received in the previous round.
      moving = [list(chunks) for chunks in held]
      for step in range(start, start + size - 1):
        arrived: list[list[int]] = [[] for _ in range(n)]
        for rank in range(n):
          there = _next_rank(rank, *dims[dim], direction)
          path = _path(topology, rank, there, *dims[dim], direction)
          rounds[step] += [
            Transfer(rank, there, c * len(flows) + flow, "copy", path)
            for c in moving[rank]
          ]
          arrived[there] = moving[rank]
        moving = arrived
        held = [old + new for old, new in zip(held, moving, strict=True)]
      start += size - 1
  owners = tuple(rank for rank in range(n) for _ in flows)
  return Schedule(
    "bucket", "all_gather", n, n * len(flows), tuple(map(tuple, rounds)),
    owners, _max_link_load(topology, dims),
  )


def _max_link_load(
  topology: Topology, dims: list[tuple[int, int]]
) -> int | None:
  """Returns the most chunks that a link carries in a round of the bucket form.

  Returns:
    Chunks per message in the last dim, which has the largest messages; None if
    several flows share links, so that links carry more.
  """
  size = dims[0][0]
  closed = all(
    (node, _next_rank(node, *dim, 1)) in topology.links_by_pair
    for dim in dims for node in range(topology.num_ranks)
  )
  # With dims of equal size, flows of different rotations are in different dims
  # at any time. Otherwise one flow enters a dim that another one still uses. In
  # a dim of two ranks, both directions use the same link.
  if not closed or size == 2 or any(dim[0] != size for dim in dims):
    return None
  return size ** (len(dims) - 1)


def build_ring_2d(topology: Topology, collective: Collective) -> Schedule:
  """Builds the 2D ring's all-reduce; other collectives use the bucket form.

  Each of four flows has a quarter of the data. The quarter is all-reduced along
  one dim, cut into as many parts as the dim has ranks, and then along the other
  dim. On a d x d torus this takes 4 (d - 1) rounds. The 2D ring does not define
  a reduce-scatter or all-gather.

  Args:
    topology: Torus or mesh with two dims of at least 2 ranks.
    collective: "all_reduce", "reduce_scatter" or "all_gather".

  Raises:
    ValueError: The topology is no torus or mesh of two dims, or links failed.
  """
  dims = _dims("ring_2d", topology)
  if len(dims) != 2:
    raise ValueError(
      f"ring_2d: topology {topology.name} must have two dims of at least 2 "
      f"ranks, but has {len(dims)}"
    )
  if collective != "all_reduce":
    return from_gather(bucket_gather, topology, collective)
  n = topology.num_ranks
  # The size of each of the two dims must divide the number of parts.
  parts = math.lcm(*(size for size, _ in dims))
  flows = _dim_orders(dims)
  num_rounds = sum(2 * (size - 1) for size, _ in dims)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for flow, (order, direction) in enumerate(flows):
    start = 0
    for dim in order:
      size, stride = dims[dim]
      for step in range(2 * (size - 1)):
        operation = "reduce" if step < size - 1 else "copy"
        for rank in range(n):
          there = _next_rank(rank, size, stride, direction)
          path = _path(topology, rank, there, size, stride, direction)
          # At step 0 a rank sends the part with the number of its position in
          # the ring, later the part that has just arrived. After size - 1
          # reducing steps the arriving part is complete, and the same formula
          # selects the parts to copy.
          part = (rank // stride - direction * step) % size
          rounds[start + step] += [
            Transfer(rank, there, flow * parts + chunk, operation, path)
            for chunk in range(part, parts, size)
          ]
      start += 2 * (size - 1)
  # With equal dims, parts = size, and each message is one chunk.
  capacity = None if _max_link_load(topology, dims) is None else 1
  return Schedule(
    "ring_2d", "all_reduce", n, len(flows) * parts, tuple(map(tuple, rounds)),
    link_capacity=capacity,
  )


def _dims(name: str, topology: Topology) -> list[tuple[int, int]]:
  """Returns (size, stride) of each dim of a grid with more than one rank.

  The stride is the difference between the numbers of neighbouring ranks. A
  grid of one rank returns [(1, 1)].

  Raises:
    ValueError: The topology is not a grid, or has failed links.
  """
  shape = topology.shape
  if topology.num_switches or math.prod(shape) != topology.num_ranks or (
    not shape
  ):
    raise ValueError(
      f"{name}: {topology.name} is not a ring, torus or mesh without failures"
    )
  return [
    (size, math.prod(shape[i + 1 :]))
    for i, size in enumerate(shape) if size > 1
  ] or [(1, 1)]


def _dim_orders(dims: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
  """Returns (order of dims, direction) of each flow of the data.

  There is one flow for each rotation of the dims and each direction.
  """
  numbers = list(range(len(dims)))
  return [
    (numbers[first:] + numbers[:first], direction)
    for first in numbers
    for direction in (1, -1)
  ]


def _next_rank(rank: int, size: int, stride: int, direction: int) -> int:
  """Returns the next rank along a dim of a grid, wrapping around at the end.

  ``stride`` is the difference of neighbouring ranks' numbers along the dim, and
  ``direction`` 1 or -1.
  """
  place = rank // stride % size
  return rank + ((place + direction) % size - place) * stride


def _path(
  topology: Topology,
  source: int,
  destination: int,
  size: int,
  stride: int,
  direction: int,
) -> tuple[int, ...]:
  """Returns the path between two ranks that are neighbours on a dim's ring.

  If no link joins them, the path goes back along the whole dim. Other arguments
  are those of `_next_rank`.
  """
  if (source, destination) in topology.links_by_pair:
    return (source, destination)
  # On a mesh, the ring is closed by walking the line back.
  path = [source]
  while path[-1] != destination:
    path.append(_next_rank(path[-1], size, stride, -direction))
  return tuple(path)
