"""Prints a datacentre's plan."""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

from caatnet.show import tables

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def quantity(x: float | None, unit: str = "") -> str:
  """Returns a number with its unit, of four digits."""
  if x is None:
    return "-"
  if unit in ("", "days", "h", "s", "$/MWh"):
    digits = f"{x:.4g}" if not 1e3 <= abs(x) < 1e9 else f"{x:,.0f}"
    return f"{digits} {unit}".strip()
  for prefix in _PREFIXES:
    if abs(x) < 1000:
      return f"{x:.4g} {prefix}{unit}"
    x /= 1000
  return f"{x:.4g} Y{unit}"


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
  _sites(result["sites"])
  if result["pod"]:
    pod = result["pod"]
    print(
      f"share of the peak: {pod['utilisation']:.1%}, predicted by the planner "
      f"for {pod['devices']} devices of {pod['cluster']}, "
      f"{pod['configuration']}, {pod['bytes'] / 1e9:.1f} of "
      f"{pod['memory_bytes'] / 1e9:.1f} GB"
    )
  _published("the paper's figures", result["paper"])
  _published("machines that exist", result["known"])
  tables.table(
    "when a model can be trained, at "
    f"{result['trainable'][0]['utilisation']:.0%} of the peak and "
    f"{result['trainable'][0]['tokens_per_parameter']:g} tokens per active "
    "parameter",
    ["parameters", "format", "active", "days", "days allowed",
     "tokens per active parameter there is time for"],
    [
      [quantity(row["parameters"]), row["precision"],
       f"{row['active_share']:.0%}", quantity(row["days"]),
       quantity(row["days_allowed"]), quantity(row["ratio_allowed"])]
      for row in result["trainable"]
    ],
  )
  _between(result["between"])
  tables.table(
    "machines of all sizes, the same knobs",
    ["accelerators", "budget", "power", "sites", "parameters in time",
     "s between failures", "tiers of switches"],
    [
      [f"{row['accelerators']:,}", quantity(row["budget"], "$"),
       quantity(row["facility_w"], "W"), quantity(row["sites_needed"]),
       f"{row['largest']:.3g}", quantity(row["mtbf_s"]),
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
    f"flows on the fullest uplink of {multipath['fabric']}, each host sending "
    "one to the next leaf",
    ["router", "whole", "without one link"],
    [[row["router"], quantity(row["whole"]), quantity(row["without_one"])]
     for row in multipath["rows"]],
  )
  _uncertainty(result)
  tables.table(
    "assumptions", ["knob", "value", "range", "mark", "source"],
    [
      [row["name"], quantity(row["value"], row["unit"]),
       f"{quantity(row['low'])} to {quantity(row['high'])}", row["mark"],
       row["source"]]
      for row in result["knobs"]
    ],
  )


def _sites(places: Mapping[str, Any]) -> None:
  used = ", ".join(
    f"{name} {quantity(watts, 'W')} of "
    f"{quantity(places['limits_w'][name], 'W')}"
    for name, watts in places["used_w"].items()
  )
  print(f"sites: {used}")
  if places["missing_w"]:
    print(f"the sites are too small by {quantity(places['missing_w'], 'W')}")


def _published(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
  tables.table(
    f"{title}; consistent: an input was backed out of outputs of the same "
    "source",
    ["what", "published", "ours", "error", "verdict", "inputs"],
    [
      [row["what"],
       " to ".join(quantity(x, row["unit"]) for x in row["published"]),
       quantity(row["ours"], row["unit"]), f"{row['error']:+.1%}",
       row["verdict"], row["inputs"]]
      for row in rows
    ],
  )


def _between(rows: Sequence[Mapping[str, Any]]) -> None:
  targets = list(rows[0]["bit_s"])
  tables.table(
    "bandwidth between two sites, each way, at which compute takes a share of "
    "the time",
    ["method", *(f"{float(t):.0%}" for t in targets)],
    [
      [row["method"], *(quantity(row["bit_s"][t], "bit/s") for t in targets)]
      for row in rows
    ],
  )


def _uncertainty(result: Mapping[str, Any]) -> None:
  of = {row["name"]: row for row in result["results"]}
  tables.table(
    f"quantiles of {result['num_draws']:,} plans; drawn is what nobody decides",
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
       quantity(bar["low"], row["unit"]),
       quantity(bar["high"], row["unit"])]
      for bar in tornado["bars"][:10]
    ],
  )
