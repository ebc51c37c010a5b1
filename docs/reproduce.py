r"""Runs the commands of claims again, and compares the numbers with CLAIMS.md.

  python -m docs.reproduce 1.1 5.1
  python -m docs.reproduce streaming --budget=30
  python -m docs.reproduce all --budget=600 --record

Arguments are numbers of claims, keys of papers (docs/papers.toml) or "all".
Claims whose commands take longer than --budget seconds, or cannot run here, are
listed with the reason. Exit status 1: a number is out of tolerance, or failed.

Commands run in a temporary folder with links to the tree and a copy of
results/, so that no tracked file is written. A run that was killed resumes from
runs/reproduce/, if neither the claim nor the code has changed since.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib

from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from docs import claim_values, claims
from docs.claim_schema import Claim
from docs.points import ROOT
from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_float("budget", 60.0, "Seconds that one claim may take.", 0)
flags.DEFINE_bool("record", False, "Write values, date, commit to docs/claims.")

STATE = ROOT / "runs" / "reproduce"
# Commands are stopped after this many times their budget, plus a minute.
_TIMEOUT_FACTOR = 10


@dataclasses.dataclass(frozen=True)
class Plan:
  """Claim with the commands that give its numbers.

  Attributes:
    claim: The claim.
    commands: Its commands, or those of the claim that it refers to.
    budget_s: Their time on two cores, in seconds.
    skipped: Reason why they are not run; "" if they are.
  """

  claim: Claim
  commands: tuple[str, ...]
  budget_s: float
  skipped: str


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Result of the commands of one claim.

  Attributes:
    plan: The claim and its commands.
    values: Numbers that were seen, each with one value per seed.
    seconds: Time of the commands, 0 if another claim had run them.
    error: Message if a command failed or a number could not be read.
  """

  plan: Plan
  values: Mapping[str, list[float]]
  seconds: float
  error: str = ""

  @property
  def left(self) -> list[str]:
    """Names of numbers that are not within tolerance of the recorded ones."""
    expected = self.plan.claim.expected
    return [k for k, v in self.values.items() if not expected[k].agrees(v)]

  @property
  def is_good(self) -> bool:
    """Whether everything was read and is within its tolerance."""
    return not self.error and not self.left


def plans(
  names: Sequence[str], budget_s: float, known: Mapping[str, Sequence[Claim]]
) -> list[Plan]:
  """Returns the claims that names select, in the order of their numbers.

  Args:
    names: Numbers of claims, keys of papers, or "all".
    budget_s: Claims whose commands take longer are skipped.
    known: All claims, by the key of their paper.

  Raises:
    ValueError: A name selects nothing.
  """
  by_number = {c.number: c for found in known.values() for c in found}
  chosen: dict[str, Claim] = {}
  for name in names:
    if name == "all":
      chosen |= by_number
    elif name in by_number:
      chosen[name] = by_number[name]
    elif name in known:
      chosen |= {c.number: c for c in known[name]}
    else:
      raise ValueError(
        f"the claim or paper {name!r} is unknown; use the number of a claim, "
        f"such as 1.1, all, or a paper: {', '.join(known)}"
      )
  ordered = sorted(chosen.values(), key=lambda claim: claim.order)
  return [_plan(claim, budget_s, by_number) for claim in ordered]


def _plan(
  claim: Claim, budget_s: float, by_number: Mapping[str, Claim]
) -> Plan:
  source = by_number[claim.same_as] if claim.same_as else claim
  needed = source.budget_s or 0.0
  reason = claim.cannot_run or source.cannot_run
  if not reason and all(e.log for e in claim.expected.values()):
    reason = "no number is read from its commands"
  if not reason and needed > budget_s:
    reason = f"takes {needed:,.0f} s, over --budget={budget_s:g}"
  return Plan(claim, tuple(source.commands), needed, reason)


def run(
  chosen: Sequence[Plan],
  state: pathlib.Path = STATE,
  on_end: Callable[[Plan], None] = lambda plan: None,
  environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
  """Runs claims, except for those that are skipped.

  Args:
    chosen: The claims.
    state: Folder with the outcomes of a run that was killed; emptied at the
      end.
    on_end: Called after each claim.
    environment: Environment of the commands; this process's if None.
  """
  state.mkdir(parents=True, exist_ok=True)
  code = _code_digest()
  found = []
  with tempfile.TemporaryDirectory(prefix="reproduce_") as above:
    # Commands -> folder in which they have run, and what they printed.
    ran: dict[tuple[str, ...], tuple[pathlib.Path, str]] = {}
    for plan in chosen:
      if plan.skipped:
        continue
      file = state / f"{plan.claim.number}.json"
      key = _key(plan, code)
      kept = json.loads(file.read_text()) if file.exists() else {}
      if kept.get("key") == key:
        outcome = Outcome(plan, kept["values"], kept["seconds"])
      else:
        outcome = _run_one(plan, pathlib.Path(above), ran, environment)
        if not outcome.error:
          part = file.with_suffix(".part")
          part.write_text(json.dumps(
            {"key": key, "values": outcome.values, "seconds": outcome.seconds}
          ))
          part.replace(file)
      found.append(outcome)
      on_end(plan)
  for plan in chosen:
    (state / f"{plan.claim.number}.json").unlink(missing_ok=True)
  return found


def _run_one(
  plan: Plan,
  above: pathlib.Path,
  ran: dict[tuple[str, ...], tuple[pathlib.Path, str]],
  environment: Mapping[str, str] | None,
) -> Outcome:
  begin = time.monotonic()
  try:
    if plan.commands not in ran:
      folder = pathlib.Path(tempfile.mkdtemp(dir=above))
      _link_tree(folder)
      timeout = _TIMEOUT_FACTOR * plan.budget_s + 60
      printed = "".join(
        _shell(command, folder, timeout, environment)
        for command in plan.commands
      )
      ran[plan.commands] = folder, printed
    values = claim_values.read(plan.claim, *ran[plan.commands])
  except ValueError as error:
    return Outcome(plan, {}, time.monotonic() - begin, str(error))
  return Outcome(plan, values, time.monotonic() - begin)


def _link_tree(folder: pathlib.Path) -> None:
  """Fills a folder with links to the repository, and a copy of results/."""
  for path in ROOT.iterdir():
    if path.name.startswith(".") or path.name in ("results", "runs", "build"):
      continue
    (folder / path.name).symlink_to(path)
  shutil.copytree(ROOT / "results", folder / "results")


def _shell(
  command: str,
  folder: pathlib.Path,
  timeout_s: float,
  environment: Mapping[str, str] | None,
) -> str:
  """Runs a shell command, and returns what it printed on both streams.

  Raises:
    ValueError: The command failed or took too long.
  """
  base = dict(os.environ if environment is None else environment)
  paths = [str(ROOT), *filter(None, [base.get("PYTHONPATH")])]
  base |= {
    # "python" is the interpreter of this process.
    "PATH": f"{pathlib.Path(sys.executable).parent}:{base.get('PATH', '')}",
    "PYTHONPATH": os.pathsep.join(paths),
  }
  process = subprocess.Popen(
    command, shell=True, cwd=folder, env=base, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
  )
  first = " ".join(command.split())[:60]
  try:
    printed, _ = process.communicate(timeout=timeout_s)
  except BaseException as error:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)  # all that the command started
    process.wait()
    if isinstance(error, subprocess.TimeoutExpired):
      raise ValueError(
        f"{first} was stopped after its time limit of {timeout_s:.0f} s"
      ) from error
    raise
  if process.returncode:
    last = (printed.strip().splitlines() or ["nothing printed"])[-1]
    raise ValueError(
      f"{first} failed with exit status {process.returncode}: {last}"
    )
  return printed


def _code_digest() -> str:
  """Returns a hash of the commit and of the uncommitted changes of the code."""
  parts = [
    _git("rev-parse", "HEAD"), _git("diff", "HEAD", "--", ":!docs/claims")
  ]
  return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _git(*arguments: str) -> str:
  ended = subprocess.run(
    ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
  )
  return ended.stdout.strip()


def _key(plan: Plan, code: str) -> str:
  text = json.dumps([plan.commands, plan.claim.model_dump_json(), code])
  return hashlib.sha256(text.encode()).hexdigest()


def table(outcomes: Sequence[Outcome]) -> Table:
  """Returns a table of numbers with a criterion or outside of their tolerance.

  Other numbers, which agree with the record, are counted in a row.
  """
  made = Table(title="claims", title_justify="left")
  for index, heading in enumerate(
    ("claim", "number", "published", "recorded", "seen now", "time", "verdict")
  ):
    made.add_column(heading, justify="right" if 1 < index < 6 else "left")
  for outcome in outcomes:
    for row in _rows(outcome):
      made.add_row(*map(Text, row))
  return made


def _rows(outcome: Outcome) -> Iterator[list[str]]:
  claim = outcome.plan.claim
  verdict = claim.verdict(dict(outcome.values))
  head = [claim.number, f"{outcome.seconds:.1f} s", verdict]
  if outcome.error:
    head[2] = f"failed: {outcome.error}"
  bounds = claim.criteria()
  shown = [
    name for name in outcome.values if name in bounds or name in outcome.left
  ]
  for name in shown or [""]:
    published = recorded = seen = ""
    if name:
      recorded = _format_values(claim.expected[name].values)
      seen = _format_values(outcome.values[name])
    if name in bounds:
      _, criterion, bound = bounds[name]
      published = f"{criterion.relation} {bound:g}"
    words = head[2]
    if name in outcome.left:
      words += ", LEFT ITS TOLERANCE"
    yield [head[0], name, published, recorded, seen, head[1], words.strip(", ")]
    head = ["", "", ""]
  others = len(outcome.values) - len(shown)
  if others:
    yield [head[0], f"{others} others", "", "", "as recorded", "", ""]


def _format_values(values: Sequence[float]) -> str:
  text = f"{statistics.fmean(values):.5g}"
  if len(values) > 1:
    text += f" ({min(values):.5g} to {max(values):.5g})"
  return text


def record(outcome: Outcome, folder: pathlib.Path = claims.FOLDER) -> None:
  """Writes an outcome's numbers, date and commit into the claim's file.

  Raises:
    ValueError: A number is not written as this function expects, with
      ``value`` as its first key.
  """
  number = outcome.plan.claim.number
  (paper,) = (
    name for name, found in claims.load(folder).items()
    if number in [claim.number for claim in found]
  )
  path = folder / f"{paper}.toml"
  commit = _git("rev-parse", "--short=7", "HEAD")
  # Records themselves do not count as changes of the code.
  if _git("status", "--porcelain", "--", ".", ":!docs/claims", ":!CLAIMS.md"):
    commit += "-dirty"
  today = datetime.date.today()
  text = update_claim_text(
    path.read_text(), number, outcome.values, today, commit
  )
  path.write_text(text)


def update_claim_text(
  text: str,
  number: str,
  values: Mapping[str, Sequence[float]],
  day: datetime.date,
  commit: str,
) -> str:
  """Returns the text of a file of claims with new values in one claim.

  Comments and layout stay; the result is parsed to make sure that nothing else
  has changed.

  Raises:
    ValueError: A line to change is missing, or other content would change.
  """
  wanted = tomllib.loads(text)
  entry = next(c for c in wanted["claims"] if c["number"] == number)
  blocks = re.split(r"(?m)^(?=\[\[claims\]\]$)", text)
  (index,) = (
    i for i, block in enumerate(blocks)
    if re.search(rf'(?m)^number = "{re.escape(number)}"$', block)
  )
  head, mark, rest = blocks[index].partition("\n[claims.")
  head = re.sub(r'(?m)^commit = ".*"\n', "", head)
  head = re.sub(
    r"(?m)^date = .*$", f'date = {day}\ncommit = "{commit}"', head, count=1
  )
  block = head + mark + rest
  # Published values, which stand first, may have the same names.
  start = block.find("\n[claims.expected")
  first, numbers = block[:start], block[start:]
  entry.update(date=day, commit=commit)
  for name, seeds in values.items():
    rounded = [float(f"{seed:.7g}") for seed in seeds]
    exact = [int(seed) if seed.is_integer() else seed for seed in rounded]
    new = exact if len(exact) > 1 else exact[0]
    key = re.escape(name)
    numbers, count = re.subn(
      rf"(?m)^(\[claims\.expected\.{key}\]\nvalue = |{key} = {{ value = )"
      r"(\[[^]]*\]|[^,\s}]+)",
      lambda match, new=new: f"{match[1]}{new!r}", numbers,
    )
    if count != 1:
      raise ValueError(f"claim {number} has no value of {name}")
    entry["expected"][name]["value"] = new
  blocks[index] = first + numbers
  made = "".join(blocks)
  if tomllib.loads(made) != wanted:
    raise ValueError(f"claim {number}: the update would change other content")
  return made


def main(names: Sequence[str]) -> int:
  """Runs claims, prints a table of their numbers, and returns an exit code."""
  if not names:
    raise ValueError("give claims, such as 1.1, papers, or all (--help)")
  chosen = plans(names, FLAGS.budget, claims.load())
  total = sum(not plan.skipped for plan in chosen)
  with Progress(transient=True, console=Console(stderr=True)) as progress:
    task = progress.add_task("claims", total=total)
    found = run(chosen, on_end=lambda plan: progress.advance(task))
  console = Console()
  if not console.is_terminal:  # a log file has no width to respect
    console = Console(width=150)
  if found:
    console.print(table(found))
  for plan in chosen:
    if plan.skipped:
      print(f"skipped {plan.claim.number}: {plan.skipped}")
  if FLAGS.record:
    for outcome in found:
      if not outcome.error:
        record(outcome)
  return int(not all(outcome.is_good for outcome in found))


if __name__ == "__main__":
  NAMES = [a for a in sys.argv[1:] if not a.startswith("-")]
  sys.argv[1:] = [a for a in sys.argv[1:] if a.startswith("-")]
  options.run(lambda: main(NAMES), uses=(), required=(), devices=False)
