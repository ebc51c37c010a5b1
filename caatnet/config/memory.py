"""Builder of ``config.memory``: the update of a step, and its memory."""

from collections.abc import Mapping
import json
import pathlib

import ml_collections

from caatnet.config.schema import optimizer as schema
from caatnet.config.schema import tree
from caatnet.config.schema.memory import Memory
from caatnet.train.update import ARRAYS, DeviceUpdate, HostUpdate
from parallel.memory.host_optimizer import AdamW
from parallel.memory.placed_buffer import Tier


def moments(section: Memory) -> str:
  """Returns the memory kind of moments between steps, as jax arrays.

  Those of the host's optimizer are jax arrays when they are read from a
  checkpoint.
  """
  return "pinned_host" if section.optimizer == "host" else section.moments


def build_update(
  config: ml_collections.ConfigDict
) -> DeviceUpdate | HostUpdate:
  """Builds the update of ``config.memory.optimizer``.

  Args:
    config: The config of a run, which has been checked.

  Raises:
    ValueError: The host cannot update the state of this run, or a key has no
      effect.
  """
  section: Memory = tree.section_of("memory", config.memory)
  if section.optimizer == "device":
    for key in ("tiers", "threads", "placement"):
      if value := getattr(section, key):
        raise ValueError(
          f"config.memory.{key}={value!r} has no effect with "
          "config.memory.optimizer='device'"
        )
    return DeviceUpdate()
  _check(config)
  if section.tiers and section.placement:
    raise ValueError(
      f"config.memory.placement={section.placement!r} cannot be combined with "
      f"config.memory.tiers={section.tiers!r}"
    )
  names = [name for name, _ in section.tiers]
  if len(set(names)) < len(names):
    raise ValueError(
      f"config.memory.tiers={section.tiers!r} must name each tier once"
    )
  optimizer: schema.AdamW = tree.section_of("optimizer", config.optimizer)
  return HostUpdate(
    AdamW(
      optimizer.beta_1, optimizer.beta_2, optimizer.eps, optimizer.weight_decay
    ),
    _placement(section), section.threads or None,
  )


def _placement(section: Memory) -> Mapping[str, Mapping[Tier, float]]:
  """Returns the tiers of each array of the host's optimizer.

  Raises:
    ValueError: The file of a placement has none that the host can execute.
    OSError: The file cannot be read.
  """
  planned = (
    _planned(section.placement, section.policy) if section.placement
    else {name: dict(section.tiers) for name in ARRAYS if section.tiers}
  )
  return {
    name: {int(t) if t.isdecimal() else t: x for t, x in shares.items()}
    for name, shares in planned.items()
  }


def _planned(path: str, policy: str) -> Mapping[str, Mapping[str, float]]:
  """Returns the tiers that a file of ``launch.place`` has for a policy."""
  try:
    rows = {
      row["policy"]: row["host_optimizer"]
      for row in json.loads(pathlib.Path(path).read_text())["policies"]
    }
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"config.memory.placement={path!r} is not a file that launch.place "
      "--output has written"
    ) from error
  usable = [name for name, found in rows.items() if found]
  if policy not in usable:
    raise ValueError(
      f"config.memory.policy={policy!r} must be one of "
      f"{', '.join(map(repr, usable))}, the policies of {path} that update all "
      "parameters on the host"
    )
  return rows[policy]


def _check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a config that the host cannot update."""
  for name, needed in (
    ("memory.moments", "device"),
    ("optimizer.name", "adamw"),
    ("outer.algorithm", "data_parallel"),
    ("parallel.worker", 1),
  ):
    section, key = name.split(".")
    value = config[section].get(key, needed)
    if value != needed:
      raise ValueError(
        f"config.memory.optimizer='host' needs config.{name}={needed!r}, not "
        f"{value!r}"
      )
  if "elastic" in config:
    raise ValueError(
      "config.memory.optimizer='host' cannot be combined with config.elastic"
    )
