"""Table of the times and bytes of a federated run."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from caatnet.show.report import Column, Table

_MOST_ROWS = 48
_TIMES = ("t_a", "t_d", "t_v", "t_tr", "t_te", "t_u", "t_d + t_u")
_NUMBERS = (*_TIMES, "bytes_down", "bytes_up", "payload_up")


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
