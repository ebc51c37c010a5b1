"""Study of plans: the best 3D configuration of a model on a cluster."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import time
from typing import Any

from rich.console import Console

from caatnet.schema import tree
from caatnet.studies.published import models
from parallel.base.checks import known
from parallel.base.naming import prefix_error_keys
from parallel.plans import workload
from parallel.plans.hardware import cluster_files, tiers
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.pipeline import builders
from parallel.plans.planner import lossy_options, memory, plan, space, subsets
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.lossy_options import Changes, LossyOptions
from parallel.plans.planner.plan import Candidate
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import (
  CONFIG_KEYS,
  MOMENTS_MEMORY,
  Choices,
  Configuration,
)
from parallel.plans.planner.subsets import Subset
from parallel.plans.workload import TrainingStep, Transformer

# Largest number of devices for which a result includes the link matrix.
MAX_MATRIX_DEVICES = 256
# Valid values of a configuration's fields, for those that are names.
_NAMES = {
  "scheme": space.SCHEMES, "route": space.ROUTES, "remat": space.REMATS,
  "keep": space.KEEPS, "schedule": builders.BUILDERS,
}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Searches for the best configurations of a model on a cluster.

  Args:
    config: Config like configs/planner/gpt_11b.py, as nested dicts.

  Returns:
    Plain data: "cluster"; "best" (seconds and bytes by cause, device order and
    config keys); "front", the Pareto front of time and memory; "excluded",
    counts by reason; "why_not", comparisons with ``config.planner.why_not``;
    "assumptions"; and "second", faster configurations that train another model.

  Raises:
    ValueError: No configuration fits, or a value is invalid; the message names
      its key.
  """
  section = config["planner"]
  with prefix_error_keys("config.planner.second", section["second"]):
    changes = Changes(**{
      key: tuple(x) if isinstance(x, list) else x
      for key, x in section["second"].items()
    })
  with prefix_error_keys("config.planner", section):
    problem, choices = _problem(config), _choices(config)
    console = Console(stderr=True)  # silent in a pipe
    end = time.monotonic() + section["max_s"]
    with console.status("") as status:
      subset = subsets.search(
        problem, choices, least=section["min_devices"], count=section["top"],
        ordered=section["ordered"], started=status.update,
        has_time=lambda: time.monotonic() < end,
      )
  whole, problem, found = problem.links, subset.problem, subset.plan
  links, best = problem.links, found.best[0]
  second = lossy_options.search(found.best, problem, choices, changes)
  answers = [
    {"asked": text, "answer": plan.why_not(
      _parse_configuration(text, best.configuration), problem, choices, best
    )} for text in section["why_not"]
  ]
  drawn = links.num_devices <= MAX_MATRIX_DEVICES
  return {
    "study": "planner",
    "cluster": {
      "name": links.name, "devices": links.num_devices,
      "device": links.device.name, "mark": links.mark, "source": links.source,
      "memory_bytes": links.device.memory_bytes,
      "bandwidth": _finite(links.bandwidth.tolist()) if drawn else None,
    },
    "left_out": _left_out(subset, whole),
    "parameters": problem.step.model.num_params,
    "batch_size": problem.step.batch_size,
    "best": [_row(x, problem) for x in found.best],
    "sensitivity": problem.sensitivity(best.configuration, best.order),
    "second": _second_pass_rows(second, found.best),
    "front": [_row(x, problem) for x in found.front],
    "excluded": {key: list(value) for key, value in found.excluded.items()},
    "priced": found.priced,
    "skipped": {"orders": found.skipped, "clusters": subset.skipped},
    "why_not": answers,
    "assumptions": _assumptions(problem, problem.fit(best.configuration)),
    "config": dict(config),
  }


def _assumptions(problem: Problem, fit: memory.Fit) -> dict[str, str]:
  """Returns the assumptions of times and sizes, with their sources.

  `fit` has the factors of memory estimates.
  """
  host = problem.timing.host
  return {
    "utilisation": f"{problem.timing.utilisation:g} of the peak: "
    f"{workload.UTILISATION_SOURCE}",
    "memory": f"{fit.upper:g} times an estimate {fit.source}; and a margin "
    f"of {memory.MARGIN_BYTES / 1e9:g} GB: {memory.MARGIN_SOURCE}",
    "offload": f"{host.to_device / 1e9:.1f} GB/s to the device and "
    f"{host.from_device / 1e9:.1f} GB/s back: {host.name}",
    "execution": problem.timing.execution,
  }


def _left_out(subset: Subset, whole: LinkMatrix) -> dict[str, Any]:
  """Returns unused devices, and the seconds of a step on all devices.

  `subset` has the used devices, `whole` the links of all.
  """
  return {
    "devices": [
      {"device": i, "node": whole.nodes[i]} for i in subset.left_out
    ],
    "of": whole.num_devices,
    "used": list(subset.devices),
    "seconds": subset.whole_s,
  }


def _problem(config: Mapping[str, Any]) -> Problem:
  section, sizes, sync = config["planner"], config["model"], config["sync"]
  step = training_step(config)
  if sync["p"] != 1 or sync["p_attention"] or sync["p_mlp"]:
    raise ValueError(
      f"config.sync.p={sync['p']}: plans are made for p = 1 only; "
      "config.planner.second.p lists smaller values to evaluate"
    )
  for key in ("sliding_window", "tied_embeddings", "qkv_bias", "qk_norm"):
    if sizes[key]:
      raise ValueError(
        f"config.model.{key}={sizes[key]} is not supported by the planner's "
        "closed forms; use the default"
      )
  return Problem(
    step, cluster_files.cluster(section["cluster"]),
    TimingAssumptions(
      section["utilisation"], section["execution"],
      tiers.resolve_host(section["tiers"]),
    ),
  )


def training_step(config: Mapping[str, Any]) -> TrainingStep:
  """Returns the model and the batch of a training run.

  Raises:
    ValueError: The model is not a transformer, or the data is not text.
  """
  known("config.model.name=", config["model"]["name"], ("transformer",))
  known("config.data.name=", config["data"]["name"], ("text",))
  sizes, backward = config["model"], config["sync"]["backward_dtype"]
  optimizer = tree.parse_section("optimizer", config["optimizer"])
  model = Transformer(**{
    field.name: sizes[field.name] for field in dataclasses.fields(Transformer)
  })
  return TrainingStep(
    model, config["data"]["batch_size"], config["data"]["seq_len"],
    # Bytes of an element that the backward reduces.
    backward_bytes=4 if (backward or sizes["dtype"]) == "float32" else 2,
    moments=list(optimizer.moments.values()).count("same"),
  )


def _choices(config: Mapping[str, Any]) -> Choices:
  section = config["planner"]
  lists = {
    key: tuple(section[key])
    for key in (
      "schedules", "chunks", "schemes", "routes", "remats", "keeps"
    )
  }
  return Choices(
    **lists, offload=section["offload"],
    max_microbatches=section["max_microbatches"],
  )


def _parse_configuration(text: str, best: Configuration) -> Configuration:
  """Parses a training run's keys; missing ones are as in ``best``.

  Raises:
    ValueError: The planner does not choose the key, or the value is invalid.
  """
  changes = {}
  for part in text.split():
    # Accepts flags of a run, as the report prints them.
    key, _, value = part.removeprefix("--").removeprefix("config.").partition(
      "="
    )
    known(f"config.planner.why_not={text!r}: ", key, CONFIG_KEYS)
    where, name = f"config.planner.why_not={text!r}: {key}=", CONFIG_KEYS[key]
    if name == "offload":
      known(where, value, MOMENTS_MEMORY.values())
      changes[name] = value == MOMENTS_MEMORY[True]
    elif name in _NAMES:
      known(where, value, _NAMES[name])
      changes[name] = value
    elif not re.fullmatch(r"[1-9]\d{0,8}", value):
      raise ValueError(f"{where}{value!r} must be an integer from 1")
    else:
      changes[name] = int(value)
  return dataclasses.replace(best, **changes)


def _row(candidate: Candidate, problem: Problem) -> dict[str, Any]:
  """Returns a candidate plan for `problem` as plain data."""
  c, order = candidate.configuration, candidate.order
  return {
    "configuration": str(c),
    "keys": c.keys() | {"parallel.device_order": c.device_order(order)},
    "seconds": candidate.latency.total,
    "own_seconds": candidate.own_s,
    "gap": candidate.gap,
    "latency": dataclasses.asdict(candidate.latency),
    "bytes": candidate.memory.total,
    "memory": dataclasses.asdict(candidate.memory),
    "binding": candidate.memory.binding,
    "order": order.ravel().tolist(),
    "pipette_s": models.pipette_s(c, problem, order),
    "amp_s": models.amp_s(c, problem, order),
  }


def _second_pass_rows(
  found: LossyOptions, best: Sequence[Candidate]
) -> dict[str, Any]:
  """Returns faster configurations that train another model as plain data.

  `found` has changes of the plans in `best`.
  """
  rows = []
  for row in found.rows:
    c, base = row.configuration, best[row.base]
    rows.append({
      "of": row.base + 1,
      "learned": c.learned(),
      "configuration": str(c),
      "keys": c.keys() | {"parallel.device_order": c.device_order(base.order)},
      "seconds": row.latency.total,
      "of_seconds": base.latency.total,
      "latency": dataclasses.asdict(row.latency),
      "bytes": row.memory.total,
      "memory": dataclasses.asdict(row.memory),
      "sent": dataclasses.asdict(row.sent),
      "of_sent": dataclasses.asdict(row.base_sent),
    })
  excluded = {key: list(value) for key, value in found.excluded.items()}
  return {"rows": rows, "excluded": excluded}


def _finite(rows: list[list[float]]) -> list[list[float | None]]:
  """Replaces non-finite entries (the diagonal) by None, for JSON."""
  return [
    [None if i == j else x for j, x in enumerate(row)]
    for i, row in enumerate(rows)
  ]
