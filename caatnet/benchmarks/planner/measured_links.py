"""Measurement of a cluster of processes, and the fitted matrix of links."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from caatnet.benchmarks.harness.processes import Peers
from parallel.plans.hardware import link_matrix
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.hardware.links import LinkKind

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)


def measure(
  hosts: Sequence[str], prefix: str = "", sizes: Sequence[int] = SIZES
) -> LinkMatrix:
  """Starts a process for each host, and measures all links between them.

  Args:
    hosts: Address that each process listens on; equal addresses are one node.
    prefix: Words before each command, with "{i}" for its number, as in
      "ip netns exec n{i}"; "" for none.
    sizes: Bytes of messages.

  Returns:
    The cluster, with processes of a node as neighbours.

  Raises:
    ValueError: There are fewer than two hosts, or a process has ended.
  """
  if len(hosts) < 2:
    raise ValueError("links need two processes or more")
  hosts = sorted(hosts, key=list(hosts).index)  # groups processes by node
  names = [f"p{i}" for i in range(len(hosts))]
  with Peers(
    "caatnet.benchmarks.planner.link_peer:Peer",
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
  return fitted(found, hosts)


def fitted(found: Sequence[Any], hosts: Sequence[str]) -> LinkMatrix:
  """Returns the cluster described by the responses of `link_peer`.

  Args:
    found: Response of each process: "links" by sender, and its "device".
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
  source = "measured in rounds of pairs by launch.measure_links"
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
