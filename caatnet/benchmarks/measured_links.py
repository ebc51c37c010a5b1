"""Measures a cluster of processes, and fits a matrix of links to it."""

from collections.abc import Sequence
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from parallel.hardware import link_matrix
from parallel.hardware.devices import Device
from parallel.hardware.link_matrix import LinkMatrix
from parallel.hardware.links import LinkKind

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)


def measure(
  hosts: Sequence[str], prefix: str = "", sizes: Sequence[int] = SIZES
) -> LinkMatrix:
  """Starts a process for each host, and measures all links between them.

  Args:
    hosts: The address that each one listens at; equal ones are one node.
    prefix: What stands before each command, with "{i}" for its number, as in
      "ip netns exec n{i}"; "" for nothing.
    sizes: Bytes of messages.

  Returns:
    The cluster, processes of a node as neighbours.

  Raises:
    ValueError: There are fewer than two, or a process has ended.
  """
  if len(hosts) < 2:
    raise ValueError("links need two processes or more")
  hosts = sorted(hosts, key=list(hosts).index)  # a node's are neighbours
  names = [f"p{i}" for i in range(len(hosts))]
  environment = os.environ | {
    f"{key}_NUM_THREADS": "1" for key in ("OMP", "OPENBLAS", "MKL")
  }
  processes = [
    subprocess.Popen(
      [*prefix.format(i=i).split(), sys.executable, "-m",
       "caatnet.benchmarks.link_peer", name, host],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
      env=environment,
    )
    for i, (name, host) in enumerate(zip(names, hosts, strict=True))
  ]
  try:
    members = dict(zip(names, map(_answer, processes), strict=True))
    order = json.dumps({"members": members, "sizes": list(sizes)}) + "\n"
    for process in processes:
      process.stdin.write(order)
      process.stdin.flush()
    found = [_answer(process) for process in processes]
    for process in processes:
      process.stdin.close()
      process.wait(30)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return fitted(found, hosts)


def _answer(process: subprocess.Popen) -> Any:
  line = process.stdout.readline()
  if not line:
    raise ValueError(
      f"process {process.args[-2]} has ended with {process.wait()}"
    )
  return json.loads(line)


def fitted(found: Sequence[Any], hosts: Sequence[str]) -> LinkMatrix:
  """Returns the cluster that answers of `link_peer` describe.

  Args:
    found: The answer of each process: "links" by sender, and its "device".
    hosts: The host of each process.
  """
  count = len(found)
  bandwidth, latency_s = np.full((2, count, count), np.nan)
  for j, answer in enumerate(found):
    for name, rows in answer["links"].items():
      i = int(name[1:])
      latency_s[i, j], bandwidth[i, j] = link_matrix.fit(
        *zip(*rows, strict=True)
      )
  devices = [answer["device"] for answer in found]
  least = {key: min(d[key] for d in devices) for key in devices[0]}
  flops = least["flops"]
  own = {host: hosts.count(host) for host in hosts}
  source = "measured in rounds of pairs by launch.measure_links"
  device = Device(
    "process", {"float32": flops, "bfloat16": flops},
    int(least["memory_bytes"] / max(own.values())), least["memory_bandwidth"],
    LinkKind("process", least["memory_bandwidth"], None, source), 1, source,
  )
  nodes = list(dict.fromkeys(hosts))
  return LinkMatrix(
    f"{count} processes", device, tuple(nodes.index(host) for host in hosts),
    bandwidth, latency_s, source, "measured",
  )
