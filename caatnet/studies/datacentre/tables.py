"""Prints a datacentre's plan."""

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any

from caatnet.show import tables

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
# Units that take no prefix; "" is that of counts and shares.
_PLAIN = ("", "days", "h", "s", "km", "$/MWh", "bit")
# Below this share of the time nothing is trained.
_PROGRESS = 1e-6


def quantity(x: float | None, unit: str = "") -> str:
  """Returns a number with its unit, of four digits."""
  if x is None:
    return "-"
  if unit == "FLOP":
    return f"{x:.4g} FLOP"
  if unit in _PLAIN:
    digits = f"{x:.4g}" if not 1e3 <= abs(x) < 1e10 else f"{x:,.0f}"
    return f"{digits} {unit}".strip()
  power = min(8, int(math.log10(abs(x)) // 3)) if abs(x) >= 1 else 0
  prefix = _PREFIXES[power]
  if unit == "$":
    return f"${x / 1e3**power:.4g}{'B' if prefix == 'G' else prefix}"
  return f"{x / 1e3**power:.4g} {prefix}{unit}"


def show(result: Mapping[str, Any]) -> None:
  """Prints the plan, what it rests on, and what decides.

  Args:
    result: What `caatnet.studies.datacentre.study.run` returned.
  """
  groups = itertools.groupby(result["results"], lambda row: row["group"])
  for group, rows in groups:
    tables.table(
      f"{group}: predicted from the assumptions below, not measured",
      ["result", "value"],
      [[row["meaning"], quantity(row["value"], row["unit"])] for row in rows],
    )
  for line in notes(result):
    print(line)
  _published(result["paper"] + result["known"])
  first = result["trainable"][0]
  tables.table(
    "when a model can be trained without failures, at "
    f"{first['utilisation']:.0%} of the peak and "
    f"{first['tokens_per_parameter']:g} tokens per active parameter",
    ["parameters", "format", "active", "days", f"in {first['days_allowed']:g}",
     "tokens per active parameter there is time for"],
    [
      [f"{row['parameters']:.3g}", row["precision"],
       f"{row['active_share']:.0%}", quantity(row["days"]),
       "yes" if row["in_time"] else "no", quantity(row["ratio_allowed"])]
      for row in result["trainable"]
    ],
  )
  _between(result["between"])
  tables.table(
    "machines of all sizes, the same knobs; fit: accelerators over those of a "
    "replica of the model",
    ["accelerators", "budget", "power", "sites", "fit", "largest model",
     "s between failures", "tiers of switches"],
    [
      [f"{row['accelerators']:,}", quantity(row["budget"], "$"),
       quantity(row["facility_w"], "W"), quantity(row["sites_needed"]),
       quantity(row["fit"]), f"{row['largest']:.3g}", quantity(row["mtbf_s"]),
       quantity(row["tiers"])]
      for row in result["scales"]
    ],
  )
  tables.table(
    "failures per day by cause, at the rates of Llama 3's training",
    ["cause", "per day"],
    [[cause, quantity(rate)] for cause, rate in result["causes"].items()],
  )
  multipath = result["multipath"]
  tables.table(
    f"a small example, {multipath['fabric']}: flows on the fullest uplink, "
    "each host sending one to the next leaf",
    ["router", "whole", "without one link"],
    [[row["router"], quantity(row["whole"]), quantity(row["without_one"])]
     for row in multipath["rows"]],
  )
  _uncertainty(result)
  tables.table(
    "assumptions", ["knob", "value", "range", "mark", "source"],
    [
      [row["name"], quantity(row["value"], row["unit"]),
       f"{quantity(row['low'], row['unit'])} to "
       f"{quantity(row['high'], row['unit'])}", row["mark"], row["source"]]
      for row in result["knobs"]
    ],
  )


def notes(result: Mapping[str, Any]) -> list[str]:
  """Returns what a reader of a plan must know, a line each."""
  of = {row["name"]: row["value"] for row in result["results"]}
  knobs = {row["name"]: row["value"] for row in result["knobs"]}
  places, pod = result["sites"], result["pod"]
  used = ", ".join(
    f"{name} {quantity(watts, 'W')} of "
    f"{quantity(places['limits_w'][name], 'W')}"
    for name, watts in places["used_w"].items()
  )
  found = [f"sites: {used}"]
  if places["missing_w"]:
    found.append(
      f"the sites are too small by {quantity(places['missing_w'], 'W')}"
    )
  if of["fit"] < 1:
    found.append(
      "the model does not fit: a replica's state needs "
      f"{1 / of['fit']:,.1f} times the accelerators"
    )
  if of["layout_share"] < knobs["utilisation"]:
    found.append(
      f"with the layout above at most {of['layout_share']:.0%} of the peak are "
      f"reached, not {knobs['utilisation']:.0%} as assumed: it takes another "
      "one, such as state that replicas share (ZeRO), chunks, or larger steps"
    )
  if of["goodput"] < _PROGRESS:
    found.append("if a failure stops all there is no progress")
  if pod:
    found.append(
      f"share of the peak: {pod['utilisation']:.1%}, predicted by the planner "
      f"for {pod['parameters']:.3g} parameters on {pod['devices']} devices of "
      f"{pod['cluster']}, {pod['configuration']}, {pod['bytes'] / 1e9:.1f} of "
      f"{pod['memory_bytes'] / 1e9:.1f} GB; the share is taken for this "
      "machine as it is, the pod's memory bounds nothing here"
    )
  return found


def _published(rows: Sequence[Mapping[str, Any]]) -> None:
  tables.table(
    "published figures; consistent: an input is a figure of the same source, "
    "or was backed out of one",
    ["what", "published", "ours", "error", "verdict", "inputs", "source"],
    [
      [row["what"],
       " to ".join(quantity(x, row["unit"]) for x in row["published"]),
       quantity(row["ours"], row["unit"]), f"{row['error']:+.1%}",
       row["verdict"], row["inputs"], row["source"]]
      for row in rows
    ],
  )


def _between(between: Mapping[str, Any]) -> None:
  rows = between["rows"]
  targets = list(rows[0]["bit_s"])

  def cell(bits: float | None) -> str:
    if bits is None:
      return "never: round trips"
    under = "up to " if bits <= between["least"] else ""
    return under + quantity(bits, "bit/s")

  tables.table(
    f"bandwidth of each of {between['sites']} sites, each way, at which "
    f"compute takes a share of the time: {between['layers']} layers, steps of "
    f"{between['step_s']:.3g} s, {1e3 * between['rtt_s']:.3g} ms there and "
    "back",
    ["method", "steps", "overlap", "bits", *(f"{float(t):.0%}"
                                             for t in targets)],
    [
      [row["method"], str(row["sync_every"]), str(row["overlap_steps"]),
       f"{row['bits']:g}", *(cell(row["bit_s"][t]) for t in targets)]
      for row in rows
    ],
  )


def _uncertainty(result: Mapping[str, Any]) -> None:
  of = {row["name"]: row for row in result["results"]}
  tables.table(
    f"quantiles of {result['num_draws']:,} plans; drawn are knobs that nobody "
    "decides",
    ["result", "5%", "50%", "95%"],
    [
      [of[key]["meaning"], *(quantity(x, of[key]["unit"]) for x in values)]
      for key, values in result["quantiles"].items()
    ],
  )
  tornado = result["tornado"]
  row = of[tornado["target"]]
  tables.table(
    f"what decides: {row['meaning']}, "
    f"{quantity(tornado['value'], row['unit'])}",
    ["knob", "decided", "at its low end", "at its high end"],
    [
      [bar["knob"], "yes" if bar["decided"] else "no",
       quantity(bar["low"], row["unit"]), quantity(bar["high"], row["unit"])]
      for bar in tornado["bars"][:10]
    ],
  )
