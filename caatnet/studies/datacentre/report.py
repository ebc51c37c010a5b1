"""Report of a datacentre's plan."""

from collections.abc import Mapping
import itertools
import math
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table

Row = Mapping[str, Any]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
# Units without SI prefixes; "" is for counts and fractions.
_UNPREFIXED_UNITS = ("", "days", "h", "s", "km", "$/MWh", "bit")
# Below this fraction of useful time there is no training progress.
_MIN_GOODPUT = 1e-6
_MAX_BARS = 10
_QUANTILES = ("5%", "50%", "95%")


def format_quantity(x: float | None, unit: str = "") -> str:
  """Formats a number with four digits and its unit."""
  if x is None:
    return "-"
  if unit == "FLOP":
    return f"{x:.4g} FLOP"
  if unit in _UNPREFIXED_UNITS:
    digits = f"{x:.4g}" if not 1e3 <= abs(x) < 1e10 else f"{x:,.0f}"
    return f"{digits} {unit}".strip()
  power = min(8, int(math.log10(abs(x)) // 3)) if abs(x) >= 1 else 0
  prefix = _PREFIXES[power]
  if unit == "$":
    return f"${x / 1e3**power:.4g}{'B' if prefix == 'G' else prefix}"
  return f"{x / 1e3**power:.4g} {prefix}{unit}"


def _in_units(row: Row, unit: str, *keys: str) -> dict[str, Any]:
  """Returns a row with its numbers at ``keys`` formatted with a unit."""
  return row | {key: format_quantity(row[key], unit) for key in keys}


def report(result: Mapping[str, Any]) -> Report:
  """Returns the plan, its assumptions, sensitivities, and curves."""
  of = {row["name"]: row for row in result["results"]}
  multipath, first = result["multipath"], result["trainable"][0]
  between = result["between"]
  return Report("Plan of a datacentre", [
    *(
      Table(
        f"{group}: predicted from the assumptions below, not measured",
        "meaning=result | value",
        [_in_units(row, row["unit"], "value") for row in rows],
      )
      for group, rows in itertools.groupby(
        result["results"], lambda row: row["group"]
      )
    ),
    *notes(result),
    Table(
      "published figures; fitted: an input was backed out of the figure; same "
      "source: an input is another figure of its source, and the error is at "
      "most 5%; differs: such an input, and a larger error",
      "what | published | ours | error:+.1% | verdict | inputs | source",
      [
        _in_units(row, row["unit"], "ours") | {"published": " to ".join(
          format_quantity(x, row["unit"]) for x in row["published"]
        )} for row in result["paper"] + result["known"]
      ],
    ),
    Table(
      "when a model can be trained without failures, at "
      f"{first['utilisation']:.0%} of the peak and "
      f"{first['tokens_per_parameter']:g} tokens per active parameter",
      f"parameters:.3g | precision=format | active_share:.0%=active | days | "
      f"in_time=in {first['days_allowed']:g} | "
      "ratio_allowed=tokens per active parameter there is time for",
      result["trainable"],
    ),
    Table(
      f"Tbit/s of each of {between['sites']} sites, each way, at which "
      f"compute takes a share of the time: {between['layers']} layers, steps "
      f"of {between['step_s']:.3g} s, {1e3 * between['rtt_s']:.3g} ms there "
      f"and back; -: never, by round trips; {between['least'] / 1e12:g} is the "
      "least that is tried",
      "method | sync_every=steps | overlap_steps=overlap | bits:g | "
      "bit_s.*/1e12:.4g", between["rows"],
    ),
    Table(
      "machines of all sizes, the same knobs; fit: accelerators over those of "
      "a replica of the model",
      "accelerators | budget/1e6:,.4g=1e6 $ | facility_w/1e6:,.4g=MW | "
      "sites_needed=sites | fit | "
      "largest:.3g=largest model | mtbf_s=between failures | "
      "tiers=tiers of switches", result["scales"],
    ),
    Table(
      "failures per day by cause, at the rates of Llama 3's training",
      "cause | rate=per day",
      [{"cause": c, "rate": rate} for c, rate in result["causes"].items()],
    ),
    Table(
      f"a small example, {multipath['fabric']}: flows on the fullest uplink, "
      "each host sending one to the next leaf",
      "router | whole | without_one=without one link", multipath["rows"],
    ),
    *_uncertainty(result, of),
    Table(
      "assumptions",
      "name=knob | value | {low} to {high}=range | mark | source",
      [_in_units(row, row["unit"], "value", "low", "high")
       for row in result["knobs"]],
    ),
  ], lambda: _figure(result))


def _uncertainty(
  result: Mapping[str, Any], of: Mapping[str, Row]
) -> list[Table]:
  """Returns tables: quantiles of results, effects of knobs on one result.

  `of` has the row of each result, by its name.
  """
  tornado = result["tornado"]
  target = of[tornado["target"]]
  return [
    Table(
      f"quantiles of {result['num_draws']:,} plans; parameters that are "
      "not decisions are drawn",
      "meaning=result | 5% | 50% | 95%",
      [
        _in_units(
          of[key] | dict(zip(_QUANTILES, values, strict=True)),
          of[key]["unit"], *_QUANTILES,
        ) for key, values in result["quantiles"].items()
      ],
    ),
    Table(
      f"what decides: {target['meaning']}, "
      f"{format_quantity(tornado['value'], target['unit'])}",
      "knob | decided | low=at its low end | high=at its high end",
      [_in_units(bar, target["unit"], "low", "high")
       for bar in tornado["bars"][:_MAX_BARS]],
    ),
  ]


def notes(result: Mapping[str, Any]) -> list[str]:
  """Returns warnings about a plan, one per line."""
  of = {row["name"]: row["value"] for row in result["results"]}
  knobs = {row["name"]: row["value"] for row in result["knobs"]}
  places, pod = result["sites"], result["pod"]
  used = ", ".join(
    f"{name} {format_quantity(watts, 'W')} of "
    f"{format_quantity(places['limits_w'][name], 'W')}"
    for name, watts in places["used_w"].items()
  )
  found = [f"sites: {used}"]
  if places["missing_w"]:
    found.append(
      f"the sites are too small by {format_quantity(places['missing_w'], 'W')}"
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
  if of["goodput"] < _MIN_GOODPUT:
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


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Plots bandwidths between sites, and the effect of each knob on a result."""
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
  return plot.figure(
    [
      *plot.lines(
        [
          row | {"share": float(target), "rate": bits}
          for row in result["between"]["rows"]
          for target, bits in row["bit_s"].items()
        ],
        "share=share of the time that compute is to take",
        "rate/1e12=Tbit/s of a site, each way", by="method", log="y",
      ),
      plot.Panel(
        [*ends, plot.Rule(value, vertical=True, style="-", width=0.8)], "",
        f"{of['meaning']} ({of['unit'] or 'a number'})",
        plot.Axis(ticks=[(i, bar["knob"]) for i, bar in enumerate(bars)],
             reverse=True),
        legend="best", frame="open",
      ),
    ],
    "predicted from assumptions, not measured",
  )
