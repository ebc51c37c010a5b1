"""Results in the terminal: a row per directory, and the survivors."""

from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeElapsedColumn,
)
from rich.table import Table

from tests.mutation.results import KILLED, Results, identity


def progress() -> Progress:
  """A progress bar with a console for lines above it."""
  return Progress(
    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
    TimeElapsedColumn(), console=Console(width=100),
  )


def described(
  file: str, function: str, before: str, after: str, operator: str
) -> str:
  """A mutant in two lines."""
  change = " ".join(f"{before} -> {after}".split())
  return f"{file} {function} ({operator})\n    {change}"


def of_entry(entry: dict[str, Any]) -> str:
  """A survivor in two lines, for the console."""
  names = ("file", "function", "before", "after", "operator")
  end = "" if entry["tests"] else ", no test executes it"
  return escape(described(*(entry[n] for n in names)) + end)


def show(results: Results, known: Collection[tuple]) -> None:
  """Prints survivors and scores.

  Args:
    results: All results.
    known: Identities of equivalent mutants.
  """
  console = Console(width=110)
  survivors = {
    identity(e): e for e in results.entries
    if e["outcome"] == "survived" and identity(e) not in known
  }
  for entry in survivors.values():
    console.print(of_entry(entry), soft_wrap=True)
  grid = Table("directory", "mutants", *KILLED, "survived", "score", "95%")
  grid.columns[0].no_wrap = True
  for name, row in results.scores(known).items():
    low, high = row["interval"]
    counts = (row[k] for k in ("mutants", *KILLED, "survived"))
    grid.add_row(
      name, *map(str, counts), f"{row['score']:.0%}", f"{low:.0%}-{high:.0%}"
    )
  console.print(grid)
