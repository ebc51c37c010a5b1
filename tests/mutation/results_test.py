"""Results accumulate, are replaced per seed, and resume."""

import json
import pathlib

import pytest

from tests.mutation import candidates
from tests.mutation.results import Results, equivalents, identity, wilson

ABOUT = {"command": "c", "commit": "1", "tree": "t"}


def entry(seed, line, outcome, directory="parallel/a"):
  return {
    "seed": seed, "directory": directory, "file": f"{directory}/f.py",
    "function": "f", "operator": "sign", "line": line, "before": "a",
    "after": "b", "occurrence": 0, "outcome": outcome, "seconds": 1.0,
    "tests": 1,
  }


def test_wilson():
  # Brown, Cai and DasGupta (2001) and R's prop.test(correct=FALSE).
  assert wilson(9, 10) == pytest.approx((0.59585, 0.98213), abs=1e-5)
  assert wilson(60, 60) == pytest.approx((0.93983, 1.0), abs=1e-5)
  assert wilson(0, 0) == (0, 1)
  low, high = wilson(3, 10)
  assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))


def test_seeds_accumulate_and_a_seed_is_replaced(tmp_path):
  path = tmp_path / "mutants.json"
  for seed, line in ((0, "x"), (1, "y"), (0, "z")):
    results = Results(path)
    assert results.begin(seed, ["parallel/a"], ABOUT) == set()
    results.add(entry(seed, line, "assertion"))
    results.finish()
  written = json.loads(path.read_text())
  assert [(e["seed"], e["line"]) for e in written["mutants"]] == [
    (0, "z"), (1, "y"),
  ]
  assert written["runs"]["c"]["commit"] == "1"


def test_an_interrupted_run_resumes(tmp_path):
  path = tmp_path / "mutants.json"
  results = Results(path)
  results.begin(0, ["parallel/a"], ABOUT)
  results.add(entry(0, "x", "assertion"))
  # A killed process has written that, and not finished.
  again = Results(path)
  done = again.begin(0, ["parallel/a"], ABOUT)
  assert done == {identity(entry(0, "x", "assertion"))}
  assert again.runs["c"]["seconds"] == 1.0
  changed = Results(path)
  assert changed.begin(0, ["parallel/a"], ABOUT | {"tree": "u"}) == set()
  assert changed.entries == []


def test_other_directories_of_a_seed_are_kept(tmp_path):
  results = Results(tmp_path / "mutants.json")
  results.begin(0, ["parallel/a"], ABOUT)
  results.add(entry(0, "x", "crash"))
  results.finish()
  results.begin(0, ["parallel/b"], ABOUT)
  results.add(entry(0, "x", "timeout", "parallel/b"))
  assert set(results.scores()) == {"parallel/a", "parallel/b"}


def test_scores(tmp_path):
  results = Results(tmp_path / "mutants.json")
  outcomes = ("assertion", "exception", "crash", "timeout", "survived")
  for line, outcome in enumerate(outcomes):
    results.add(entry(0, str(line), outcome))
  results.add(entry(1, "0", "survived"))  # drawn again: the last one counts
  row = results.scores()["parallel/a"]
  assert row == {
    "mutants": 5, "killed": 3, "assertion": 0, "exception": 1, "crash": 1,
    "timeout": 1, "survived": 2, "score": 0.6, "interval": row["interval"],
  }
  known = {identity(entry(0, "4", "survived"))}
  assert results.scores(known)["parallel/a"]["survived"] == 1


def test_equivalents_have_identities_and_reasons(tmp_path):
  path = tmp_path / "equivalent.toml"
  fields = {
    k: v for k, v in entry(0, "x", "").items()
    if k in ("file", "function", "operator", "line", "before", "after")
  }
  lines = [f"{k} = {json.dumps(v)}" for k, v in fields.items()]
  path.write_text("\n".join(["[[equivalent]]", *lines, 'reason = "r"']))
  assert equivalents(path) == {identity(entry(0, "x", "")): "r"}


def test_listed_equivalents_are_mutants_of_the_sources():
  root = pathlib.Path(__file__).parents[2]
  listed = equivalents(root / "tests/mutation/equivalent.toml")
  for found, reason in listed.items():
    source = candidates.read(root, found[0])
    assert found in {m.identity for m in candidates.candidates(
      source, found[0]
    )}
    assert len(reason) > 20
