"""Live view of a swarm of peers on the coordinator's terminal.

If the output is not a terminal, lines are printed as in a log.
"""

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parallel.peers.membership import service

_MINUTE_S = 60.0


class Screen:
  """Output of a coordinator: log lines, and a live table of its peers.

  The table is shown on a terminal only; log lines scroll above it.
  """

  def __init__(self, console: Console | None = None) -> None:
    self._console = console or Console()
    self._live: Live | None = None
    self._rounds: list[tuple[float, int]] = []

  def __enter__(self) -> "Screen":
    return self

  def __exit__(self, *_: Any) -> None:
    if self._live is not None:
      self._live.stop()

  def say(self, line: str) -> None:
    """Prints a line."""
    if self._live is not None:
      self._console.print(line, markup=False, emoji=False, highlight=False)
    else:
      print(line, flush=True)

  def follow(self, there: service.CoordinatorService) -> None:
    """Prints a service's address; on a terminal starts the live table."""
    self.say("coordinator at {}:{}".format(*there.address))
    if self._console.is_terminal:
      self._live = Live(
        console=self._console, refresh_per_second=2,
        get_renderable=lambda: self.view(there),
      )
      self._live.start()

  def view(self, there: service.CoordinatorService) -> Group:
    """Returns the view of a service: a summary line, and a row per peer."""
    state, now = there.state, time.monotonic()
    # Samples (time, revision) of the last minute.
    self._rounds = [
      *((t, r) for t, r in self._rounds if now - t < _MINUTE_S),
      (now, state.record.revision),
    ]
    # Rounds per minute over the last minute, from the stored revisions.
    (start, first), seen = self._rounds[0], there.seen()
    # Mean of the peers' last reported losses.
    losses = [
      x.report.loss for x in seen if x.report and x.report.loss is not None
    ]
    head = [
      f"epoch {state.record.epoch}",
      f"round {state.record.revision:,}",
      f"{(state.record.revision - first) / max(now - start, 1) * 60:.0f} a "
      "minute",
      f"{len(state.record.members)} members",
      f"{_format_bytes(sum(x.report.sent_bytes for x in seen if x.report))} "
      "sent",
      *([f"loss {sum(losses) / len(losses):.4f}"] if losses else []),
    ]
    table = Table("peer", "is at", box=None)
    for name in ("heard, s ago", "round", "sent", "loss"):
      table.add_column(name, justify="right")
    for peer, what, silent_s, report in seen:
      table.add_row(
        Text(peer), Text(what),
        "no connection" if silent_s is None else f"{silent_s:.1f}",
        *_cells(report),
      )
    waits = service.describe_wait(state, there.rules)
    return Group("", ", ".join(head), Text(waits), table)


def _cells(report: Any) -> tuple[str, str, str]:
  """Returns the cells of a peer's last report; "-" without a report."""
  if report is None:
    return "-", "-", "-"
  loss = "-" if report.loss is None else f"{report.loss:.4f}"
  return f"{report.revision:,}", _format_bytes(report.sent_bytes), loss


def _format_bytes(count: float) -> str:
  """Formats a number of bytes with its unit, such as "12 MB"."""
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000:
      return f"{count:.0f} {unit}"
    count /= 1000
  return f"{count:,.1f} TB"
