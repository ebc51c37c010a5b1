"""Claims are run: five on each day, and made-up ones."""

import datetime
import itertools
import math
import os
import pathlib
import re
import subprocess
import sys
import tomllib

from hypothesis import given
from hypothesis import strategies as st
import pytest

from docs import claims, reproduce
from docs.claim_schema import Claim
from tests.claims_data_test import _toml, changed

ROOT = pathlib.Path(__file__).parents[1]
# Another day's claims: CLAIMS_DAY=2026-11-26; some: CLAIMS_DAY=5.1,6.3.
DAY = os.environ.get("CLAIMS_DAY", "")
# Number of claims of a day, and the most seconds that they take together.
COUNT, SECONDS = 5, 30.0


def of_the_day(candidates, day):
  """Returns the claims that are run on a day, of those that fit in its time.

  The choice rotates by a number of claims without a common divisor with theirs,
  so that every claim comes first some day.
  """
  fitting = [p for p in candidates if not p.skipped and p.budget_s <= SECONDS]
  if not fitting:
    return []
  num = len(fitting)
  stride = next(s for s in itertools.count(COUNT) if math.gcd(s, num) == 1)
  start = day.toordinal() * stride % num
  chosen, rest = [], fitting[start:] + fitting[:start]
  while rest and len(chosen) < COUNT:
    plan = rest.pop(0)
    # Without a choice that leaves too little time for the others.
    cheapest = sorted(p.budget_s for p in rest)[: COUNT - len(chosen) - 1]
    # Claims with the same commands take their time once.
    taken = {p.commands: p.budget_s for p in [*chosen, plan]}
    if sum(taken.values()) + sum(cheapest) <= SECONDS:
      chosen.append(plan)
  return chosen


def todays():
  """Claims that are run today, or those that CLAIMS_DAY names."""
  known = claims.load()
  if re.fullmatch(r"[\d.]+(,[\d.]+)*", DAY):
    return reproduce.plans(DAY.split(","), float("inf"), known)
  day = datetime.date.fromisoformat(DAY) if DAY else datetime.date.today()
  candidates = reproduce.plans(["all"], SECONDS / 2, known)
  return of_the_day(candidates, day)


def tree():
  """State of all tracked files."""
  return subprocess.run(
    ["git", "status", "--porcelain=v1", "--untracked-files=no"], cwd=ROOT,
    capture_output=True, text=True, check=True,
  ).stdout


def test_todays_claims_keep_to_their_tolerance(tmp_path):
  chosen = todays()
  assert len(chosen) == 5 or DAY
  before = tree()
  # The claims' programs are compiled as a user's are.
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  found = reproduce.run(chosen, tmp_path, environment=environment)
  assert len(found) == sum(not plan.skipped for plan in chosen)
  for outcome in found:
    number = outcome.plan.claim.number
    assert outcome.error == "", number
    now = {name: outcome.values[name] for name in outcome.left}
    assert now == {}, f"make reproduce ARGS={number}"
  assert tree() == before


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.dates())
def test_a_day_has_five_claims_within_their_time(budgets, day):
  candidates = [
    plan(f"1.{i + 1}", float(b), f"echo {i}") for i, b in enumerate(budgets)
  ]
  chosen = of_the_day(candidates, day)
  assert chosen == of_the_day(candidates, day)
  assert len(chosen) <= 5
  assert sum(p.budget_s for p in chosen) <= SECONDS
  assert len({p.claim.number for p in chosen}) == len(chosen)
  if sum(sorted(budgets)[:5]) <= SECONDS:
    assert len(chosen) == min(5, len(budgets))


def test_each_day_of_a_year_has_five_claims():
  candidates = reproduce.plans(["all"], SECONDS / 2, claims.load())
  start, seen = datetime.date(2026, 11, 25), set()
  for days in range(366):
    day = start + datetime.timedelta(days=days)
    chosen = of_the_day(candidates, day)
    assert len(chosen) == 5, day
    seen |= {p.claim.number for p in chosen}
  assert seen == {p.claim.number for p in candidates if not p.skipped}


@pytest.mark.parametrize("count", [1, 4, 5, 6, 10, 23, 25])
def test_every_claim_has_its_day(count):
  candidates = [
    plan(f"1.{i + 1}", 1.0 + i % 16, f"echo {i}") for i in range(count)
  ]
  start = datetime.date(2026, 11, 25)
  seen = {
    p.claim.number for days in range(count + 5)
    for p in of_the_day(candidates, start + datetime.timedelta(days=days))
  }
  assert seen == {p.claim.number for p in candidates}


def plan(number, budget_s=1.0, command="echo 8", **changes):
  fields = changed(number=number, budget_s=budget_s, commands=[command])
  fields["expected"]["bytes"]["printed"] = r"(?P<value>[\d.]+)"
  claim = Claim.model_validate(fields | changes)
  return reproduce.Plan(claim, (command,), budget_s, "")


def test_values_are_read_and_compared(tmp_path):
  good = plan("1.1", command="echo 8.1")
  left = plan("1.2", command="echo 8.3")
  failed = plan("1.3", command="echo no; exit 3")
  silent = plan("1.4", command="echo none")
  found = reproduce.run([good, left, failed, silent], tmp_path)
  assert [outcome.is_good for outcome in found] == [True, False, False, False]
  assert found[1].left == ["bytes"]
  assert "exit status 3: no" in found[2].error
  assert "nothing printed matches" in found[3].error
  # 8.3 leaves the record, and is within 5% of the published 8.
  assert left.claim.verdict(dict(found[1].values)) == "reproduced"
  assert list(tmp_path.iterdir()) == []
  assert reproduce.table(found).row_count == 4


def test_commands_run_in_a_folder_of_their_own(tmp_path):
  """Results are a copy; what is written there is read there."""
  command = (
    "echo 8.1 > results/demo.json; touch here; ls launch/train.py; "
    "python -c 'import sys; print(sys.executable)'; cat results/demo.json"
  )
  before = tree()
  (outcome,) = reproduce.run(
    [plan("1.1", command=command, expected={"bytes": {
      "value": 8.1, "printed": r"(?m)^(?P<value>[\d.]+)$",
      "against_published": {"name": "bytes", "relative": 0.05},
    }})], tmp_path,
  )
  assert outcome.is_good, outcome
  assert tree() == before


def test_a_killed_run_resumes(tmp_path):
  marks = tmp_path / "marks"
  chosen = [
    plan(f"1.{i}", command=f"echo {i} >> {marks}; echo 8.1") for i in (1, 2, 3)
  ]

  def kill(ended):
    if ended.claim.number == "1.2":
      raise KeyboardInterrupt

  state = tmp_path / "state"
  with pytest.raises(KeyboardInterrupt):
    reproduce.run(chosen, state, kill)
  assert marks.read_text().split() == ["1", "2"]
  # Another command is another claim: it is run again.
  chosen[0] = plan("1.1", command=f"echo 4 >> {marks}; echo 8.1")
  found = reproduce.run(chosen, state)
  assert all(outcome.is_good for outcome in found)
  assert marks.read_text().split() == ["1", "2", "4", "3"]
  assert list(state.iterdir()) == []


def test_claims_that_share_commands_run_them_once(tmp_path):
  command = f"echo x >> {tmp_path / 'marks'}; echo 8.1"
  found = reproduce.run(
    [plan("1.1", command=command), plan("1.2", command=command)],
    tmp_path / "state",
  )
  assert all(outcome.is_good for outcome in found)
  assert (tmp_path / "marks").read_text() == "x\n"


def test_what_is_skipped_has_a_reason():
  known = {"a": [
    Claim.model_validate(changed()),
    Claim.model_validate(changed(number="1.2", budget_s=90.0)),
    Claim.model_validate(changed(
      number="1.3", commands=None, cannot_run="it needs a GPU"
    )),
    Claim.model_validate(changed(number="1.4", commands=None, same_as="1.2")),
  ]}
  chosen = reproduce.plans(["all"], 60.0, known)
  assert [p.skipped for p in chosen] == [
    "", "takes 90 s, over --budget=60", "it needs a GPU",
    "takes 90 s, over --budget=60",
  ]
  assert reproduce.plans(["1.2", "a"], 60.0, known) == chosen
  with pytest.raises(ValueError, match="the claim or paper 'b' is unknown"):
    reproduce.plans(["b"], 60.0, known)


def test_a_record_changes_one_claim(tmp_path):
  text = "# A comment.\n" + _toml(changed()) + "\n\n" + _toml(
    changed(number="1.2")
  )
  (tmp_path / "a.toml").write_text(text)
  outcome = reproduce.Outcome(plan("1.2"), {"bytes": [8.25]}, 1.0)
  reproduce.record(outcome, tmp_path)
  made = (tmp_path / "a.toml").read_text()
  first, second = tomllib.loads(made)["claims"]
  assert first == tomllib.loads(text)["claims"][0]
  assert second["expected"]["bytes"]["value"] == 8.25
  assert second["date"] == datetime.date.today()
  assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", second["commit"])
  assert made.startswith("# A comment.\n")
  again = reproduce.update_claim_text(
    made, "1.2", {"bytes": [8.1]}, datetime.date(2026, 11, 25), "c"
  )
  assert tomllib.loads(again)["claims"][1]["commit"] == "c"
  with pytest.raises(ValueError, match=r"claim 1\.2 has no value of bytes"):
    reproduce.update_claim_text(
      made.replace("\nvalue", "\n# Here.\nvalue"), "1.2", {"bytes": [8.0]},
      datetime.date.today(), "",
    )


@pytest.mark.parametrize(
  ("arguments", "code", "message"),
  [
    ((), 2, "error: give claims"),
    (("99.1",), 2, "error: the claim or paper '99.1' is unknown"),
    (("1.2",), 0, "skipped 1.2: "),
    (("1.2", "--budgt=1"), 2, "did you mean --budget?"),
  ],
)
def test_the_command_line(arguments, code, message):
  ended = subprocess.run(
    [sys.executable, "-m", "docs.reproduce", *arguments], cwd=ROOT, text=True,
    capture_output=True, check=False,
  )
  assert ended.returncode == code, ended.stderr
  assert message in ended.stdout + ended.stderr
