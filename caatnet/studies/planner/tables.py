"""Prints a plan."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints the best few, what excluded others, and a command.

  Args:
    result: What `caatnet.studies.planner.study.run` returned.
  """
  cluster, best = result["cluster"], result["best"]
  tables.table(
    f"{result['parameters'] / 1e9:.2f}B parameters, batch of "
    f"{result['batch_size']}, on {cluster['devices']} {cluster['device']} "
    f"({cluster['name']}; links {cluster['mark']}): predicted, not measured\n"
    "own order: devices in their own order; gap: how much faster than this a "
    "better device order could be, at most",
    ["configuration", "s / step", "own order", "gap", "GB", "Pipette's s",
     "AMP's s"],
    [
      [
        f"{number}. {row['configuration']}", f"{row['seconds']:.4g}",
        f"{row['own_seconds']:.4g}", f"{row['gap']:.1%}",
        f"{row['bytes'] / 1e9:.1f}", f"{row['pipette_s']:.4g}",
        f"{row['amp_s']:.4g}",
      ]
      for number, row in enumerate(best, 1)
    ],
  )
  _breakdown("seconds of a step", best, "latency", 1.0)
  _breakdown("GB of a device", best, "memory", 1e9)
  front = result["front"]
  tables.table(
    f"{len(front)} of {result['priced']:,} configurations that no other beats "
    "in both time and memory, in the devices' own order",
    ["configuration", "s / step", "GB", "most of it"],
    [
      [row["configuration"], f"{row['own_seconds']:.4g}",
       f"{row['bytes'] / 1e9:.1f}", row["binding"]]
      for row in front
    ],
  )
  for name, (count, reason) in result["excluded"].items():
    print(f"excluded by {name}: {count:,}, as {reason}")
  for factor, seconds in result["sensitivity"].items():
    print(f"with links {factor:g} times as fast: {seconds:.4g} s")
  for name, text in result["assumptions"].items():
    print(f"{name}: {text}")
  for answer in result["why_not"]:
    print(f"why not {answer['asked']}? {answer['answer']}")
  flags = " ".join(
    f"--config.{key}={_text(value)}" for key, value in best[0]["keys"].items()
    if value != ()
  )
  print(f"the best as a run's flags: {flags}")


def _text(value: Any) -> str:
  """Returns a value as a flag has it, which a shell leaves as it is."""
  return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def _breakdown(
  title: str, rows: list[Mapping[str, Any]], key: str, unit: float
) -> None:
  """Prints what makes the sums of some rows, a column for each cause."""
  causes = [c for c in rows[0][key] if any(row[key][c] for row in rows)]
  tables.table(
    title, ["of", *causes],
    [
      [f"{number}.", *(f"{row[key][c] / unit:.3g}" for c in causes)]
      for number, row in enumerate(rows, 1)
    ],
  )
