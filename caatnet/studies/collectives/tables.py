"""Prints tables of the comparison of collective algorithms."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables
from caatnet.show.tables import size_text
from caatnet.studies.collectives.study import PUBLISHED


def show(result: Mapping[str, Any]) -> None:
  """Prints a table for each topology, and MultiTree's speed-ups.

  Args:
    result: What `caatnet.studies.collectives.study.run` returned.
  """
  nets: dict[str, list[Mapping[str, Any]]] = {}
  for row in result["rows"]:
    nets.setdefault(row["topology"], []).append(row)
  for name, rows in nets.items():
    sizes = sorted({r["size_bytes"] for r in rows})
    cells = {(r["algorithm"], r["size_bytes"]): r for r in rows}
    lines = []
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows):
      of_size = [cells[algorithm, size] for size in sizes]
      line = [algorithm, str(of_size[0]["num_rounds"])]
      for cell in of_size:
        ring = cells.get(("ring", cell["size_bytes"]))
        gain = f" {ring['events_us'] / cell['events_us']:.2f}x" if ring else ""
        line.append(f"{cell['events_us']:,.1f}{gain}")
      last = of_size[-1]
      line.append(f"{last['lockstep_us']:,.1f}")
      line.append(f"{last['bound_us'] / last['lockstep_us']:.0%}")
      lines.append(line)
    largest = cells[rows[0]["algorithm"], sizes[-1]]
    tables.table(
      f"all-reduce on {name}, {rows[0]['num_ranks']} ranks: us by events"
      f"{' with barriers' if result['barrier'] else ''}, speed-up over ring; "
      f"lockstep us of {size_text(sizes[-1])}\nand its bound's share "
      f"({largest['bound_us']:,.1f} us: the ranks' own links)",
      ["algorithm", "rounds", *map(size_text, sizes), "lockstep", "bound"],
      lines,
    )
  lines = [
    [f"{model.removesuffix('_us')}, {name}", f"{gain['mean']:.2f}x",
     f"{gain['least']:.2f}x to {gain['most']:.2f}x",
     f"{gain['wins']} of {gain['cells']}"]
    for model, gains in result["speedups"].items()
    for name, gain in gains.items()
  ]
  if lines:
    tables.table(
      "MultiTree's speed-up: geometric mean and range over the sizes and "
      "topologies above, and\nhow often it is not slower (its paper, in a "
      "simulator of its own, over its own "
      f"sizes: {PUBLISHED['over ring']}x over ring, "
      f"{PUBLISHED['over prior art']}x over prior art)",
      ["model", "mean", "range", "fastest"],
      lines,
    )
  skipped: dict[str, list[str]] = {}
  for row in result["skipped"]:
    skipped.setdefault(row["algorithm"], []).append(row["topology"])
  for name, nets_without in skipped.items():
    print(f"{name} does not run on {', '.join(nets_without)}")
