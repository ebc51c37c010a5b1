"""Programs of other projects: environments are made elsewhere, not in tests."""

import importlib.util
import json
import pathlib
import sys

import pytest

from caatnet.benchmarks.foreign import foreign_programs, planted
from configs.benchmark import foreign_programs as config_file

PYTHON = pathlib.Path(sys.executable)
HERE = pathlib.Path(foreign_programs.__file__).parent
RECORDED = (
  pathlib.Path(__file__).parents[3] / "results/foreign_programs_v5p.json"
)


@pytest.fixture(scope="module")
def sound():
  """Reading of the step around a model of Flax, in this environment."""
  found, facts = foreign_programs.read(PYTHON, "flax", "sharded")
  assert {"flax", "optax", "jax"} <= facts["versions"].keys()
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


def test_planted_fault_is_named_by_its_line(sound):
  found, facts = foreign_programs.read(
    PYTHON, "flax", "sharded", kind="all_reduce"
  )
  row = foreign_programs.judged(found, facts["lines"], sound)
  assert row["found"]
  (line,) = row["blamed"]
  file, _, number = line.partition(":")
  text = (HERE / file).read_text().splitlines()[int(number) - 1]
  assert planted.FAULTS["flax", "sharded"]["all_reduce"].old in text
  for other in (foreign_programs.judged(sound, facts["lines"], sound),
                foreign_programs.judged(found, ["other.py:1"], sound)):
    assert not other["found"]


@pytest.mark.parametrize("kind", ["dtype", "gather"])
def test_fault_in_an_installed_module_is_named_there(kind):
  program = PYTHON, "flax", "batch_norm", "cpu:16"
  sound, _ = foreign_programs.read(*program)
  assert dict(sound.axes) == {"data": 16}
  expected = foreign_programs.programs(16)["flax"]["batch_norm"]
  assert foreign_programs.compared(sound, expected)["equal"]
  found, facts = foreign_programs.read(*program, kind)
  (line,) = facts["lines"]
  assert "flax/linen/normalization.py:" in line
  assert {e.source for e in foreign_programs.added(found, sound)} == {line}


def test_texts_of_faults_occur_once(monkeypatch):
  """Modules that are not installed are left out."""
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  checked = 0
  for faults in planted.FAULTS.values():
    assert faults.keys() <= {*planted.KINDS}
    for fault in faults.values():
      assert all(map(str.isidentifier, fault.module.split(".")))
      assert fault.new != fault.old
      texts = {m: _text(m) for m in (fault.module, *dict(fault.named))}
      if None in texts.values():
        continue
      changed = planted._replaced(texts[fault.module], fault)
      for module, text in fault.named or [
        (fault.module, fault.new.split("\n")[0])
      ]:
        planted._around(
          changed if module == fault.module else texts[module], text
        )
      checked += 1
  assert checked > 20
  fault = planted.FAULTS["flax", "sharded"]["dtype"]
  for text in ("", 2 * fault.old):
    with pytest.raises(ValueError, match="times, not once"):
      planted._replaced(text, fault)


def _text(module):
  """Returns the text of a module; None if it is not installed."""
  own = HERE / f"{module}.py"
  if own.exists():
    return own.read_text()
  if importlib.util.find_spec(module.partition(".")[0]) is None:
    return None
  found = importlib.util.find_spec(module)
  return found and pathlib.Path(found.origin).read_text()


def test_every_project_has_its_file_and_packages():
  for project, programs in foreign_programs.PROGRAMS.items():
    module = foreign_programs._module(project)
    assert module.PACKAGES
    for name in programs:
      assert callable(getattr(module, name))


def test_environment_is_made_once(tmp_path):
  for project, target, name, further in (
    ("flax", "cpu:8", "shared", []),
    ("flax", "tpu:v5p:2x2x2", "shared_tpu", ["jax[tpu]"]),
    ("ringattention", "cpu:8", "ringattention", []),
  ):
    _, packages = foreign_programs._environment(project)
    (tmp_path / name).mkdir()
    (tmp_path / name / "installed").write_text("\n".join(packages + further))
    own = foreign_programs._module(project).PACKAGES
    assert {*own} <= {*packages}
    assert any("==" in p for p in packages) == any("==" in p for p in own)
    made = foreign_programs.environment(
      project, tmp_path, "no such python", target
    )
    assert made == tmp_path / name / "bin/python"
  with pytest.raises(ValueError, match=r"targets='npu' must be one"):
    foreign_programs.environment("flax", tmp_path, "", "npu:8")


def test_programs_with_arrays_are_compiled_for_eight_cpus_only():
  both = ("tpu:v5p:2x2x2", "cpu:8")
  rows = json.loads(RECORDED.read_text())["rows"]
  assert {p for p in foreign_programs.PROGRAMS if (
    foreign_programs._targets(p, both[:1])
  )} == {row["project"] for row in rows}
  for project, targets in (("flax", list(both)), ("keras", ["cpu:8"])):
    assert foreign_programs._targets(project, both) == targets
    assert foreign_programs._targets(project, both[:1]) == targets[:-1]


def test_unknown_project_is_refused():
  config = config_file.get_config()
  config.benchmark.projects = ("torch",)
  with pytest.raises(ValueError, match=r"projects='torch' must be one"):
    foreign_programs.run(config)


def test_python_that_cannot_make_environments_is_one_line(tmp_path):
  with pytest.raises(ValueError, match="no such python: No such file"):
    foreign_programs.environment("flax", tmp_path / "a/b", "no such python")
  # An environment with other packages is made again.
  (tmp_path / "shared").mkdir()
  (tmp_path / "shared/installed").write_text("other")
  with pytest.raises(ValueError, match="no such python: No such file"):
    foreign_programs.environment("flax", tmp_path, "no such python")
  assert not (tmp_path / "shared").exists()
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
    "target": "cpu:8",
    "axes": {"data": 2, "fsdp": 4}, "collectives": 3, "equal": True,
    "read": {"data all_reduce": 12_345},
    "expected": {"data all_reduce": 54_321}, "unknown": [],
  }
  fault = {"project": "brax", "program": "f", "fault": "axis",
           "lines": ["a.py:1"], "blamed": ["b.py:2"]}
  foreign_programs._print({"rows": [row, row | {
    "equal": False, "unknown": ["Not understood: x"]
  }], "faults": [fault]})
  first, targets, second, _, third = [
    [cell.strip() for cell in line.strip("│").split("│")]
    for line in capsys.readouterr().out.splitlines() if line.startswith("│")
  ]
  assert targets[1] == "cpu:8"
  common = ["flax 9.8", "sharded", "data 2, fsdp 4", "3"]
  assert first == [*common, "data all_reduce 12,345", "equal", "nothing"]
  assert second == [
    *common, "data all_reduce 12,345", "data all_reduce 54,321",
    "Not understood: x",
  ]
  assert third == ["brax", "f", "axis", "a.py:1", "b.py:2"]


def test_rows_are_programs_errors_and_faults(sound):
  """Two targets; a program does not compile on one of them."""
  facts = {"versions": {"flax": "9"}, "lines": []}
  name = "flax", "sharded"
  found = foreign_programs._rows({
    (*name, "cpu:8", ""): (sound, facts),
    (*name, "tpu:v5p:2x2x2", ""): "no such compiler",
    (*name, "cpu:8", "dtype"): (sound, facts),
    (*name, "cpu:8", "gather"): (sound, facts | {"lines": ["a.py:1"]}),
  })
  sharded, error = found["rows"]
  assert sharded["equal"]
  assert (sharded["target"], sharded["versions"]) == ("cpu:8", {"flax": "9"})
  assert sharded["axes"] == dict(sound.axes)
  of = {"project": "flax", "program": "sharded"}
  assert error == of | {"target": "tpu:v5p:2x2x2", "error": "no such compiler"}
  assert found["faults"] == [
    of | {"fault": "dtype", "lines": [], "blamed": [], "found": True},
    of | {
      "fault": "gather", "lines": ["a.py:1"], "blamed": [], "found": False,
    },
  ]
