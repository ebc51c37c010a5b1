"""Rings: each chunk goes once around a cycle of all ranks.

The reduce-scatter takes n - 1 rounds and the all-gather n - 1 more. Source:
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009.
"""

from collections.abc import Sequence
import math

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology.graph import Topology


def gather(topology: Topology) -> Schedule:
  """Builds the all-gather around one cycle, in one direction.

  Args:
    topology: The network that the schedule runs on.
  """
  return _gather("ring", topology, [cycle(topology)])


def gather_both_ways(topology: Topology) -> Schedule:
  """Builds the all-gather that sends half of every slice in each direction.

  Args:
    topology: The network that the schedule runs on.
  """
  order = cycle(topology)
  return _gather("bidirectional_ring", topology, [order, order[::-1]])


def _gather(
  name: str, topology: Topology, cycles: Sequence[Sequence[int]]
) -> Schedule:
  """Builds the all-gather around several cycles at once.

  Each of the cycles, orders of all ranks, carries an equal part of every slice.
  """
  n, parts = topology.num_ranks, len(cycles)
  # The last rank that a chunk reaches is the one before its owner. It does not
  # send the chunk on, so there are n - 1 rounds and not n.
  rounds: list[list[Transfer]] = [[] for _ in range(n - 1)]
  for part, order in enumerate(cycles):
    for i in range(n):
      source, destination = order[i], order[(i + 1) % n]
      path = topology.shortest_path(source, destination)
      for step in range(n - 1):
        # A rank sends its own chunk first. Then it passes on what it received
        # in the round before: after `step` hops, the chunk of the rank that is
        # `step` places behind it on the cycle.
        chunk = order[(i - step) % n] * parts + part
        rounds[step].append(
          Transfer(source, destination, chunk, "copy", path)
        )
  direct = all(len(t.path) == 2 for transfers in rounds for t in transfers)
  return Schedule(
    name,
    "all_gather",
    n,
    n * parts,
    tuple(map(tuple, rounds)),
    tuple(rank for rank in range(n) for _ in range(parts)),
    # If neighbours on the cycle are joined by links, a link carries one chunk
    # a round, as the two directions use different links. Between two ranks
    # they do not: both parts go over the one link from 0 to 1 (or back).
    link_capacity=(1 if n > 2 else parts) if direct else None,
  )


def cycle(topology: Topology) -> list[int]:
  """Returns an order of all ranks to go around in.

  On rings, on 2D tori, and on grids of several dims of which one is even, a
  link joins every rank to the next one and the last rank to the first. A mesh
  with an odd number of ranks has no such cycle: some steps of the order take
  several links. No cycle is searched for on other topologies, and the order is
  that of the ranks' numbers.

  Args:
    topology: The network whose ranks are ordered.
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
  """Returns a cycle that uses no wrap-around link; None if all dims are odd.

  It goes down along the even dim at the first place of a line through all
  other dims. It comes back row by row, walking the rest of that line to and
  fro. The number of rows must be even for it to end beside its start.

  Args:
    shape: Sizes of the dims, each at least 2; ranks are in row-major order.
  """
  even = next((i for i, size in enumerate(shape) if size % 2 == 0), None)
  if even is None:
    return None
  stride = math.prod(shape[even + 1 :])
  rest = [
    (size, math.prod(shape[i + 1 :]))
    for i, size in enumerate(shape) if i != even
  ]
  line = _snake(rest)  # a row: offsets of a walk through all other dims
  order = [line[0] + row * stride for row in range(shape[even])]
  for row in reversed(range(shape[even])):
    # Alternately away from the first place and back to it, which line[0] has
    # taken on the way down. Row 0 is the last one and is walked towards it.
    back = line[1:] if (shape[even] - 1 - row) % 2 == 0 else line[:0:-1]
    order += [node + row * stride for node in back]
  return order


def _snake(dims: Sequence[tuple[int, int]]) -> list[int]:
  """Returns the offsets of a walk that visits a grid in single steps.

  Args:
    dims: (size, stride) of each dim of the grid, outermost first.
  """
  if not dims:
    return [0]
  (size, stride), inner = dims[0], _snake(dims[1:])
  return [
    node + i * stride
    for i in range(size)
    for node in (inner if i % 2 == 0 else inner[::-1])
  ]


def _odd_torus_cycle(rows: int, columns: int) -> list[int]:
  """Returns a cycle of a torus whose two dims are odd.

  It walks whole rows one after the other, each to the right or to the left.
  A row walked to the right ends one column to the left of its start, and the
  next row starts there; a row walked to the left ends one column to the right.
  With ``columns`` more rows to the left than to the right, the shifts add up
  to a full turn, and the cycle closes.
  """
  # There must be at least as many rows as columns: transpose otherwise.
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
