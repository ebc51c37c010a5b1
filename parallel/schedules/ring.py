"""Rings: each chunk goes once around a cycle of all ranks.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69,
2009; reduce-scatter in n - 1 rounds, all-gather in n - 1 more.
"""

from collections.abc import Sequence
import math

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import Topology


def gather(topology: Topology) -> Schedule:
  """The all-gather around one direction of one cycle."""
  return _gather("ring", topology, [cycle(topology)])


def gather_both_ways(topology: Topology) -> Schedule:
  """Half of every rank's slice goes around each way."""
  order = cycle(topology)
  return _gather("bidirectional_ring", topology, [order, order[::-1]])


def _gather(
  name: str, topology: Topology, cycles: Sequence[Sequence[int]]
) -> Schedule:
  n, parts = topology.num_ranks, len(cycles)
  links = topology.links_by_pair
  rounds: list[list[Transfer]] = [[] for _ in range(n - 1)]
  for part, order in enumerate(cycles):
    for i in range(n):
      source, destination = order[i], order[(i + 1) % n]
      path = topology.shortest_path(source, destination)
      for step in range(n - 1):
        chunk = order[(i - step) % n] * parts + part
        rounds[step].append(
          Transfer(source, destination, chunk, "copy", path)
        )
  order = cycles[0]
  direct = all(pair in links for pair in zip(order, order[1:] + order[:1],
                                             strict=True))
  return Schedule(
    name,
    "all_gather",
    n,
    n * parts,
    tuple(map(tuple, rounds)),
    tuple(rank for rank in range(n) for _ in range(parts)),
    # Two ranks' two directions are different links; n = 2 has no cycle.
    link_capacity=(1 if n > 2 else parts) if direct else None,
  )


def cycle(topology: Topology) -> list[int]:
  """Every rank once, each beside the next one where the shape allows that.

  A mesh of an odd number of ranks has no such cycle, and of other graphs none
  is searched for: there it is the order of ranks.
  """
  n, shape = topology.num_ranks, [d for d in topology.shape if d > 1]
  order = list(range(n))
  if topology.num_switches or math.prod(shape) != n or len(shape) < 2:
    return order
  grid = _grid_cycle(shape)
  if grid is None and len(shape) == 2:
    grid = _odd_torus_cycle(*shape)
  return order if grid is None else grid


def _grid_cycle(shape: Sequence[int]) -> list[int] | None:
  """Along no wrapped link; None if all dims are odd."""
  even = next((i for i, size in enumerate(shape) if size % 2 == 0), None)
  if even is None:
    return None
  stride = math.prod(shape[even + 1 :])
  rest = [
    (size, math.prod(shape[i + 1 :]))
    for i, size in enumerate(shape) if i != even
  ]
  line = _snake(rest)  # of all other dims; rows go back and forth beside it
  order = [line[0] + row * stride for row in range(shape[even])]
  for row in reversed(range(shape[even])):
    back = line[1:] if (shape[even] - 1 - row) % 2 == 0 else line[:0:-1]
    order += [node + row * stride for node in back]
  return order


def _snake(dims: Sequence[tuple[int, int]]) -> list[int]:
  """Offsets of a walk through a grid of (size, stride) in single steps."""
  if not dims:
    return [0]
  (size, stride), inner = dims[0], _snake(dims[1:])
  return [
    node + i * stride
    for i in range(size)
    for node in (inner if i % 2 == 0 else inner[::-1])
  ]


def _odd_torus_cycle(rows: int, columns: int) -> list[int]:
  """Whole rows, one after the other, each walked to the right or to the left.

  A row walked to the right ends one column to the left of its start. With
  ``columns`` more rows to the left than to the right the walk closes.
  """
  if rows < columns:
    return [
      (node % rows) * columns + node // rows
      for node in _odd_torus_cycle(columns, rows)
    ]
  num_right = (rows - columns) // 2
  order, column = [], 0
  for row in range(rows):
    step = 1 if row < num_right else -1
    order += [row * columns + (column + step * i) % columns
              for i in range(columns)]
    column = (column - step) % columns
  return order
