"""Report of a datacentre's plan."""

from collections.abc import Mapping, Sequence
import functools
import itertools
import math
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed, yes_no

Row = Mapping[str, Any]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
# Units without SI prefixes; "" is for counts and fractions.
_PLAIN = ("", "days", "h", "s", "km", "$/MWh", "bit")
# Below this fraction of useful time there is no training progress.
_PROGRESS = 1e-6
_MAX_BARS = 10


def quantity(x: float | None, unit: str = "") -> str:
  """Formats a number with four digits and its unit."""
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


def _in_units(row: Row, unit: str, *keys: str) -> dict[str, Any]:
  """Returns a row with some of its numbers formatted with a unit."""
  return row | {key: quantity(row[key], unit) for key in keys}


def report(result: Mapping[str, Any]) -> Report:
  """Returns the plan, its assumptions, sensitivities, and curves."""
  parts: list[Table | str] = [
    Table(
      f"{group}: predicted from the assumptions below, not measured",
      [Column("meaning", "result"), "value"],
      [_in_units(row, row["unit"], "value") for row in rows],
    )
    for group, rows in itertools.groupby(
      result["results"], lambda row: row["group"]
    )
  ]
  parts += notes(result)
  multipath = result["multipath"]
  parts += [
    _published(result["paper"] + result["known"]),
    _trainable(result["trainable"]),
    _between(result["between"]),
    _scales(result["scales"]),
    Table(
      "failures per day by cause, at the rates of Llama 3's training",
      ["cause", Column("rate", "per day", quantity)],
      [{"cause": c, "rate": rate} for c, rate in result["causes"].items()],
    ),
    Table(
      f"a small example, {multipath['fabric']}: flows on the fullest uplink, "
      "each host sending one to the next leaf",
      ["router", Column("whole", "whole", quantity),
       Column("without_one", "without one link", quantity)],
      multipath["rows"],
    ),
    *_uncertainty(result),
    Table(
      "assumptions",
      [Column("name", "knob"), "value",
       Column("", "range", "{low} to {high}"), "mark",
       "source"],
      [_in_units(row, row["unit"], "value", "low", "high")
       for row in result["knobs"]],
    ),
  ]
  return Report(
    "Plan of a datacentre", parts, lambda: _figure(result),
  )


def notes(result: Mapping[str, Any]) -> list[str]:
  """Returns warnings about a plan, one per line."""
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
      f"{pod['memory_bytes'] / 1e9:.1f} GB; this machine is "
      "assumed to reach the same share, whatever its memory"
    )
  return found


def _published(rows: Sequence[Row]) -> Table:
  return Table(
    "published figures; consistent: an input is a figure of the same source, "
    "or was backed out of one, and the error is at most 5%; differs: such an "
    "input, and a larger error",
    [
      "what", Column("published", "published", " to ".join),
      "ours", Column("error", "error", "+.1%"),
      "verdict", "inputs",
      "source",
    ],
    [
      _in_units(row, row["unit"], "ours") | {
        "published": [quantity(x, row["unit"]) for x in row["published"]]
      }
      for row in rows
    ],
  )


def _trainable(rows: Sequence[Row]) -> Table:
  first = rows[0]
  return Table(
    "when a model can be trained without failures, at "
    f"{first['utilisation']:.0%} of the peak and "
    f"{first['tokens_per_parameter']:g} tokens per active parameter",
    [
      Column("parameters", "parameters", ".3g"),
      Column("precision", "format"), Column("active_share", "active", ".0%"),
      Column("days", "days", quantity),
      Column("in_time", f"in {first['days_allowed']:g}", yes_no),
      Column("ratio_allowed",
             "tokens per active parameter there is time for", quantity),
    ],
    rows,
  )


def _scales(rows: Sequence[Row]) -> Table:
  return Table(
    "machines of all sizes, the same knobs; fit: accelerators over those of "
    "a replica of the model",
    [
      Column("accelerators", "accelerators", ","),
      Column("budget", "budget", functools.partial(quantity, unit="$")),
      Column("facility_w", "power", functools.partial(quantity, unit="W")),
      Column("sites_needed", "sites", quantity),
      Column("fit", "fit", quantity),
      Column("largest", "largest model", ".3g"),
      Column("mtbf_s", "s between failures", quantity),
      Column("tiers", "tiers of switches", quantity),
    ],
    rows,
  )


def _between(between: Mapping[str, Any]) -> Table:

  def cell(bits: float | None) -> str:
    if bits is None:
      return "never: round trips"
    under = "up to " if bits <= between["least"] else ""
    return under + quantity(bits, "bit/s")

  return Table(
    f"bandwidth of each of {between['sites']} sites, each way, at which "
    f"compute takes a share of the time: {between['layers']} layers, steps of "
    f"{between['step_s']:.3g} s, {1e3 * between['rtt_s']:.3g} ms there and "
    "back",
    [
      "method", Column("sync_every", "steps"),
      Column("overlap_steps", "overlap"), Column("bits", "bits", "g"),
      *(Column(target, f"{float(target):.0%}", cell)
        for target in between["rows"][0]["bit_s"]),
    ],
    [row | row["bit_s"] for row in between["rows"]],
  )


def _uncertainty(result: Mapping[str, Any]) -> list[Table]:
  of = {row["name"]: row for row in result["results"]}
  tornado = result["tornado"]
  row, quantiles = of[tornado["target"]], ["5%", "50%", "95%"]
  return [
    Table(
      f"quantiles of {result['num_draws']:,} plans; parameters that are "
      "not decisions are drawn",
      [Column("meaning", "result"), *keyed(quantiles)],
      [
        {"meaning": of[key]["meaning"]} | dict(zip(
          quantiles, (quantity(x, of[key]["unit"]) for x in values), strict=True
        ))
        for key, values in result["quantiles"].items()
      ],
    ),
    Table(
      f"what decides: {row['meaning']}, "
      f"{quantity(tornado['value'], row['unit'])}",
      ["knob",
       Column("decided", "decided", yes_no),
       Column("low", "at its low end"), Column("high", "at its high end")],
      [_in_units(bar, row["unit"], "low", "high")
       for bar in tornado["bars"][:_MAX_BARS]],
    ),
  ]


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Returns bandwidths between sites, and a tornado of knobs."""
  lines = []
  for row in result["between"]["rows"]:
    points = [
      (float(target), bits / 1e12)
      for target, bits in row["bit_s"].items() if bits is not None
    ]
    if points:
      lines.append(plot.Line(
        *zip(*points, strict=True), label=row["method"], marker="o"
      ))
  tornado = result["tornado"]
  bars, value = tornado["bars"][:_MAX_BARS], tornado["value"]
  of = {row["name"]: row for row in result["results"]}[tornado["target"]]
  ends: list[Any] = [
    plot.Bars(
      range(len(bars)), [bar[end] - value for bar in bars],
      [value] * len(bars), f"at the knob's {end} end",
    )
    for end in ("low", "high")
  ]
  return plot.Figure(
    [
      plot.Panel(
        lines, "", "share of the time that compute is to take",
        plot.Axis("Tbit/s of a site, each way", "log"), legend="best",
        frame="open",
      ),
      plot.Panel(
        [*ends, plot.Rule(value, vertical=True, style="-", width=0.8)], "",
        f"{of['meaning']} ({of['unit'] or 'a number'})",
        plot.Axis(ticks=[(i, bar["knob"]) for i, bar in enumerate(bars)],
             reverse=True),
        legend="best", frame="open",
      ),
    ],
    (12, 4.5), 2, "predicted from assumptions, not measured",
  )
