"""Report of the times and bytes of a federated run."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from caatnet.federated.links import Link
from caatnet.show.plot import Axis, Figure, Panel, stacked
from caatnet.show.report import Column, Report, Table

_MOST_ROWS = 48
_TIMES = ("t_a", "t_d", "t_v", "t_tr", "t_te", "t_u", "t_d + t_u")
_NUMBERS = (*_TIMES, "bytes_down", "bytes_up", "payload_up")


def report(
  rows: Sequence[Mapping[str, Any]], links: Sequence[Link] = ()
) -> Report:
  """Returns a table, and a plot with a panel per interface.

  Args:
    rows: `service.Service.rows`.
    links: Emulated link of each client; () for none.
  """
  return Report(
    "Federated run", [table(rows)],
    (lambda: figure(rows, links)) if rows else None,
  )


def figure(
  rows: Sequence[Mapping[str, Any]], links: Sequence[Link] = ()
) -> Figure:
  """Returns the phases of each client, medians of all rounds, as stacked bars.

  Args:
    rows, links: Arguments of `report`.
  """
  panels: dict[str, list[dict[str, Any]]] = {}
  for row in _medians(rows):
    name = links[row["client"]].name if links else "links of this machine"
    panels.setdefault(name, []).append(row)
  times = [name for name in _TIMES if any(name in row for row in rows)]
  return Figure([
    Panel(
      stacked(
        {name: [row.get(name, 0.0) for row in some] for name in times},
        horizontal=False,
      ),
      title=name, y="seconds",
      x=Axis("client", ticks=[(i, str(row["client"]))
                              for i, row in enumerate(some)]),
    ) for name, some in panels.items()
  ], (max(4.0, 2.5 * len(panels) + 1.5), 4.0), len(panels),
    title="phases of a round, medians", legend="outside right upper",
    share_y="all")


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Returns a row per client and round, or medians per client of a long run.

  Args:
    rows: `service.Service.rows`.
  """
  long = len(rows) > _MOST_ROWS
  title = "times of each client, medians" if long else "times of each round"
  shown = _medians(rows) if long else rows
  # The sum is shown where clocks differ.
  times = [
    name for name in _TIMES if any(row.get(name) is not None for row in shown)
  ]
  return Table(
    f"{title}, ms, and bytes on the socket; models are float32 unless coded",
    [
      *([] if long else ["round"]), "client",
      *(Column(name, name, ",.1f", 1e-3, "-") for name in times),
      Column("bytes_down", "kB down", ",.1f", 1e3, "-"),
      Column("bytes_up", "kB up", ",.1f", 1e3, "-"),
    ],
    shown,
  )


def _medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns the medians of each client."""
  found = []
  for client in sorted({row["client"] for row in rows}):
    mine = [row for row in rows if row["client"] == client]
    values = {
      name: [row[name] for row in mine if row.get(name) is not None]
      for name in _NUMBERS
    }
    found.append({"client": client} | {
      name: statistics.median(some) for name, some in values.items() if some
    })
  return found
