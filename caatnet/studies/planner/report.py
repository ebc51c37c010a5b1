"""Report of a plan: best configurations, exclusions, flags, and changes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parallel.base import labels, plot
from parallel.base.report import Report, Table

Row = Mapping[str, Any]
# up to this many unused devices are listed with their nodes
_MAX_LISTED_DEVICES = 16


def report(result: Mapping[str, Any]) -> Report:
  """Returns the report: best plans, exclusions, flags, and figure."""
  cluster, best, front = result["cluster"], result["best"], result["front"]
  numbered = [
    row | {"name": f"{number}. {row['configuration']}", "of": f"{number}."}
    for number, row in enumerate(best, 1)
  ]
  return Report("Plan of a parallel configuration", [
    *_skipped(result),
    *_left_out(result["left_out"]),
    Table(
      f"{result['parameters'] / 1e9:.2f}B parameters, batch of "
      f"{result['batch_size']}, on {_devices(cluster)} "
      f"({cluster['name']}; links {cluster['mark']}): predicted, not measured\n"
      "own order: devices in their own order; gap: how much faster than this a "
      "better device order could be, at most",
      "name=configuration | seconds:.4g=s / step | own_seconds:.4g=own order | "
      "gap:.1% | bytes/1e9:.1f=GB | pipette_s:.4g=Pipette's s | "
      "amp_s:.4g=AMP's s",
      numbered,
    ),
    Table("seconds of a step", "of | latency.*:.3g", numbered),
    Table("GB of a device", "of | memory.*/1e9:.3g", numbered),
    Table(
      f"{len(front)} of {result['priced']:,} configurations that no other "
      "beats in both time and memory, in the devices' own order",
      "configuration | own_seconds:.4g=s / step | bytes/1e9:.1f=GB | "
      "binding=most of it",
      front,
    ),
    *(f"excluded by {name}: {count:,}, as {reason}"
      for name, (count, reason) in result["excluded"].items()),
    *(f"with links {factor} times as fast: {seconds:.4g} s"
      for factor, seconds in result["sensitivity"].items()),
    labels.format_items(result["assumptions"]),
    *(f"why not {answer['asked']}? {answer['answer']}"
      for answer in result["why_not"]),
    f"the best as a run's flags: {flags(best[0]['keys'])}",
    *_second_pass_tables(result["second"], best),
  ], lambda: _figure(cluster, numbered))


def _devices(cluster: Row) -> str:
  """Returns the number and the kind of devices; of each kind, if several."""
  several = " + " in cluster["device"]
  return cluster["device"] if several else (
    f"{cluster['devices']} {cluster['device']}"
  )


def _skipped(result: Row) -> list[str]:
  """Returns a line on searches that were skipped; [] if there were none."""
  found = result["skipped"]
  if not any(found.values()):
    return []
  return [
    f"after {result['config']['planner']['max_s']:g} s (config.planner.max_s) "
    f"{found['orders']} searches of a device order and {found['clusters']} of "
    "a smaller cluster were skipped: there may be a faster plan"
  ]


def _left_out(found: Row) -> list[str]:
  """Returns a line on a cluster's unused devices; [] if all are used.

  `found` is the result of `caatnet.studies.planner.study._left_out`.
  """
  if not found["devices"]:
    return []
  if len(found["devices"]) <= _MAX_LISTED_DEVICES:
    names = "slow ones first: devices " + ", ".join(
      f"{x['device']} (node {x['node']})" for x in found["devices"]
    )
  else:
    names = f"devices {_ranges([x['device'] for x in found['devices']])}"
  return [
    f"not used, {names} of {found['of']}; s of a step with all of them: "
    f"{labels.text(found['seconds'])}. A run has the devices "
    f"{_ranges(found['used'])} only"
  ]


def _ranges(numbers: Sequence[int]) -> str:
  """Formats integers; three or more consecutive ones become "0 to 7"."""
  runs: list[list[int]] = []
  for number in sorted(numbers):
    if runs and number == runs[-1][-1] + 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  return ", ".join(
    f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
    for run in runs
  )


def flags(keys: Mapping[str, Any]) -> str:
  """Formats config keys of a training run as command-line flags."""
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


def _second_pass_tables(
  found: Mapping[str, Any], best: Sequence[Row]
) -> Iterator[Table | str]:
  """Yields the tables of changes that are faster but train another model.

  Args:
    found: Part "second" of the result.
    best: Part "best" of the result, to which the changes apply.
  """
  rows = list(enumerate(found["rows"], 1))
  if rows:
    yield Table(
      "what would be faster, but trains another model: one change at a time "
      "in a configuration above, in its order of devices; GB sent are operand "
      "bytes of a device in a step (without the change)",
      "of | {number}) {learned}=changed | seconds:.4g=s / step | "
      "faster:.2f=times as fast | bytes/1e9:.1f=GB of a device | sent.*",
      [
        row | {
          "number": number, "faster": row["of_seconds"] / row["seconds"],
          "sent": {
            f"{axis}, GB sent":
            f"{size / 1e9:.3g} ({row['of_sent'][axis] / 1e9:.3g})"
            for axis, size in row["sent"].items()
          },
        }
        for number, row in rows
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
  for number, row in rows:
    base = best[row["of"] - 1]["keys"]
    changed = {k: x for k, x in row["keys"].items() if base.get(k) != x}
    loop = changed.get("outer.algorithm")
    of = f" and a config with the section of {loop}" if loop else ""
    yield (
      f"{number}) as a run: flags of {row['of']}.{of}, then {flags(changed)}"
    )


def _figure(cluster: Row, best: Sequence[Row]) -> plot.Figure:
  """Plots link matrices in two device orders, and time and memory of plans."""
  times, sizes = (
    plot.stacked_bar_panels(best, "of", parts, label=label)[0]
    for parts, label in (
      ("latency", "seconds of a step"), ("memory/1e9", "GB of a device")
    )
  )
  sizes.marks.append(plot.Rule(cluster["memory_bytes"] / 1e9, vertical=True))
  return plot.figure(
    [*_matrices(cluster, best[0]), times, sizes],
    f"{cluster['name']}: predicted, not measured", columns=2,
  )


def _matrices(cluster: Row, best: Row) -> list[plot.Panel]:
  """Plots link rates in the devices' own order and in the plan's order."""
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
