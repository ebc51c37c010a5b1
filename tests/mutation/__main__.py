"""Mutation tests: plants one-line bugs, and tells which no test notices.

    python -m tests.mutation --seed=1
    python -m tests.mutation --dir=parallel/outer --num=20
"""

import argparse
from collections.abc import Sequence
import concurrent.futures
import datetime
import itertools
import json
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
from typing import Any

from tests.mutation import trial
from tests.mutation.operators import Mutant, draw

_COUNTS = ("drawn", "killed", "survived", "timed_out")
_RESULTS = "results/mutants.json"
_TOPS = ("parallel", "caatnet")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m tests.mutation", description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--seed", type=int, default=0, help="seed of the draws (0)")
  add("--num", type=int, default=100, help="mutants in all (100)")
  add(
    "--dir", action="append", default=[], metavar="DIR",
    help="only this directory, e.g. parallel/outer; may be repeated",
  )
  add("--workers", type=int, default=2, help="mutants at a time (2)")
  add(
    "--budget", type=float, default=60, metavar="S",
    help="seconds of tests: of the mutant's file's own, and twice of the "
    "nearest 8 test files that import it (60)",
  )
  add(
    "--patience", type=float, default=120, metavar="S",
    help="tests that take so much longer, with imports, have timed out (120)",
  )
  add(
    "--resume", action="store_true",
    help=f"leaves out directories that {_RESULTS} has for the seed and the "
    "commit, after a run was stopped",
  )
  add("--list", action="store_true", help="shows the mutants, runs nothing")
  add("--root", type=pathlib.Path, default=trial.ROOT, help=argparse.SUPPRESS)
  options = parser.parse_args(arguments)
  for name in ("num", "workers", "budget", "patience"):
    if not getattr(options, name) > 0:
      parser.error(f"--{name}={getattr(options, name)} must be positive")
  options.root = options.root.resolve()
  options.dir = [name.rstrip("/") for name in options.dir]
  return options


def _directory(file: str, named: Sequence[str]) -> str:
  """The directory among those named, or the first two levels; "" for none."""
  path = pathlib.PurePosixPath(file)
  if not named:
    return "/".join(path.parts[:-1][:2])
  return next((name for name in named if path.is_relative_to(name)), "")


def _texts(root: pathlib.Path, named: Sequence[str]) -> dict[str, str]:
  """Path and content of the product's files below the directories named."""
  found = {
    path.relative_to(root).as_posix(): path.read_text()
    for top in _TOPS for path in sorted((root / top).rglob("*.py"))
  }
  known = {_directory(file, named): None for file in found}
  for name in named:
    if name not in known:
      sys.exit(
        f"error: --dir: {name!r} has no code; use a directory of "
        f"{' or '.join(_TOPS)}, such as {_directory(min(found), ())}"
      )
  return {f: text for f, text in found.items() if _directory(f, named)}


def _commit(root: pathlib.Path) -> str:
  """Commit of the code, with "-dirty" if the code differs from it."""
  git = ["git", "-C", str(root)]
  commit, status = (
    subprocess.run([*git, *c], capture_output=True, text=True, check=False)
    for c in (
      ("rev-parse", "--short=8", "HEAD"),
      ("status", "--porcelain", "--", *trial.TOPS),
    )
  )
  dirty = "-dirty" if status.stdout.strip() else ""
  return commit.stdout.strip() + dirty or "unknown"


def stored(root: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of results/mutants.json."""
  path = root / _RESULTS
  return json.loads(path.read_text()) if path.exists() else []


def _store(root: pathlib.Path, row: dict[str, Any]) -> None:
  """Adds a row to the file of results; it is complete at any time."""
  lines = ",\n".join(json.dumps(row) for row in [*stored(root), row])
  (root / _RESULTS).parent.mkdir(exist_ok=True)
  temporary = (root / _RESULTS).with_suffix(".tmp")
  temporary.write_text(f"[\n{lines}\n]\n")
  temporary.replace(root / _RESULTS)


def _table(rows: Sequence[dict[str, Any]]) -> str:
  total = {name: sum(row[name] for row in rows) for name in _COUNTS}
  lines = [("directory", *_COUNTS)] + [
    (row["directory"], *(row[name] for name in _COUNTS))
    for row in (*rows, total | {"directory": "all"})
  ]
  return "\n".join(
    f"{name:28}" + "".join(f"{x:>11}" for x in rest) for name, *rest in lines
  )


def _try_all(
  options: argparse.Namespace, drawn: dict[str, list[Mutant]],
  texts: dict[str, str], folder: pathlib.Path,
) -> list[dict[str, Any]]:
  """Tries mutants; prints outcomes, and stores a row per directory."""
  about = {"commit": _commit(options.root), "seed": options.seed}
  if options.resume:
    done = {
      row["directory"] for row in stored(options.root)
      if all(row[name] == value for name, value in about.items())
    }
    drawn = {name: those for name, those in drawn.items() if name not in done}
  trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
  for number in range(options.workers):
    trial.copy_tree(options.root, folder / str(number))
    trees.put(folder / str(number))
  trials = trial.Trials(
    trial.users(folder / "0"), options.budget, options.patience
  )

  def attempt(mutant: Mutant) -> str:
    tree = trees.get()
    outcome = trials.run(tree, mutant)
    trees.put(tree)
    text = mutant.described(texts[mutant.file])
    print(f"{outcome.kind}: {text}\n  {outcome.test}".rstrip(), flush=True)
    return outcome.kind

  rows = []
  pool = concurrent.futures.ThreadPoolExecutor(options.workers)
  try:
    waiting = {
      name: [pool.submit(attempt, mutant) for mutant in those]
      for name, those in drawn.items()
    }
    for name, those in waiting.items():
      kinds = [found.result() for found in those]
      today = datetime.date.today().isoformat()
      counts = (len(kinds), *map(kinds.count, trial.KINDS))
      rows.append(
        {"date": today, **about, "directory": name}
        | dict(zip(_COUNTS, counts, strict=True))
      )
      _store(options.root, rows[-1])
  finally:
    trials.close()
    pool.shutdown(cancel_futures=True)
  return rows


def main(arguments: Sequence[str] | None = None) -> int:
  """Draws mutants and tries them; returns 1 if some survive."""
  options = _options(arguments)
  texts = _texts(options.root, options.dir)
  drawn: dict[str, list[Mutant]] = {}
  for mutant in draw(texts, options.num, str(options.seed)):
    directory = _directory(mutant.file, options.dir)
    drawn.setdefault(directory, []).append(mutant)
  if options.list:
    for mutant in itertools.chain(*drawn.values()):
      print(mutant.described(texts[mutant.file]))
    return 0
  with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
    rows = _try_all(options, drawn, texts, pathlib.Path(folder))
  print(_table(rows))
  return int(any(row["survived"] for row in rows))


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  sys.exit(main())
