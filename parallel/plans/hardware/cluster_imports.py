"""Imports of clusters from the output of NVIDIA's tools.

`nvidia-smi topo -m` prints the connection of each pair of GPUs in a node:
"NV12" stands for twelve bonded NVLinks. The others use PCI Express: PIX and PXB
through PCIe switches; PHB, NODE and SYS through the host, whose internal links
may be slower. `sendrecv_perf` of NCCL-tests measures a ring of all ranks, each
of which sends to the next one: with two ranks, both directions of one pair
concurrently.

Formats: NVIDIA's legend of `nvidia-smi topo -m`; NVIDIA/nccl-tests,
doc/PERFORMANCE.md and src/common.cu.

Example:
  >>> from parallel.plans.hardware import cluster_imports
  >>> text = '''
  ...         GPU0  GPU1  CPU Affinity
  ... GPU0     X    NV12  0-31
  ... GPU1    NV12   X    0-31
  ... '''
  >>> cluster_imports.parse_topo_matrix(text)
  [['X', 'NV12'], ['NV12', 'X']]
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from parallel.base import checks
from parallel.plans.hardware import link_matrix
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.hardware.links import LinkKind

PCIE_CONNECTIONS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
# Bytes per second and direction of one NVLink: half of the datasheets' GB/s per
# GPU over its number of links, 300 / 6, 600 / 12, 900 / 18 and 1,800 / 18.
NVLINK_RATES = {
  "v100": 25e9, "a100": 25e9, "h100": 25e9, "h200": 25e9, "b200": 50e9
}


def parse_topo_matrix(text: str) -> list[list[str]]:
  """Returns the connection of each pair of GPUs in a node.

  Args:
    text: Output of `nvidia-smi topo -m`; columns of network adapters and
      affinities are ignored.

  Returns:
    ``[GPUs][GPUs]``: "X" on the diagonal, otherwise "NV12", "PIX" and so on.

  Raises:
    ValueError: There are no rows of GPUs, or a row lacks an entry.
  """
  text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined
  rows = [line.split() for line in text.splitlines()]
  rows = [r for r in rows if r and re.fullmatch(r"GPU\d+", r[0])]
  # The header line also starts with GPU0.
  if [r[0] for r in rows[:2]] == ["GPU0", "GPU0"]:
    del rows[0]
  if not rows:
    raise ValueError(
      "the text has no rows of GPUs; pass the output of `nvidia-smi topo -m`"
    )
  # Columns after the GPUs describe adapters and CPU affinity.
  found = [row[1 : 1 + len(rows)] for row in rows]
  for i, row in enumerate(found):
    if len(row) < len(rows):
      raise ValueError(
        f"the row of GPU{i} has {len(row)} links to GPUs; it must have "
        f"{len(rows)}"
      )
    for j, way in enumerate(row):
      if (way == "X") != (i == j) or not (
        way in ("X", *PCIE_CONNECTIONS) or re.fullmatch(r"NV\d+", way)
      ):
        raise ValueError(
          f"the link from GPU{i} to GPU{j} is {way!r}; it must be X, NV# or "
          f"one of {', '.join(PCIE_CONNECTIONS)}"
        )
  return found


def from_topo(
  text: str, device: Device, pcie: LinkKind, network: LinkKind | None = None,
  nodes: int = 1,
) -> LinkMatrix:
  """Builds a cluster of identical nodes with one network adapter per GPU.

  Args:
    text: Output of `nvidia-smi topo -m` on one node.
    device: Type of the GPUs, which determines the bandwidth of an NVLink.
    pcie: Link between GPUs without NVLink.
    network: Link between nodes; None for one node.
    nodes: Number of nodes.

  Raises:
    ValueError: The text is not output of `nvidia-smi topo -m`, ``network`` is
      missing for several nodes, or the bandwidth of the NVLinks is unknown.
  """
  kinds = parse_topo_matrix(text)
  if nodes > 1 and network is None:
    raise ValueError(f"nodes={nodes} need a network that connects them")
  size = len(kinds)  # GPUs per node
  # [size, size]: PCI Express unless an NVLink connects the pair.
  bandwidth = np.full((size, size), pcie.bandwidth)
  latency_s = np.full((size, size), link_matrix.PCIE_LATENCY_S)
  for i, row in enumerate(kinds):
    for j, way in enumerate(row):
      if way.startswith("NV"):
        checks.known("NVLinks of device=", device.name, NVLINK_RATES)
        bandwidth[i, j] = int(way[2:]) * NVLINK_RATES[device.name]
        latency_s[i, j] = link_matrix.NVLINK_LATENCY_S
  of = np.repeat(np.arange(nodes), size)
  between = of[:, None] != of  # [N, N], whether in different nodes
  # Every node has the same matrix; pairs of different nodes are replaced below.
  bandwidth, latency_s = (np.tile(m, (nodes, nodes))
                          for m in (bandwidth, latency_s))
  if network is not None:
    bandwidth[between] = network.bandwidth
    latency_s[between] = link_matrix.NETWORK_LATENCY_S
  return LinkMatrix(
    f"topo of {nodes} x {size} {device.name}", device, tuple(of.tolist()),
    bandwidth, latency_s, f"nvidia-smi topo -m; links as published; "
    f"latencies: {link_matrix.LATENCY_SOURCE}", "published",
  )


@dataclasses.dataclass(frozen=True)
class NcclRun:
  """Measurements of one run of NCCL-tests.

  Attributes:
    ranks: (host, device number) of each rank.
    sizes: Message sizes in bytes.
    seconds: Out-of-place time of each size.
  """

  ranks: tuple[tuple[str, int], ...]
  sizes: tuple[int, ...]
  seconds: tuple[float, ...]


def parse_nccl_run(text: str) -> NcclRun:
  """Returns the ranks, sizes and times in the output of an NCCL-tests program.

  Columns differ between versions and programs ("root" and "redop" may be
  missing), so the header determines the column of the time.

  Args:
    text: Output of the program.

  Raises:
    ValueError: The output has no table or no list of ranks.
  """
  ranks = tuple(
    (host, int(device)) for host, device in re.findall(
      r"^#\s+Rank\s+\d+ .*?Pid\s+\d+ on\s+(\S+) device\s+(\d+)", text, re.M
    )
  )
  head = re.search(r"^#\s+size\s+count\s.*$", text, re.M)
  if head is None or not ranks:
    raise ValueError(
      "the text has no list of ranks or no table of times; pass the output of "
      "a program of NCCL-tests"
    )
  # The first "time" is out of place, the second one in place.
  column = head[0].lstrip("# ").split().index("time")
  rows = [
    line.split() for line in text[head.end() :].splitlines()
    if re.match(r"\s*\d{1,18}\s+\d{1,18}\s", line)
  ]
  for row in rows:
    if len(row) <= column or not 0 < _number(row[column]) < math.inf:
      raise ValueError(f"the row {' '.join(row)[:80]!r} must have a time")
  return NcclRun(
    ranks, tuple(int(row[0]) for row in rows),
    tuple(float(row[column]) / 1e6 for row in rows),  # from microseconds
  )


def _number(text: str) -> float:
  """Returns the number that a text contains; NaN if it is not a number."""
  try:
    return float(text)
  except ValueError:
    return math.nan


def from_nccl(texts: Mapping[str, str], device: Device) -> LinkMatrix:
  """Builds a cluster from runs of ``sendrecv_perf``, one per pair of GPUs.

  Args:
    texts: File name -> output of a run with two ranks.
    device: Type of the GPUs.

  Raises:
    ValueError: A file is not a run with two ranks, or pairs are missing.
  """
  pairs: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {}
  for name, text in texts.items():
    try:
      run = parse_nccl_run(text)
      if len(run.ranks) != 2:
        raise ValueError(
          f"the run has {len(run.ranks)} ranks; it must have two, since with "
          "more the slowest link of the ring is unknown"
        )
      # (latency, bandwidth) of the pair.
      pairs[run.ranks] = link_matrix.fit(run.sizes, run.seconds)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
  # Sorted by host, so that the devices of a node are contiguous.
  gpus: Sequence[tuple[str, int]] = sorted({g for pair in pairs for g in pair})
  if not gpus:
    raise ValueError("there must be at least one output of sendrecv_perf")
  number = {gpu: i for i, gpu in enumerate(gpus)}
  # [2, N, N]: latency and bandwidth; NaN marks missing pairs.
  matrices = np.full((2, len(gpus), len(gpus)), np.nan)
  for (a, b), (latency_s, rate) in pairs.items():
    # Both directions were measured concurrently, so they have one value.
    for i, j in ((number[a], number[b]), (number[b], number[a])):
      matrices[:, i, j] = latency_s, rate
  hosts = sorted({host for host, _ in gpus})
  return LinkMatrix(
    f"{len(gpus)} {device.name} by NCCL-tests", device,
    tuple(hosts.index(host) for host, _ in gpus), matrices[1], matrices[0],
    f"sendrecv_perf of NCCL-tests, {len(texts)} runs of a pair", "measured",
  )
