"""Study of placements: where each tensor of a training step is held.

Other sections of the config define the model and its batch. The policies place
tensors on the host ``placement.tiers`` and are compared with the policy
"dram_only" on ``placement.baseline``, a host with enough DRAM.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any

from caatnet.studies.placement import of_run, ranges
from caatnet.studies.planner.study import training_step
from parallel.base import checks
from parallel.base.naming import prefix_error_keys
from parallel.memory import preflight
from parallel.plans import placement
from parallel.plans.hardware import tiers
from parallel.plans.hardware.devices import DEVICES, Device
from parallel.plans.hardware.tiers import Host
from parallel.plans.placement import optimum, problem
from parallel.plans.placement.costs import Cost, Placement
from parallel.plans.placement.problem import INSTANTS, PHASES, Problem
from parallel.plans.workload import TrainingStep, Transformer

# Smaller fractions of a tensor are rounding errors of the solver.
MIN_SHARE = 1e-6
# Arrays of the host's optimizer -> tensors of a step.
_ARRAYS = {
  "weights": "master weights", "gradients": "gradients",
  "first": "first moments", "second": "second moments",
}
# The search of the longest context and the largest model ends within 1/64.
_SEARCH_RESOLUTION = 64


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Places the tensors of a training step with every policy.

  Args:
    config: Config like configs/memory/12b_32k.py, as nested dicts.

  Returns:
    Plain data:

    - "policies", a row for each: seconds by phase, binding resource, missing
      bytes, longest context, largest model; "above", relative excess of the
      seconds over a lower bound for all placements; "placed", tensors by tier.
      Training executes "host_optimizer" and "activations" (``config.memory``);
    - of the optimum: "tensors" with their tiers and the cost of other tiers,
      "occupied" bytes by instant and tier, "timeline" of bytes by tier at the
      ends of phases, and "whole", the time if no layer is divided;
    - by `ranges`: "scanned" speeds, "needed" rates, and tiers used "alone";
    - "host" with every rate, its range and source, and "warnings" if the host
      is this machine.

  Raises:
    ValueError: A value is invalid; the message names its key. Or the host is
      this machine, and it lacks a node or the memory of the optimum.
  """
  section = config["placement"]
  with prefix_error_keys("config.placement", section):
    checks.known("device=", section["device"], DEVICES)
    for policy in section["policies"]:
      checks.known("policies=", policy, placement.POLICIES)
    host = tiers.resolve_host(section["tiers"])
    baseline = tiers.resolve_host(section["baseline"])
  step = training_step(config)

  of_step = (
    of_run.problem if section["state"] == "run" else _mixed_state_problem
  )

  def made(
    model: Transformer = step.model, seq_len: int = step.seq_len,
    on: Host = host,
  ) -> Problem:
    return of_step(
      config, dataclasses.replace(step, model=model, seq_len=seq_len),
      DEVICES[section["device"]], on, section["utilisation"], section["fill"],
    )

  # On the baseline, "optimum" chooses recomputation and updates, but no tiers.
  rows = [
    {"policy": f"{baseline.name}, {policy}"}
    | _evaluate_policy(made(on=baseline), policy) | _execution_fields(None)
    for policy in ("dram_only", "optimum")
  ]
  for policy in section["policies"]:
    rows.append(
      {"policy": policy} | _evaluate_policy(made(), policy) | {
        "longest": _longest_context(made, policy, section["longest"]) or "none",
        "largest": _largest_model(made, policy, step.model) or "none",
      }
    )
  bound_s = _bound_s(made())
  for row in rows:
    row["relative"] = (
      rows[0]["step_s"] / row["step_s"]
      if row["step_s"] and rows[0]["step_s"] else None
    )
    row["above"] = (
      row["step_s"] / bound_s - 1
      if bound_s and row["step_s"] and "longest" in row else None
    )
  contexts = (step.seq_len, *section["contexts"])
  return {
    "study": "placement",
    "parameters": step.model.num_params,
    "batch_size": step.batch_size,
    "seq_len": step.seq_len,
    "state": section["state"],
    "device": section["device"],
    "device_bytes": made().device_bytes,
    "policies": rows,
    "scanned": ranges.scan_rates(
      made, host, baseline, section["policies"], contexts
    ),
    "needed": ranges.find_needed_rates(
      made, host, baseline, section["targets"], contexts
    ),
    "alone": ranges.evaluate_single_tiers(made, host),
    **_optimum(made()),
    "host": host.model_dump(),
    "config": dict(config),
  }


def _bound_s(step: Problem) -> float | None:
  """Returns a lower bound of a step's seconds over all placements, or None.

  The bound is the optimum of the linear program. There is none if nothing fits,
  or if a tier has measured `passes`, which the linear program does not model.
  """
  if any(tier.passes for tier in step.host.tiers):
    return None
  try:
    return placement.cost(step, optimum.place(step)).step_s
  except ValueError:
    return None


def _mixed_state_problem(
  config: Mapping[str, Any], step: TrainingStep, device: Device, host: Host,
  utilisation: float, fill: float,
) -> Problem:
  """Returns the placement problem of ``config.placement.state="mixed"``."""
  return problem.training_step(
    step.model, batch_size=step.batch_size, seq_len=step.seq_len,
    device=device, host=host, utilisation=utilisation, fill=fill,
  )


def _evaluate_policy(step: Problem, policy: str) -> dict[str, Any]:
  """Returns the time and the missing memory of a policy's placement."""
  try:
    chosen = placement.place(step, policy)
  except ValueError as error:
    return {"error": str(error), "step_s": None} | _execution_fields(None)
  found = placement.cost(step, chosen)
  return _execution_fields(None if found.missing else chosen, step.host) | {
    "error": ", ".join(
      f"{tier} lacks {size / 1e9:.1f} GB" for tier, size in
      found.missing.items()
    ),
    "step_s": None if found.missing else found.step_s,
    **_phases(found),
  }


def _execution_fields(
  chosen: Placement | None, host: Host | None = None
) -> dict[str, Any]:
  """Returns the fields of a placement `chosen` that a training run reads.

  Returns:
    "host_optimizer" (see `_host_optimizer_tiers`); "placed", tensor -> tier ->
    fraction of the tensor; and "activations", "saved" or "recomputed" ->
    "device" or "host" -> fraction of the layers. None for each if there is no
    placement.
  """
  if chosen is None:
    return dict.fromkeys(("host_optimizer", "placed", "activations"))
  placed: dict[str, dict[str, float]] = {}
  activations: dict[str, dict[str, float]] = {}
  for (part, way, tensor), shares in chosen.tiers.items():
    for tier, share in shares.items():
      if share <= MIN_SHARE:
        continue
      into = placed.setdefault(tensor, {})
      into[tier] = into.get(tier, 0.0) + share
      if part == "activations":
        memory = "device" if tier == problem.DEVICE else "host"
        into = activations.setdefault(way, {})
        into[memory] = into.get(memory, 0.0) + share
  return {
    "host_optimizer": _host_optimizer_tiers(host, chosen), "placed": placed,
    "activations": activations,
  }


def _host_optimizer_tiers(
  host: Host, chosen: Placement
) -> dict[str, dict[str, float]] | None:
  """Returns the tiers of the host's optimizer, for ``config.memory.placement``.

  Returns:
    Array -> number of the NUMA node, or folder of the file -> fraction of the
    array. None if some parameters are updated on the device.
  """
  names = {
    tier.name: str(pathlib.Path(tier.path).parent) if tier.kind == "file"
    else str(tier.node)
    for tier in host.tiers
  }
  found: dict[str, dict[str, float]] = {}
  for (part, way), share in chosen.ways.items():
    if part != "parameters" or share <= MIN_SHARE:
      continue
    if not way.startswith("updated by the cpu"):
      return None
    for array, tensor in _ARRAYS.items():
      shares = found.setdefault(array, {})
      for tier, x in chosen.tiers[part, way, tensor].items():
        if x > MIN_SHARE:
          shares[names[tier]] = shares.get(names[tier], 0.0) + x
  return {
    array: {tier: x / sum(shares.values()) for tier, x in shares.items()}
    for array, shares in found.items()
  }


def _phases(found: Cost) -> dict[str, Any]:
  return {
    phase: {"seconds": found.seconds[phase], "binding": found.binding(phase)}
    for phase in PHASES
  }


def _fits(step: Problem, policy: str) -> bool:
  try:
    return placement.cost(step, placement.place(step, policy)).fits
  except ValueError:
    return False


def _longest_context(
  made: Callable[..., Problem], policy: str, most: int
) -> int | None:
  """Returns the longest context up to ``most`` that a policy fits, or None.

  `made` returns the placement problem of a context.
  """
  return _search_largest(
    lambda tokens: _fits(made(seq_len=tokens), policy), most
  )


def _largest_model(
  made: Callable[..., Problem], policy: str, model: Transformer
) -> int | None:
  """Returns the parameters of the largest model that a policy fits, or None.

  The models have the width of `model`; `made` returns a model's problem.
  """

  def resized(layers: int) -> Transformer:
    return dataclasses.replace(model, num_layers=layers)

  layers = _search_largest(
    lambda layers: _fits(made(resized(layers)), policy), 100 * model.num_layers
  )
  return resized(layers).num_params if layers else None


def _search_largest(fits: Callable[[int], bool], most: int) -> int | None:
  """Returns the largest number up to ``most`` that fits, to a relative 1/64."""
  if not fits(1):
    return None
  low, high = 1, 2
  while high <= most and fits(high):
    low, high = high, 2 * high
  high = min(high, most + 1)
  while high - low > max(1, low // _SEARCH_RESOLUTION):
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low


def _optimum(step: Problem) -> dict[str, Any]:
  """Returns the fields of `run` that describe the optimum."""
  try:
    best = optimum.place(step)
  except ValueError:
    return {
      "tensors": [], "occupied": [], "timeline": [], "whole": None,
      "warnings": preflight.check(step.host, {}, 0.0),
    }
  found = placement.cost(step, best)
  tensors = []
  for part, way, tensor in step.tensors():
    key = part.name, way.name, tensor.name
    shares = {
      tier: share for tier, share in best.tiers[key].items()
      if share > MIN_SHARE
    }
    if shares:
      tensors.append({
        "part": part.name, "way": way.name, "tensor": tensor.name,
        "bytes": tensor.size_bytes * sum(shares.values()), "tiers": shares,
        "elsewhere": _single_tier_penalties(
          step, key, tensor, found.step_s, shares
        ),
      })
  try:
    whole_s = placement.cost(step, optimum.place(step, whole=True)).step_s
  except ValueError:  # fractions of layers fit, whole ones do not
    whole_s = None
  return {
    "tensors": tensors,
    "occupied": _occupied(step, best),
    "timeline": _timeline(step, best, found),
    "warnings": preflight.check(
      step.host, found.occupied, _pinned_bytes(step, best)
    ),
    "whole": whole_s and {
      "step_s": whole_s, "gap": whole_s / found.step_s - 1,
    },
  }


def _pinned_bytes(step: Problem, best: Placement) -> float:
  """Returns a placement's peak bytes on NUMA nodes that the device accesses."""
  nodes = {tier.name for tier in step.host.tiers if tier.kind != "file"}
  return max(
    sum(
      share * tensor.size_bytes
      for part, way, tensor in step.tensors()
      if instant in tensor.held and any(u.by == "device" for u in tensor.uses)
      for tier, share in best.tiers[part.name, way.name, tensor.name].items()
      if tier in nodes
    ) for instant in INSTANTS
  )


def _single_tier_penalties(
  step: Problem, key: tuple[str, str, str], tensor: problem.Tensor,
  best_s: float, shares: Mapping[str, float],
) -> dict[str, float | None]:
  """Returns tier -> extra seconds of a step with the tensor on that tier only.

  `key` is the tensor's key in `Placement.tiers`, `best_s` the step's seconds in
  the optimum, `shares` the tensor's tiers there. A tier that holds the whole
  tensor is left out; None if nothing fits.
  """
  found: dict[str, float | None] = {}
  for tier in step.tiers_of(tensor):
    if list(shares) == [tier]:
      continue
    try:
      forced = optimum.place(step, forced={key: tier})
    except ValueError:
      found[tier] = None
    else:
      found[tier] = placement.cost(step, forced).step_s - best_s
  return found


def _occupied(step: Problem, best: Placement) -> list[dict[str, Any]]:
  """Returns the bytes of each tensor of a placement by instant and tier."""
  rows = []
  for part, way, tensor in step.tensors():
    key = part.name, way.name, tensor.name
    for instant in INSTANTS:
      for tier, share in best.tiers[key].items():
        if instant in tensor.held and share > MIN_SHARE:
          rows.append({
            "instant": instant, "tier": tier, "tensor": tensor.name,
            "bytes": share * tensor.size_bytes,
          })
  for instant in INSTANTS:
    rows.append({
      "instant": instant, "tier": problem.DEVICE,
      "tensor": step.content, "bytes": step.reserved[instant],
    })
  return rows


def _timeline(
  step: Problem, best: Placement, found: Cost
) -> list[dict[str, Any]]:
  """Returns the bytes of each tier at the start and at the end of each phase.

  `found` is the cost of the placement `best`. Within a phase, bytes change
  linearly: activations grow in the forward, gradients
  replace them in the backward, and the update frees the gradients. At the start
  only tensors that are kept between steps are in memory.
  """
  between = dict.fromkeys([problem.DEVICE, *(t.name for t in step.host.tiers)],
                          0.0)
  for part, way, tensor in step.tensors():
    if tensor.held == INSTANTS:
      shares = best.tiers[part.name, way.name, tensor.name]
      for tier, share in shares.items():
        between[tier] += share * tensor.size_bytes
  ends = [dict(found.occupied[instant]) for instant in INSTANTS]
  for instant, held in zip(INSTANTS, ends, strict=True):
    held[problem.DEVICE] += step.reserved[instant]
  rows, seconds = [{"phase": "", "seconds": 0.0, "bytes": between}], 0.0
  for phase, held in zip(PHASES, [*ends, between], strict=True):
    seconds += found.seconds[phase]
    rows.append({"phase": phase, "seconds": seconds, "bytes": held})
  return rows
