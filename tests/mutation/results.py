"""Outcomes of mutants, accumulated over seeds in one file."""

from collections.abc import Collection, Iterable
import dataclasses
import json
import math
import os
import pathlib
import threading
import tomllib
from typing import Any

from tests.mutation.candidates import Mutant

KILLED = ("assertion", "exception", "crash", "timeout")
_IDENTITY = tuple(f.name for f in dataclasses.fields(Mutant))[:7]


def wilson(killed: int, num: int) -> tuple[float, float]:
  """95% confidence interval of a proportion (Wilson, 1927)."""
  if not num:
    return 0.0, 1.0
  z, p = 1.959964, killed / num
  centre = p + z * z / (2 * num)
  half = z * math.sqrt(p * (1 - p) / num + z * z / (4 * num * num))
  scale = 1 + z * z / num
  low, high = (centre - half) / scale, (centre + half) / scale
  return max(0.0, low), min(1.0, high)


def identity(entry: dict[str, Any]) -> tuple:
  """Identity of the mutant of an entry, as `Mutant.identity`."""
  return tuple(entry[name] for name in _IDENTITY)


def equivalents(path: pathlib.Path) -> dict[tuple, str]:
  """Mutants that no test can kill -> the reason."""
  if not path.exists():
    return {}
  listed = tomllib.loads(path.read_text()).get("equivalent", [])
  return {
    identity({"occurrence": 0} | entry): entry["reason"] for entry in listed
  }


class Results:
  """The file of results; written after every mutant, atomically.

  Args:
    path: JSON file; created if it does not exist.

  Attributes:
    lock: Held by threads that add.
  """

  def __init__(self, path: pathlib.Path) -> None:
    self._path = path
    self.lock = threading.Lock()
    known = json.loads(path.read_text()) if path.exists() else {}
    # By command.
    self.runs: dict[str, dict[str, Any]] = known.get("runs", {})
    self._run: dict[str, Any] = {}
    self.entries: list[dict[str, Any]] = known.get("mutants", [])

  def begin(
    self, seed: int, directories: Iterable[str], about: dict[str, Any]
  ) -> set[tuple]:
    """Starts a run of a seed, or resumes one that was interrupted.

    Args:
      seed: Seed of the samples.
      directories: Directories that are sampled.
      about: Command, commit and hash of the tree.

    Returns:
      Identities of mutants whose entries are kept: those of an unfinished run
      of the same seed, command and tree. Otherwise entries of this seed and
      these directories are replaced.
    """
    before = self.runs.get(about["command"], {})
    resumes = before.get("tree") == about["tree"] and not before["finished"]
    those = set(directories)
    if not resumes:
      self.entries = [
        e for e in self.entries
        if e["seed"] != seed or e["directory"] not in those
      ]
    rest = {k: v for k, v in about.items() if k != "command"}
    self._run = self.runs[about["command"]] = rest | {
      "seed": seed, "finished": False,
      "seconds": before["seconds"] if resumes else 0.0,
    }
    seeds = {seed, *(e["seed"] for e in self.entries)}
    self.runs = {k: r for k, r in self.runs.items() if r["seed"] in seeds}
    return {
      identity(e) for e in self.entries
      if e["seed"] == seed and e["directory"] in those
    }

  def add(self, entry: dict[str, Any], known: Collection[tuple] = ()) -> None:
    """Adds or replaces the entry of a mutant, and writes the file."""
    same = (entry["seed"], identity(entry))
    self.entries = [
      e for e in self.entries if (e["seed"], identity(e)) != same
    ]
    self.entries.append(entry)
    if self._run:
      self._run["seconds"] = round(self._run["seconds"] + entry["seconds"], 1)
    self.write(known)

  def finish(self, known: Collection[tuple] = ()) -> None:
    """Marks the run as finished."""
    self._run["finished"] = True
    self.write(known)

  def scores(self, known: Collection[tuple] = ()) -> dict[str, dict[str, Any]]:
    """Per directory: counts of outcomes, score and its 95% interval.

    A mutant that several seeds have drawn counts once, with its last outcome.

    Args:
      known: Identities of equivalent mutants, which do not count.
    """
    last = {identity(e): e for e in self.entries if identity(e) not in known}
    found: dict[str, dict[str, Any]] = {}
    for entry in sorted(last.values(), key=lambda e: e["directory"]):
      row = found.setdefault(
        entry["directory"],
        {"mutants": 0, "killed": 0, **dict.fromkeys(KILLED, 0), "survived": 0},
      )
      row["mutants"] += 1
      row["killed"] += entry["outcome"] in KILLED
      row[entry["outcome"]] += 1
    for row in found.values():
      interval = wilson(row["killed"], row["mutants"])
      row["score"] = round(row["killed"] / row["mutants"], 3)
      row["interval"] = [round(x, 3) for x in interval]
    return found

  def write(self, known: Collection[tuple] = ()) -> None:
    """Writes the file: it is complete at any time."""
    order = sorted(self.entries, key=lambda e: (e["seed"], identity(e)))
    content = {
      "directories": self.scores(known), "runs": self.runs, "mutants": order
    }
    self._path.parent.mkdir(parents=True, exist_ok=True)
    temporary = self._path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, self._path)
