"""Files in results/: each is what the command that it names has written.

Command and files are those of the commit that a result names.
"""

import json
import re
import shlex

import pytest

from caatnet.show import results
from docs import log
from docs.points import ROOT
from tests import history
from tests.mutation import __main__ as mutation

FILES = sorted(path.name for path in (ROOT / "results").iterdir())
# Written by make mutants: a row per seed and directory.
OTHERS = {"mutants.json"}
JSON = [name for name in FILES if name.endswith(".json") and name not in OTHERS]

# Files that are not exactly what their command writes today. Each has a `note`
# that states the difference.
TIMES, HOURS = "contains times of an idle machine", "takes long to run"
EDITED = {
  "calibration.json": "its family was added later", "decoding.json": TIMES,
  "kernels_h100.json": TIMES, "train_step_h100.json": TIMES,
  "planner_memory_h200.json": HOURS, "planner_memory_v5p.json": HOURS,
  "planner_memory_answers_v5p.json": HOURS,
  "planner_memory_held_out_v5p.json": HOURS,
  "programs.json": HOURS,
}
# Results of compiled programs, whose rows must name the program.
PROGRAMS = {"kernels_bytes_h200.json", "kernels_bytes_v5p.json",
            "programs.json"}


def origin_faults(name: str, content: dict) -> list[str]:
  """Returns what is missing for a file to be repeated."""
  found = [
    f"no {key}" for key in ("command", "date", "commit", "versions")
    if not content.get(key)
  ]
  if found:
    return found
  if not re.fullmatch(r"[0-9a-f]{7,40}", content["commit"]):
    return [f"commit {content['commit']}"]
  if content.get("sha256") != results.digest(content):
    found.append("content was edited: its sha256 differs")
  found += history.faults(f"`{content['command']}`", content["commit"])
  if bool(content.get("note")) != (name in EDITED):
    found.append("a note and an entry of EDITED go together")
  if name not in EDITED:
    found += [
      f"no version of {package}" for package in ("python", "jax")
      if package not in content["versions"]
    ]
  words = shlex.split(content["command"])
  path = f"results/{name}"
  outputs = {"--output", "--config.benchmark.results"}
  default = name in ("programs.json", "planner_memory_v5p.json")
  if not default and not {f"{key}={path}" for key in outputs} & {*words}:
    found.append(f"the command does not write {path}")
  if name in PROGRAMS:
    found += [
      f"row {number} has no fingerprint"
      for number, row in enumerate(content["rows"])
      if not re.fullmatch("[0-9a-f]{64}", row.get("fingerprint", ""))
    ]
  return found


def content(name: str) -> dict:
  text = (ROOT / "results" / name).read_text()
  return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.quick
@pytest.mark.parametrize("name", JSON)
def test_a_result_is_what_its_command_has_written(name):
  assert origin_faults(name, content(name)) == []


def test_counts_of_mutants_add_up_and_name_a_commit():
  rows = mutation.stored(ROOT)
  assert rows
  for row in rows:
    kinds = ("killed", "survived", "timed_out")
    assert row["drawn"] == sum(row[kind] for kind in kinds), row
    assert history.faults("", row["commit"].removesuffix("-dirty")) == []


def test_every_exception_is_a_file():
  assert {*EDITED, *PROGRAMS, *OTHERS} <= {*FILES}


@pytest.mark.parametrize(
  "name", [name for name in FILES if name not in {*JSON, *OTHERS}]
)
def test_a_table_or_picture_is_in_an_entry_of_the_log(name):
  """Sweeps and pictures have no place for a command: the log names it."""
  entries = [
    text for path in log.paths()
    if f"results/{name}" in (text := path.read_text())
  ]
  drawn = (ROOT / "docs/draw.py").read_text()
  is_picture = name.endswith(".png")  # docs.draw makes it from a table
  assert entries or (is_picture and f"results/{name}" in drawn)
  for text in entries:
    assert re.search(r"python -m launch\.|`configs/", text)
    assert re.search(r"^- Commit: [0-9a-f]{7}", text, re.MULTILINE)


@pytest.mark.parametrize(("key", "value", "fault"), [
  ("command", "", "no command"),
  ("command", "python -m launch.simulate --output=results/other.json",
   "the command does not write results/fairness.json"),
  ("command", "python -m launch.simulate --output=results/fairness.json "
   "--config=configs/serving/nowhere.py", "nowhere"),
  ("commit", "unknown", "commit unknown"),
  ("versions", {"jax": "0.10.2"}, "no version of python"),
  ("bound", 1.0, "content was edited"),
  ("note", "by hand", "a note"),
])
def test_a_result_without_origin_is_named(key, value, fault):
  changed = content("fairness.json") | {key: value}
  found = origin_faults("fairness.json", changed)
  assert any(fault in line for line in found), found
