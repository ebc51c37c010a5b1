"""What studies of networks read from their configs, checked."""

from collections.abc import Collection, Mapping
import math
from typing import Any

from parallel.topology import builders as topologies
from parallel.topology.graph import Topology


def parse_topology(
  text: str, key: str, bandwidth: float, latency_s: float
) -> Topology:
  """A config's topology.

  Args:
    text: As `parallel.topologies.parse` reads it.
    key: Of the config, for messages.
    bandwidth: Of each link, bytes per second.
    latency_s: Of each link.

  Raises:
    ValueError: What is wrong with the text, and the key; or a single rank,
      which has nobody to send to.
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
    config: With "topologies", "size_bytes", and a list for each keyword.
    **allowed: The names that may be in that list.
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
