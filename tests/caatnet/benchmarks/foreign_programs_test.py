"""Programs of other projects: environments are made elsewhere, not in tests."""

import pathlib
import sys

import pytest

from caatnet.benchmarks.foreign import foreign_programs, sharded_step
from configs.benchmark import foreign_programs as config_file

PYTHON = pathlib.Path(sys.executable)


@pytest.fixture(scope="module")
def sound():
  """Reading of the step around a model of Flax, in this environment."""
  found, versions = foreign_programs.read(PYTHON, "flax", "sharded")
  assert {"flax", "optax", "jax"} <= versions.keys()
  return found


def test_step_sends_what_the_closed_form_says(sound):
  expected = foreign_programs.PROGRAMS["flax"]["sharded"]
  row = foreign_programs.compared(sound, expected)
  assert row["equal"], row
  for key in expected:
    other = expected | {key: expected[key] + 1}
    assert not foreign_programs.compared(sound, other)["equal"]
  less = {k: v for k, v in expected.items() if k[1] != "all_gather"}
  assert not foreign_programs.compared(sound, less)["equal"]


def test_planted_fault_is_named_by_its_line(sound, monkeypatch):
  monkeypatch.setattr(sharded_step, "FAULTS", ("all_reduce",))
  (row,) = foreign_programs.faults(PYTHON, "flax", sound)
  assert row["found"]
  assert row["blamed"] == [row["planted"]]
  assert foreign_programs.added(sound, sound) == []


def test_every_project_has_its_file_and_packages():
  for project, programs in foreign_programs.PROGRAMS.items():
    module = foreign_programs._module(project)
    assert module.PACKAGES
    for name in programs:
      assert callable(getattr(module, name))


def test_environment_is_made_once(tmp_path):
  for project in ("flax", "ringattention"):
    name, packages = foreign_programs._environment(project)
    (tmp_path / name).mkdir()
    (tmp_path / name / "installed").write_text("\n".join(packages))
  for project, name in (("flax", "shared"), ("ringattention", "ringattention")):
    made = foreign_programs.environment(project, tmp_path, "no such python")
    assert made == tmp_path / name / "bin/python"


def test_unknown_project_is_refused():
  config = config_file.get_config()
  config.benchmark.projects = ("torch",)
  with pytest.raises(ValueError, match=r"projects='torch' must be one"):
    foreign_programs.run(config)


def test_python_that_cannot_make_environments_is_one_line(tmp_path):
  with pytest.raises(ValueError, match="no such python: No such file"):
    foreign_programs.environment("flax", tmp_path, "no such python")
  script = tmp_path / "python"
  script.write_text(
    "#!/bin/sh\necho 'python: not installed' >&2; echo hint >&2; exit 127\n"
  )
  script.chmod(0o755)
  with pytest.raises(ValueError, match=r"python: not installed$"):
    foreign_programs.environment("flax", tmp_path, str(script))


def test_tables_show_what_was_read_and_the_closed_form_if_it_differs(capsys):
  row = {
    "project": "flax", "program": "sharded", "versions": {"flax": "9.8"},
    "axes": {"data": 2, "fsdp": 4}, "collectives": 3, "equal": True,
    "read": {"data all_reduce": 12_345},
    "expected": {"data all_reduce": 54_321}, "unknown": [],
  }
  fault = {"project": "brax", "fault": "axis", "planted": "a.py:1",
           "blamed": ["a.py:1", "b.py:2"]}
  foreign_programs._print({"rows": [row, row | {
    "equal": False, "unknown": ["Not understood: x"]
  }], "faults": [fault]})
  first, second, third = [
    [cell.strip() for cell in line.strip("│").split("│")]
    for line in capsys.readouterr().out.splitlines() if line.startswith("│")
  ]
  common = ["flax 9.8", "sharded", "data 2, fsdp 4", "3"]
  assert first == [*common, "data all_reduce 12,345", "equal", "nothing"]
  assert second == [
    *common, "data all_reduce 12,345", "data all_reduce 54,321",
    "Not understood: x",
  ]
  assert third == ["brax", "axis", "a.py:1", "a.py:1, b.py:2"]
