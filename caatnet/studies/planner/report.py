"""Report of a plan: best configurations, exclusions, flags, and changes."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import string
from typing import Any

import numpy as np

from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed

Row = Mapping[str, Any]


def report(result: Mapping[str, Any]) -> Report:
  """Returns the report: best plans, exclusions, flags, and figure."""
  cluster, best, front = result["cluster"], result["best"], result["front"]
  numbered = [
    row | {"name": f"{number}. {row['configuration']}", "of": f"{number}."}
    for number, row in enumerate(best, 1)
  ]
  parts: list[Table | str] = [
    *_left_out(result["left_out"]),
    Table(
      f"{result['parameters'] / 1e9:.2f}B parameters, batch of "
      f"{result['batch_size']}, on {cluster['devices']} {cluster['device']} "
      f"({cluster['name']}; links {cluster['mark']}): predicted, not measured\n"
      "own order: devices in their own order; gap: how much faster than this a "
      "better device order could be, at most",
      [
        Column("name", "configuration"), Column("seconds", "s / step", ".4g"),
        Column("own_seconds", "own order", ".4g"), Column("gap", "gap", ".1%"),
        Column("bytes", "GB", ".1f", unit=1e9),
        Column("pipette_s", "Pipette's s", ".4g"),
        Column("amp_s", "AMP's s", ".4g"),
      ],
      numbered,
    ),
    _breakdown("seconds of a step", numbered, "latency", 1.0),
    _breakdown("GB of a device", numbered, "memory", 1e9),
    Table(
      f"{len(front)} of {result['priced']:,} configurations that no other "
      "beats in both time and memory, in the devices' own order",
      [
        "configuration",
        Column("own_seconds", "s / step", ".4g"),
        Column("bytes", "GB", ".1f", unit=1e9), Column("binding", "most of it"),
      ],
      front,
    ),
  ]
  parts += [
    f"excluded by {name}: {count:,}, as {reason}"
    for name, (count, reason) in result["excluded"].items()
  ]
  parts += [
    f"with links {factor:g} times as fast: {seconds:.4g} s"
    for factor, seconds in result["sensitivity"].items()
  ]
  parts += [f"{name}: {text}" for name, text in result["assumptions"].items()]
  parts += [
    f"why not {answer['asked']}? {answer['answer']}"
    for answer in result["why_not"]
  ]
  parts.append(f"the best as a run's flags: {flags(best[0]['keys'])}")
  return Report(
    "Plan of a parallel configuration",
    [*parts, *_second(result["second"], best)],
    lambda: _figure(cluster, best),
  )


def _left_out(found: Row) -> list[str]:
  """Returns a line on devices that are not used; [] if all are."""
  if not found["devices"]:
    return []
  names = ", ".join(
    f"{x['device']} (node {x['node']})" for x in found["devices"]
  )
  seconds = found["seconds"]
  whole = (
    "no configuration runs on all of them" if seconds is None
    else f"with all {found['of']} a step takes {seconds:.4g} s"
  )
  return [
    f"not used, slow ones first: devices {names} of {found['of']}; {whole}. "
    f"A run has the devices {', '.join(map(str, found['used']))} only"
  ]


def flags(keys: Mapping[str, Any]) -> str:
  """Formats some of a training run's keys as command-line flags."""
  return " ".join(
    f"--config.{key}={_text(value)}" for key, value in keys.items()
    if value != ()
  )


def _text(value: Any) -> str:
  """Formats a value for a flag, without shell metacharacters."""
  if not isinstance(value, tuple):
    return f"{value}"
  # A tuple of one entry needs the trailing comma.
  return ",".join(map(str, value)) + "," * (len(value) == 1)


def _second(
  found: Mapping[str, Any], best: Sequence[Row]
) -> Iterator[Table | str]:
  """Yields the tables of changes that are faster but train another model.

  Args:
    found: Part "second" of the result.
    best: Part "best" of the result, to which the changes apply.
  """
  rows = list(zip(letters(), found["rows"], strict=False))
  if rows:
    axes = list(found["rows"][0]["sent"])
    headings = dict(zip(
      axes, ("tensor, GB sent", "data", "worker"), strict=True
    ))
    yield Table(
      "what would be faster, but trains another model: one change at a time "
      "in a configuration above, in its order of devices; GB sent are operand "
      "bytes of a device in a step (without the change)",
      [
        Column("of", "of", "{:}.".format),
        Column("", "changed", "{letter}) {learned}"),
        Column("seconds", "s / step", ".4g"),
        Column("faster", "times as fast", ".2f"),
        Column("bytes", "GB of a device", ".1f", unit=1e9),
        *(Column(axis, headings[axis]) for axis in axes),
      ],
      [
        row | {
          "letter": letter, "faster": row["of_seconds"] / row["seconds"],
        } | {
          axis: f"{size / 1e9:.3g} ({row['of_sent'][axis] / 1e9:.3g})"
          for axis, size in row["sent"].items()
        }
        for letter, row in rows
      ],
    )
    yield (
      "What these learn is not predicted. Costs in loss that were measured: "
      "docs/strategies.md; CLAIMS.md, 1 to 3 and 5.11."
    )
  for name, (count, reason) in found["excluded"].items():
    yield f"of changes excluded by {name}: {count:,}, as {reason}"
  for number in sorted({row["of"] for _, row in rows if row["of"] > 1}):
    yield f"{number}. as a run's flags: {flags(best[number - 1]['keys'])}"
  for letter, row in rows:
    base = best[row["of"] - 1]["keys"]
    changed = {k: x for k, x in row["keys"].items() if base.get(k) != x}
    loop = changed.get("outer.algorithm")
    of = f" and a config with the section of {loop}" if loop else ""
    yield (
      f"{letter}) as a run: flags of {row['of']}.{of}, then {flags(changed)}"
    )


def letters() -> Iterator[str]:
  """Yields a, b, ... z, aa, ab, and so on."""
  for length in itertools.count(1):
    for word in itertools.product(string.ascii_lowercase, repeat=length):
      yield "".join(word)


def _breakdown(
  title: str, rows: Sequence[Row], key: str, unit: float
) -> Table:
  """Returns a table of the terms of some rows' sums, one column per cause."""
  causes = [c for c in rows[0][key] if any(row[key][c] for row in rows)]
  return Table(
    title, ["of", *keyed(causes, ".3g", unit=unit)],
    [row[key] | {"of": row["of"]} for row in rows],
  )


def _figure(cluster: Row, best: Sequence[Row]) -> plot.Figure:
  """Returns link matrices in two device orders, and bars of time and memory."""
  panels = _matrices(cluster, best[0])
  names = [row["configuration"].replace(", ", "\n", 1) for row in best]
  for key, unit, text, rules, ticks in (
    ("latency", 1.0, "seconds of a step", [], names),
    ("memory", 1e9, "GB of a device",
     [plot.Rule(cluster["memory_bytes"] / 1e9, vertical=True)],
     [""] * len(best)),
  ):
    parts = {
      cause: [row[key][cause] / unit for row in best] for cause in best[0][key]
    }
    panels.append(plot.Panel(
      [*plot.stacked({k: v for k, v in parts.items() if any(v)}), *rules], "",
      plot.Axis(text), plot.Axis(ticks=list(enumerate(ticks)), reverse=True),
      legend="below", frame="open",
    ))
  return plot.Figure(
    panels, (12, 9), 2, f"{cluster['name']}: predicted, not measured"
  )


def _matrices(cluster: Row, best: Row) -> list[plot.Panel]:
  """Returns link rates in the devices' own order and in the plan's order."""
  if cluster["bandwidth"] is None:
    words = f"{cluster['devices']} devices: too many to draw"
    return 2 * [plot.Panel(
      [plot.Texts([words], [0.5], [0.5], (0, 0), ("center", "baseline"), 10)],
      frame="none",
    )]
  rates = np.log10(np.array(cluster["bandwidth"], float) / 1e9)
  return [
    plot.Panel([plot.Heat(rates[np.ix_(order, order)])], f"log10 GB/s, {text}",
          "to", "from")
    for text, order in (
      ("own order", range(len(rates))),
      (f"in order of\n{best['configuration'].split(',')[0]}", best["order"]),
    )
  ]
