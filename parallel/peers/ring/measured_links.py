"""Bandwidths and latencies of the links of a cluster of processes or GPUs.

Pairs of processes are measured in rounds. In each round every process exchanges
messages with one other (`parallel.peers.ring.bandwidth.round_robin_pairings`),
in both directions at once. A message is an all-gather of two processes, so a
latency includes the receiver's OPEN frame (`parallel.peers.transport.links`).
"""

from collections.abc import Sequence
import os
import pathlib
import time
from typing import Any

import numpy as np

from parallel.base import checks
from parallel.peers.emulation.processes import Peers
from parallel.peers.ring import link_collectives
from parallel.peers.ring.bandwidth import round_robin_pairings
from parallel.peers.transport.handshake import Security
from parallel.peers.transport.links import Links
from parallel.peers.transport.listener import Listener
from parallel.plans.hardware import (
  cluster_files,
  cluster_imports,
  link_matrix,
)
from parallel.plans.hardware.devices import DEVICES, Device
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.hardware.links import KINDS, LinkKind

# These links are used by this measurement only, but a token is required.
SECURITY = Security(b"a token of a benchmark")
LIMIT_S = 300.0  # time limit of an operation between processes
_REPETITIONS = 7  # repetitions per size; the mean of the fastest third counts
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)


def build_cluster_file(
  num_processes: int | None, hosts: Sequence[str], prefix: str, topo: str,
  nccl: Sequence[str], device: str, nodes: int, network: str, pcie: str,
) -> tuple[str, str]:
  """Measures links, or reads them from output of NVIDIA's tools.

  Args:
    num_processes: Number of processes to measure; None to read a file.
    hosts: Addresses, which the processes use cyclically.
    prefix: See `measure`.
    topo: File with the output of ``nvidia-smi topo -m``; "" for none.
    nccl: Files with the output of ``sendrecv_perf``.
    device: Name of the GPU type that produced the output.
    nodes: Number of nodes, as for `cluster_imports.from_topo`.
    network, pcie: Names of link types, as there; network="" for one node.

  Returns:
    (text of a cluster file, one-line description of the cluster).

  Raises:
    ValueError: Not exactly one of num_processes, topo, nccl; or invalid values.
    FileNotFoundError: A file does not exist.
  """
  if bool(topo) + bool(nccl) + (num_processes is not None) != 1:
    raise ValueError("give one of --num_processes, --topo and --nccl")
  checks.known("--device=", device, DEVICES)
  if topo:
    checks.known("--pcie=", pcie, KINDS)
    if network:
      checks.known("--network=", network, KINDS)
    links = cluster_imports.from_topo(
      pathlib.Path(topo).read_text(), DEVICES[device], KINDS[pcie],
      KINDS.get(network), nodes,
    )
  elif nccl:
    texts = {name: pathlib.Path(name).read_text() for name in nccl}
    links = cluster_imports.from_nccl(texts, DEVICES[device])
  else:
    links = measure(
      [hosts[i % len(hosts)] for i in range(num_processes)], prefix
    )
  return cluster_files.to_json(links), (
    f"{links.num_devices} devices, {links.source}"
  )


def measure(
  hosts: Sequence[str], prefix: str = "", sizes: Sequence[int] = SIZES
) -> LinkMatrix:
  """Starts a process for each host, and measures all links between them.

  Args:
    hosts: Address that each process listens on; equal addresses are one node.
    prefix: Prefix of each command, in which "{i}" is the process's number, as
      in "ip netns exec n{i}"; "" for none.
    sizes: Bytes of messages.

  Returns:
    The cluster, with processes of a node as neighbours.

  Raises:
    ValueError: There are fewer than two hosts, or a process ended early.
  """
  if len(hosts) < 2:
    raise ValueError("links need two processes or more")
  hosts = sorted(hosts, key=list(hosts).index)  # groups processes by node
  names = [f"p{i}" for i in range(len(hosts))]
  with Peers(
    "parallel.peers.ring.measured_links:Peer",
    list(zip(names, hosts, strict=True)),
    [prefix.format(i=i).split() for i in range(len(hosts))],
  ) as peers:
    try:
      members = dict(zip(names, peers.do("address").found, strict=True))
      found = peers.do(
        "measure", lambda _: {"members": members, "sizes": list(sizes)}
      ).found
      peers.do("close")
    except RuntimeError as error:
      raise ValueError(str(error)) from error
  return fit_link_matrix(found, hosts)


def fit_link_matrix(found: Sequence[Any], hosts: Sequence[str]) -> LinkMatrix:
  """Fits a bandwidth and a latency to the measured times of each link.

  Args:
    found: Result of `Peer.measure` at each process.
    hosts: Host of each process.
  """
  count = len(found)
  bandwidth, latency_s = np.full((2, count, count), np.nan)
  for j, answer in enumerate(found):
    for name, rows in answer["links"].items():
      i = int(name[1:])  # sender; j receives
      latency_s[i, j], bandwidth[i, j] = link_matrix.fit(
        *zip(*rows, strict=True)
      )
  devices = [answer["device"] for answer in found]
  # A plan assumes equal devices, so the slowest values are used.
  least = {key: min(d[key] for d in devices) for key in devices[0]}
  flops = least["flops"]
  own = {host: hosts.count(host) for host in hosts}
  source = "measured in rounds of pairs by launch.measure"
  device = Device(
    "process", {"float32": flops, "bfloat16": flops},
    # Processes of one host share its memory.
    int(least["memory_bytes"] / max(own.values())), least["memory_bandwidth"],
    LinkKind("process", least["memory_bandwidth"], None, source), 1, source,
  )
  nodes = list(dict.fromkeys(hosts))
  return LinkMatrix(
    f"{count} processes", device, tuple(nodes.index(host) for host in hosts),
    bandwidth, latency_s, source, "measured",
  )


def measure_pairs(
  links: Links, sizes: list[int]
) -> dict[str, list[tuple[int, float]]]:
  """Measures the links of all pairs; all members call this at the same time.

  Args:
    links: Links between all members.
    sizes: Bytes of messages.

  Returns:
    Sender -> (bytes, seconds) of its messages to this member, for each size.
  """
  members = links.members
  me = members.index(links.me)
  found: dict[str, list[tuple[int, float]]] = {}
  for pairs in round_robin_pairings(len(members)):
    pair = next((p for p in pairs if me in p), None)
    if pair is not None:
      names = [members[i] for i in pair]
      other = names[pair[0] == me]
      found[other] = [(n, _seconds(links, names, n)) for n in sizes]
    _barrier(links)  # all begin the next round together
  return found


def _barrier(links: Links) -> None:
  link_collectives.gather(links, 1, b"").result(LIMIT_S)


def _seconds(links: Links, pair: list[str], size: int) -> float:
  """Returns a message's seconds, averaged over the fastest repetitions."""
  data, times = np.zeros(size, np.uint8), []
  for _ in range(_REPETITIONS):
    # This synchronises the pair, so that both directions start together.
    link_collectives.gather(links, 0, b"", ranks=pair).result(LIMIT_S)
    start = time.perf_counter()
    link_collectives.gather(links, 0, data, ranks=pair).result(LIMIT_S)
    times.append(time.perf_counter() - start)
  return float(np.mean(sorted(times)[: _REPETITIONS // 3]))


def measure_compute(min_s: float = 0.3) -> dict[str, float]:
  """Measures float32 products and copies, in all processes at the same time.

  Returns:
    "flops" in FLOP/s, "memory_bandwidth" in bytes/s (reads and writes), and
    "memory_bytes" of the whole machine.
  """
  x = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
  big = np.zeros(1 << 23, np.float32)
  out, found = np.empty_like(big), {}
  for key, work, amount in (
    ("flops", lambda: x @ x, 2.0 * 512**3),
    ("memory_bandwidth", lambda: np.copyto(out, big), 2.0 * big.nbytes),
  ):
    work()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < min_s:
      work()
      count += 1
    found[key] = count * amount / (time.perf_counter() - start)
  pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return found | {"memory_bytes": float(pages)}


class Peer:
  """Process of a measurement; its methods are orders of `processes.Peers`."""

  def __init__(self, me: str, host: str) -> None:
    self._me, self._listener = me, Listener(me, SECURITY, (host, 0))
    self._links: Links | None = None

  def address(self) -> tuple[str, int]:
    """Returns the (host, port) at which this process listens."""
    return self._listener.address

  def measure(
    self, members: dict[str, Any], sizes: list[int]
  ) -> dict[str, Any]:
    """Returns `measure_compute` as "device", and `measure_pairs` as "links"."""
    links = self._links = Links(
      self._me, 1, {name: tuple(a) for name, a in members.items()}, SECURITY
    ).connect(self._listener, LIMIT_S)
    _barrier(links)
    device = measure_compute()
    _barrier(links)
    return {"device": device, "links": measure_pairs(links, sizes)}

  def close(self) -> None:
    """Closes the links, after all others have measured."""
    self._links.close()
