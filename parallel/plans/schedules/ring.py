"""Ring schedules: each chunk travels once around a cycle of all ranks.

The reduce-scatter takes n - 1 rounds, the all-gather another n - 1. Source:
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009.
"""

from collections.abc import Sequence
import math

from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology.graph import Topology


def gather(topology: Topology) -> Schedule:
  """Builds the all-gather around one cycle, in one direction.

  Args:
    topology: Network that the schedule runs on.

  Returns:
    For n ranks, an all-gather of n chunks in n - 1 rounds.
  """
  return _gather("ring", topology, [cycle(topology)])


def gather_both_ways(topology: Topology) -> Schedule:
  """Builds the all-gather that sends half of every slice in each direction.

  Args:
    topology: Network that the schedule runs on.

  Returns:
    For n ranks, an all-gather of 2 n chunks in n - 1 rounds.
  """
  order = cycle(topology)
  return _gather("bidirectional_ring", topology, [order, order[::-1]])


def _gather(
  name: str, topology: Topology, cycles: Sequence[Sequence[int]]
) -> Schedule:
  """Builds the all-gather around several cycles of ranks at once.

  Each cycle, an order of all ranks, carries an equal part of every rank's
  slice.
  """
  n, parts = topology.num_ranks, len(cycles)
  # The last rank to receive a chunk, the predecessor of its owner, does not
  # forward it. There are therefore n - 1 rounds, not n.
  rounds: list[list[Transfer]] = [[] for _ in range(n - 1)]
  for part, order in enumerate(cycles):
    for i in range(n):
      source, destination = order[i], order[(i + 1) % n]
      path = topology.shortest_path(source, destination)
      for step in range(n - 1):
        # A rank first sends its own chunk. Later it forwards the chunk received
        # in the previous round: after `step` hops, that chunk belongs to the
        # rank `step` positions behind on the cycle.
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
    # If neighbours on the cycle are joined by links, each link carries one
    # chunk per round, as the two directions use different links. With two ranks
    # both parts use the same links, from 0 to 1 and from 1 to 0.
    link_capacity=(1 if n > 2 else parts) if direct else None,
  )


def cycle(topology: Topology) -> list[int]:
  """Returns the cyclic order of ranks for a ring schedule.

  On rings, on 2D tori, and on grids of several dims with at least one even dim,
  consecutive ranks, including the last and the first, are joined by a link. A
  mesh with an odd number of ranks has no such cycle, and some steps of the
  order take several links. Other topologies are not searched: their order is
  that of the rank numbers, or the reverse where that takes fewer links.

  Example:
    >>> from parallel.plans.topology.builders import mesh
    >>> cycle(mesh((2, 3)))  # ranks 0 1 2 over 3 4 5
    [0, 3, 4, 5, 2, 1]

  Args:
    topology: Network whose ranks are ordered.

  Returns:
    All ranks, each once, starting with rank 0.
  """
  n, shape = topology.num_ranks, [d for d in topology.shape if d > 1]
  order = list(range(n))
  if topology.num_switches or math.prod(shape) != n or len(shape) < 2:
    return order if topology.symmetric else _shorter_direction(topology, order)
  grid = _grid_cycle(shape)
  if grid is None and len(shape) == 2:
    grid = _odd_torus_cycle(*shape)
  return order if grid is None else grid


def _shorter_direction(topology: Topology, order: list[int]) -> list[int]:
  """Returns a cycle in the direction in which it has fewer links.

  The directions differ if links have no reverse, as in a one-way ring.
  """
  back = [order[0], *order[:0:-1]]
  return min(order, back, key=lambda nodes: sum(
    topology.hops(node, following)
    for node, following in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
  ))


def _grid_cycle(shape: Sequence[int]) -> list[int] | None:
  """Returns a cycle without wrap-around links; None if all dims are odd.

  A row is a line through all dims except one of even size, along which rows
  follow one another. The cycle first goes down the first column, then returns
  row by row, alternately forwards and backwards through the rest of each row.
  It ends next to its start because the number of rows is even.

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
  line = _snake(rest)  # offsets of one row: a walk through all other dims
  order = [line[0] + row * stride for row in range(shape[even])]
  for row in reversed(range(shape[even])):
    # Rows lead alternately away from the first column, line[0], and back to it.
    # It was visited on the way down; row 0, the last one, ends next to it.
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
  """Returns a cycle of a 2D torus with two odd dims.

  The cycle walks one whole row after the other, to the right or to the left.
  A row walked to the right ends one column to the left of its start, and the
  next row starts there; a row walked to the left ends one column to the right.
  With ``columns`` more rows to the left than to the right, the shifts add up
  to a full turn, and the cycle closes.
  """
  # This needs at least as many rows as columns; otherwise transpose.
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
