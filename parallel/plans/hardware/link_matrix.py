"""Latency and bandwidth matrices of a cluster.

A message of n bytes from device i to device j takes

    latency_s[i, j] + n / bandwidth[i, j]

seconds. The bandwidth of a pair is measured while all other devices communicate
in pairs, too (rounds of `launch.measure`), so devices that share a
network adapter share its bandwidth. Matrices may be asymmetric: row i, column j
describes the direction from i to j.

Shape legend: N = devices.

Example:
  >>> from parallel.plans.hardware import link_matrix
  >>> from parallel.plans.hardware.clusters import CLUSTERS
  >>> links = link_matrix.of_cluster(CLUSTERS["h100"], groups=2)
  >>> links.num_devices, links.nodes[:9]
  (16, (0, 0, 0, 0, 0, 0, 0, 0, 1))
  >>> (links.bandwidth[0, [1, 8]] / 1e9).tolist()  # GB/s: node, network
  [450.0, 50.0]
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize

from parallel.base import checks
from parallel.plans.hardware.clusters import Cluster, Level
from parallel.plans.hardware.devices import Device, slowed, worst_case_device
from parallel.plans.hardware.links import PCIE_4, PCIE_5

# Both matrices together take 268 MB for 4,096 devices, and grow quadratically.
MAX_DEVICES = 4096
# Seconds of one step of a ring (protocol "Simple") over NVLink, PCI Express and
# a network. Vendors publish no latencies; these are constants of the cost model
# with which NCCL selects algorithms.
NVLINK_LATENCY_S, PCIE_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 5.7e-6, 14.0e-6
LATENCY_SOURCE = "NCCL, src/graph/tuning.cc, hwLat, ring, Simple"
SOURCE_MARKS = ("measured", "published", "assumption", "drawn")


class Links(NamedTuple):
  """Links between pairs of devices, in arrays of any shape.

  Attributes:
    latency_s: Latency of each link in seconds, float64 ``[...]``.
    bandwidth: Bytes per second of each link, float64 ``[...]``.
  """

  latency_s: np.ndarray
  bandwidth: np.ndarray

  def seconds(self, size_bytes: float) -> np.ndarray:
    """Returns the seconds that a message takes on each link, ``[...]``."""
    return self.latency_s + size_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True, eq=False)
class LinkMatrix:
  """Cluster of devices with a link for every ordered pair.

  Attributes:
    name: Name in printed tables.
    device: Type of all devices. If types differ, a device with the lowest rates
      of all (`devices.worst_case_device`), which bounds the time of equal
      shards.
    nodes: ``[N]``: number of each device's node, in ascending order, so that
      devices of a node are contiguous.
    bandwidth: float64 ``[N, N]``, bytes per second; infinite on the diagonal.
    latency_s: float64 ``[N, N]``, seconds; 0 on the diagonal.
    source: Source of the numbers.
    mark: Kind of ``source``, one of ``SOURCE_MARKS``.
    residuals: log(measured / predicted) of step times of compiled programs that
      the rates were not fitted to (`parallel.ledger.conformal`); () if there
      are none.
    family: Config key -> its values in the programs that gave ``residuals``.
    widening: Logarithm of the factor by which both ends of a prediction
      interval move for each key whose value is outside of ``family``.
    devices: Type of each device, ``[N]``, if there are several; () if all are
      `device`.

  Raises:
    ValueError: There are too many devices, a matrix has a wrong shape, a link
      is missing or invalid, or devices have different platforms.
  """

  name: str
  device: Device
  nodes: tuple[int, ...]
  bandwidth: np.ndarray
  latency_s: np.ndarray
  source: str
  mark: str
  residuals: tuple[float, ...] = ()
  family: Mapping[str, Sequence[str | float]] = dataclasses.field(
    default_factory=dict
  )
  widening: float = math.inf
  devices: tuple[Device, ...] = ()

  def __post_init__(self) -> None:
    n = len(self.nodes)
    check_size(n)
    if self.devices:
      if len(self.devices) != n:
        raise ValueError(
          f"the cluster has {n} devices, but {len(self.devices)} device types "
          "are given; give one type per device"
        )
      object.__setattr__(self, "device", worst_case_device(self.devices))
      if self.device is self.devices[0]:  # all are equal
        object.__setattr__(self, "devices", ())
    checks.known("mark=", self.mark, SOURCE_MARKS)
    for before, after in itertools.pairwise(self.nodes):
      if before > after:
        raise ValueError(
          "node numbers must ascend, so that the devices of a node are "
          f"contiguous, but node {after} follows node {before}"
        )
    for key in ("bandwidth", "latency_s"):
      matrix = np.array(getattr(self, key), float)
      if matrix.shape != (n, n):
        raise ValueError(
          f"{key} has shape {' x '.join(map(str, matrix.shape))}; it must be "
          f"square, with a row and a column for each of {n} devices"
        )
      # A message to the same device takes no time.
      np.fill_diagonal(matrix, math.inf if key == "bandwidth" else 0.0)
      _check(key, matrix)
      object.__setattr__(self, key, matrix)  # a frozen dataclass

  @property
  def num_devices(self) -> int:
    """Number of devices, N."""
    return len(self.nodes)

  def seconds(self, size_bytes: float) -> np.ndarray:
    """Returns the time of a message between each pair of devices.

    Args:
      size_bytes: Size of the message.

    Returns:
      float64 ``[N, N]``, seconds; 0 on the diagonal.
    """
    return Links(self.latency_s, self.bandwidth).seconds(size_bytes)

  def between(self, here: np.ndarray, there: np.ndarray) -> Links:
    """Returns the links from devices ``here`` to devices ``there``.

    Args:
      here: Devices that send, int ``[...]``.
      there: Devices that receive, int ``[...]``.
    """
    return Links(self.latency_s[here, there], self.bandwidth[here, there])

  def per_device(self, value: Callable[[Device], float]) -> np.ndarray:
    """Returns ``value(device)`` of each device, float64 ``[N]``."""
    if not self.devices:
      return np.full(self.num_devices, value(self.device))
    kinds = {device.name: value(device) for device in self.devices}
    return np.array([kinds[device.name] for device in self.devices])

  def part(self, devices: Sequence[int]) -> "LinkMatrix":
    """Returns the sub-cluster of some devices, in ascending order."""
    # Ascending order keeps the devices of a node contiguous.
    some = np.sort(np.asarray(devices, int))
    return dataclasses.replace(
      self, nodes=tuple(np.array(self.nodes)[some].tolist()),
      bandwidth=self.bandwidth[np.ix_(some, some)],
      latency_s=self.latency_s[np.ix_(some, some)],
      devices=tuple(self.devices[i] for i in some) if self.devices else (),
    )


def check_size(num_devices: int) -> None:
  """Raises ValueError for more devices than matrices can describe."""
  n = num_devices
  if n > MAX_DEVICES:
    raise ValueError(
      f"{n:,} devices are more than {MAX_DEVICES:,}: two matrices would take "
      f"{16 * n * n / 1e9:.1f} GB, and a search many times that. Plan one of "
      "several identical parts, such as a pod; the parts then differ in "
      "data-parallel ranks only"
    )


def _check(key: str, matrix: np.ndarray) -> None:
  """Raises ValueError if an off-diagonal entry is missing, 0 or infinite.

  ``key`` is the name of the matrix in the message.
  """
  off = ~np.eye(len(matrix), dtype=bool)  # [N, N], off the diagonal
  missing = np.argwhere(np.isnan(matrix) & off)
  if len(missing):
    i, j = missing[0]
    raise ValueError(
      f"{key}[{i}][{j}] is missing, one of {len(missing)} missing entries; "
      "give a value for each pair of devices, also for indirect routes"
    )
  wrong = matrix <= 0 if key == "bandwidth" else matrix < 0
  wrong = np.argwhere((wrong | np.isinf(matrix)) & off)
  if len(wrong):
    i, j = wrong[0]
    raise ValueError(
      f"{key}[{i}][{j}]={matrix[i, j]:g}, one of {len(wrong)} errors, must be "
      + ("positive and finite: a message over a link of rate 0 never arrives"
         if key == "bandwidth" else "at least 0, and finite")
    )


def of_cluster(cluster: Cluster, groups: int) -> LinkMatrix:
  """Returns the matrices of a cluster with the published bandwidths.

  Args:
    cluster: Record of the cluster.
    groups: Number of groups of its outermost network level, such as nodes;
      devices if the cluster has one level.

  Raises:
    ValueError: The cluster has fewer groups, or there are too many devices.
  """
  # Only the outermost level may be used in part.
  last = cluster.levels[-1]
  if not 1 <= groups <= last.size:
    raise ValueError(
      f"{cluster.name!r} has 1 to {last.size:,} groups of its outermost level "
      f"{last.name!r}, not {groups}"
    )
  levels = (*cluster.levels[:-1], dataclasses.replace(last, size=groups))
  n = math.prod(level.size for level in levels)
  if n > MAX_DEVICES:  # raises before the matrices are allocated
    LinkMatrix("", cluster.device, (0,) * n, *[np.empty((0, 0))] * 2, "", "")
  devices, inside = np.arange(n), 1
  bandwidth, latency_s = np.full((n, n), np.nan), np.full((n, n), np.nan)
  for index, level in enumerate(levels):
    inside *= level.size  # devices per group of this level
    group = devices // inside
    # Pairs whose innermost common group is on this level. [N, N]
    new = (group[:, None] == group) & np.isnan(bandwidth)
    # Bandwidth of each device while all devices send concurrently.
    bandwidth[new] = level.link.bandwidth * level.links_per_device
    latency_s[new] = _latency(level, index == len(levels) - 1 and index > 0)
  # A node is a group of the level below the outermost one.
  node = math.prod(level.size for level in levels[: max(1, len(levels) - 1)])
  return LinkMatrix(
    f"{cluster.name}:{groups}", cluster.device,
    tuple((devices // node).tolist()), bandwidth, latency_s,
    f"{cluster.source}; latencies: {LATENCY_SOURCE}", "published",
  )


def joined(clusters: Sequence[tuple[Cluster, int]]) -> LinkMatrix:
  """Returns one cluster of nodes of several kinds on one network.

  A message between nodes of two kinds takes the slower adapter's rate and the
  longer latency.

  Args:
    clusters: Records, each with a number of groups of its outermost level.

  Raises:
    ValueError: `of_cluster` rejects a cluster, or one has only a single level.

  Example:
    >>> from parallel.plans.hardware.clusters import CLUSTERS
    >>> links = joined([(CLUSTERS["h100"], 1), (CLUSTERS["a100"], 1)])
    >>> links.device.name, float(links.bandwidth[0, 8] / 1e9)
    ('8 h100 + 8 a100', 25.0)
  """
  for cluster, _ in clusters:
    if len(cluster.levels) < 2:
      raise ValueError(
        f"the cluster {cluster.name!r} has one level, so no network connects "
        "it to other clusters; use a cluster with an outer level"
      )
  parts = [of_cluster(*x) for x in clusters]
  counts = [part.num_devices for part in parts]
  check_size(sum(counts))
  kind = np.repeat(np.arange(len(parts)), counts)  # [N]
  last = [cluster.levels[-1] for cluster, _ in clusters]
  rates = np.array([x.link.bandwidth * x.links_per_device for x in last])[kind]
  latency = np.array([_latency(x, True) for x in last])[kind]
  bandwidth = np.minimum(rates[:, None], rates)
  latency_s = np.maximum(latency[:, None], latency)
  nodes, at = [], 0
  for part in parts:
    here = slice(at, at + part.num_devices)
    bandwidth[here, here] = part.bandwidth
    latency_s[here, here] = part.latency_s
    nodes += [x + (nodes[-1] + 1 if at else 0) for x in part.nodes]
    at = here.stop
  return LinkMatrix(
    " + ".join(part.name for part in parts), parts[0].device, tuple(nodes),
    bandwidth, latency_s,
    "; ".join(dict.fromkeys(part.source for part in parts))
    + "; between kinds: the slower adapter", "assumption",
    devices=tuple(parts[k].device for k in kind),
  )


def slow_down_devices(
  links: LinkMatrix, slowdowns: Mapping[int, float]
) -> LinkMatrix:
  """Returns a copy of a cluster in which some devices are slower.

  Args:
    links: The cluster.
    slowdowns: Index of a device -> factor by which its products, memory
      accesses and overhead take longer (`slowed`).

  Raises:
    ValueError: There is no such device, or `slowed` rejects a factor.
  """
  devices = list(links.devices or (links.device,) * links.num_devices)
  for index, factor in slowdowns.items():
    if not 0 <= index < len(devices):
      raise ValueError(f"device {index} must be one of 0 to {len(devices) - 1}")
    devices[index] = slowed(devices[index], factor)
  return dataclasses.replace(
    links, devices=tuple(devices), mark="assumption",
    name=f"{links.name}, {len(slowdowns)} slow",
  )


def _latency(level: Level, network: bool) -> float:
  """Returns a network level's link latency (s): published, or NCCL's constant.

  ``network``: whether the level's links connect nodes.
  """
  if level.link.latency_s is not None:
    return level.link.latency_s
  if network:
    return NETWORK_LATENCY_S
  return PCIE_LATENCY_S if level.link in (PCIE_4, PCIE_5) else NVLINK_LATENCY_S


def randomize_bandwidths(
  links: LinkMatrix, seed: int, least: float = 0.25, jitter: float = 0.05
) -> LinkMatrix:
  """Returns a cluster whose bandwidths are reduced at random.

  The bandwidth between two nodes is multiplied by a factor that is uniform in
  [least, 1]. Each direction between two nodes, and each between two devices,
  has an additional factor, uniform in [1 - jitter, 1]. Pipette (arXiv
  2405.18093) reports such uneven networks; the distribution is our choice.

  Args:
    links: Cluster with nominal bandwidths.
    seed: Seed of the random generator.
    least: Smallest factor between two nodes.
    jitter: Largest relative reduction per direction.
  """
  rng, n = np.random.default_rng(seed), links.num_devices
  of = np.array(links.nodes)  # [N]
  count = int(of.max()) + 1
  # [nodes, nodes]: a factor per pair of nodes, then another per direction.
  shares = np.triu(rng.uniform(least, 1, (count, count)))
  shares += shares.T
  shares = shares * rng.uniform(1 - jitter, 1, (count, count))
  np.fill_diagonal(shares, 1.0)  # inside a node, only `pairs` reduces rates
  pairs = rng.uniform(1 - jitter, 1, (n, n))
  return dataclasses.replace(
    links, name=f"{links.name}, uneven {seed}",
    bandwidth=links.bandwidth * shares[np.ix_(of, of)] * pairs, mark="drawn",
    source=f"{links.source}; shares of rates between nodes drawn from "
    f"[{least:g}, 1] with seed {seed}",
  )


def fit(
  sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Fits latency + bytes / bandwidth to the times of messages.

  Both parameters are nonnegative. Squared relative errors are minimised, so
  that small and large messages have equal weight.

  Args:
    sizes: Message sizes in bytes.
    seconds: Time of each message.

  Returns:
    (latency in seconds, bandwidth in bytes per second).

  Raises:
    ValueError: There are fewer than two sizes, or times do not increase with
      the size.

  Example:
    >>> from parallel.plans.hardware import link_matrix
    >>> latency_s, bandwidth = link_matrix.fit([1e3, 1e6], [2e-6, 1e-4])
    >>> round(latency_s * 1e6, 2), round(bandwidth / 1e9, 2)  # us, GB/s
    (1.9, 10.19)
  """
  # Two unknowns need two different sizes.
  if len(set(sizes)) < 2:
    raise ValueError(
      "latency and rate can be fitted only to messages of two or more sizes"
    )
  times = np.asarray(seconds, float)
  rows = np.stack([np.ones(len(times)), np.asarray(sizes, float)], 1)
  scale = np.array([1.0, float(np.max(sizes))])
  # Rows divided by the times give relative errors; columns are scaled to
  # similar magnitudes.
  found, _ = optimize.nnls(
    rows / scale / times[:, None], np.ones(len(times))
  )
  latency_s, per_byte = found / scale
  if per_byte <= 0:  # nnls sets it to 0 if times decrease
    raise ValueError(
      "no rate can be fitted, since larger messages took no longer than "
      "smaller ones; measure larger messages"
    )
  return float(latency_s), float(1 / per_byte)
