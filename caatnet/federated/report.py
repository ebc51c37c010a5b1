"""Report of a federated run: times t_* (see `service.py`) and bytes."""

from collections.abc import Iterable, Mapping, Sequence
import statistics
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table
from parallel.plans.hardware.client_links import Link

_MAX_ROWS = 48
_TIME_KEYS = ("t_a", "t_d", "t_v", "t_tr", "t_te", "t_u", "t_d + t_u")
_NUMERIC_KEYS = (*_TIME_KEYS, "bytes_down", "bytes_up", "payload_up")


def report(
  rows: Sequence[Mapping[str, Any]], links: Sequence[Link] = ()
) -> Report:
  """Returns tables by client and by interface, and a plot of both.

  Args:
    rows: `service.Service.rows`.
    links: Emulated link of each client; () for none.
  """
  return Report(
    "Federated run",
    [table(rows), *([interface_table(rows, links)] if links else [])],
    (lambda: figure(rows, links)) if rows else None,
  )


def figure(
  rows: Sequence[Mapping[str, Any]], links: Sequence[Link] = ()
) -> plot.Figure:
  """Returns stacked bars of each client's phases, their medians over rounds.

  Args:
    rows, links: Arguments of `report`.
  """
  times = [name for name in _TIME_KEYS if any(name in row for row in rows)]
  shown = [
    dict.fromkeys(times, 0.0) | row | {
      "link": links[row["client"]].name if links else "links of this machine",
    } for row in _medians(rows)
  ]
  return plot.figure(plot.stacked_bar_panels(
    shown, "client", {name: name for name in times}, label="seconds",
    each="link",
  ), "phases of a round, medians")


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Returns a row per client and round, or medians per client of a long run.

  Args:
    rows: `service.Service.rows`.
  """
  long = len(rows) > _MAX_ROWS
  title = "times of each client, medians" if long else "times of each round"
  shown = _medians(rows) if long else rows
  # Where clocks differ, only the sum "t_d + t_u" is known.
  times = [
    name for name in _TIME_KEYS if any(
      row.get(name) is not None for row in shown
    )
  ]
  return Table(
    f"{title}, ms, and bytes on the socket; models are float32 unless coded",
    [
      *([] if long else ["round"]), "client", *_millisecond_columns(times),
      # Rows from an emulation lack these bytes.
      Column("bytes_down", "kB down", ",.1f", 1e3, "-"),
      Column("bytes_up", "kB up", ",.1f", 1e3, "-"),
    ],
    shown,
  )


def interface_table(
  rows: Sequence[Mapping[str, Any]], links: Sequence[Link]
) -> Table:
  """Returns a table of the medians of all phases, one row per name of a link.

  The cost of stragglers is the slowest client's time minus the median client's,
  both of clients with the same link; the table has its median over rounds.

  Args:
    rows, links: Arguments of `report`.
  """
  groups: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    if row.get("t_u") is not None:  # the client has answered
      groups.setdefault(links[row["client"]].name, []).append(row)
  found = []
  for name, some in groups.items():
    rounds: dict[int, list[float]] = {}
    for row in some:
      rounds.setdefault(row["round"], []).append(
        sum(row[phase] for phase in _TIME_KEYS[:-1])
      )
    slowest = list(map(max, rounds.values()))
    found.append({
      "interface": name,
      **{phase: statistics.median(row[phase] for row in some)
         for phase in _TIME_KEYS[:-1]},
      "slowest": statistics.median(slowest),
      "stragglers": statistics.median(
        max(times) - statistics.median(times) for times in rounds.values()
      ),
      "share": statistics.fmean(row["t_u"] for row in some)
      / statistics.fmean(slowest),
    })
  return Table(
    "medians by interface, ms; t_a and the phases of the slowest client; its "
    "excess over\nthe median client; mean uplink as a share of the mean "
    "slowest time",
    [
      "interface",
      *_millisecond_columns((*_TIME_KEYS[:-1], "slowest", "stragglers")),
      "share:.0%=uplink",
    ],
    found,
  )


def _millisecond_columns(names: Iterable[str]) -> list[str]:
  """Returns columns that show values in seconds as milliseconds."""
  return [f"{name}/1e-3:,.1f={name}" for name in names]


def _medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns a row per client, with the medians of its numbers over rounds."""
  found = []
  for client in sorted({row["client"] for row in rows}):
    mine = [row for row in rows if row["client"] == client]
    values = {
      name: [row[name] for row in mine if row.get(name) is not None]
      for name in _NUMERIC_KEYS
    }
    found.append({"client": client} | {
      name: statistics.median(some) for name, some in values.items() if some
    })
  return found
