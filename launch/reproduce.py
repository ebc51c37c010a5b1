r"""Runs the commands of claims again, and compares the numbers with CLAIMS.md.

  python -m launch.reproduce 1.1 5.1
  python -m launch.reproduce streaming --budget=30
  python -m launch.reproduce all --budget=600 --record

Arguments are numbers of claims, keys of papers (docs/papers.toml) or "all".
Claims whose commands take longer than --budget seconds, or need what is not
here, are listed with the reason. Exit status 1: a number left its tolerance.
A run that was killed resumes from runs/reproduce/.
"""

import sys

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_float("budget", 60.0, "Seconds that one claim may take.", 0)
flags.DEFINE_bool("record", False, "Write values, date, commit to docs/claims.")

# Arguments that are no flags.
NAMES: list[str] = []


def main() -> int:
  from caatnet import commands

  commands.require_checkout("reproduce")
  from rich.console import Console
  from rich.progress import Progress

  try:
    from docs import claims, reproduce
  except ModuleNotFoundError as error:
    raise ValueError(
      f'reproducing needs {error.name}: pip install "caatnet[serve]"'
    ) from error
  if not NAMES:
    raise ValueError("name claims, such as 1.1, papers, or all (--help)")
  chosen = reproduce.plans(NAMES, FLAGS.budget, claims.load())
  total = sum(not plan.skipped for plan in chosen)
  with Progress(transient=True, console=Console(stderr=True)) as progress:
    task = progress.add_task("claims", total=total)
    found = reproduce.run(chosen, on_end=lambda plan: progress.advance(task))
  console = Console()
  if not console.is_terminal:  # a log file has no width to respect
    console = Console(width=150)
  if found:
    console.print(reproduce.table(found))
  for plan in chosen:
    if plan.skipped:
      print(f"skipped {plan.claim.number}: {plan.skipped}")
  if FLAGS.record:
    for outcome in found:
      if not outcome.error:
        reproduce.record(outcome)
  return int(not all(outcome.is_good for outcome in found))


if __name__ == "__main__":
  NAMES += [a for a in sys.argv[1:] if not a.startswith("-")]
  sys.argv[1:] = [a for a in sys.argv[1:] if a.startswith("-")]
  options.run(main, uses=(), required=(), devices=False)
