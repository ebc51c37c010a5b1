"""The study of datacentres: what a budget buys, trains, and has to connect."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from caatnet.checks import naming
from caatnet.studies.datacentre import known, page
from caatnet.studies.planner import study as planner
from caatnet.train import files
from parallel import checks
from parallel.hardware import devices, sites
from parallel.network import flows, traffic, utilisation
from parallel.planner import datacentre, uncertainty
from parallel.planner.knobs import KNOBS
from parallel.topology import text as topologies

# The results that a report gives quantiles of.
DRAWN = (
  "facility_w", "energy_year_cost", "days", "largest", "cross_bits", "goodput",
  "replica_goodput", "replica_days",
)
# Accelerators at which all is computed once more.
SCALES = (1, 8, 64, 16_384, 1_677_600)
# A leaf-spine network in which flows are routed one by one.
_FABRIC = "leaf_spine:16x16x16"
# Bandwidths between sites that are tried, bit/s.
_BANDWIDTHS = np.logspace(9, 16, 281)


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Plans.

  Args:
    config: A config like configs/datacentre/hundred_billion.py, as nested
      dicts.

  Returns:
    Plain data: "knobs" and "results" with units and sources, "sites", "paper"
    (published figures and ours), "trainable" (models by precision), "known"
    (machines), "causes" (of failures, per day), "scales", "between" (bandwidths
    between sites), "multipath", "quantiles" and "tornado".

  Raises:
    ValueError: A value is wrong; the message has its key.
  """
  with naming("config", ("sites",)):
    places = _places(config["sites"])
  pod = _pod(config["pod"])
  values = _values(config, places, pod)
  given = config["given"]
  with naming("config.knobs", KNOBS), naming("config", ("given",)):
    found = datacentre.plan(values, given)
    scales = _scales(values)
  used, left = datacentre.fill(found["facility_w"], places)
  with naming("config", ("num_draws",)):
    drawn = uncertainty.draws(
      values, given, num_draws=config["num_draws"], seed=config["seed"]
    )
  try:
    bars = uncertainty.tornado(config["tornado"], values, given)
  except ValueError as error:
    raise ValueError(f"config.tornado: {error}") from error
  return {
    "study": "datacentre",
    "given": given,
    "rack": config["rack"],
    "precision": config["precision"],
    "knobs": _knobs(values, given),
    "results": [
      {"name": key, "value": float(found[key]), "formula": str(r.formula)}
      | {"unit": r.unit, "meaning": r.meaning, "group": r.group}
      for key, r in datacentre.results(given).items()
    ],
    "sites": {"limits_w": places, "used_w": used, "missing_w": left},
    "pod": pod,
    "paper": known.paper(),
    "trainable": known.trainable(
      config["rack"], {**values, "accelerators": found["accelerators"]}
    ),
    "known": known.machines(),
    "causes": _causes(found["accelerators"]),
    "scales": scales,
    "between": _between(config, found),
    "multipath": _multipath(found),
    "quantiles": uncertainty.quantiles(drawn, DRAWN),
    "num_draws": config["num_draws"],
    "tornado": {
      "target": config["tornado"], "value": float(found[config["tornado"]]),
      "bars": [bar._asdict() for bar in bars],
    },
  }


def write_page(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the page with sliders.

  Args:
    result: What `run` returned.
    path: The file to write, HTML.
  """
  files.replace(path, page.text(result))


def _places(texts: Sequence[str]) -> dict[str, float]:
  """Returns watts by site."""
  found = {}
  for text in texts:
    name, _, watts = text.partition(":")
    try:
      found[name] = float(watts) if watts else sites.SITES[name].power_w
    except (KeyError, ValueError) as error:
      raise ValueError(
        f"sites={text!r} is neither NAME:WATTS nor one of "
        f"{', '.join(sites.SITES)}"
      ) from error
  datacentre.fill(0, found)  # refuses what is no site
  return found


def _values(
  config: Mapping[str, Any], places: Mapping[str, float],
  pod: Mapping[str, Any] | None,
) -> dict[str, float]:
  """Returns the knobs that are not as in `KNOBS`."""
  with naming("config", ("rack", "precision", "cooling")):
    values = datacentre.rack(config["rack"], config["precision"])
    checks.known("cooling=", config["cooling"], sites.COOLING)
  values["pue"], _ = sites.COOLING[config["cooling"]]
  values["site_w"] = max(places.values())
  if pod is not None:
    values["utilisation"] = pod["utilisation"]
  own = {k: v for k, v in config["knobs"].items() if v is not None}
  with naming("config", ("given",)):
    read = datacentre.knobs_of(config["given"])
  for key in own:
    if key not in read:
      raise ValueError(
        f"config.knobs.{key} has no effect: with "
        f"config.given={config['given']!r} it follows from other knobs"
      )
  return values | own


def _knobs(values: Mapping[str, float], given: str) -> list[dict[str, Any]]:
  ranges = uncertainty.ranges(values, given)
  rows = []
  for key in datacentre.knobs_of(given):
    knob = dataclasses.asdict(KNOBS[key])
    value = values.get(key, knob["value"])
    if value != knob["value"]:
      knob |= {"source": "this config", "mark": "choice"}
    low, _, high = ranges.get(key, (knob["low"], value, knob["high"]))
    rows.append(
      {"name": key} | knob
      | {"value": value, "low": min(low, value), "high": max(high, value)}
    )
  return rows


def _scales(values: Mapping[str, float]) -> list[dict[str, Any]]:
  """Computes the same plan for machines of all sizes."""
  keys = (
    "budget", "facility_w", "sites_needed", "largest", "mtbf_s", "tiers",
  )
  rows = []
  for count in SCALES:
    found = datacentre.plan(
      {**values, "accelerators": count}, "accelerators"
    )
    rows.append({"accelerators": count} | {k: float(found[k]) for k in keys})
  return rows


def _between(
  config: Mapping[str, Any], found: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Finds the bandwidths between two sites that methods need.

  Steps, parameters and layers are the plan's; a reduction arrives half a round
  trip after it was sent.
  """
  checks.at_least("config.round_steps", config["round_steps"])
  layers = int(found["layers"])
  model = utilisation.Model(
    float(found["parameters"]), layers, float(found["step_s"])
  )
  methods = utilisation.paper_methods(layers, config["round_steps"])
  rows = []
  for name, method in methods.items():
    period = utilisation.simulate(
      model, method, _BANDWIDTHS, latency_s=found["rtt_s"] / 2
    )
    reached = {}
    for target in config["targets"]:
      places = np.flatnonzero(period.utilisation >= target)
      reached[str(target)] = (
        float(_BANDWIDTHS[places[0]]) if len(places) else None
      )
    rows.append({
      "method": name, "bits": method.bits, "sync_every": method.sync_every,
      "bit_s": reached,
    })
  return rows


def _multipath(found: Mapping[str, Any]) -> dict[str, Any]:
  """Routes a shift over leaves and spines, whole and without one link."""
  net = flows.fabric(topologies.parse(_FABRIC))
  leaf, spine = sorted(set(net.leaf_of))[0], net.spines[0]
  broken = flows.fabric(
    net.topology.without((leaf, spine), (spine, leaf))
  )
  rows = []
  for router in ("ecmp", "spray", "ethereal"):
    loads = []
    for each in (net, broken):
      sent = traffic.shift(each, 0)
      routes = flows.ROUTERS[router](each, sent)
      loads.append(float(
        flows.fullest_uplink(each, flows.loads(each, sent, routes))
      ))
    rows.append({
      "router": router, "whole": loads[0], "without_one": loads[1],
    })
  return {
    "fabric": _FABRIC, "rows": rows, "uplink_share": found["uplink_share"],
    "link_failures_day": float(found["link_failures_day"]),
  }


def _causes(accelerators: float) -> dict[str, float]:
  """Returns failures per day by their causes, at the published rates."""
  hours = sites.INTERRUPTED_GPUS * sites.INTERRUPTED_HOURS
  return {
    cause: float(24 * accelerators * count / hours)
    for cause, count in sites.INTERRUPTIONS.items()
  }


def _pod(config: Mapping[str, Any]) -> dict[str, Any] | None:
  """Asks the planner for a pod; None without its config."""
  if not config:
    return None
  plan = planner.run(config)
  best, cluster = plan["best"][0], plan["cluster"]
  device = devices.DEVICES[cluster["device"]]
  tokens = plan["batch_size"] * config["data"]["seq_len"]
  flops = 6 * plan["parameters"] * tokens
  peak = device.peak(config["model"]["dtype"]) * cluster["devices"]
  return {
    "cluster": cluster["name"], "devices": cluster["devices"],
    "configuration": best["configuration"], "step_s": best["seconds"],
    "bytes": best["bytes"], "memory_bytes": cluster["memory_bytes"],
    "utilisation": flops / (best["seconds"] * peak),
  }
