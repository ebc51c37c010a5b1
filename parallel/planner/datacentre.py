"""A datacentre for training, from a budget, from its size or from a model.

Knobs are numbers with ranges and sources. Results are formulas of knobs and of
results before them (`parallel.planner.expressions`), so that a plan, a thousand
plans at once and a web page compute the same. Units are SI: bytes, bit/s, W, s;
days, hours and dollars where the name says so.

Compute is 6 FLOPs per active parameter and token (Kaplan et al., 2001.08361)
at a share of the peak. Tokens are a multiple of the active parameters, 20 in
Hoffmann et al., 2203.15556. A failure stops all, or with membership that is
elastic one replica; then the work since the last copy is lost, and a restart
waited for. The interval of copies is that of Young, CACM 1974, the goodput that
of Daly, FGCS 22, 2006, equation 21, whose failures are a Poisson process.

Inside a site each replica of the model is one rack of tensor ranks for each
stage. Bytes are those of this project's programs: two reductions over tensor
ranks of a layer, forward and back, a hop of the stream each way, and one
reduction of the gradients, all by rings in two bytes per number.
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from scipy import optimize

from parallel import checks
from parallel.hardware import sites
from parallel.planner import expressions
from parallel.planner.expressions import (
  Expression,
  ceil,
  exp,
  floor,
  least,
  log,
  most,
  name,
  sqrt,
)
from parallel.planner.knobs import KNOBS

GIVEN = ("budget", "accelerators", "model")
_FIBRE_KM_S = 2e5  # of light in glass, two thirds of that in a vacuum
class Result(NamedTuple):
  """What a plan says.

  Attributes:
    formula: Of knobs and of results before it.
    unit: Its unit; "" for a plain number.
    meaning: What it is, in a few words.
    group: The part of a report that it belongs to.
  """

  formula: Expression
  unit: str
  meaning: str
  group: str


_K = {key: name(key) for key in KNOBS}


def _size(given: str) -> dict[str, Result]:
  """Returns how many accelerators there are, and what they cost."""
  k, group = _K, "machine"
  share = k["compute_share"] / k["rack_price"]
  racks = floor(k["budget"] * share)
  count, price = name("racks") * k["per_rack"], None
  if given != "budget":
    count = k["accelerators"]
    if given == "model":
      active = k["parameters"] * k["active_share"]
      count = ceil(
        6 * active * active * k["tokens_per_parameter"] / (
          86400 * k["days_allowed"] * k["peak"] * k["utilisation"]
          * k["availability"]
        )
      )
    racks = ceil(name("accelerators") / k["per_rack"])
    price = name("accelerators") / k["per_rack"] / share
  found = {
    "racks": Result(racks, "", "racks", group),
    "accelerators": Result(count, "", "accelerators", group),
  }
  if price is None:
    return found
  found = dict(reversed(found.items()))  # racks are for the accelerators
  return found | {"budget": Result(price, "$", "budget", group)}


def _machine() -> dict[str, Result]:
  n, group = name, "machine"
  return {
    key: Result(formula, unit, meaning, group)
    for key, formula, unit, meaning in (
      ("it_w", n("accelerators") / n("per_rack") * n("rack_w") * n("overhead"),
       "W", "IT power"),
      ("facility_w", n("it_w") * n("pue"), "W", "power with cooling"),
      ("sites_needed", ceil(n("facility_w") / n("site_w")), "",
       "sites, each as large as the largest"),
      ("energy_year_wh", n("facility_w") * 8760, "Wh", "energy of a year"),
      ("energy_year_cost", n("energy_year_wh") / 1e6 * n("energy_price"), "$",
       "energy of a year"),
      ("memory", n("accelerators") * n("memory_bytes"), "B", "memory"),
      ("spares", ceil(
        n("accelerators") * n("repair_h") / n("mtbf_h")
        + 3 * sqrt(n("accelerators") * n("repair_h") / n("mtbf_h"))
      ), "", "accelerators being repaired, mean and three deviations"),
    )
  }


def _training() -> dict[str, Result]:
  n, group = name, "training"
  return {
    key: Result(formula, unit, meaning, group)
    for key, formula, unit, meaning in (
      ("speed", n("accelerators") * n("peak") * n("utilisation")
       * n("availability"), "FLOP/s", "speed of the machine"),
      ("active", n("parameters") * n("active_share"), "",
       "parameters that a token uses"),
      ("tokens", n("active") * n("tokens_per_parameter"), "", "tokens"),
      ("flops", 6 * n("active") * n("tokens"), "FLOP", "FLOPs of training"),
      ("days", n("flops") / (86400 * n("speed")), "days",
       "days of training without failures"),
      ("state", n("parameters") * n("state_bytes"), "B", "training state"),
      ("state_share", n("state") / n("memory"), "",
       "share of the memory that is state"),
      ("largest", sqrt(
        86400 * n("days_allowed") * n("speed")
        / (6 * n("tokens_per_parameter"))
      ) / n("active_share"), "", "parameters that can be trained in time"),
      ("ratio_allowed", 86400 * n("days_allowed") * n("speed")
       / (6 * n("active") * n("active")), "",
       "tokens per active parameter that there is time for"),
    )
  }


def _inside() -> dict[str, Result]:
  n, group = name, "inside a site"
  stream = n("microbatches") * n("microbatch_tokens") * n("width") * 2
  window = n("step_share") * n("step_s")
  return {
    key: Result(formula, unit, meaning, group)
    for key, formula, unit, meaning in (
      ("step_s", 6 * n("active") * n("batch_tokens") / n("speed"), "s",
       "time of a step"),
      ("stages", ceil(
        ceil(n("state") / (n("fill") * n("memory_bytes"))) / n("per_rack")
      ), "", "stages of a replica, a rack each"),
      ("replicas", most(
        1, floor(n("accelerators") / (n("stages") * n("per_rack")))
      ), "", "replicas of the model"),
      ("microbatches", most(
        1, floor(n("batch_tokens") / (n("replicas") * n("microbatch_tokens")))
      ), "", "microbatches of a replica"),
      ("bubble", (n("stages") - 1) / (
        n("chunks") * n("microbatches") + n("stages") - 1
      ), "", "share of a step in which stages idle"),
      ("tokens_of_tenth", 9 * (n("stages") - 1) / n("chunks")
       * n("microbatch_tokens") * n("replicas"), "",
       "tokens of a step of which stages idle a tenth"),
      ("width", sqrt(n("active") / (12 * n("layers"))), "",
       "channels of the stream"),
      ("gradient_bytes", 2 * n("parameters") / (n("stages") * n("per_rack")),
       "B", "gradients of an accelerator"),
      ("data_bits", 8 * 2 * (n("replicas") - 1) / n("replicas")
       * n("gradient_bytes") / window, "bit/s",
       "sent per accelerator, gradients"),
      ("stage_bits", 8 * 2 * stream / window, "bit/s",
       "sent per accelerator, from stage to stage"),
      ("tensor_bits", 8 * 4 * 2 * (n("per_rack") - 1) / n("per_rack")
       * n("layers") / n("stages") * stream / window, "bit/s",
       "sent per accelerator, tensor ranks"),
      ("endpoints", ceil(n("accelerators") / n("sites_needed")), "",
       "accelerators of a site"),
      ("tiers", most(1, ceil(
        log(n("endpoints") / 2) / log(n("radix") / 2) - 1e-9
      )), "", "tiers of a fat tree of a site"),
      ("links", n("endpoints") * n("tiers"), "", "links of that tree"),
      ("link_failures_day", 24 * n("accelerators") / n("network_mtbf_h"), "",
       "failures of links per day"),
      ("uplink_share", 2 / n("radix"), "",
       "of a leaf's uplinks that one failure takes"),
    )
  }


def _between() -> dict[str, Result]:
  n, group = name, "between sites"
  return {
    key: Result(formula, unit, meaning, group)
    for key, formula, unit, meaning in (
      ("cross_bits", 2 * (n("sites_needed") - 1) / n("sites_needed")
       * n("parameters") * n("gradient_bits") / (
         n("sync_every") * n("step_s")
       ), "bit/s", "sent by a site, each way"),
      ("rtt_s", 2 * n("distance_km") * n("detour") / _FIBRE_KM_S, "s",
       "round trip between sites"),
      ("in_flight", n("cross_bits") * n("rtt_s") / 8, "B",
       "under way in a round trip"),
    )
  }


def _failures() -> dict[str, Result]:
  n, group = name, "failures"

  def daly(mtbf: Expression, interval: Expression) -> Expression:
    return interval / (
      mtbf * exp(least(n("restart_s") / mtbf, 700))
      * (exp(least((interval + n("save_s")) / mtbf, 700)) - 1)
    )

  return {
    key: Result(formula, unit, meaning, group)
    for key, formula, unit, meaning in (
      ("mtbf_s", 3600 * n("mtbf_h") / n("accelerators"), "s",
       "time between failures of the machine"),
      ("save_s", n("state") / (n("accelerators") * n("save_rate")), "s",
       "time of a copy of the state"),
      ("interval_s", sqrt(2 * n("save_s") * n("mtbf_s")), "s",
       "time between copies"),
      ("save_traffic", n("state") / n("interval_s"), "B/s",
       "copied by all together"),
      ("loss", n("save_s") / n("interval_s")
       + n("interval_s") / (2 * n("mtbf_s")), "",
       "share lost to copies and work done again, first order"),
      ("goodput", daly(n("mtbf_s"), n("interval_s")), "",
       "share of the time that counts, if a failure stops all"),
      ("replica_mtbf_s", 3600 * n("mtbf_h") / least(
        n("accelerators"), n("stages") * n("per_rack")
      ), "s", "time between failures of a replica"),
      ("replica_goodput", daly(
        n("replica_mtbf_s"), sqrt(2 * n("save_s") * n("replica_mtbf_s"))
      ), "", "the same, if a failure stops one replica"),
      ("replica_days", n("days") / n("replica_goodput"), "days",
       "days of training, if a failure stops one replica"),
    )
  }


def results(given: str = "budget") -> dict[str, Result]:
  """Returns what a plan says, in the order in which it is computed.

  Args:
    given: What the size of the machine follows from, one of ``GIVEN``.
  """
  checks.known("given=", given, GIVEN)
  return (
    _size(given) | _machine() | _training() | _inside() | _between()
    | _failures()
  )


def formulas(given: str = "budget") -> dict[str, Expression]:
  """Returns the formulas of `results` alone."""
  return {key: result.formula for key, result in results(given).items()}


def knobs_of(given: str = "budget") -> list[str]:
  """Returns the knobs that a plan reads, in the order of ``KNOBS``."""
  found, read = results(given), set()
  for result in found.values():
    read.update(result.formula.names())
  own = {"accelerators": "accelerators", "budget": "budget"}.get(given)
  return [k for k in KNOBS if k in read and (k not in found or k == own)]


def rack(kind: str, precision: str) -> dict[str, float]:
  """Returns the knobs that a kind of rack sets.

  Raises:
    ValueError: The rack or the precision is unknown.
  """
  checks.known("rack=", kind, sites.RACKS)
  found = sites.RACKS[kind]
  checks.known("precision=", precision, found.flops)
  return {
    "per_rack": found.accelerators, "rack_w": found.power_w,
    "rack_price": found.price,
    "peak": found.flops[precision], "memory_bytes": found.memory_bytes,
  }


def plan(
  values: Mapping[str, Any] | None = None, given: str = "budget"
) -> dict[str, Any]:
  """Computes a plan.

  Args:
    values: Knobs that are not as in ``KNOBS``, numbers or arrays of equal
      shapes.
    given: What the size of the machine follows from, one of ``GIVEN``.

  Returns:
    Knobs and results by their names.

  Raises:
    ValueError: A knob is unknown or out of its bounds, or the budget buys no
      rack, or a rack needs more than a site has.
  """
  values = dict(values or {})
  for key, value in values.items():
    checks.known("knob ", key, KNOBS)
    _check(key, value)
  own = {key: knob.value for key, knob in KNOBS.items()} | values
  rack_w = _largest(own["rack_w"]) * _largest(own["overhead"])
  if rack_w * _largest(own["pue"]) > _smallest(own["site_w"]):
    raise ValueError(
      f"rack_w={own['rack_w']:g}: a rack takes {rack_w / 1e3:,.0f} kW and its "
      f"cooling, and the largest site has {own['site_w'] / 1e3:,.0f} kW"
    )
  spent = own["budget"] * own["compute_share"]
  if given == "budget" and _smallest(spent / own["rack_price"]) < 1:
    raise ValueError(
      f"budget={own['budget']:g} buys no rack: its share of "
      f"{own['compute_share']:g} is less than rack_price={own['rack_price']:g}"
    )
  return expressions.evaluate(formulas(given), own)


def _check(key: str, value: Any) -> None:
  knob = KNOBS[key]
  low, high = _smallest(value), _largest(value)
  if not (low > 0 and low >= knob.least and high <= knob.most
          and high < math.inf):
    bounds = f", at least {knob.least:g}" * (knob.least > 0)
    bounds += f", at most {knob.most:g}" * (knob.most < math.inf)
    raise ValueError(f"{key}={low:g} must be positive and finite{bounds}")


def _smallest(value: Any) -> float:
  return value if isinstance(value, int | float) else value.min()


def _largest(value: Any) -> float:
  return value if isinstance(value, int | float) else value.max()


def solve(
  key: str, target: str, wanted: float, values: Mapping[str, float],
  given: str = "budget",
) -> float:
  """Finds the knob with which a result is as wanted.

  Args:
    key: The knob. The result must rise or fall with it.
    target: The result.
    wanted: What it is to be.
    values: The other knobs, as for `plan`.
    given: As for `plan`.

  Raises:
    ValueError: No value from a thousandth of the knob's range to a thousand
      times it gives that.
  """
  knob = KNOBS[key]
  low = max(knob.least, knob.low / 1e3, 1e-12)
  high = min(knob.most, knob.high * 1e3)

  def over(value: float) -> float:
    return float(plan({**values, key: value}, given)[target]) - wanted

  try:
    return float(optimize.brentq(over, low, high, rtol=1e-12))
  except ValueError as error:
    raise ValueError(
      f"no {key} from {low:g} to {high:g} gives {target}={wanted:g}"
    ) from error


def fill(
  power_w: float, places: Mapping[str, float]
) -> tuple[dict[str, float], float]:
  """Spreads a machine over sites, the largest first.

  Args:
    power_w: Watts of the machine with cooling.
    places: Watts that each site can give, by name.

  Returns:
    Watts of each site that is used, and what is left over.

  Raises:
    ValueError: There is no site, or one without power.
  """
  if not places:
    raise ValueError("sites=() must have at least one site")
  found = {}
  for site in sorted(places, key=lambda key: -places[key]):
    if not places[site] > 0:
      raise ValueError(f"site {site} has {places[site]:g} W: it must have some")
    if power_w > 0:
      found[site] = min(power_w, places[site])
      power_w -= found[site]
  return found, max(0.0, power_w)
