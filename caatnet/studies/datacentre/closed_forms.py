"""Closed-form plan of a training datacentre, from a budget, a size or a model.

Knobs are numbers with ranges and sources. Results are formulas of knobs and of
earlier results (`caatnet.studies.datacentre.expressions`), so that one plan, a
thousand plans at once and a web page use the same formulas. Units are SI:
bytes, bit/s, W, s; days, hours and dollars if the name ends in them.

Compute is 6 FLOPs per active parameter and token (Kaplan et al., 2001.08361) at
a fraction of the peak. Tokens are a multiple of the active parameters, 20 in
Hoffmann et al., 2203.15556.

Inside a site, each replica of the model has one scale-up domain of tensor ranks
per stage, without any sharding over replicas. The fraction of the peak that
this layout permits is a separate result: if it is less than the assumed
fraction, another layout is needed. Bytes are those of this project's programs:
per layer, two all-reduces over tensor ranks in the forward and two in the
backward; per stage, one send of the residual stream in each direction; and one
all-reduce of the gradients. They use rings, with two bytes per number.

Failures occur at random, at a constant rate. A failure stops all replicas or,
with elastic membership, one of them. The work since the last checkpoint is
lost; a restart takes time and may itself fail. The checkpoint interval follows
Young, CACM 1974, and the fraction of useful time Daly, FGCS 22, 2006, equation
21.
"""

from collections.abc import Iterable, Mapping
import math
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from caatnet.studies.datacentre import expressions
from caatnet.studies.datacentre.expressions import (
  Expression,
  ceil,
  exp,
  floor,
  log,
  maximum,
  minimum,
  sqrt,
  variable,
)
from caatnet.studies.datacentre.knobs import KNOBS
from parallel.base import checks
from parallel.plans.hardware import sites

GIVEN_QUANTITIES = ("budget", "accelerators", "model")
_DAY_S = 86_400
_FIBRE_KM_S = 2e5  # speed of light in glass, two thirds of that in a vacuum
_ITEM_BYTES = 2  # bytes per activation or gradient element inside a site
_MAX_EXPONENT = 300.0  # exp(2 * _MAX_EXPONENT) is still finite in float64
# Fraction of the published interruptions that are due to hardware.
_HARDWARE_FRACTION = 1 - sum(
  sites.INTERRUPTIONS[cause] for cause in sites.SOFTWARE_CAUSES
) / sum(sites.INTERRUPTIONS.values())


class ResultSpec(NamedTuple):
  """One result of a plan.

  Attributes:
    formula: Formula in knobs and earlier results.
    unit: Unit; "" for a plain number.
    meaning: Short description.
    group: Title of its table in the report.
  """

  formula: Expression
  unit: str
  meaning: str
  group: str


_Rows = Iterable[tuple[str, Expression, str, str]]


def _group(title: str, rows: _Rows) -> dict[str, ResultSpec]:
  return {
    key: ResultSpec(formula, unit, meaning, title)
    for key, formula, unit, meaning in rows
  }


def _size_specs(given: str) -> dict[str, ResultSpec]:
  """Returns the formulas of the machine's size, from the given quantity."""
  n = variable
  if given == "budget":
    bought = floor(n("budget") * n("compute_share") / n("rack_price"))
    return _group("machine", (
      ("racks", bought, "", "racks"),
      ("accelerators", n("racks") * n("per_rack"), "", "accelerators"),
    ))
  count = n("accelerators")
  if given == "model":
    active = n("parameters") * n("active_share")
    # 6 FLOPs per parameter and token over the FLOPs of one accelerator in the
    # allowed time.
    count = ceil(6 * active * active * n("tokens_per_parameter") / (
      _DAY_S * n("days_allowed") * n("peak") * n("utilisation")
      * n("availability")
    ))
  price = n("rack_price") / n("per_rack") / n("compute_share")
  return _group("machine", (
    ("accelerators", count, "", "accelerators"),
    ("racks", ceil(n("accelerators") / n("per_rack")), "", "racks"),
    ("budget", n("accelerators") * price, "$", "budget"),
  ))


def _machine_specs() -> dict[str, ResultSpec]:
  n = variable
  # Mean number of accelerators in repair (Little's law).
  in_repair = n(
    "accelerators"
  ) * n("repair_h") * _HARDWARE_FRACTION / n("mtbf_h")
  return _group("machine", (
    ("it_w", n("accelerators") / n("per_rack") * n("rack_w") * n("overhead"),
     "W", "IT power"),
    ("facility_w", n("it_w") * n("pue"), "W", "power with cooling"),
    ("sites_needed", ceil(n("facility_w") / n("site_w")), "", "sites"),
    ("energy_year_wh", n("facility_w") * 8760, "Wh", "energy per year"),
    ("energy_year_cost", n("energy_year_wh") / 1e6 * n("energy_price"), "$",
     "price of the energy per year"),
    ("memory", n("accelerators") * n("memory_bytes"), "B", "memory"),
    # Mean plus three standard deviations of a Poisson process.
    ("spares", ceil(in_repair + 3 * sqrt(in_repair)), "",
     "spare accelerators, so that repairs stop nothing"),
  ))


def _training_specs() -> dict[str, ResultSpec]:
  n = variable
  allowed = _DAY_S * n("days_allowed") * n("speed")
  return _group("training", (
    ("speed", n("accelerators") * n("peak") * n("utilisation")
     * n("availability"), "FLOP/s", "speed of the machine"),
    ("active", n("parameters") * n("active_share"), "",
     "parameters that a token uses"),
    ("tokens", n("active") * n("tokens_per_parameter"), "", "tokens"),
    ("flops", 6 * n("active") * n("tokens"), "FLOP", "FLOPs of training"),
    ("days", n("flops") / (_DAY_S * n("speed")), "days",
     "days of training without failures"),
    ("state", n("parameters") * n("state_bytes"), "B", "training state"),
    ("state_share", n("state") / n("memory"), "",
     "training state over all memory"),
    ("largest", minimum(
      sqrt(allowed / (6 * n("tokens_per_parameter"))) / n("active_share"),
      n("memory") * n("fill") / n("state_bytes"),
    ), "", "parameters for which there is time and memory"),
    ("ratio_allowed", allowed / (6 * n("active") * n("active")), "",
     "tokens per active parameter that the time allows"),
  ))


def _inside_site_specs() -> dict[str, ResultSpec]:
  n = variable
  window = n("step_share") * n("step_s")
  # Bytes of the residual stream that a replica's stage boundary carries per
  # step and direction.
  stream = (
    n("microbatches") * n("microbatch_tokens") * n("width") * _ITEM_BYTES
  )
  needed = ceil(n("state") / (n("fill") * n("memory_bytes")))  # per replica
  return _group("inside a site", (
    ("step_s", 6 * n("active") * n("batch_tokens") / n("speed"), "s",
     "time of a step"),
    ("tensor", minimum(n("per_domain"), n("accelerators")), "",
     "tensor ranks: the accelerators of a scale-up domain"),
    ("stages", ceil(needed / n("tensor")), "",
     "pipeline stages that a replica's state needs"),
    ("fit", n("accelerators") / (n("stages") * n("tensor")), "",
     "accelerators / accelerators of a replica; below 1 none fits"),
    # No more replicas than the batch has microbatches.
    ("replicas", maximum(1, minimum(
      floor(n("fit")), floor(n("batch_tokens") / n("microbatch_tokens"))
    )), "", "replicas of the model"),
    ("microbatches", maximum(
      1, floor(n("batch_tokens") / (n("replicas") * n("microbatch_tokens")))
    ), "", "microbatches of a replica in a step"),
    # Bubble of 1F1B, interleaved if there are chunks.
    ("bubble", (n("stages") - 1) / (
      n("chunks") * n("microbatches") + n("stages") - 1
    ), "", "share of a step in which stages idle"),
    ("layout_share", (1 - n("bubble")) * minimum(
      1, n("replicas") * n("stages") * n("tensor") / n("accelerators")
    ), "", "upper bound of this layout's share of the peak"),
    # Solves bubble = 1/10 for the tokens of a step.
    ("tokens_of_tenth", 9 * (n("stages") - 1) / n("chunks")
     * n("microbatch_tokens") * n("replicas"), "",
     "tokens per step at which stages idle a tenth of the time"),
    # A layer has 12 width^2 parameters.
    ("width", sqrt(n("active") / (12 * n("layers"))), "",
     "width of the stream"),
    ("gradient_bytes", _ITEM_BYTES * n("parameters") / (
      n("stages") * n("tensor")
    ), "B", "gradients of an accelerator"),
    # Rings send 2 (n - 1) / n of the reduced bytes; 8 bits are a byte.
    ("data_bits", 8 * 2 * (n("replicas") - 1) / n("replicas")
     * n("gradient_bytes") / window, "bit/s",
     "rate of an accelerator to other replicas: gradients"),
    ("stage_bits", 8 * 2 * minimum(n("stages") - 1, 1) * stream / window,
     "bit/s", "rate of an accelerator to other stages, both directions"),
    ("tensor_bits", 8 * 4 * 2 * (n("tensor") - 1) / n("tensor") * n("layers")
     / n("stages") * stream / window, "bit/s",
     "rate of an accelerator to tensor ranks, 4 reductions per layer"),
    ("scale_out_share", (n("data_bits") + n("stage_bits"))
     / n("scale_out_bits"), "", "rates of gradients and stages / link rate"),
    ("scale_up_share", n("tensor_bits") / n("scale_up_bits"), "",
     "rate to tensor ranks / its rate inside a domain"),
    ("endpoints", ceil(n("accelerators") / n("sites_needed")), "",
     "accelerators of a site"),
    # A full tree of k tiers has 2 (radix / 2)^k hosts. If it is exactly full,
    # rounding must not add a tier.
    ("tiers", maximum(1, ceil(
      log(n("endpoints") / 2) / log(n("radix") / 2) - 1e-9
    )), "", "tiers of a fat tree of a site's accelerators"),
    ("links", n("endpoints") * n("tiers"), "", "links of the fat tree"),
    ("link_failures_day", 24 * n("accelerators") / n("network_mtbf_h"), "",
     "failures of links per day"),
    ("uplink_share", 2 / n("radix"), "",
     "share of a switch's uplinks that one link failure removes"),
  ))


def _between_site_specs() -> dict[str, ResultSpec]:
  n = variable
  return _group("between sites", (
    ("cross_bits", 2 * (n("sites_needed") - 1) / n("sites_needed")
     * n("parameters") * n("gradient_bits") / (
       n("sync_every") * n("step_s")
     ), "bit/s", "rate of a site, in each direction"),
    ("rtt_s", 2 * n("distance_km") * n("detour") / _FIBRE_KM_S, "s",
     "round trip between sites"),
    ("in_flight", n("cross_bits") * n("rtt_s") / 8, "B",
     "bytes in flight in a round trip"),
  ))


def _failure_specs() -> dict[str, ResultSpec]:
  n = variable

  def daly(mtbf: Expression, interval: Expression, save: Expression):
    # Daly's expected time per interval; exponents are capped to stay finite.
    part = minimum((interval + save) / mtbf, _MAX_EXPONENT)
    # exp(part) - 1 without cancellation for a small `part` (Kahan): `grown` has
    # the same rounding error in `grown - 1` and in log(grown).
    grown = maximum(exp(part), 1 + np.finfo(float).eps)
    work = (grown - 1) * part / log(grown)
    return interval / (
      mtbf * exp(minimum(n("restart_s") / mtbf, _MAX_EXPONENT)) * work
    )

  # Number of accelerators of a replica.
  replica = minimum(n("accelerators"), n("stages") * n("tensor"))
  return _group("failures", (
    ("mtbf_s", 3600 * n("mtbf_h") / n("accelerators"), "s",
     "time between failures of the machine"),
    ("save_s", n("state") / (n("accelerators") * n("save_rate")), "s",
     "time of a copy of the state by all accelerators"),
    ("interval_s", sqrt(2 * n("save_s") * n("mtbf_s")), "s",
     "time between copies"),
    ("save_traffic", n("state") / (n("interval_s") + n("save_s")), "B/s",
     "rate of copies by all accelerators"),
    ("loss", n("save_s") / n("interval_s")
     + n("interval_s") / (2 * n("mtbf_s")), "",
     "share lost to copies and to work done again, first order"),
    ("goodput", daly(n("mtbf_s"), n("interval_s"), n("save_s")), "",
     "useful share of the time, if a failure stops all replicas"),
    ("replica_mtbf_s", 3600 * n("mtbf_h") / replica, "s",
     "time between failures of a replica"),
    ("replica_save_s", n("state") / (replica * n("save_rate")), "s",
     "time of a copy of the state by one replica"),
    ("replica_interval_s", sqrt(2 * n("replica_save_s") * n("replica_mtbf_s")),
     "s", "time between a replica's copies"),
    ("replica_goodput", daly(
      n("replica_mtbf_s"), n("replica_interval_s"), n("replica_save_s")
    ), "", "useful share of the time, if a failure stops one replica"),
    ("replica_days", n("days") / n("replica_goodput"), "days",
     "days of training, if a failure stops a replica"),
  ))


def result_specs(given: str = "budget") -> dict[str, ResultSpec]:
  """Returns formula and unit of each result, in the order of computation.

  Args:
    given: Quantity that determines the size of the machine, one of
      ``GIVEN_QUANTITIES``.
  """
  checks.known("given=", given, GIVEN_QUANTITIES)
  return (
    _size_specs(given)
    | _machine_specs()
    | _training_specs()
    | _inside_site_specs()
    | _between_site_specs()
    | _failure_specs()
  )


def formulas(given: str = "budget") -> dict[str, Expression]:
  """Returns the formula of each result, in the order of computation."""
  return {key: result.formula for key, result in result_specs(given).items()}


def knobs_of(given: str = "budget") -> list[str]:
  """Returns the names of the knobs that a plan reads, ordered as ``KNOBS``."""
  found, read = result_specs(given), set()
  for result in found.values():
    read.update(result.formula.names())
  return [k for k in KNOBS if k in read and (k not in found or k == given)]


def plan(
  values: Mapping[str, Any] | None = None, given: str = "budget"
) -> dict[str, Any]:
  """Computes a plan.

  Example:
    A fully dense model of 405e9 parameters, with 20 tokens per parameter:

    >>> found = plan({"parameters": 405e9, "active_share": 1})
    >>> f"{found['flops']:.3g} FLOPs"
    '1.97e+25 FLOPs'

  Args:
    values: Knobs that differ from ``KNOBS``, numbers or float64 arrays of equal
      shapes.
    given: Quantity that determines the size of the machine, one of
      ``GIVEN_QUANTITIES``.

  Returns:
    Knobs and results by their names.

  Raises:
    ValueError: A knob is unknown or out of its bounds, the budget is below the
      price of a rack, or a rack needs more power than a site has.
  """
  own = with_defaults(values or {})
  spent = np.min(own["budget"] * own["compute_share"])
  if given == "budget" and spent < np.max(own["rack_price"]):
    raise ValueError(
      f"budget={np.min(own['budget']):g} must pay for at least one rack: "
      f"{spent:g} of it are for racks, and "
      f"rack_price={np.max(own['rack_price']):g}"
    )
  needed, there = np.max(_rack_w(own)), np.min(own["site_w"])
  if needed > there:
    raise ValueError(
      f"site_w={there:g} must be enough for one rack: a rack takes "
      f"{needed / 1000.0:,.1f} kW with its share of the network and of "
      f"cooling, and a site has {there / 1000.0:,.1f} kW"
    )
  return expressions.evaluate(formulas(given), own)


def is_feasible(values: Mapping[str, Any], given: str = "budget") -> np.ndarray:
  """Returns which plans `plan` would accept, bool of the knobs' shape.

  Args:
    values: Knobs within their bounds, as for `plan`.
    given: Quantity that determines the size, as for `plan`.
  """
  own = with_defaults(values)
  found = np.asarray(_rack_w(own) <= own["site_w"])
  if given == "budget":
    bought = own["budget"] * own["compute_share"] >= own["rack_price"]
    found = found & bought
  return found


def _rack_w(own: Mapping[str, Any]) -> Any:
  return own["rack_w"] * own["overhead"] * own["pue"]


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns all knobs: the given values, and the defaults of the others.

  Raises:
    ValueError: A knob is unknown or out of its bounds.
  """
  for key, value in values.items():
    checks.known("knob ", key, KNOBS)
    knob, x = KNOBS[key], np.asarray(value, float)
    inside = (x > 0) & (x >= knob.least) & (x <= knob.most) & (x < math.inf)
    if not inside.all():
      bounds = f", at least {knob.least:g}" * (knob.least > 0)
      bounds += f", at most {knob.most:g}" * (knob.most < math.inf)
      raise ValueError(
        f"{key}={x[~inside].flat[0]:g} must be positive and finite{bounds}"
      )
    if knob.whole and (x != np.floor(x)).any():
      raise ValueError(f"{key}={x.flat[0]:g} must be an integer")
  # Products of Python's or NumPy's integers could overflow.
  own = {
    key: np.asarray(x, float) if np.ndim(x) else float(x)
    for key, x in values.items()
  }
  return {key: knob.value for key, knob in KNOBS.items()} | own


def solve(
  key: str, target: str, wanted: float,
  values: Mapping[str, float] | None = None,
) -> float:
  """Returns the value of a knob at which a result has a wanted value.

  Args:
    key: Knob. The result must be monotonic in it.
    target: Name of the result.
    wanted: Value that the result must reach.
    values: Other knobs, as for `plan` with a given budget.

  Raises:
    ValueError: The knob or the result is unknown, or no value of the knob from
      ``low / 1000`` to ``1000 * high`` gives the wanted value.
  """
  checks.known("target=", target, result_specs("budget"))
  checks.known("knob ", key, knobs_of("budget"))
  knob = KNOBS[key]
  # The search interval of Brent's method; the ends must have opposite signs.
  low = max(knob.least, knob.low / 1e3)
  high = min(knob.most, knob.high * 1e3)

  def over(value: float) -> float:
    own = {**(values or {}), key: value}
    return float(plan(own)[target]) - wanted

  try:
    return float(optimize.brentq(over, low, high, rtol=1e-12))
  except ValueError as error:
    raise ValueError(
      f"no {key} from {low:g} to {high:g} gives {target}={wanted:g}: {error}"
    ) from error


def distribute_power(
  power_w: float, places: Mapping[str, float]
) -> tuple[dict[str, float], float]:
  """Distributes a machine's power over sites, the largest site first.

  Args:
    power_w: Power of the machine including cooling, in watts.
    places: Available power of each site in watts, by name.

  Returns:
    Watts of each site that is used, and the watts that do not fit.

  Raises:
    ValueError: There is no site, or a site has no power.
  """
  if not places:
    raise ValueError("sites=() must have at least one site")
  found = {}
  for site in sorted(places, key=lambda key: -places[key]):
    if not 0 < places[site] <= sites.MAX_W:
      raise ValueError(
        f"site {site} has {places[site]:g} W: must be positive and at most "
        f"{sites.MAX_W:g}"
      )
    if power_w > 0:
      found[site] = min(power_w, places[site])
      power_w -= found[site]
  return found, max(0.0, power_w)
