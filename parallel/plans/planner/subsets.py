"""Plans on a subset of a cluster's devices, if the others slow down a step.

A step waits for the slowest device and for the slowest link that its
configuration uses, and 11 devices may not allow a configuration that 8 devices
allow. Devices are removed one after the other, always the one with the slowest
links to the remaining ones. If devices compute at different rates, a second
order removes those that compute slowest first. For clusters of few devices,
further orders leave a multiple of 2, 4 and so on in each node, which groups of
tensor ranks need. Each smaller cluster that may be faster gets a quick plan,
and the best one a full plan. The search ends when the FLOPs of a step, at the
total rate of the n fastest devices, take longer than the best step so far.
"""

from collections.abc import Callable, Iterator
import dataclasses
import math

import numpy as np

from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.planner import plan as plans
from parallel.plans.planner.plan import Plan
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices

_MESSAGE_BYTES = 2.0**20  # size of the messages by which devices are compared
# A device is slow if its messages take this many times as long as those of a
# fast device.
_SLOW_RATIO = 1.5
# With at most _MAX_SMALL_CLUSTER devices, all smaller numbers are tried if one
# device's messages take more than _UNEVEN_RATIO times as long as another's.
_MAX_SMALL_CLUSTER, _UNEVEN_RATIO = 16, 1.05
_DEVICE_MULTIPLE = 8  # larger clusters are reduced to a multiple of this number


@dataclasses.dataclass(frozen=True, eq=False)
class Subset:
  """A plan on a subset of a cluster's devices.

  Attributes:
    problem: The problem on the devices that are used.
    plan: The plan of this problem.
    devices: The devices that are used, ascending.
    left_out: The other devices, the slow ones first.
    whole_s: Seconds of the best step on all devices; None if nothing runs on
      all of them.
    skipped: Number of smaller clusters that were not tried for lack of time.
  """

  problem: Problem
  plan: Plan
  devices: tuple[int, ...]
  left_out: tuple[int, ...] = ()
  whole_s: float | None = None
  skipped: int = 0

  @property
  def seconds(self) -> float:
    """Predicted seconds of the best step."""
    return self.plan.best[0].latency.total


def search(
  problem: Problem, choices: Choices, *, least: int = 0, count: int = 5,
  ordered: int = 10, started: Callable[[str], None] = lambda text: None,
  has_time: Callable[[], bool] = lambda: True,
) -> Subset:
  """Finds the best configurations on all or some devices of a cluster.

  Args:
    problem: The training step on the cluster.
    choices: Values to try.
    least: Smallest number of devices to use; 0 for half of all devices, or for
      the number of devices of the fastest kind minus 16 if that is less.
    count: Number of results, which differ in their (stages, data, tensor).
    ordered: Number of candidates whose device order is optimised.
    started: Called with a description of each search before it starts: on
      1,000 devices one takes about ten seconds.
    has_time: Called before each search; if it returns False, the best plan so
      far is the result.

  Raises:
    ValueError: No configuration fits.
  """
  n = problem.links.num_devices
  started(f"searching plans on all {n:,} devices")
  everything = tuple(range(n))
  try:
    whole = Subset(
      problem, plans.plan(
        problem, choices, count=count, ordered=ordered, has_time=has_time
      ), everything,
    )
  except ValueError as error:
    whole, failed = None, error
  layer_s = problem.links.per_device(
    lambda device: problem.step.layer_s(
      1, 1, device, problem.timing.utilisation
    )
  )
  num_fast, half = int((layer_s == layer_s.min()).sum()), -(-n // 2)
  if num_fast < n:  # include a round number of devices of the fastest kind
    half = min(half, num_fast - 2 * _DEVICE_MULTIPLE)
  order, num_slow = removals(problem.links, max(1, least or half))
  orders, is_needed = [order], whole is None
  if n <= _MAX_SMALL_CLUSTER:
    orders += _node_aligned_orders(problem.links, order, num_slow)
    own = _pair_seconds(problem.links).sum(axis=1)
    is_needed |= bool(own.max() > _UNEVEN_RATIO * own.min())
  numbers = [*_removal_counts(n, len(order), num_slow, is_needed)]
  smaller = [(number, some) for some in orders for number in numbers]
  if num_fast < n:
    order, slow = _slow_first(layer_s, order), n - num_fast
    orders = [order]
    if n <= _MAX_SMALL_CLUSTER and slow < len(order):
      orders += _node_aligned_orders(problem.links, order, slow)
    numbers = _removal_counts_by_kind(n, len(order), slow)
    smaller += [(number, some) for some in orders for number in numbers]
  best, max_s = None, math.inf if whole is None else whole.seconds
  # Sets of devices that several orders remove are tried once.
  tried = {
    (number, frozenset(some[:number])): some[:number]
    for number, some in sorted(smaller, key=lambda x: x[0])
  }
  skipped = 0
  for turn, ((number, _), gone) in enumerate(tried.items(), 1):
    if _ideal_s(problem, n - number) >= max_s:
      break
    if not (has_time() or math.isinf(max_s)):
      skipped += 1
      continue
    started(
      f"smaller cluster {turn} of at most {len(tried)}: {n - number:,} devices"
    )
    found = _plan_without(problem, choices, gone, has_time)
    # Some numbers of devices have no configuration that runs and fits.
    if found and found.seconds < max_s:
      best, max_s = found, found.seconds
  if best is None:
    if whole is None:
      raise failed
    return dataclasses.replace(whole, skipped=skipped)
  started(f"searching plans on {len(best.devices):,} devices")
  found = plans.plan(
    best.problem, choices, count=count, ordered=ordered, has_time=has_time
  )
  return dataclasses.replace(
    best, plan=found, whole_s=whole and whole.seconds, skipped=skipped
  )


def _plan_without(
  problem: Problem, choices: Choices, gone: tuple[int, ...],
  has_time: Callable[[], bool],
) -> Subset | None:
  """Returns a quick plan without the devices `gone`; None if nothing fits.

  ``has_time`` is that of `search`.
  """
  kept = tuple(i for i in range(problem.links.num_devices) if i not in gone)
  part = dataclasses.replace(problem, links=problem.links.part(kept))
  try:
    found = plans.plan(part, choices, count=1, ordered=3, has_time=has_time)
  except ValueError:
    return None
  return Subset(part, found, kept, gone)


def removals(links: LinkMatrix, least: int) -> tuple[tuple[int, ...], int]:
  """Returns devices to remove, in order, and how many of them have slow links.

  Those with slow links come first.

  Args:
    links: The cluster.
    least: Number of devices that stay.

  Example:
    >>> from parallel.plans.hardware.clusters import CLUSTERS
    >>> from parallel.plans.hardware import link_matrix
    >>> links = link_matrix.of_cluster(CLUSTERS["a100"], groups=1)
    >>> slow = links.bandwidth.copy()
    >>> slow[2] /= 100  # all that device 2 sends
    >>> removals(dataclasses.replace(links, bandwidth=slow), least=6)
    ((2, 7), 1)
  """
  pairs = _pair_seconds(links)
  kept, gone, num_slow = list(range(links.num_devices)), [], 0
  while len(kept) > least:
    own = pairs[np.ix_(kept, kept)].sum(axis=1) / (len(kept) - 1)
    # Of equal devices the last one is removed, to keep the first nodes whole.
    at = len(own) - 1 - int(np.argmax(own[::-1]))
    if own[at] > _SLOW_RATIO * np.quantile(own, 0.25):
      num_slow = len(gone) + 1
    gone.append(kept.pop(at))
  return tuple(gone), num_slow


def _slow_first(
  layer_s: np.ndarray, order: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns as many devices as `order` has, those with slowest compute first.

  Args:
    layer_s: Seconds of a layer on each device, ``[N]``.
    order: The devices to remove according to their links, from `removals`.
  """
  # Of equally fast devices, those with slow links are first, then high indices.
  place = {device: at for at, device in enumerate(order)}
  found = sorted(
    range(len(layer_s)),
    key=lambda i: (-layer_s[i], place.get(i, len(order)), -i),
  )
  return tuple(found[:len(order)])


def _pair_seconds(links: LinkMatrix) -> np.ndarray:
  """Returns seconds of a 1 MiB message, in the slower direction, ``[N, N]``."""
  seconds = links.seconds(_MESSAGE_BYTES)
  return np.maximum(seconds, seconds.T)


def _node_aligned_orders(
  links: LinkMatrix, order: tuple[int, ...], num_slow: int
) -> Iterator[tuple[int, ...]]:
  """Yields orders of removal that leave multiples of 2, 4, ... in each node.

  Each order has as many devices as `order`, and begins with the slow ones.

  Args:
    links: The cluster.
    order: The devices to remove, from `removals`.
    num_slow: Number of slow devices, which are the first ones in `order`.
  """
  own = _pair_seconds(links).sum(axis=1)
  size = 2
  while size <= np.bincount(links.nodes).max():
    gone, kept = list(order[:num_slow]), np.array(links.nodes)
    kept[gone] = -1  # [N]: the node of each device that is left
    while len(gone) < len(order):
      nodes, counts = np.unique(kept[kept >= 0], return_counts=True)
      # The node with fewest devices beyond a multiple of `size`; if no node has
      # any, the smallest node.
      left = np.where(counts % size, counts % size, size + counts)
      node = nodes[::-1][np.argmin(left[::-1])]
      inside = np.flatnonzero(kept == node)[::-1]
      gone.append(int(inside[np.argmax(own[inside])]))
      kept[gone[-1]] = -1
    yield tuple(gone)
    size *= 2


def _removal_counts(
  n: int, most: int, num_slow: int, is_needed: bool
) -> Iterator[int]:
  """Yields the numbers of devices whose removal is to be tried.

  Args:
    n: Number of devices.
    most: Largest number to remove.
    num_slow: Number of devices with slow links.
    is_needed: Whether to try removals even if no links are slow.
  """
  if not (num_slow or is_needed):
    return
  if n <= _MAX_SMALL_CLUSTER:
    yield from range(1, most + 1)
    return
  # At most the slow devices, and further ones until a multiple of
  # _DEVICE_MULTIPLE is left.
  last = n - (n - max(num_slow, 1)) // _DEVICE_MULTIPLE * _DEVICE_MULTIPLE
  first = max(1, num_slow - _DEVICE_MULTIPLE)
  yield from range(first, min(last, most) + 1)


def _removal_counts_by_kind(n: int, most: int, num_slow: int) -> list[int]:
  """Returns numbers of devices to remove if ``num_slow`` of n compute slowly.

  They are at most ``most``.

  What remains is the fast devices, or one of the two largest multiples of
  ``_DEVICE_MULTIPLE`` up to the number of all devices or of fast devices.
  """
  if n <= _MAX_SMALL_CLUSTER:
    return [*range(1, most + 1)]
  left = {n - num_slow}
  for kept in (n, n - num_slow):
    left |= {
      kept // _DEVICE_MULTIPLE * _DEVICE_MULTIPLE,
      (kept // _DEVICE_MULTIPLE - 1) * _DEVICE_MULTIPLE
    }
  return sorted(n - x for x in left if 0 < n - x <= most)


def _ideal_s(problem: Problem, num_devices: int) -> float:
  """Returns a step's seconds at the total rate of the fastest devices."""
  step = problem.step
  tokens = step.batch_size * step.seq_len
  flops = tokens * step.model.flops_per_token(step.seq_len)
  rates = problem.links.per_device(lambda x: x.peak(step.model.dtype))
  rate = np.sort(rates)[-num_devices:].sum() * problem.timing.utilisation
  return flops / rate
