"""A cluster as a matrix: what a message takes from each device to each other.

A message of n bytes from device i to device j takes

    latency_s[i, j] + n / bandwidth[i, j]

seconds. A rate is what a pair gets while all other devices talk in pairs, too,
as it is measured in rounds (`launch.measure_links`): so devices that share a
network adapter have its rate divided among them. Matrices need not be
symmetric: row i, column j is from i to j, and a message goes one way.

Shape legend: N = devices.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np
from scipy import optimize

from parallel import checks
from parallel.hardware.clusters import Cluster, Level
from parallel.hardware.devices import Device

# Matrices and their search are quadratic: 4,096 devices take 268 MB.
MOST_DEVICES = 4096
# Of a step of a ring (protocol "Simple"). Vendors publish no latencies of
# links; those are NCCL's own, by which it chooses its algorithms.
INSIDE_S, PCIE_S, NETWORK_S = 3.4e-6, 5.7e-6, 14.0e-6
LATENCY_SOURCE = "NCCL, src/graph/tuning.cc, hwLat, ring, Simple"
MARKS = ("measured", "published", "assumption", "drawn")


@dataclasses.dataclass(frozen=True, eq=False)
class LinkMatrix:
  """Equal devices, the nodes that they are in, and all links between them.

  Attributes:
    name: Name in tables.
    device: What each of them is.
    nodes: The number of each device's node, ``[N]``; those of a node are
      neighbours in the order of devices.
    bandwidth: float64 ``[N, N]``, bytes per second; infinite on the diagonal.
    latency_s: float64 ``[N, N]``, seconds; 0 on the diagonal.
    source: Where the numbers come from.
    mark: One of ``MARKS``.
  """

  name: str
  device: Device
  nodes: tuple[int, ...]
  bandwidth: np.ndarray
  latency_s: np.ndarray
  source: str
  mark: str

  def __post_init__(self) -> None:
    n = len(self.nodes)
    if n > MOST_DEVICES:
      raise ValueError(
        f"{n:,} devices are more than {MOST_DEVICES:,}: two matrices would "
        f"take {16 * n * n / 1e9:.1f} GB, and a search many times that. Plan "
        "one of equal parts, such as a pod; parts differ in data-parallel "
        "ranks only"
      )
    checks.known("mark=", self.mark, MARKS)
    if list(self.nodes) != sorted(self.nodes):
      raise ValueError("devices of a node must be neighbours in their order")
    for key in ("bandwidth", "latency_s"):
      matrix = np.array(getattr(self, key), float)
      if matrix.shape != (n, n):
        raise ValueError(
          f"{key} is {' x '.join(map(str, matrix.shape))}, not square with a "
          f"row and a column for each of {n} devices"
        )
      np.fill_diagonal(matrix, math.inf if key == "bandwidth" else 0.0)
      _check(key, matrix)
      object.__setattr__(self, key, matrix)

  @property
  def num_devices(self) -> int:
    """The number of devices, N."""
    return len(self.nodes)

  @property
  def skew(self) -> float:
    """How much slower one direction of a pair is than the other, at most."""
    with np.errstate(invalid="ignore"):
      ratio = np.nan_to_num(self.bandwidth / self.bandwidth.T, nan=1.0)
    return float(ratio.max(initial=1.0))

  def seconds(self, size_bytes: float) -> np.ndarray:
    """Returns what a message takes, float64 ``[N, N]``; 0 on the diagonal."""
    return self.latency_s + size_bytes / self.bandwidth

  def part(self, devices: Sequence[int]) -> "LinkMatrix":
    """Returns the cluster of some devices, in ascending order."""
    some = np.sort(np.asarray(devices, int))
    return dataclasses.replace(
      self, nodes=tuple(np.array(self.nodes)[some].tolist()),
      bandwidth=self.bandwidth[np.ix_(some, some)],
      latency_s=self.latency_s[np.ix_(some, some)],
    )


def _check(key: str, matrix: np.ndarray) -> None:
  """Refuses links that are missing, or that no message crosses."""
  off = ~np.eye(len(matrix), dtype=bool)
  missing = np.argwhere(np.isnan(matrix) & off)
  if len(missing):
    i, j = missing[0]
    raise ValueError(
      f"{key}[{i}][{j}] is missing, one of {len(missing)}: every device needs "
      "a rate to every other, be it by way of others"
    )
  wrong = matrix <= 0 if key == "bandwidth" else matrix < 0
  wrong = np.argwhere((wrong | np.isinf(matrix)) & off)
  if len(wrong):
    i, j = wrong[0]
    raise ValueError(
      f"{key}[{i}][{j}]={matrix[i, j]:g}, one of {len(wrong)}, must be "
      + ("positive and finite: over a link of rate 0 nothing ever arrives"
         if key == "bandwidth" else "at least 0, and finite")
    )


def of_cluster(cluster: Cluster, groups: int) -> LinkMatrix:
  """Returns the matrix of a cluster whose links are all as published.

  Args:
    cluster: The cluster.
    groups: How many groups of its outermost level there are, such as nodes.

  Raises:
    ValueError: The cluster has fewer.
  """
  last = cluster.levels[-1]
  if not 1 <= groups <= last.size:
    raise ValueError(
      f"{cluster.name!r} has 1 to {last.size:,} groups of its outermost level "
      f"{last.name!r}, not {groups}"
    )
  levels = (*cluster.levels[:-1], dataclasses.replace(last, size=groups))
  n = math.prod(level.size for level in levels)
  if n > MOST_DEVICES:  # before anything of that size is made
    LinkMatrix("", cluster.device, (0,) * n, *[np.empty((0, 0))] * 2, "", "")
  devices, inside = np.arange(n), 1
  bandwidth, latency_s = np.full((n, n), np.nan), np.full((n, n), np.nan)
  for index, level in enumerate(levels):
    inside *= level.size
    group = devices // inside
    new = (group[:, None] == group) & np.isnan(bandwidth)
    bandwidth[new] = level.link.bandwidth * level.links_per_device
    latency_s[new] = _latency(level, index == len(levels) - 1 and index > 0)
  node = math.prod(level.size for level in levels[: max(1, len(levels) - 1)])
  return LinkMatrix(
    f"{cluster.name}:{groups}", cluster.device,
    tuple((devices // node).tolist()), bandwidth, latency_s,
    f"{cluster.source}; latencies: {LATENCY_SOURCE}", "published",
  )


def _latency(level: Level, network: bool) -> float:
  if level.link.latency_s is not None:
    return level.link.latency_s
  return NETWORK_S if network else INSIDE_S


def uneven(
  links: LinkMatrix, seed: int, least: float = 0.25, jitter: float = 0.05
) -> LinkMatrix:
  """Draws a cluster whose links between nodes reach less than they should.

  Each direction between two nodes reaches a share of its rate, uniform in
  [least, 1]; each pair of devices, also within a node, up to ``jitter`` less.
  That a network is uneven so is what Pipette (arXiv 2405.18093) reports; the
  distribution is ours.

  Args:
    links: The cluster as it should be.
    seed: The seed.
    least: The least share between nodes.
    jitter: By how much pairs of two nodes differ.
  """
  rng, n = np.random.default_rng(seed), links.num_devices
  of = np.array(links.nodes)
  count = int(of.max()) + 1
  shares = np.triu(rng.uniform(least, 1, (count, count)), 1)
  shares += shares.T + np.eye(count)
  shares = shares * rng.uniform(1 - jitter, 1, (count, count))
  np.fill_diagonal(shares, 1.0)
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
  """Fits the time of a message: latency + bytes / rate, neither below 0.

  Relative errors are made small, so that small messages count as large ones.

  Args:
    sizes: Bytes of messages.
    seconds: The time of each.

  Returns:
    The latency in seconds and the rate in bytes per second.

  Raises:
    ValueError: There are fewer than two sizes, or times do not rise with them.
  """
  if len(set(sizes)) < 2:
    raise ValueError("latency and rate need messages of two sizes or more")
  times = np.asarray(seconds, float)
  rows = np.stack([np.ones(len(times)), np.asarray(sizes, float)], 1)
  scale = np.array([1.0, float(np.max(sizes))])
  found, _ = optimize.nnls(
    rows / scale / times[:, None], np.ones(len(times))
  )
  latency_s, per_byte = found / scale
  if per_byte <= 0:
    raise ValueError("larger messages took no longer: no rate can be fitted")
  return float(latency_s), float(1 / per_byte)
