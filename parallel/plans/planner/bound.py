"""Lower bound of the cost of all device orders, for the optimality gap.

In a device order, let E be the time of the slowest hop between stages, R that
of the slowest link of a data ring, and T that of the slowest link of a tensor
group.

- Every device has a predecessor and a successor in its data ring, over links of
  cost at most R. The graph of all links up to that cost thus has a 2-matching
  and a perfect matching.
- These links connect the devices of a ring, so each connected component has a
  multiple of d devices. The same holds for the other axes, and for the union of
  links of several axes. If, for example, only links within nodes cost at most
  T, each tensor group is within one node.
- If the components of some axes have exactly the size of a group, each is a
  unit of devices. The other axes order the units, which is a smaller problem of
  this kind. Each device of a unit has one partner in an adjacent unit, so the
  slowest link between two units costs at least as much as, for each device, its
  cheapest link to the other unit.

For up to `device_order.MAX_EXACT_DEVICES` units all orders are tried. Otherwise
the time of hops is bounded by the larger of two values: the mean time of all
pipelines, from an assignment problem, and the largest, over devices, of the
cheapest pipeline through the device. E, R and T are enumerated in ranges: the
lower end bounds the cost, the upper end selects the allowed links.

Shape legend: N = devices; p, d, t = stages, data, tensor.
"""

from collections.abc import Callable, Iterator
import itertools

import numpy as np
from scipy import optimize, sparse
from scipy.sparse import csgraph

from parallel.plans.planner.device_order import MAX_EXACT_DEVICES, brute_force
from parallel.plans.planner.message_costs import Grid, Traffic

# number of ranges per axis, besides those that start where components merge
_RANGES_PER_AXIS = 12
# largest number of devices for which 2-matchings are checked
_MAX_FLOW_DEVICES = 256


def cost_lower_bound(traffic: Traffic) -> float:
  """Returns a lower bound, in seconds, of `message_costs.cost` over all orders.

  Args:
    traffic: Cost matrices of the messages.

  Example:
    Four data ranks in two nodes: every ring crosses nodes.

    >>> node = np.arange(4) // 2
    >>> ring = np.where(node[:, None] == node, 1.0, 9.0)
    >>> none = np.zeros((4, 4))
    >>> cost_lower_bound(Traffic(Grid(1, 4, 1), none, none, ring, none))
    9.0
  """
  if traffic.grid.size <= MAX_EXACT_DEVICES:
    return brute_force(traffic).seconds
  matrices = traffic.chain + traffic.hop, traffic.ring, traffic.reduce
  hops = _pipeline_bound(traffic)
  levels = [
    list(_link_time_ranges(matrix, size, axis))
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
    if least >= best:  # boxes are sorted: no later one is better
      break
    best = min(best, _bound_in_box(traffic, box, least, known))
  return float(best)


def _bound_in_box(
  traffic: Traffic, box: tuple, least: float, known: dict
) -> float:
  """Returns a lower bound of the cost of some device orders.

  Args:
    traffic: Cost matrices of the messages.
    box: For each axis, a range of the time of its slowest link, as from
      `_link_time_ranges`; the orders are those whose slowest links are in the
      ranges.
    least: Sum of the lower ends of the ranges.
    known: Cache of bounds of smaller problems, which the function extends.

  Returns:
    Seconds; infinity if no order has its slowest links in these ranges.
  """
  grid = traffic.grid
  axes = [axis for axis in range(3) if grid[axis] > 1]
  for count in range(1, len(axes) + 1):
    for some in itertools.combinations(axes, count):
      size = int(np.prod([grid[axis] for axis in some]))
      sets = _merge_partitions([box[axis][1] for axis in some])
      sizes = np.bincount(sets)
      if (sizes % size).any():  # a component cannot consist of whole groups
        return np.inf
      # Each component is one group of these axes; what remains is to order the
      # components.
      if size < grid.size and (sizes == size).all():
        key = some, sets.tobytes()
        if key not in known:
          known[key] = cost_lower_bound(
            _contract_components(traffic, some, sets)
          )
        lows = sum(box[axis][0] for axis in some)
        least = max(least, lows + known[key])
  return least


def _merge_partitions(labels: list[np.ndarray]) -> np.ndarray:
  """Returns the finest partition whose sets are unions of sets of each input.

  A partition of N devices is given by the number of the set that each device is
  in, int ``[N]``; ``labels`` are the inputs.
  """
  found = labels[0]
  for other in labels[1:]:
    links = sparse.coo_matrix(
      (np.ones(len(found)), (found, other)),
      shape=(found.max() + 1, other.max() + 1),
    )
    # Bipartite graph of the sets of both partitions.
    blocks = sparse.bmat([[None, links], [links.T, None]])
    found = csgraph.connected_components(blocks, directed=False)[1][found]
  return found


def _contract_components(
  traffic: Traffic, axes: tuple[int, ...], sets: np.ndarray
) -> Traffic:
  """Returns the smaller problem in which each component is one device.

  ``axes``: axes of the grid inside a component; ``sets``: component of each of
  the N devices, int ``[N]``.
  """
  grid = traffic.grid
  order = np.argsort(sets, kind="stable")
  count = sets.max() + 1
  size = len(sets) // count

  # [components, components]: lower bound of the time of the slowest link from
  # one component to another. Each device of both components needs a link to the
  # other component, at best its fastest one. So the bound is the largest, over
  # devices, of the time of the device's fastest link.
  def nearest(matrix, whole):
    if 0 in axes and whole:
      return np.zeros((count, count))
    m = matrix[np.ix_(order, order)].reshape(count, size, count, size)
    out, into = m.min(3), m.min(1)
    if matrix is traffic.chain:  # the slowest pipeline takes at least the mean
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


def _link_time_ranges(
  seconds: np.ndarray, size: int, axis: int
) -> Iterator[tuple[float, np.ndarray]]:
  """Yields ranges of the time of an axis's slowest link, the lowest first.

  ``seconds[a, b]`` is the time of the link from device a to device b, ``[N,
  N]``; ``size`` is the number of ranks along the axis.

  A range ends before a link that would merge components of the graph of links
  up to that time. Long ranges are subdivided.

  Yields:
    The range's lower end in seconds, and each device's component in the graph
    of links up to the upper end, int ``[N]``.
  """
  n = len(seconds)
  if size == 1:
    yield 0.0, np.arange(n)
    return
  values = np.unique(seconds[~np.eye(n, dtype=bool)])
  # Index of the smallest value at which rings or pipelines may be possible.
  fits = _can_form_pipelines if axis == 0 else _can_form_rings
  first = _first(len(values), lambda i: fits(seconds, size, values[i]))
  # Components merge exactly at the edges of a minimum spanning tree. The offset
  # distinguishes links of cost zero from missing edges of the sparse matrix.
  tree = csgraph.minimum_spanning_tree(
    sparse.csr_matrix(np.minimum(seconds, seconds.T) + 1e-30)
  )
  merges = np.searchsorted(values, np.unique(tree.data) - 1e-30)
  if len(merges) > 2 * _RANGES_PER_AXIS:  # keep the largest relative gaps
    gaps = np.diff(np.log(values[merges]), prepend=-np.inf)
    merges = merges[np.sort(np.argsort(-gaps)[: 2 * _RANGES_PER_AXIS])]
  more = np.linspace(
    first, len(values), _RANGES_PER_AXIS + 1
  ).round().astype(int)
  starts = np.unique([first, *merges[merges > first], *more])
  starts = starts[starts < len(values)]
  ends = [*starts[1:], len(values)]
  for start, end in zip(starts, ends, strict=True):
    allowed = (seconds <= values[end - 1]) & ~np.eye(n, dtype=bool)
    sets = _components(allowed)
    if not (np.bincount(sets) % size).any():
      yield float(values[start]), sets


def _first(count: int, fits: Callable[[int], bool]) -> int:
  """Returns the first index below ``count`` at which ``fits`` holds.

  ``fits`` also holds at all later indices; its value at the last index is not
  tested. The index is found by bisection.
  """
  low, high = 0, count - 1
  while low < high:
    middle = (low + high) // 2
    low, high = (low, middle) if fits(middle) else (middle + 1, high)
  return low


def _can_form_pipelines(seconds: np.ndarray, stages: int, most: float) -> bool:
  """Returns whether hops of at most ``most`` seconds could form pipelines.

  ``seconds[a, b]`` is the time of a hop from device a to device b, ``[N, N]``;
  a pipeline has ``stages`` devices.
  """
  allowed = (seconds <= most) & ~np.eye(len(seconds), dtype=bool)
  count = len(seconds) // stages * (stages - 1)  # devices with a successor
  return not (
    np.bincount(_components(allowed)) % stages
  ).any() and _has_matching(
    allowed, count
  )


def _can_form_rings(seconds: np.ndarray, size: int, most: float) -> bool:
  """Returns whether links of at most ``most`` seconds could form rings.

  ``seconds[a, b]`` is the time of the link from device a to device b, ``[N,
  N]``; a ring has ``size`` devices.
  """
  allowed = (seconds <= most) & ~np.eye(len(seconds), dtype=bool)
  if size == 2:  # a ring of two uses both directions of one link
    allowed = allowed & allowed.T
  if (np.bincount(_components(allowed)) % size).any():
    return False
  if not _has_matching(allowed, len(seconds)):
    return False
  return size == 2 or len(seconds) > _MAX_FLOW_DEVICES or _has_two_matching(
    allowed | allowed.T
  )


def _components(allowed: np.ndarray) -> np.ndarray:
  """Returns the connected component of each device in a graph of links.

  ``allowed[a, b]`` is whether the graph has a link from device a to device b,
  bool ``[N, N]``.
  """
  return csgraph.connected_components(
    sparse.csr_matrix(allowed), directed=False
  )[1]


def _has_matching(allowed: np.ndarray, count: int) -> bool:
  """Returns whether ``count`` devices can have distinct successors.

  ``allowed[a, b]`` is whether device b may directly follow device a in a
  pipeline or a ring, bool ``[N, N]``.
  """
  found = csgraph.maximum_bipartite_matching(sparse.csr_matrix(allowed))
  return int((found >= 0).sum()) >= count


def _has_two_matching(allowed: np.ndarray) -> bool:
  """Returns whether each device can have two neighbours in rings.

  ``allowed[a, b]`` is whether devices a and b may be neighbours, bool ``[N,
  N]``, symmetric. A maximum flow tests whether each can have two.
  """
  n = len(allowed)
  flow = np.zeros((2 * n + 2, 2 * n + 2), np.int32)
  # Source -> each device (2) -> its neighbours (1) -> sink (2).
  flow[-2, :n] = flow[n : 2 * n, -1] = 2
  flow[:n, n : 2 * n] = allowed
  found = csgraph.maximum_flow(sparse.csr_matrix(flow), 2 * n, 2 * n + 1)
  return found.flow_value == 2 * n


# Hops -------------------------------------------------------------------------


def _pipeline_bound(traffic: Traffic) -> float:
  """Returns a lower bound of (slowest pipeline + slowest hop), in seconds."""
  grid, chain = traffic.grid, traffic.chain.copy()
  if grid.stages == 1:
    return 0.0
  np.fill_diagonal(chain, np.inf)
  planes = grid.data * grid.tensor
  # Cheapest walks of each length that end or start at each device.
  ahead, back = [np.zeros(len(chain))], [np.zeros(len(chain))]
  for _ in range(grid.stages - 1):
    ahead.append((ahead[-1][:, None] + chain).min(0))
    back.append((chain + back[-1]).min(1))
  # [p, N]: cheapest pipeline that has a given device at a given stage.
  walks = [a + b for a, b in zip(ahead, back[::-1], strict=True)]
  through = float(np.min(walks, axis=0).max())
  slowest = 0.0
  if traffic.hop.any():
    values = np.unique(traffic.hop[~np.eye(grid.size, dtype=bool)])
    slowest = values[_first(
      len(values),
      lambda i: _can_form_pipelines(traffic.hop, grid.stages, values[i])
    )]
  return max(_mean_pipeline_s(chain, planes), through) + float(slowest)


def _mean_pipeline_s(chain: np.ndarray, planes: int) -> float:
  """Returns a lower bound of the mean time of ``planes`` parallel pipelines.

  ``chain[a, b]`` are the seconds of a hop from device a to device b, ``[N,
  N]``.

  Each device but the last of a pipeline is assigned a successor, and each but
  the first a predecessor; an assignment may also contain cycles.
  """
  n = len(chain)
  matrix = np.block([
    [chain, np.zeros((n, planes))],
    [np.zeros((planes, n)), np.full((planes, planes), np.inf)],
  ])
  return float(matrix[optimize.linear_sum_assignment(matrix)].sum()) / planes
