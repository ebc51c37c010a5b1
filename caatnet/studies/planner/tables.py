"""Prints a plan."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import string
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
  print(f"the best as a run's flags: {flags(best[0]['keys'])}")
  _second(result["second"], best)


def flags(keys: Mapping[str, Any]) -> str:
  """Returns some of a training run's keys as flags."""
  return " ".join(
    f"--config.{key}={_text(value)}" for key, value in keys.items()
    if value != ()
  )


def _text(value: Any) -> str:
  """Returns a value as a flag has it, which a shell leaves as it is."""
  if not isinstance(value, tuple):
    return f"{value}"
  # With one entry the comma is what makes it a tuple.
  return ",".join(map(str, value)) + "," * (len(value) == 1)


def _second(
  found: Mapping[str, Any], best: Sequence[Mapping[str, Any]]
) -> None:
  """Prints what would be faster, but trains another model.

  Args:
    found: The result's part "second".
    best: The result's part "best", of which the rows are changes.
  """
  rows = found["rows"]
  if rows:
    tables.table(
      "what would be faster, but trains another model: one change at a time "
      "in a configuration above, in its order of devices; GB sent are operand "
      "bytes of a device in a step (without the change)",
      ["of", "changed", "s / step", "times as fast", "GB of a device",
       "tensor, GB sent", "data", "worker"],
      [
        [
          f"{row['of']}.", f"{letter}) {row['learned']}",
          f"{row['seconds']:.4g}", f"{row['of_seconds'] / row['seconds']:.2f}",
          f"{row['bytes'] / 1e9:.1f}",
          *(f"{size / 1e9:.3g} ({row['of_sent'][axis] / 1e9:.3g})"
            for axis, size in row["sent"].items()),
        ]
        for letter, row in zip(letters(), rows, strict=False)
      ],
    )
    print(
      "What these learn is not predicted. Costs in loss that were measured: "
      "README.md, Strategies; CLAIMS.md, 1 to 3 and 5.11."
    )
  for name, (count, reason) in found["excluded"].items():
    print(f"of changes excluded by {name}: {count:,}, as {reason}")
  for number in sorted({row["of"] for row in rows if row["of"] > 1}):
    print(f"{number}. as a run's flags: {flags(best[number - 1]['keys'])}")
  for letter, row in zip(letters(), rows, strict=False):
    base = best[row["of"] - 1]["keys"]
    changed = {k: x for k, x in row["keys"].items() if base.get(k) != x}
    loop = changed.get("outer.algorithm")
    of = f" and a config with the section of {loop}" if loop else ""
    print(f"{letter}) as a run: flags of {row['of']}.{of}, then "
          f"{flags(changed)}")


def letters() -> Iterator[str]:
  """Yields a, b, ... z, aa, ab, and so on."""
  for length in itertools.count(1):
    for word in itertools.product(string.ascii_lowercase, repeat=length):
      yield "".join(word)


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
