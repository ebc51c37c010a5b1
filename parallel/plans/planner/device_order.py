"""Search for a device order: the device at each (stage, data, tensor).

The search is deterministic. It first forms tensor groups of close devices, then
orders whole groups, and finally single devices. Each step is the same problem
with other cost matrices. Starting from several greedy orders, each device in
turn is exchanged with the device for which the cost decreases most, until no
exchange helps. An exchange changes at most four links of each kind, so all
exchanges of a device are priced at once (`_Exchanges`). Then whole stages and
replicas are exchanged, and a few pairs of devices are exchanged at random (with
a seed); the search continues from there if that leads to a lower cost.

The cost is a sum of maxima, which do not change when a link improves that is
not the slowest. The objective therefore also contains the mean time of the
links, with a small weight that is larger in the first round than in the second.

If every link has a different rate, this search ends far from the optimum. For
few devices, orders are therefore also annealed, many at a time: each step
exchanges two random devices of an order, and accepts a higher cost with a
probability that decreases over time (Kirkpatrick et al., "Optimization by
simulated annealing", Science 220, 1983).

Shape legend: N = devices; B = candidates; C = orders that are annealed; p, d, t
= stages, data, tensor.
"""

import dataclasses
import functools
import itertools

import numpy as np

from parallel.plans.planner.message_costs import CostTerm, Grid, Traffic, cost

# largest number of devices for which all greedy orders are improved
_MAX_GREEDY_DEVICES = 256
# largest number of devices for which all orders are tried
MAX_EXACT_DEVICES = 8
_MEAN_WEIGHTS = (0.3, 0.01)  # weight of the links' mean time in rounds 1 and 2
# random restarts x devices; four times as many for few devices
_RESTART_BUDGET = 512
# largest number of devices for which orders are annealed
_MAX_ANNEALED_DEVICES = 16
# Annealing: orders per device in a full and in a quick search, exchanges per
# order, number of best orders that are then improved, and the first and last
# temperature as fractions of the lowest cost.
_CHAINS, _CHAINS_QUICK, _ANNEALING_STEPS, _NUM_KEPT_ORDERS = 128, 16, 4000, 16
_HOT, _COLD = 0.1, 0.01
_MAX_EXCHANGES = 2.5e6  # largest number of exchanges that a search prices


@dataclasses.dataclass(frozen=True, eq=False)
class Order:
  """A device order and its cost.

  Attributes:
    devices: Device by stage, data and tensor rank, int ``[p, d, t]``.
    seconds: Its `message_costs.cost`.
  """

  devices: np.ndarray
  seconds: float


def default_order(traffic: Traffic) -> Order:
  """Returns the default order: tensor innermost, stages outermost."""
  return _evaluate_order(traffic, np.arange(traffic.grid.size))


def brute_force(traffic: Traffic) -> Order:
  """Returns the best of all orders.

  Raises:
    ValueError: There are more than ``MAX_EXACT_DEVICES`` devices.
  """
  n = traffic.grid.size
  if n > MAX_EXACT_DEVICES:
    raise ValueError(
      f"{n} devices have too many orders; at most {MAX_EXACT_DEVICES} devices "
      "are allowed"
    )
  orders = permutations(n)
  return _evaluate_order(traffic, orders[
    cost(traffic, orders.reshape(-1, *traffic.grid)).argmin()
  ])


@functools.lru_cache(maxsize=MAX_EXACT_DEVICES)
def permutations(count: int) -> np.ndarray:
  """Returns all permutations of ``count`` devices, int ``[count!, count]``."""
  found = np.array(list(itertools.permutations(range(count))))
  found.flags.writeable = False  # all callers share it
  return found


def search(
  traffic: Traffic, *, seed: int = 0, kicks: int | None = None,
  exact: bool = True,
) -> Order:
  """Searches for an order of low cost as the module's docstring describes.

  Args:
    traffic: Cost matrices of the messages.
    seed: Seed of random exchanges.
    kicks: Number of random restarts; a small number makes the search quick.
      None for a number that decreases with the number of devices.
    exact: Whether to try all orders if there are at most ``MAX_EXACT_DEVICES``
      devices, which is faster than the search.

  Returns:
    An order that is never worse than the default one.

  Example:
    Four devices in two nodes; the search puts each data ring into one node.

    >>> node = np.array([0, 1, 0, 1])
    >>> ring = np.where(node[:, None] == node, 1.0, 9.0)
    >>> none = np.zeros((4, 4))
    >>> traffic = Traffic(Grid(2, 2, 1), none, none, ring, none)
    >>> default_order(traffic).seconds
    9.0
    >>> found = search(traffic)
    >>> found.devices[..., 0].tolist(), found.seconds
    ([[0, 2], [1, 3]], 1.0)
  """
  if exact and traffic.grid.size <= MAX_EXACT_DEVICES:
    return brute_force(traffic)
  # A plan makes about 20 quick searches, so on large clusters each of them has
  # a smaller budget.
  quick = kicks == 0
  budget = _Budget(
    _MAX_EXCHANGES / (1 + quick * traffic.grid.size // _MAX_GREEDY_DEVICES)
  )
  start = _starting(traffic, seed, budget)
  best = _improved(traffic, start, budget)
  rng, n = np.random.default_rng(seed), traffic.grid.size
  if n <= _MAX_ANNEALED_DEVICES:
    chains = n * (_CHAINS if kicks is None else _CHAINS_QUICK)
    tried = [
      _improved(traffic, devices, budget, shares=_MEAN_WEIGHTS[-1:])
      for devices in _annealed(traffic, chains, rng)
    ]
    best = min([best, *tried], key=lambda order: order.seconds)
  if kicks is None:
    kicks = (4 if n <= 2 * MAX_EXACT_DEVICES else 1) * _RESTART_BUDGET // n
  # Each kick exchanges two to four random pairs of devices.
  for kick in range(kicks):
    trial = best.devices.ravel().copy()
    for _ in range(2 + kick % 3):
      a, b = rng.integers(n, size=2)
      trial[[a, b]] = trial[[b, a]]
    if not budget.left:
      break
    found = _improved(traffic, trial, budget, shares=_MEAN_WEIGHTS[-1:])
    if found.seconds < best.seconds * (1 - 1e-9):
      best = found
  own = default_order(traffic)
  return own if own.seconds <= best.seconds else best


class _Budget:
  """Remaining search effort, counted in exchanges that may still be priced.

  The result thus does not depend on the machine's speed. Pricing a batch of
  exchanges has a fixed cost, equal to that of 150 exchanges.
  """

  def __init__(self, candidates: float = _MAX_EXCHANGES) -> None:
    self._left = candidates

  @property
  def left(self) -> bool:
    """Whether further exchanges may be priced."""
    return self._left > 0

  def take(self, count: int) -> None:
    """Subtracts the cost of pricing ``count`` exchanges in one batch."""
    self._left -= 150 + count


def _evaluate_order(traffic: Traffic, devices: np.ndarray) -> Order:
  devices = np.asarray(devices).reshape(traffic.grid)
  return Order(devices, float(cost(traffic, devices)))


# Starts -----------------------------------------------------------------------


def _starting(traffic: Traffic, seed: int, budget: "_Budget") -> np.ndarray:
  """Returns the device at each of N positions of an initial order, int ``[N]``.

  It is built from tensor groups, or is the best of several greedy orders.
  ``budget`` limits the search.
  """
  grid, n = traffic.grid, traffic.grid.size
  if grid.tensor > 1:
    return _by_groups(traffic, Grid(1, 1, grid.tensor), seed, budget)
  starts = [np.arange(n)]
  # Consecutive devices on a walk form the data ring of a stage, or a pipeline.
  # Both kinds of groups can also be ordered as units.
  if grid.data > 1:
    starts.append(_walk(traffic.ring, grid.data))
  if grid.stages > 1:
    way = _walk(traffic.chain + traffic.hop, grid.stages)
    starts.append(way.reshape(grid.data, grid.stages).T.ravel())
  if grid.data > 1 and grid.stages > 1:
    starts += [
      _by_groups(traffic, whole, seed, budget)
      for whole in (Grid(1, grid.data, 1), Grid(grid.stages, 1, 1))
    ]
  if n <= _MAX_GREEDY_DEVICES:
    return min(
      (_improved(traffic, start, budget) for start in starts),
      key=lambda order: order.seconds,
    ).devices.ravel()
  return min(starts, key=lambda start: _evaluate_order(traffic, start).seconds)


def _by_groups(
  traffic: Traffic, whole: Grid, seed: int, budget: "_Budget"
) -> np.ndarray:
  """Returns an order of the N devices that is made of groups of close devices.

  ``whole`` is the size of a group along each axis: 1, or all coordinates. The
  groups are formed first and then ordered; ``budget`` limits the search.
  """
  grid, n = traffic.grid, traffic.grid.size
  none = np.zeros((n, n))
  # Groups are formed on a grid in which groups exchange no messages.
  count, rest = n // whole.size, Grid(*(
    1 if inside > 1 else size for size, inside in zip(grid, whole, strict=True)
  ))
  if whole.stages > 1:
    alone = Traffic(Grid(whole.stages, count, 1), traffic.chain, traffic.hop,
                    none, none)
    start = _walk(traffic.chain + traffic.hop, whole.size)
    start = start.reshape(count, whole.size).T
  else:
    alone = Traffic(Grid(1, count, whole.size), none, none, none,
                    traffic.ring if whole.data > 1 else traffic.reduce)
    start = _walk(alone.reduce, whole.size)
  starts = np.arange(n), start.ravel()
  start = min(starts, key=lambda start: _evaluate_order(alone, start).seconds)
  found = _improved(alone, start, budget, shares=_MEAN_WEIGHTS[-1:]).devices
  groups = found.reshape(count, -1)
  if whole.stages > 1:
    groups = found.reshape(whole.stages, count).T
  if count == 1:
    return groups.reshape(grid).ravel()

  # Cost between groups: the slowest link between devices at equal positions.
  def slowest(matrix, inside):
    if inside > 1:
      return np.zeros((count, count))
    return np.max([matrix[np.ix_(g, g)] for g in groups.T], axis=0)

  units = Traffic(
    rest, slowest(traffic.chain, whole.stages),
    slowest(traffic.hop, whole.stages), slowest(traffic.ring, whole.data),
    slowest(traffic.reduce, whole.tensor),
  )
  found = search(units, seed=seed, kicks=_RESTART_BUDGET // count)
  order = groups[found.devices]  # [p', d', t', group]
  axis = next(i for i, size in enumerate(whole) if size > 1)
  return np.moveaxis(order, -1, axis).reshape(grid).ravel()


def _walk(seconds: np.ndarray, run: int) -> np.ndarray:
  """Orders devices greedily: each one is followed by the nearest remaining one.

  The order consists of runs (groups) of consecutive devices. A run starts with
  the device that has the largest mean distance to all remaining ones, since no
  later run would reach it at lower cost.

  Args:
    seconds: Cost of each link between N devices, float64 ``[N, N]``.
    run: Number of devices per run.

  Returns:
    All devices in order, int ``[N]``.
  """
  n = len(seconds)
  both = np.maximum(seconds, seconds.T).copy()
  left, order = np.ones(n, dtype=bool), []
  for step in range(n):
    if step % run == 0:
      some = np.flatnonzero(left)
      inside = both[np.ix_(some, some)]
      here = some[inside.mean(1).argmax()]
    else:
      here = np.where(left, both[order[-1]], np.inf).argmin()
    order.append(int(here))
    left[here] = False
  return np.array(order)


# Annealing --------------------------------------------------------------------


def _annealed(
  traffic: Traffic, chains: int, rng: np.random.Generator
) -> np.ndarray:
  """Anneals ``chains`` random orders; returns the best few of them.

  The result has the device at each of N positions, int ``[orders, N]``.
  """
  families, grid = traffic.families(), traffic.grid
  everyone = np.arange(grid.size)

  def energy(orders):  # [C, N] -> [C]
    found = np.zeros(chains)
    for f in families:
      links = f.seconds[orders[:, f.source], orders[:, f.target]]
      if f.summed:
        links = links.reshape(chains, grid.stages - 1, -1).sum(1)
      found += links.max(1) + _MEAN_WEIGHTS[-1] * links.mean(1)
    return found

  orders = rng.permuted(np.tile(everyone, (chains, 1)), axis=1)
  values = energy(orders)
  best, least = orders.copy(), values.copy()
  rows = np.arange(chains)
  for share in np.geomspace(_HOT, _COLD, _ANNEALING_STEPS):
    if not least.min():  # an order without any cost is optimal
      break
    a, b = rng.integers(grid.size, size=(2, chains))
    trial = orders.copy()
    trial[rows, a], trial[rows, b] = orders[rows, b], orders[rows, a]
    new = energy(trial)
    # Metropolis criterion; the temperature is a fraction of the lowest cost.
    worse = np.maximum(new - values, 0) / (share * least.min())
    taken = rng.random(chains) < np.exp(-worse)
    orders[taken], values[taken] = trial[taken], new[taken]
    better = values < least
    best[better], least[better] = orders[better], values[better]
  return best[np.argsort(least, kind="stable")[:_NUM_KEPT_ORDERS]]


# Improvement ------------------------------------------------------------------


def _improved(
  traffic: Traffic, start: np.ndarray, budget: "_Budget",
  shares: tuple[float, ...] = _MEAN_WEIGHTS,
) -> Order:
  """Returns the order that a local search finds from ``start``.

  The search exchanges devices, then stages and replicas, until none helps or
  ``budget`` is spent; ``shares`` has the weight of the links' mean time in the
  objective of each round.
  """
  devices = start
  for share in shares:
    devices = _Exchanges(traffic, devices, share).run(budget)
    devices = _exchange_blocks(traffic, devices)
  return _evaluate_order(traffic, devices)


def _exchange_blocks(traffic: Traffic, devices: np.ndarray) -> np.ndarray:
  """Returns an improved order after swaps and reversals of stages or replicas.

  A reversal turns a range of consecutive stages or replicas around.
  """
  grid = traffic.grid
  best = devices.reshape(grid)
  while True:
    found = [best]
    for dim, size in ((0, grid.stages), (1, grid.data)):
      for i, j in itertools.combinations(range(size), 2):
        turned = np.arange(size)
        turned[i : j + 1] = turned[i : j + 1][::-1]
        swapped = np.arange(size)
        swapped[[i, j]] = j, i
        found += [best.take(x, dim) for x in (turned, swapped)]
        if len(found) > 4096:  # bounds the memory of a batch
          break
    seconds = cost(traffic, np.array(found))
    if seconds.min() >= seconds[0] * (1 - 1e-9):
      return best.ravel()
    best = found[int(seconds.argmin())]


class _Exchanges:
  """Local search from one order by exchanges of two devices.

  Attributes:
    devices: Device at each of the N positions of the order, ``[N]``.
  """

  def __init__(
    self, traffic: Traffic, devices: np.ndarray, share: float
  ) -> None:
    self.devices = devices.copy()
    self._families, self._share = traffic.families(), share
    self._planes = traffic.grid.data * traffic.grid.tensor
    self._reset()

  def _reset(self) -> None:
    """Recomputes the link costs and the objective for the current order."""
    y = self.devices
    self._links = [f.seconds[y[f.source], y[f.target]] for f in self._families]
    self._tops, self._sums = [], []
    for family, links in zip(self._families, self._links, strict=True):
      worst = links  # if links of a pipeline add up: the sum of each pipeline
      if family.summed:
        worst = np.bincount(
          family.source % self._planes, links, self._planes
        )
      self._sums.append(worst)
      # An exchange changes at most four links of a kind, or two pipelines: at
      # least one of the five slowest, if there are that many, is unchanged.
      self._tops.append(np.argsort(-worst, kind="stable")[:5])
    self.value = sum(
      worst.max() + self._share * worst.mean() for worst in self._sums
    )

  def run(self, budget: "_Budget") -> np.ndarray:
    """Applies each device's best exchange in turn until no exchange helps."""
    n, since, a = len(self.devices), 0, 0
    if not self._families:
      return self.devices
    everyone = np.arange(n)
    while since < n and budget.left:
      budget.take(n)
      values = self.values(a, everyone)
      b = int(values.argmin())
      if values[b] < self.value * (1 - 1e-9):
        self.devices[[a, b]] = self.devices[[b, a]]
        self._reset()
        since = 0
      else:
        since += 1
      a = (a + 1) % n
    return self.devices

  def values(self, a: int, b: np.ndarray) -> np.ndarray:
    """Returns the objective if position a were exchanged with each of ``b``.

    b are B positions of the order; the result is ``[B]``.
    """
    found = np.zeros(len(b))
    for index, family in enumerate(self._families):
      ids, new, old = self._changed(index, family, a, b)
      worst, tops = self._sums[index], self._tops[index]
      if family.summed:
        # Sum the changes of each of the two pipelines, [B, 2].
        changed = np.where(ids >= 0, new - old, 0.0)
        pipes = np.where(ids >= 0, family.source[ids] % self._planes, -1)
        ends = np.stack([np.full_like(b, a), b], 1) % self._planes
        delta = (changed[:, None] * (pipes[:, None] == ends[..., None])).sum(-1)
        ids, new = ends, worst[ends] + delta
        mean = changed.sum(1) / len(worst)
      else:
        mean = np.where(ids >= 0, new - old, 0.0).sum(1) / len(worst)
        new = np.where(ids >= 0, new, -np.inf)
      stays = ~(tops[:, None] == ids[:, None]).any(-1)  # [B, 5]
      # The new maximum: of the unchanged top links and of the changed links.
      rest = np.where(stays, worst[tops], -np.inf).max(1)
      found += np.maximum(rest, new.max(1))
      found += self._share * (worst.mean() + mean)
    return found

  def _changed(
    self, index: int, family: CostTerm, a: int, b: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the links of a cost term that exchanging a and b changes.

    Args:
      index: Index of the term.
      family: The term.
      a: A position of the order.
      b: B positions, each to be exchanged with a.

    Returns:
      Index, new cost and old cost of each link, ``[B, 4]`` each. The index is
      -1 for a missing link or a duplicate.
    """
    y = self.devices
    ids = np.stack([
      np.full_like(b, family.into[a]), np.full_like(b, family.out[a]),
      family.into[b], family.out[b],
    ], 1)
    # If a and b are adjacent they share a link; in a ring of two, both links.
    for i, j in itertools.product((2, 3), (0, 1)):
      ids[ids[:, i] == ids[:, j], i] = -1
    source, target = family.source[ids], family.target[ids]
    mine, other = y[a], y[b][:, None]

    def after(c):
      return np.where(c == a, other, np.where(c == b[:, None], mine, y[c]))

    new = family.seconds[after(source), after(target)]
    return ids, new, self._links[index][ids]
