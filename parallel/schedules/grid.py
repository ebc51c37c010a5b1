"""2D rings on tori and meshes: rings along one dim after another.

Two forms. *Bucket*: each dim gathers what the one before has gathered, so a
reduce-scatter's second dim works on 1/d of the data (Jain and Sabharwal,
"Optimal bucket algorithms for large MPI collectives on torus interconnects",
ICS 2010). *2D ring*, as MultiTree's simulator has it: a whole all-reduce in
rows, then one in columns. In both, every dim order and both directions carry
an equal share of the data. On a mesh a ring closes back along its line.
"""

import math

from parallel.schedules.schedule import (
  Collective,
  Schedule,
  Transfer,
  from_gather,
)
from parallel.topology import Topology


def bucket_gather(topology: Topology) -> Schedule:
  """The bucket form's all-gather on a grid of any number of dims."""
  dims = _dims("bucket", topology)
  n = topology.num_ranks
  flows = _flows(dims)
  num_rounds = sum(size - 1 for size, _ in dims)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for flow, (order, direction) in enumerate(flows):
    held = [[rank] for rank in range(n)]
    start = 0
    for dim in reversed(order):
      size = dims[dim][0]
      moving = [list(chunks) for chunks in held]
      for step in range(start, start + size - 1):
        arrived: list[list[int]] = [[] for _ in range(n)]
        for rank in range(n):
          there = _beside(rank, *dims[dim], direction)
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
    owners, _capacity(topology, dims),
  )


def _capacity(topology: Topology, dims: list[tuple[int, int]]) -> int | None:
  """Chunks of the last dim's messages; None where rings share links."""
  size = dims[0][0]
  closed = all(
    (node, _beside(node, *dim, 1)) in topology.links_by_pair
    for dim in dims for node in range(topology.num_ranks)
  )
  if not closed or size == 2 or any(dim[0] != size for dim in dims):
    return None
  return size ** (len(dims) - 1)


def two_pass(topology: Topology, collective: Collective) -> Schedule:
  """The 2D ring; a reduce-scatter or all-gather of it is the bucket's.

  A flow's quarter of the data is all-reduced along each row in as many parts
  as the row has ranks, and then along each column: 4 (d - 1) rounds.
  """
  dims = _dims("ring_2d", topology)
  if len(dims) != 2:
    raise ValueError(
      f"ring_2d: {topology.name} must have two dims of at least 2 ranks, "
      f"has {len(dims)}"
    )
  if collective != "all_reduce":
    return from_gather(bucket_gather, topology, collective)
  n = topology.num_ranks
  parts = math.lcm(*(size for size, _ in dims))
  flows = _flows(dims)
  num_rounds = sum(2 * (size - 1) for size, _ in dims)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for flow, (order, direction) in enumerate(flows):
    start = 0
    for dim in order:
      size, stride = dims[dim]
      for step in range(2 * (size - 1)):
        operation = "reduce" if step < size - 1 else "copy"
        for rank in range(n):
          there = _beside(rank, size, stride, direction)
          path = _path(topology, rank, there, size, stride, direction)
          part = (rank // stride - direction * step) % size
          rounds[start + step] += [
            Transfer(rank, there, flow * parts + chunk, operation, path)
            for chunk in range(part, parts, size)
          ]
      start += 2 * (size - 1)
  capacity = None if _capacity(topology, dims) is None else 1
  return Schedule(
    "ring_2d", "all_reduce", n, len(flows) * parts, tuple(map(tuple, rounds)),
    link_capacity=capacity,
  )


def _dims(name: str, topology: Topology) -> list[tuple[int, int]]:
  """(size, stride) of the dims of more than one rank."""
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


def _flows(dims: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
  """(order of dims, direction): every rotation, both ways."""
  numbers = list(range(len(dims)))
  return [
    (numbers[first:] + numbers[:first], direction)
    for first in numbers
    for direction in (1, -1)
  ]


def _beside(rank: int, size: int, stride: int, direction: int) -> int:
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
  if (source, destination) in topology.links_by_pair:
    return (source, destination)
  path = [source]  # the end of a mesh's line, back to its start
  while path[-1] != destination:
    path.append(_beside(path[-1], size, stride, -direction))
  return tuple(path)
