"""Builder of ``config.memory``: the optimizer's update and memory placement.

A run executes two parts of a placement that ``launch.place`` has written: the
tiers of master weights, moments and gradients, and the activations that layers
save on the device or on the host. `unexecuted` names other parts: XLA cannot
choose the NUMA node of pinned memory, and weights stay on the device.
"""

from collections.abc import Mapping
import pathlib
from typing import Annotated, Any, Literal

import ml_collections

from caatnet.schema import optimizer as schema
from caatnet.schema import tree
from caatnet.schema.memory import PLACEMENT, Memory
from caatnet.train.update import STATE, DeviceUpdate, HostUpdate
from parallel.base import schema as files
from parallel.memory.host_optimizer import AdamW
from parallel.memory.offload import ON_DEVICE, ON_HOST, Activations
from parallel.memory.placed_buffer import Tier

_Share = Annotated[float, files.Field(ge=0, le=1 + 1e-6)]
_Memories = dict[Literal["device", "host"], _Share]


class _Row(files.OpenSchema):
  """Policy in a file of ``launch.place``; fields that do not apply are None."""

  policy: str
  host_optimizer: dict[str, dict[str, _Share]] | None = None
  placed: dict[str, dict[str, _Share]] | None = None
  activations: dict[Literal["saved", "recomputed"], _Memories] | None = None


class _Placements(files.OpenSchema):
  """File that ``launch.place --output`` writes."""

  policies: tuple[_Row, ...]


def moments(section: Memory) -> str:
  """Returns the jax memory kind of the inner optimizer's moments between steps.

  The moments of an optimizer on the host are jax arrays only while they are
  read from a checkpoint.
  """
  return "pinned_host" if section.optimizer == "host" else section.moments


def activations(section: Memory) -> Activations:
  """Returns which activations layers save for their backward, and where.

  Raises:
    ValueError: There is no placement, or its file lacks the section's policy.
    OSError: The file of the placement cannot be read.
  """
  if section.activations != PLACEMENT:
    return ON_DEVICE if section.activations == "device" else ON_HOST
  if not section.placement:
    raise ValueError(
      f"config.memory.activations={PLACEMENT!r} needs config.memory.placement, "
      "a file that launch.place --output has written"
    )
  found = _planned(section, "activations")
  return Activations(
    found.get("saved", {}).get("device", 0.0),
    found.get("recomputed", {}).get("device", 0.0),
    found.get("saved", {}).get("host", 0.0),
  )


def unexecuted(section: Memory) -> str:
  """Returns the tensors whose tiers a run does not execute; "" for none."""
  if not section.placement:
    return ""
  layers = section.activations == PLACEMENT
  on_host = section.optimizer == "host"
  reasons = {
    "weights": "on the device",
    "activations": "in pinned memory of any node" if layers
    else f"config.memory.activations={section.activations!r}",
  }
  reasons["layer inputs"] = reasons["activations"]
  if not on_host:
    reasons |= dict.fromkeys(
      ("master weights", "first moments", "second moments"),
      f"config.memory.moments={section.moments!r}",
    ) | {"gradients": "on the device"}
  elif "gradients" not in _planned(section, "host_optimizer"):
    # Files of earlier versions have no tiers of the host's gradients.
    reasons["gradients"] = "in memory of any node"
  found = []
  for tensor, shares in _planned(section, "placed").items():
    tiers = [tier for tier in shares if tier != "device"]
    if tensor in reasons and tiers:
      found.append(f"{tensor} on {', '.join(tiers)} ({reasons[tensor]})")
  return "; ".join(found)


def build_update(
  config: ml_collections.ConfigDict
) -> DeviceUpdate | HostUpdate:
  """Builds the inner optimizer's update on ``config.memory.optimizer``.

  Args:
    config: The config of a run, which has been checked.

  Raises:
    ValueError: The optimizer on the host does not support this run, or a key
      has no effect.
  """
  section: Memory = tree.section_of("memory", config.memory)
  if section.optimizer == "device":
    keys = ["tiers", "threads"]
    keys += [] if section.activations == PLACEMENT else ["placement"]
    for key in keys:
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
  """Returns the tiers, with fractions, of each array of the host's optimizer.

  Raises:
    ValueError: The file has no placement that the host can execute.
    OSError: The file cannot be read.
  """
  planned = (
    _planned(section, "host_optimizer") if section.placement
    else {name: dict(section.tiers) for name in STATE if section.tiers}
  )
  return {
    name: {int(t) if t.isdecimal() else t: x for t, x in shares.items()}
    for name, shares in planned.items()
  }


def _planned(section: Memory, field: str) -> Mapping[str, Any]:
  """Returns a field of the section's policy in the file of ``launch.place``."""
  try:
    read = files.parse(
      _Placements, files.read_bytes(pathlib.Path(section.placement))
    )
  except ValueError as error:
    raise ValueError(
      f"config.memory.placement={section.placement!r} is not a file that "
      f"launch.place --output has written: {error}"
    ) from error
  rows = {row.policy: getattr(row, field) for row in read.policies}
  usable = [name for name, found in rows.items() if found]
  if section.policy not in usable:
    what = (
      " that update all parameters on the host" if field == "host_optimizer"
      else " that fit"
    )
    names = ", ".join(map(repr, usable)) or "none"
    raise ValueError(
      f"config.memory.policy={section.policy!r} must be one of {names}, the "
      f"policies of {section.placement}{what}"
    )
  return rows[section.policy]


def _check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if the optimizer on the host cannot run a config."""
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
