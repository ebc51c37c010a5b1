"""Mutation tests: generated one-line bugs, and whether a test fails.

    python -m tests.mutation --seed=1
    python -m tests.mutation --dir=parallel/outer --num=20
    python -m tests.mutation --changed=main
    python -m tests.mutation --survivors --dir=parallel/outer
"""

import argparse
from collections.abc import Sequence
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from tests.mutation import coverage_map, report, sample
from tests.mutation.candidates import Mutant, candidates, read
from tests.mutation.results import Results, equivalents, identity
from tests.mutation.runner import Runner, Server, copy_tree, each

ROOT = pathlib.Path(__file__).parents[2]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m tests.mutation", description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--seed", type=int, default=0, help="seed of the samples (0)")
  add("--num", type=int, default=100, help="mutants in all (100)")
  add(
    "--dir", action="append", default=[], metavar="DIR",
    help="only this directory, e.g. parallel/outer; may be repeated",
  )
  add(
    "--changed", nargs="?", const="HEAD~1", metavar="BASE",
    help="only files that differ from a commit (HEAD~1); results are kept in "
    "another file",
  )
  add(
    "--survivors", action="store_true",
    help="tries the survivors of all seeds again, if the code still has them",
  )
  add(
    "--map", nargs="?", const="tests", metavar="PATH",
    help="only measures coverage, of all tests or of those below a path",
  )
  add(
    "--measured", action="store_true",
    help="measures no tests but those of the directory that import the file",
  )
  add("--workers", type=int, default=2, help="processes (2)")
  add(
    "--budget", type=float, default=60, metavar="S",
    help="limit in seconds of a mutant's tests per phase, and of the tests "
    "that are measured for it (60)",
  )
  add(
    "--bound", type=float, default=60, metavar="S",
    help="time limit of a run of tests, plus ten times their usual time (60)",
  )
  add("--preload", default="", help=argparse.SUPPRESS)
  add("--list", action="store_true", help="shows the mutants, runs nothing")
  add("--report", action="store_true", help="shows the results, runs nothing")
  add("--root", type=pathlib.Path, default=ROOT, help=argparse.SUPPRESS)
  add("--results", type=pathlib.Path, help="results/mutants.json")
  options = parser.parse_args(arguments)
  options.root = options.root.resolve()
  options.tree = options.root  # later a copy, which does not change
  if options.num < 1 or options.workers < 1:
    parser.error("--num and --workers must be at least 1")
  if not options.budget > 0:
    parser.error("--budget must be positive")
  if options.results is None:
    folder = ".cache/mutation" if options.changed else "results"
    options.results = options.root / folder / "mutants.json"
  options.command = " ".join(
    ["python -m tests.mutation", *(sys.argv[1:] if arguments is None else
                                   arguments)]
  )
  return options


def _git(root: pathlib.Path, *command: str) -> str:
  found = subprocess.run(
    ["git", *command], cwd=root, capture_output=True, text=True, check=False
  )
  if found.returncode:
    sys.exit(f"error: git {command[0]}: {found.stderr.strip()}")
  return found.stdout.strip()


def _changed(root: pathlib.Path, base: str) -> set[str]:
  names = _git(root, "diff", "--name-only", "--relative", base).splitlines()
  new = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
  return {*names, *new}


def _about(options: argparse.Namespace) -> dict[str, Any]:
  """Command, commit and hash of all code."""
  tree = hashlib.sha256()
  for top in ("parallel", "caatnet", "configs", "launch", "tests"):
    for path in sorted((options.tree / top).rglob("*.py")):
      tree.update(path.read_bytes())
  commit = subprocess.run(
    ["git", "describe", "--always", "--dirty"], cwd=options.root,
    capture_output=True, text=True, check=False,
  ).stdout.strip()
  return {
    "command": options.command, "commit": commit,
    "tree": tree.hexdigest()[:16],
  }


def _chosen(options: argparse.Namespace) -> dict[str, list[str]]:
  """Directories and their files."""
  found = sample.sources(options.tree)
  unknown = set(options.dir) - set(found)
  if unknown:
    sys.exit(f"error: --dir: {min(unknown)!r} is none of {', '.join(found)}")
  if options.dir:
    found = {d: found[d] for d in options.dir}
  if options.changed:
    names = _changed(options.root, options.changed)
    found = {d: [f for f in fs if f in names] for d, fs in found.items()}
    found = {d: files for d, files in found.items() if files}
  return found


def _sampled(options: argparse.Namespace, skipped: Any) -> list[Mutant]:
  chosen = _chosen(options)
  if not chosen:
    return []
  nums = sample.split(options.num, list(chosen), options.seed)
  return [
    m for directory, files in chosen.items() for m in sample.sample(
      options.tree, directory, files, nums[directory], options.seed, skipped
    )
  ]


def _survivors(
  options: argparse.Namespace, results: Results, skipped: Any
) -> list[tuple[Mutant, int]]:
  """Recorded survivors with their seeds.

  Those that the sources no longer have are dropped from the results.
  """
  wanted = {
    identity(e): e["seed"] for e in results.entries
    if e["outcome"] == "survived" and identity(e) not in skipped
    and (not options.dir or e["directory"] in options.dir)
  }
  files = sorted({i[0] for i in wanted if (options.tree / i[0]).exists()})
  found = [
    (m, wanted[m.identity]) for file in files
    for m in candidates(read(options.tree, file), file)
    if m.identity in wanted
  ]
  gone = set(wanted) - {m.identity for m, _ in found}
  results.entries = [e for e in results.entries if identity(e) not in gone]
  return found


def _run(
  options: argparse.Namespace, folder: pathlib.Path, jobs: Sequence[Any],
  work: Any, what: str,
) -> None:
  """Runs jobs on servers, with a progress bar."""
  servers: list[Server] = []
  try:
    with report.progress() as shown:
      task = shown.add_task(what, total=len(jobs))
      for number in range(min(options.workers, len(jobs))):
        servers.append(Server(
          options.tree, folder / str(number), folder / "programs",
          options.preload,
        ))

      def step(server: Server, job: Any) -> None:
        work(server, job, shown.console.print)
        shown.advance(task)

      each(servers, jobs, step)
  finally:
    for server in servers:
      server.close()


def _measure(options: argparse.Namespace, folder: pathlib.Path) -> int:
  """Measures all test files that have changed since they were measured."""
  runner = _runner(options)
  lines = _lines(options)
  files = [
    f for f in coverage_map.test_files(options.tree)
    if f.startswith(options.map) and not lines.has(f)
  ]
  _run(
    options, folder, files, lambda s, f, _: runner.measure(s, f), "test files"
  )
  return 0


def _lines(options: argparse.Namespace) -> coverage_map.Map:
  return coverage_map.Map(options.tree, options.root / ".cache/mutation/lines")


def _runner(options: argparse.Namespace) -> Runner:
  return Runner(
    options.tree, _lines(options), options.budget, options.bound,
    not options.measured,
  )


def _try(
  options: argparse.Namespace, folder: pathlib.Path, results: Results,
  known: dict[tuple, str],
) -> int:
  """Tries mutants; returns 1 if one has survived."""
  about = _about(options)
  if options.survivors:
    seeds = dict(_survivors(options, results, known))
    mutants = list(seeds)
  else:
    mutants = _sampled(options, known)
    seeds = dict.fromkeys(mutants, options.seed)
    directories = {sample.directory_of(m.file) for m in mutants}
    done = results.begin(options.seed, directories, about)
    mutants = [m for m in mutants if m.identity not in done]
  runner = _runner(options)

  def work(server: Server, mutant: Mutant, say: Any) -> None:
    entry = runner.try_mutant(server, mutant)
    entry |= {"seed": seeds[mutant], "commit": about["commit"]}
    with results.lock:
      results.add(entry, known)
    if entry["outcome"] == "survived":
      say(report.of_entry(entry))

  _run(options, folder, mutants, work, "mutants")
  if not options.survivors:
    results.finish(known)
  report.show(results, known)
  tried = {m.identity for m in mutants}
  return int(any(
    e["outcome"] == "survived" for e in results.entries if identity(e) in tried
  ))


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns 1 if a mutant has survived."""
  options = _options(arguments)
  known = equivalents(options.root / "tests/mutation/equivalent.toml")
  results = Results(options.results)
  if options.report:
    report.show(results, known)
    return 0
  if options.list:
    for m in _sampled(options, known):
      print(report.described(m.file, m.function, m.before, m.after, m.operator))
    return 0
  os.environ.pop("COVERAGE_PROCESS_START", None)
  with tempfile.TemporaryDirectory(
    prefix="mutants_", ignore_cleanup_errors=True
  ) as name:
    folder = pathlib.Path(name)
    options.tree = folder / "source"
    copy_tree(options.root, options.tree)
    if options.map:
      return _measure(options, folder)
    return _try(options, folder, results, known)


if __name__ == "__main__":
  sys.exit(main())
