"""Adapter to lm-evaluation-harness, with a substitute for that package.

`tests/eval` runs the package itself, which the other tests do not need.
"""

import importlib.machinery
import logging
import os
import sys
import types

import pytest

from caatnet.interop import harness

KNOWN = ["sums", "words"]
RESULTS = {
  "results": {
    "sums": {
      "alias": "sums", "acc,none": 0.5, "acc_stderr,none": 0.25,
      "em,strict": 1.0, "em_stderr,strict": "N/A",
    },
  },
  "groups": {"all": {"acc,none": 0.75, "alias": "all"}},
  "versions": {"sums": 2.0},
  "n-shot": {"sums": 3},
  "n-samples": {"sums": {"original": 9, "effective": 4}},
}
METRICS = [
  harness.TaskMetric("sums", "2.0", 3, 4, "acc", "none", 0.5, 0.25),
  harness.TaskMetric("sums", "2.0", 3, 4, "em", "strict", 1.0, None),
  harness.TaskMetric("all", "", 0, 0, "acc", "none", 0.75, None),
]


class Manager:
  """Substitute for the task manager of the harness."""

  def __init__(self, include_path, include_defaults):
    self.include_path, self.include_defaults = include_path, include_defaults
    self.all_tasks = KNOWN

  def load(self, names):
    if any(name.endswith("damaged.yaml") for name in names):
      raise TypeError("no field 'x'")
    made = {name: f"task {name}" for name in names if name != "mine"}
    if "mine" not in names:
      return {"tasks": made, "groups": {}, "group_map": {}}
    return {
      "tasks": made | {"part": "task part"}, "groups": {"mine": "group mine"},
      "group_map": {"mine": ["part"]},
    }


@pytest.fixture
def calls(monkeypatch):
  """Installs the substitute; returns the arguments of its evaluations."""
  found = []

  def simple_evaluate(model, **options):
    print("progress of the harness")
    found.append((model, options))
    return RESULTS

  modules = {
    "lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.api": {},
    "lm_eval.api.model": {"LM": type("LM", (), {})},
    "lm_eval.tasks": {"TaskManager": Manager},
  }
  for name, members in modules.items():
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.setenv("DISABLE_MULTIPROC", "")
  monkeypatch.delenv("DISABLE_MULTIPROC")
  return found


def responder():
  return types.SimpleNamespace(
    context=12, num_cut=5, loglikelihood=lambda asked: ("a", asked),
    loglikelihood_rolling=lambda asked: ("b", asked),
    generate_until=lambda asked: ("c", asked),
  )


def test_model_and_options_reach_the_harness(calls, capsys):
  found = harness.evaluate(responder(), ["words", "sums"], 0.5)
  assert found == {
    "context": 12, "num_cut": 5, "metrics": [x._asdict() for x in METRICS]
  }
  (model, options), = calls
  assert model.loglikelihood(1) == ("a", 1)
  assert model.loglikelihood_rolling(2) == ("b", 2)
  assert model.generate_until(3) == ("c", 3)
  manager = options.pop("task_manager")
  assert (manager.include_path, manager.include_defaults) == ([], True)
  assert options == {
    "tasks": ["task words", "task sums"], "limit": 0.5, "log_samples": False,
    "bootstrap_iters": 1000,
  }
  assert os.environ["DISABLE_MULTIPROC"] == "1"
  assert logging.getLogger("lm_eval").level == logging.ERROR
  printed = capsys.readouterr()
  assert (printed.out, printed.err) == ("", "progress of the harness\n")


def test_files_of_tasks_and_groups_are_loaded(calls, tmp_path):
  """Reads the harness's own tasks only if one of them is named."""
  pytest.importorskip("yaml")
  texts = {
    "group": "group: mine\ntask: [part]", "task": "task: x", "list": "[]",
    "tagged": "task: !function y",
  }
  paths = {name: str(tmp_path / f"{name}.yaml") for name in texts}
  for name, text in texts.items():
    (tmp_path / f"{name}.yaml").write_text(text)
  harness.evaluate(responder(), list(paths.values()))
  harness.evaluate(responder(), [paths["task"], "sums"])
  (_, first), (_, second) = calls
  # The group replaces its part.
  assert first["tasks"] == [
    "group mine", *(f"task {paths[name]}" for name in list(texts)[1:])
  ]
  assert first["limit"] is None
  manager = first["task_manager"]
  assert manager.include_path == [str(tmp_path)]
  assert not manager.include_defaults
  assert second["task_manager"].include_path == []
  assert second["task_manager"].include_defaults


def test_task_that_cannot_be_loaded_is_named(calls, tmp_path):
  path = tmp_path / "damaged.yaml"
  path.write_text("task: damaged")
  for tasks, message in (
    ([str(path)], r"^--tasks=.*damaged.yaml: TypeError: no field 'x'$"),
    (["sums", "word"], r"^--tasks=word: not a task .*; did you mean words\?$"),
    (["sums", "other"], r"^--tasks=other: not a task .*-harness$"),
  ):
    with pytest.raises(ValueError, match=message):
      harness.evaluate(responder(), tasks)
  assert not calls


def test_arguments_are_checked_before_a_model_is_read(calls, tmp_path):
  (tmp_path / "x.yaml").touch()
  harness.check(["sums", str(tmp_path / "x.yaml")], 1e-9)
  harness.check(["sums"], None)
  for tasks, limit, kind, message in (
    (["sums", ""], None, ValueError, "--tasks=sums, has an empty name"),
    (["no.yaml"], None, FileNotFoundError, "--tasks=no.yaml: no such file"),
    (["sums"], 0, ValueError, "--limit=0 must be above 0"),
    (["sums"], float("nan"), ValueError, "--limit=nan must be above 0"),
  ):
    with pytest.raises(kind, match=message):
      harness.check(tasks, limit)
