"""Reads and checks what studies of networks have in their configs."""

from collections.abc import Collection, Mapping
import math
from typing import Any

from parallel.topology import builders as topologies
from parallel.topology.graph import Topology


def parse_topology(
  text: str, key: str, bandwidth: float, latency_s: float
) -> Topology:
  """Builds the topology that a config names.

  Args:
    text: The topology, as `parallel.topology.builders.parse` reads it.
    key: The config's key, for messages.
    bandwidth: Bytes per second of each link.
    latency_s: Seconds of latency of each link.

  Raises:
    ValueError: A number is out of its range, the text is wrong, or there is a
      single rank, which has nobody to send to; the message names the key.
  """
  if not 0 < bandwidth < math.inf:
    raise ValueError(f"config.bandwidth={bandwidth} must be positive")
  if not 0 <= latency_s < math.inf:
    raise ValueError(f"config.latency_s={latency_s} must be at least 0")
  try:
    net = topologies.parse(text, bandwidth=bandwidth, latency_s=latency_s)
  except ValueError as error:
    raise ValueError(f"{key}={text!r}: {error}") from error
  if net.num_ranks < 2:
    raise ValueError(f"{key}={text!r} has 1 rank; must have at least 2")
  return net


def check_lists(
  config: Mapping[str, Any], **allowed: Collection[str]
) -> None:
  """Refuses lists that are empty or have unknown names.

  Args:
    config: A config with lists "topologies" and "size_bytes", and a list for
      each keyword.
    **allowed: For each of these lists the names that it may have.

  Raises:
    ValueError: A list is empty, or has another name.
  """
  for key in ("topologies", "size_bytes", *allowed):
    if not config[key]:
      raise ValueError(f"config.{key}=() must have at least one entry")
  for key, names in allowed.items():
    for name in config[key]:
      if name not in names:
        raise ValueError(
          f"config.{key}={tuple(config[key])}: {name!r} must be one of "
          f"{', '.join(names)}"
        )
