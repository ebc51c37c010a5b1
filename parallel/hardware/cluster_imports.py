"""Imports clusters from what NVIDIA's tools print.

`nvidia-smi topo -m` says how each pair of a node's GPUs is joined: "NV12" is
twelve bonded NVLinks, all others go over PCI Express: PIX and PXB through its
switches, PHB, NODE and SYS through the host, whose own links may be slower.
`sendrecv_perf` of NCCL-tests measures a ring of all its ranks, each of which
sends to the next one: with two ranks, a pair in both directions at once.

Formats: NVIDIA's legend of `nvidia-smi topo -m`; NVIDIA/nccl-tests,
doc/PERFORMANCE.md and src/common.cu.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re

import numpy as np

from parallel import checks
from parallel.hardware import link_matrix
from parallel.hardware.devices import Device
from parallel.hardware.link_matrix import LinkMatrix
from parallel.hardware.links import LinkKind

PCIE_WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
# GB/s and direction of one NVLink (NVIDIA's datasheets: 300 / 6, 600 / 12,
# 900 / 18 and 1,800 / 18 GB/s both ways).
NVLINK_RATES = {
  "v100": 25e9, "a100": 25e9, "h100": 25e9, "h200": 25e9, "b200": 50e9
}


def ways(text: str) -> list[list[str]]:
  """Reads how GPUs are joined: "X" for themselves, "NV12", "PIX" and so on.

  Args:
    text: What `nvidia-smi topo -m` prints; columns of network adapters and of
      affinities are left out.

  Raises:
    ValueError: There are no rows of GPUs, or one has no word for each GPU.
  """
  text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the head is underlined
  rows = [line.split() for line in text.splitlines()]
  rows = [r for r in rows if len(r) > 1 and re.fullmatch(r"GPU\d+", r[0])]
  # The head is a row, too, but for its second word.
  rows = [r[1:] for r in rows if not re.fullmatch(r"GPU\d+", r[1])]
  if not rows and re.search(r"^\s*GPU0\s*$", text, re.M):
    rows = [["X"]]
  if not rows:
    raise ValueError("there are no rows of GPUs as `nvidia-smi topo -m` has")
  found = [row[: len(rows)] for row in rows]
  for i, row in enumerate(found):
    for j, way in enumerate(row):
      if (way == "X") != (i == j) or not (
        way in ("X", *PCIE_WAYS) or re.fullmatch(r"NV\d+", way)
      ):
        raise ValueError(
          f"GPU{i} has {way!r} to GPU{j}, which is none of X, NV#, "
          f"{', '.join(PCIE_WAYS)}"
        )
  return found


def from_topo(
  text: str, device: Device, pcie: LinkKind, network: LinkKind | None = None,
  nodes: int = 1,
) -> LinkMatrix:
  """Makes a cluster of equal nodes, of each of which each GPU has an adapter.

  Args:
    text: What `nvidia-smi topo -m` prints on one of them.
    device: What the GPUs are, which says how fast an NVLink is.
    pcie: What joins pairs without NVLink.
    network: What joins nodes; None for one node.
    nodes: How many there are.

  Raises:
    ValueError: The text is something else, or there is no network between
      nodes, or no rate of the device's NVLinks.
  """
  kinds = ways(text)
  if nodes > 1 and network is None:
    raise ValueError(f"nodes={nodes} need a network that joins them")
  size = len(kinds)
  bandwidth = np.full((size, size), pcie.bandwidth)
  latency_s = np.full((size, size), link_matrix.PCIE_S)
  for i, row in enumerate(kinds):
    for j, way in enumerate(row):
      if way.startswith("NV"):
        checks.known("NVLinks of device=", device.name, NVLINK_RATES)
        bandwidth[i, j] = int(way[2:]) * NVLINK_RATES[device.name]
        latency_s[i, j] = link_matrix.INSIDE_S
  of = np.repeat(np.arange(nodes), size)
  between = of[:, None] != of
  bandwidth, latency_s = (np.tile(m, (nodes, nodes))
                          for m in (bandwidth, latency_s))
  if network is not None:
    bandwidth[between] = network.bandwidth
    latency_s[between] = link_matrix.NETWORK_S
  return LinkMatrix(
    f"topo of {nodes} x {size} {device.name}", device, tuple(of.tolist()),
    bandwidth, latency_s, f"nvidia-smi topo -m; links as published; "
    f"latencies: {link_matrix.LATENCY_SOURCE}", "published",
  )


@dataclasses.dataclass(frozen=True)
class NcclRun:
  """A run of a program of NCCL-tests.

  Attributes:
    ranks: Host and device number of each rank.
    sizes: Bytes of messages.
    seconds: The time of each, out of place.
  """

  ranks: tuple[tuple[str, int], ...]
  sizes: tuple[int, ...]
  seconds: tuple[float, ...]


def nccl_run(text: str) -> NcclRun:
  """Reads what a program of NCCL-tests prints.

  Old versions have no column "root", and some programs no "redop" either; what
  the time's column is, the head says.

  Raises:
    ValueError: There is no table, or no list of ranks.
  """
  ranks = tuple(
    (host, int(device)) for host, device in re.findall(
      r"^#\s+Rank\s+\d+ .*?Pid\s+\d+ on\s+(\S+) device\s+(\d+)", text, re.M
    )
  )
  head = re.search(r"^#\s+size\s+count\s.*$", text, re.M)
  if head is None or not ranks:
    raise ValueError("there is no table with ranks as NCCL-tests print them")
  column = head[0].lstrip("# ").split().index("time")
  rows = [
    line.split() for line in text[head.end() :].splitlines()
    if re.match(r"\s*\d+\s+\d+\s", line)
  ]
  return NcclRun(
    ranks, tuple(int(row[0]) for row in rows),
    tuple(float(row[column]) / 1e6 for row in rows),
  )


def from_nccl(texts: Mapping[str, str], device: Device) -> LinkMatrix:
  """Makes a cluster of runs of ``sendrecv_perf``, one for each pair of GPUs.

  Args:
    texts: What was printed, by the name of its file.
    device: What the GPUs are.

  Raises:
    ValueError: A file is none of two ranks, or pairs are missing.
  """
  pairs: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {}
  for name, text in texts.items():
    try:
      run = nccl_run(text)
      if len(run.ranks) != 2:
        raise ValueError(
          f"it has {len(run.ranks)} ranks; of more than two, nobody knows "
          "which link made a ring slow"
        )
      pairs[run.ranks] = link_matrix.fit(run.sizes, run.seconds)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
  gpus: Sequence[tuple[str, int]] = sorted({g for pair in pairs for g in pair})
  if not gpus:
    raise ValueError("there are no files of sendrecv_perf")
  number = {gpu: i for i, gpu in enumerate(gpus)}
  matrices = np.full((2, len(gpus), len(gpus)), np.nan)
  for (a, b), (latency_s, rate) in pairs.items():
    for i, j in ((number[a], number[b]), (number[b], number[a])):
      matrices[:, i, j] = latency_s, rate
  hosts = sorted({host for host, _ in gpus})
  return LinkMatrix(
    f"{len(gpus)} {device.name} by NCCL-tests", device,
    tuple(hosts.index(host) for host, _ in gpus), matrices[1], matrices[0],
    f"sendrecv_perf of NCCL-tests, {len(texts)} runs of a pair", "measured",
  )
