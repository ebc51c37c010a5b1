"""Builder of ``config.memory``: the optimizer's update and memory placement.

``launch.place`` writes a placement: the memory tiers of all tensors. A run can
follow it for master weights, moments and gradients, and for the activations
that layers save on the device or on the host. `describe_unexecuted` names all
other tensors: XLA cannot choose the NUMA node of pinned memory, and weights
stay on the device.
"""

from collections.abc import Mapping
import pathlib
from typing import Annotated, Any, Literal

import ml_collections

from caatnet.schema import optimizer as schema
from caatnet.schema import tree
from caatnet.schema.memory import FROM_PLACEMENT, Memory
from caatnet.train.update import STATE_ARRAYS, DeviceUpdate, HostUpdate
from parallel.base import schema as files
from parallel.memory.host_optimizer import AdamW
from parallel.memory.offload import ON_DEVICE, ON_HOST, ActivationPlacement
from parallel.memory.placed_buffer import Tier

_Share = Annotated[float, files.Field(ge=0, le=1 + 1e-6)]
_MemoryFractions = dict[Literal["device", "host"], _Share]


class _Row(files.OpenSchema):
  """Result of a placement policy; fields that do not apply to it are None."""

  policy: str
  host_optimizer: dict[str, dict[str, _Share]] | None = None
  placed: dict[str, dict[str, _Share]] | None = None
  activations: dict[
    Literal["saved", "recomputed"], _MemoryFractions
  ] | None = None


class _Placements(files.OpenSchema):
  """File that ``launch.place --output`` writes."""

  policies: tuple[_Row, ...]


def moments_memory_kind(section: Memory) -> str:
  """Returns the jax memory kind of the inner optimizer's moments between steps.

  The moments of an optimizer on the host are jax arrays only while they are
  read from a checkpoint.
  """
  return "pinned_host" if section.optimizer == "host" else section.moments


def activations(section: Memory) -> ActivationPlacement:
  """Returns which activations layers save for their backward, and where.

  Raises:
    ValueError: If there is no placement, or its file lacks the policy.
    OSError: If the file of the placement cannot be read.
  """
  if section.activations != FROM_PLACEMENT:
    return ON_DEVICE if section.activations == "device" else ON_HOST
  if not section.placement:
    raise ValueError(
      f"config.memory.activations={FROM_PLACEMENT!r} needs "
      "config.memory.placement, "
      "a file that launch.place --output has written"
    )
  found = _read_policy_field(section, "activations")
  return ActivationPlacement(
    found.get("saved", {}).get("device", 0.0),
    found.get("recomputed", {}).get("device", 0.0),
    found.get("saved", {}).get("host", 0.0),
  )


def describe_unexecuted(section: Memory) -> str:
  """Names the tensors that a run does not place as planned; "" for none."""
  if not section.placement:
    return ""
  layers = section.activations == FROM_PLACEMENT
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
  elif "gradients" not in _read_policy_field(section, "host_optimizer"):
    # Files of earlier versions have no tiers for gradients on the host.
    reasons["gradients"] = "in memory of any node"
  found = []
  for tensor, shares in _read_policy_field(section, "placed").items():
    tiers = [tier for tier in shares if tier != "device"]
    if tensor in reasons and tiers:
      found.append(f"{tensor} on {', '.join(tiers)} ({reasons[tensor]})")
  return "; ".join(found)


def build_update(
  config: ml_collections.ConfigDict
) -> DeviceUpdate | HostUpdate:
  """Builds the inner optimizer's update, on the device or on the host.

  Args:
    config: The config of a run, which has been checked.

  Raises:
    ValueError: If the optimizer on the host does not support this run, or a key
      has no effect.
  """
  section: Memory = tree.parse_section("memory", config.memory)
  if section.optimizer == "device":
    keys = ["tiers", "threads"]
    keys += [] if section.activations == FROM_PLACEMENT else ["placement"]
    for key in keys:
      if value := getattr(section, key):
        raise ValueError(
          f"config.memory.{key}={value!r} has no effect with "
          "config.memory.optimizer='device'"
        )
    return DeviceUpdate()
  _check_host_optimizer(config)
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
  optimizer: schema.AdamW = tree.parse_section("optimizer", config.optimizer)
  return HostUpdate(
    AdamW(
      optimizer.beta_1, optimizer.beta_2, optimizer.eps, optimizer.weight_decay
    ),
    _placement(section), section.threads or None,
  )


def _placement(section: Memory) -> Mapping[str, Mapping[Tier, float]]:
  """Returns the fraction on each tier, for arrays of the host's optimizer.

  Raises:
    ValueError: If the file has no placement that the host can execute.
    OSError: If the file cannot be read.
  """
  planned = (
    _read_policy_field(section, "host_optimizer") if section.placement
    else {name: dict(section.tiers) for name in STATE_ARRAYS if section.tiers}
  )
  return {
    name: {int(t) if t.isdecimal() else t: x for t, x in shares.items()}
    for name, shares in planned.items()
  }


def _read_policy_field(section: Memory, field: str) -> Mapping[str, Any]:
  """Returns a field of the policy's `_Row` in the placement file."""
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


def _check_host_optimizer(config: ml_collections.ConfigDict) -> None:
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
