"""Parsing and validation of config values shared by the network studies."""

from collections.abc import Collection, Mapping
from typing import Any

from parallel.base import checks
from parallel.base.naming import prefix_error_keys
from parallel.plans.schedules import builders
from parallel.plans.schedules.schedule import Schedule
from parallel.plans.topology import text as topologies
from parallel.plans.topology.graph import Topology

# Limits schedules: a ring all-reduce on this many ranks has 2e6 transfers.
MAX_RANKS = 1024


def parse_topology(config: Mapping[str, Any], key: str, text: str) -> Topology:
  """Builds the topology that a config names.

  Args:
    config: Config with the keys "bandwidth" (bytes/s) and "latency_s"; "" keeps
      the values of the builder or file.
    key: Config key of the text, for messages.
    text: Topology in the syntax of `parallel.plans.topology.text.parse`.

  Raises:
    ValueError: A number is out of its range, the text is malformed, or the
      number of ranks is not from 2 to ``MAX_RANKS``. The message names the key.
  """
  with prefix_error_keys("config", ("bandwidth", "latency_s")):
    given = {
      name: topologies.parse_quantity(name, config[name])
      for name in ("bandwidth", "latency_s") if config[name] != ""
    }
    checks.positive("bandwidth", given.get("bandwidth", 1.0))
    checks.not_negative("latency_s", given.get("latency_s", 0.0))
  try:
    net = topologies.parse(text, **given)
  except ValueError as error:
    raise ValueError(f"config.{key}={text!r}: {error}") from error
  if not 2 <= net.num_ranks <= MAX_RANKS:
    raise ValueError(
      f"config.{key}={text!r} has {net.num_ranks} ranks; it must have 2 to "
      f"{MAX_RANKS}"
    )
  return net


def build_schedule(text: str, net: Topology) -> Schedule:
  """Builds an all-reduce from a text like "multitree,farthest_first=True".

  Raises:
    ValueError: The text is malformed, or the builder does not support the
      topology.
  """
  name, options = builders.parse_builder(text)
  return builders.build(name, net, "all_reduce", **options)


def check_lists(
  config: Mapping[str, Any],
  other_algorithms: Collection[str] = (),
  *,
  key: str = "algorithms",
  **allowed: Collection[str],
) -> None:
  """Rejects lists that contain unknown names.

  Args:
    config: Config with a list of algorithms and with the lists in ``allowed``.
    other_algorithms: Valid algorithm names that are not schedule builders.
    key: Config key of the algorithms.
    **allowed: Config key of a list -> valid names in it.

  Raises:
    ValueError: A list contains an unknown name.
  """
  for text in config[key]:
    if text not in other_algorithms:
      try:
        builders.parse_builder(text)
      except ValueError as error:
        raise ValueError(f"config.{key}: {error}") from error
  for listed, names in allowed.items():
    for name in config[listed]:
      checks.known(f"config.{listed}={tuple(config[listed])}: ", name, names)
