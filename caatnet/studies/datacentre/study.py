"""Study of datacentres: purchase, training and network for a budget."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from caatnet.studies.datacentre import (
  closed_forms,
  knobs,
  known,
  page,
  uncertainty,
)
from caatnet.studies.datacentre.knobs import KNOBS
from caatnet.studies.flows import link_loads, patterns
from caatnet.studies.planner import study as planner
from caatnet.studies.utilisation import predictor
from parallel.base import checks, files
from parallel.base.naming import prefix_error_keys
from parallel.plans.hardware import devices, sites
from parallel.plans.topology import text as topologies

# Results for which the report gives quantiles.
QUANTILE_RESULTS = (
  "facility_w", "energy_year_cost", "days", "largest", "cross_bits", "goodput",
  "replica_goodput", "replica_days",
)
# Numbers of accelerators for which the whole plan is recomputed.
SCALES = (1, 8, 64, 16_384, 1_677_600)
# Leaf-spine network in which flows are routed one by one.
_FABRIC = "leaf_spine:16x16x16"
# Bandwidths between sites that are tried, bit/s, before the answer is refined.
_BANDWIDTHS = np.logspace(6, 17, 221)


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the plan and its analyses.

  Args:
    config: Config like configs/datacentre/hundred_billion.py, as nested dicts.

  Returns:
    Plain data: "knobs" and "results" with units and sources; "sites" with their
    power; "pod", the planner's result for one cluster; "paper" and "known",
    comparisons with published figures; "trainable", training times by model and
    precision; "causes", failures per day; "scales", plans of other sizes;
    "between", bandwidths between sites; "multipath", link loads by routing
    algorithm; "quantiles" of results; and "tornado", the effect of each knob on
    one result.

  Raises:
    ValueError: A value is invalid; the message names its key.
  """
  given = config["given"]
  with prefix_error_keys(
    "config", ("sites", "given", "rack", "precision", "cooling")
  ):
    checks.known("given=", given, closed_forms.GIVEN_QUANTITIES)
    places = _parse_sites(config["sites"])
    values, sources = _hardware_knobs(config)
  pod = _pod(config["pod"])
  _override_knobs(config, pod, places, values, sources)
  with prefix_error_keys("config.knobs", KNOBS):
    found = closed_forms.plan(values, given)
    used, left = closed_forms.distribute_power(found["facility_w"], places)
    if not left and len(used) != found["sites_needed"]:
      # Sites differ in size; the formulas assume equal sites of mean size.
      values["site_w"] = found["facility_w"] / len(used) * (1 + 1e-9)
      sources["site_w"] = ("the mean of the sites that are used", "choice")
      found = closed_forms.plan(values, given)
  with prefix_error_keys("config", ("num_draws",)):
    drawn = uncertainty.draws(
      values, given, num_draws=config["num_draws"], seed=config["seed"]
    )
  target = config["tornado"] or (
    "accelerators" if given == "model" else "replica_days"
  )
  try:
    bars = uncertainty.tornado(target, values, given)
  except ValueError as error:
    raise ValueError(f"config.tornado: {error}") from error
  return {
    "study": "datacentre",
    "given": given,
    "rack": config["rack"],
    "precision": config["precision"],
    "knobs": _knobs(values, sources, given),
    "results": [
      {"name": key, "value": float(found[key]), "formula": str(r.formula)}
      | {"unit": r.unit, "meaning": r.meaning, "group": r.group}
      for key, r in closed_forms.result_specs(given).items()
    ],
    "sites": {"limits_w": places, "used_w": used, "missing_w": left},
    "pod": pod,
    "paper": known.compare_with_paper(),
    "trainable": known.check_trainability(
      config["rack"], {**values, "accelerators": found["accelerators"]}
    ),
    "known": known.compare_with_machines(),
    "causes": _failure_rates(found["accelerators"]),
    "scales": _plan_at_scales(values),
    "between": _intersite_bandwidths(config, found),
    "multipath": _multipath(),
    "quantiles": uncertainty.quantiles(drawn, QUANTILE_RESULTS),
    "num_draws": len(drawn["days"]),
    "seed": config["seed"],
    "tornado": {
      "target": target, "value": float(found[target]),
      "bars": [bar._asdict() for bar in bars],
    },
  }


def write_page(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes a result as an HTML page with sliders for the knobs.

  Args:
    result: Result of `run`.
    path: HTML file to write.
  """
  files.replace(path, page.render_html(result))


def _parse_sites(texts: Sequence[str]) -> dict[str, float]:
  """Returns the power of each site in watts."""
  found: dict[str, float] = {}
  for text in texts:
    name, _, watts = text.partition(":")
    if name in found:
      raise ValueError(f"sites={text!r} must not have the site {name!r} twice")
    try:
      found[name] = float(watts) if watts else sites.SITES[name].power_w
    except (KeyError, ValueError) as error:
      raise ValueError(
        f"sites={text!r} must be NAME:WATTS or one of {', '.join(sites.SITES)}"
      ) from error
  closed_forms.distribute_power(0, found)  # raises if a site is invalid
  return found


def _hardware_knobs(
  config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, sites.Source]]:
  """Returns the knobs set by rack, precision and cooling, and their sources."""
  kind, precision, cooling = (
    config[key] for key in ("rack", "precision", "cooling")
  )
  checks.known("rack=", kind, sites.RACKS)
  checks.known("precision=", precision, sites.RACKS[kind].flops)
  checks.known("cooling=", cooling, sites.COOLING)
  values = knobs.of_rack(kind, precision) | knobs.of_cooling(cooling)
  sources = dict(sites.RACKS[kind].sources) | {"pue": sites.COOLING[cooling][1]}
  return values, sources


def _override_knobs(
  config: Mapping[str, Any], pod: Mapping[str, Any] | None,
  places: Mapping[str, float], values: dict[str, float],
  sources: dict[str, sites.Source],
) -> None:
  """Overrides knobs' ``values`` and their ``sources`` in place.

  Args:
    config: Config of the study; its own knobs have precedence.
    pod: Result of `_pod`, which gives the utilisation; None without one.
    places: Available power of each site in watts, by name.
    values: Knobs.
    sources: Source of each knob.
  """
  if pod is not None:
    values["utilisation"] = pod["utilisation"]
    sources["utilisation"] = (
      f"parallel/plans/planner, for {pod['parameters']:.3g} parameters on "
      f"{pod['devices']} devices of {pod['cluster']}", "choice"
    )
  own = _config_knobs(config)
  # The config's own knobs have precedence over rack, cooling and pod.
  values |= own | {"site_w": max(places.values())}
  sources |= dict.fromkeys(own, ("this config", "choice"))
  sources["site_w"] = ("config.sites", "choice")


def _config_knobs(config: Mapping[str, Any]) -> dict[str, float]:
  """Returns the knobs that the config itself sets."""
  given = config["given"]
  own = {k: v for k, v in config["knobs"].items() if v is not None}
  read = closed_forms.knobs_of(given)
  for key in own:
    if key not in read:
      raise ValueError(
        f"config.knobs.{key} has no effect, since config.given={given!r} "
        "computes it from other knobs"
      )
  return own


def _knobs(
  values: Mapping[str, float], sources: Mapping[str, sites.Source], given: str
) -> list[dict[str, Any]]:
  rows = []
  for key in closed_forms.knobs_of(given):
    knob = dataclasses.asdict(KNOBS[key])
    value = values.get(key, knob["value"])
    low, high = knobs.scaled_range(key, value)
    source, mark = sources.get(key, (knob["source"], knob["mark"]))
    rows.append({"name": key} | knob | {
      "value": value, "low": min(low, value), "high": max(high, value),
      "source": source, "mark": mark, "most": None,  # JSON has no infinity
    })
  return rows


def _plan_at_scales(values: Mapping[str, float]) -> list[dict[str, Any]]:
  """Returns a plan's results for each number of accelerators in ``SCALES``."""
  keys = (
    "budget", "facility_w", "sites_needed", "fit", "largest", "mtbf_s", "tiers",
  )
  rows = []
  for count in SCALES:
    found = closed_forms.plan({**values, "accelerators": count}, "accelerators")
    rows.append({"accelerators": count} | {k: float(found[k]) for k in keys})
  return rows


def _intersite_bandwidths(
  config: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the bandwidths between sites that training methods need.

  Step time, parameters, layers and number of sites (at least two) are those of
  the plan. A reduction arrives half a round trip after it was sent.
  """
  rounds, targets = config["round_steps"], config["targets"]
  layers, count = int(found["layers"]), max(2, int(found["sites_needed"]))
  if layers // 3 >= rounds:
    raise ValueError(
      f"config.round_steps={rounds} must be more than a third of "
      f"config.knobs.layers={layers}, since each fragment of three layers "
      "needs a step of its own"
    )
  model = predictor.Model(
    float(found["parameters"]), layers, float(found["step_s"])
  )

  def utilisation(method: predictor.SyncMethod, grid: np.ndarray) -> np.ndarray:
    """Returns the compute utilisation at each bandwidth (bit/s) of a grid."""
    return predictor.simulate(
      model, method, grid, volume_factor=2 * (count - 1) / count,
      latency_s=float(found["rtt_s"]) / 2,
    ).utilisation

  def needed(method: predictor.SyncMethod) -> dict[str, float | None]:
    """Returns the minimum bandwidth in bit/s, to 0.2%, by target, or None."""
    coarse, least = utilisation(method, _BANDWIDTHS), {}
    for target in targets:
      if coarse[-1] < target:
        least[str(target)] = None
        continue
      # A second grid refines the interval that contains the answer.
      first = int(np.argmax(coarse >= target))
      fine = np.geomspace(
        _BANDWIDTHS[max(0, first - 1)], _BANDWIDTHS[first], 65
      )
      reached = utilisation(method, fine) >= target
      least[str(target)] = float(fine[int(np.argmax(reached))])
    return least

  methods = predictor.paper_methods(layers, rounds)
  return {
    "sites": count, "round_steps": rounds, "layers": layers,
    "step_s": model.step_seconds, "rtt_s": float(found["rtt_s"]),
    "least": float(_BANDWIDTHS[0]), "most": float(_BANDWIDTHS[-1]),
    "rows": [
      {
        "method": name, "bits": method.bits, "sync_every": method.sync_every,
        "overlap_steps": method.overlap_steps,
        "bit_s": needed(method),
      }
      for name, method in methods.items()
    ],
  }


def _multipath() -> dict[str, Any]:
  """Returns the load of the fullest link by routing algorithm.

  "whole" is the load in flows on a whole leaf-spine network, "without_one" the
  load with one failed link.
  """
  net = link_loads.fabric(topologies.parse(_FABRIC))
  leaf, spine = sorted(set(net.leaf_of))[0], net.spines[0]
  # One failed link, in both directions.
  broken = link_loads.fabric(net.topology.without((leaf, spine), (spine, leaf)))
  rows = []
  for router in ("ecmp", "spray", "ethereal"):
    loads = []
    for each in (net, broken):
      sent = patterns.shift(each, 0)
      routes = link_loads.ROUTERS[router](each, sent)
      loads.append(float(
        link_loads.max_spine_link_load(
          each, link_loads.loads(each, sent, routes)
        )
      ))
    rows.append({
      "router": router, "whole": loads[0], "without_one": loads[1],
    })
  return {"fabric": _FABRIC, "rows": rows}


def _failure_rates(accelerators: float) -> dict[str, float]:
  """Returns failures per day by cause, at the published rates."""
  hours = sites.OBSERVED_GPUS * sites.OBSERVED_HOURS  # GPU-hours observed
  return {
    cause: float(24 * accelerators * count / hours)
    for cause, count in sites.INTERRUPTIONS.items()
  }


def _pod(config: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the planner's best plan for the training step of ``config``.

  Returns None if ``config`` is empty.
  """
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
    "parameters": plan["parameters"],
    "configuration": best["configuration"], "step_s": best["seconds"],
    "bytes": best["bytes"], "memory_bytes": cluster["memory_bytes"],
    "utilisation": flops / (best["seconds"] * peak),
  }
