"""A lower bound of what any device order costs, for the gap of one.

Suppose that an order's slowest hop takes E, its slowest link of a data ring R,
and that of a tensor group T. Then

- every device has two neighbours in its ring over links of at most R, and one
  successor: the graph of such links has a 2-matching and a perfect matching;
- devices of a ring are connected by such links, so what these connect is a
  multiple of d devices; likewise for the other axes, and for links of several
  axes together. So in a cluster of nodes, a T of links within nodes means that
  each tensor group is within one;
- if what some axes connect is as small as that, each such set is a unit, and
  the others order units, a smaller problem of this kind. Between two units each
  device has one of the other, so the slowest link is no faster than the
  fastest one of any device.

Of up to `device_order.EXACT` units all orders are tried. Else hops have bounds
of their own: the mean of all pipelines by an assignment problem, and the one
through the worst device by the cheapest walk. E, R and T are tried in ranges:
the lower end is counted, the upper end allows links.

Shape legend: N = devices; p, d, t = stages, data, tensor.
"""

from collections.abc import Callable, Iterator
import itertools

import numpy as np
from scipy import optimize, sparse
from scipy.sparse import csgraph

from parallel.planner.device_order import EXACT, brute_force
from parallel.planner.message_costs import Grid, Traffic

_RANGES = 12  # of each of E, R and T, beside where sets grow together
_FLOWS = 256  # devices up to which 2-matchings are asked for


def bound(traffic: Traffic) -> float:
  """Returns seconds below which no order is (`traffic.cost`)."""
  if traffic.grid.size <= EXACT:
    return brute_force(traffic).seconds
  matrices = traffic.chain + traffic.hop, traffic.ring, traffic.reduce
  hops = _hops(traffic)
  levels = [
    list(_levels(matrix, size, axis))
    for axis, (matrix, size) in enumerate(
      zip(matrices, traffic.grid, strict=True)
    )
  ]
  levels[0] = [(max(low, hops), sets) for low, sets in levels[0]]
  boxes = sorted(
    itertools.product(*levels), key=lambda box: sum(low for low, _ in box)
  )
  best, known = np.inf, {}
  for box in boxes:
    least = sum(low for low, _ in box)
    if least >= best:
      break
    best = min(best, _in_box(traffic, box, least, known))
  return float(best)


def _in_box(
  traffic: Traffic, box: tuple, least: float, known: dict
) -> float:
  """Returns a bound of the orders whose slowest links are in ranges.

  Args:
    traffic: The messages.
    box: For each axis the lower end, and the set of each device by links up to
      the upper end.
    least: The sum of the lower ends.
    known: Bounds of smaller problems, by what they are made of; added to.
  """
  grid = traffic.grid
  axes = [axis for axis in range(3) if grid[axis] > 1]
  for count in range(1, len(axes) + 1):
    for some in itertools.combinations(axes, count):
      size = int(np.prod([grid[axis] for axis in some]))
      sets = _joined([box[axis][1] for axis in some])
      sizes = np.bincount(sets)
      if (sizes % size).any():
        return np.inf
      if size < grid.size and (sizes == size).all():
        key = some, sets.tobytes()
        if key not in known:
          known[key] = bound(_of_units(traffic, some, sets))
        lows = sum(box[axis][0] for axis in some)
        least = max(least, lows + known[key])
  return least


def _joined(labels: list[np.ndarray]) -> np.ndarray:
  """Returns the sets of devices that some divisions into sets connect."""
  found = labels[0]
  for other in labels[1:]:
    links = sparse.coo_matrix(
      (np.ones(len(found)), (found, other)),
      shape=(found.max() + 1, other.max() + 1),
    )
    blocks = sparse.bmat([[None, links], [links.T, None]])
    found = csgraph.connected_components(blocks, directed=False)[1][found]
  return found


def _of_units(
  traffic: Traffic, axes: tuple[int, ...], sets: np.ndarray
) -> Traffic:
  """Returns a problem of sets as units, each of which has some axes whole."""
  grid = traffic.grid
  order = np.argsort(sets, kind="stable")
  count = sets.max() + 1
  size = len(sets) // count

  def nearest(matrix, whole):  # the fastest link of each device to each unit
    if 0 in axes and whole:
      return np.zeros((count, count))
    m = matrix[np.ix_(order, order)].reshape(count, size, count, size)
    out, into = m.min(3), m.min(1)
    if matrix is traffic.chain:  # a maximum over pipelines is above their mean
      return np.maximum(out.mean(1), into.mean(2))
    return np.maximum(out.max(1), into.max(2))

  none = np.zeros((count, count))
  return Traffic(
    Grid(*(1 if axis in axes else n for axis, n in enumerate(grid))),
    nearest(traffic.chain, True), nearest(traffic.hop, True),
    none if 1 in axes else nearest(traffic.ring, False),
    none if 2 in axes else nearest(traffic.reduce, False),
  )


# Ranges of the slowest link ---------------------------------------------------


def _levels(
  seconds: np.ndarray, size: int, axis: int
) -> Iterator[tuple[float, np.ndarray]]:
  """Yields ranges: the lower end, and sets by links up to the upper end.

  Ranges end before links that connect what was apart, so that all of a range
  have the same sets, and some more lie between.
  """
  n = len(seconds)
  if size == 1:
    yield 0.0, np.arange(n)
    return
  values = np.unique(seconds[~np.eye(n, dtype=bool)])
  fits = _hops_fit if axis == 0 else _rings_fit
  first = _first(len(values), lambda i: fits(seconds, size, values[i]))
  tree = csgraph.minimum_spanning_tree(
    sparse.csr_matrix(np.minimum(seconds, seconds.T) + 1e-30)
  )
  merges = np.searchsorted(values, np.unique(tree.data) - 1e-30)
  if len(merges) > 2 * _RANGES:  # where most of a node or more grow together
    gaps = np.diff(np.log(values[merges]), prepend=-np.inf)
    merges = merges[np.sort(np.argsort(-gaps)[: 2 * _RANGES])]
  more = np.linspace(first, len(values), _RANGES + 1).round().astype(int)
  starts = np.unique([first, *merges[merges > first], *more])
  starts = starts[starts < len(values)]
  ends = [*starts[1:], len(values)]
  low = float(values[first])
  for start, end in zip(starts, ends, strict=True):
    allowed = (seconds <= values[end - 1]) & ~np.eye(n, dtype=bool)
    sets = _sets(allowed)
    if not (np.bincount(sets) % size).any():
      yield max(low, float(values[start])), sets


def _first(count: int, fits: Callable[[int], bool]) -> int:
  """Returns the first number from which on something holds, by halving."""
  low, high = 0, count - 1
  while low < high:
    middle = (low + high) // 2
    low, high = (low, middle) if fits(middle) else (middle + 1, high)
  return low


def _hops_fit(seconds: np.ndarray, stages: int, most: float) -> bool:
  """Returns whether hops of at most so much may make pipelines."""
  allowed = (seconds <= most) & ~np.eye(len(seconds), dtype=bool)
  count = len(seconds) // stages * (stages - 1)
  return not (np.bincount(_sets(allowed)) % stages).any() and _matches(
    allowed, count
  )


def _rings_fit(seconds: np.ndarray, size: int, most: float) -> bool:
  """Returns whether links of at most so much may make rings of that size."""
  allowed = (seconds <= most) & ~np.eye(len(seconds), dtype=bool)
  if size == 2:  # both directions are used
    allowed = allowed & allowed.T
  if (np.bincount(_sets(allowed)) % size).any():
    return False
  if not _matches(allowed, len(seconds)):
    return False
  return size == 2 or len(seconds) > _FLOWS or _two_each(allowed | allowed.T)


def _sets(allowed: np.ndarray) -> np.ndarray:
  """Returns the number of the connected set that each device is in."""
  return csgraph.connected_components(
    sparse.csr_matrix(allowed), directed=False
  )[1]


def _matches(allowed: np.ndarray, count: int) -> bool:
  """Returns whether so many devices can have successors of their own."""
  found = csgraph.maximum_bipartite_matching(sparse.csr_matrix(allowed))
  return int((found >= 0).sum()) >= count


def _two_each(allowed: np.ndarray) -> bool:
  """Returns whether devices may have two neighbours each, by a flow."""
  n = len(allowed)
  flow = np.zeros((2 * n + 2, 2 * n + 2), np.int32)
  flow[-2, :n] = flow[n : 2 * n, -1] = 2
  flow[:n, n : 2 * n] = allowed
  found = csgraph.maximum_flow(sparse.csr_matrix(flow), 2 * n, 2 * n + 1)
  return found.flow_value == 2 * n


# Hops -------------------------------------------------------------------------


def _hops(traffic: Traffic) -> float:
  """Returns a bound of what pipelines and the slowest hop take together."""
  grid, chain = traffic.grid, traffic.chain.copy()
  if grid.stages == 1:
    return 0.0
  np.fill_diagonal(chain, np.inf)
  planes = grid.data * grid.tensor
  ahead, back = [np.zeros(len(chain))], [np.zeros(len(chain))]
  for _ in range(grid.stages - 1):
    ahead.append((ahead[-1][:, None] + chain).min(0))
    back.append((chain + back[-1]).min(1))
  walks = [a + b for a, b in zip(ahead, back[::-1], strict=True)]
  through = float(np.min(walks, axis=0).max())
  slowest = 0.0
  if traffic.hop.any():
    values = np.unique(traffic.hop[~np.eye(grid.size, dtype=bool)])
    slowest = values[_first(
      len(values), lambda i: _hops_fit(traffic.hop, grid.stages, values[i])
    )]
  return max(_mean(chain, planes), through) + float(slowest)


def _mean(chain: np.ndarray, planes: int) -> float:
  """Returns the mean of pipelines if each device had the best successor.

  As many devices as there are pipelines are last, and as many first.
  """
  n = len(chain)
  matrix = np.block([
    [chain, np.zeros((n, planes))],
    [np.zeros((planes, n)), np.full((planes, planes), np.inf)],
  ])
  return float(matrix[optimize.linear_sum_assignment(matrix)].sum()) / planes
