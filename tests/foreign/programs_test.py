"""Programs of other projects send and compute what they are expected to.

`make test-foreign` compiles all of them, in environments that it makes from the
package registry (1.5 GB, once), and plants all faults. Other tests use what is
installed here.
"""

import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest

from docs import tables
from tests.foreign import closed_forms, planted, programs

PYTHON = pathlib.Path(sys.executable)
HERE = pathlib.Path(programs.__file__).parent
RESULTS = HERE.parents[1] / "results"
# Folder of the environments of `make test-foreign`.
FOLDER = os.environ.get("FOREIGN", "")
CASES = [(p, name) for p, sends in programs.PROGRAMS.items() for name in sends]
# Programs that are no function of the layout, with the reason.
NOT_EQUAL = {
  ("brax", "sharded"): "depends? on the layout: .1. is float32.8.",  # losses
  ("flax", "sharded"): "depends? on the layout: .1. is float32.8.",
  # Its arguments have a dim of devices; its jax is older than the comparison.
  ("jraph", "sharded_edges"): None, ("ringattention", "causal"): None,
}


@pytest.mark.skipif(not FOLDER, reason="make test-foreign")
@pytest.mark.parametrize(("project", "name"), CASES)
def test_program_and_its_faults(project, name):
  """Faults that the recorded readings name are still named."""
  python = programs.environment(
    project, pathlib.Path(FOLDER), os.environ.get("FOREIGN_PYTHON", "")
  )
  sound, facts = programs.read(python, project, name)
  row = programs.compared(sound, programs.PROGRAMS[project][name])
  assert row["equal"], row
  assert not row["unknown"]
  recorded = {"rows": [], "faults": []}
  for file in ("programs", "frameworks"):
    results = json.loads((RESULTS / f"foreign_{file}.json").read_text())
    for key, rows in recorded.items():
      rows += [r for r in results[key]
               if (r["project"], r["program"]) == (project, name)]
  (versions,) = (row["versions"] for row in recorded["rows"])
  if versions != facts["versions"]:
    pytest.skip(f"faults were recorded with {versions}")
  named = {row["fault"]: row["found"] for row in recorded["faults"]}
  for kind in planted.FAULTS[project, name]:
    found, facts = programs.read(python, project, name, kind)
    judged = programs.judged(found, facts["lines"], sound)
    assert judged["found"] == named[kind], (kind, judged)


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("project", "name"), CASES if FOLDER else [
  ("flax", "attention"), ("flax", "sharded"),
])
def test_program_computes_on_devices_what_it_does_on_one(project, name):
  python = PYTHON
  reason = NOT_EQUAL.get((project, name), "")
  if reason is None:
    pytest.skip("cannot be compared")
  if FOLDER:
    python = programs.environment(
      project, pathlib.Path(FOLDER), os.environ.get("FOREIGN_PYTHON", "")
    )
  found = programs.equal(python, project, name)
  expected = "refused" if reason else "rounding"
  assert found["verdict"] == expected, found["text"]
  assert re.search(reason, found["text"])


@pytest.fixture(scope="module")
def sound():
  """Reading of the step around a model of Flax, in this environment."""
  found, facts = programs.read(PYTHON, "flax", "sharded")
  assert {"flax", "optax", "jax"} <= facts["versions"].keys()
  return found


def test_step_sends_what_the_closed_form_says(sound):
  expected = programs.PROGRAMS["flax"]["sharded"]
  row = programs.compared(sound, expected)
  assert row["equal"], row
  for key in expected:
    other = expected | {key: expected[key] + 1}
    assert not programs.compared(sound, other)["equal"]
  less = {k: v for k, v in expected.items() if k[1] != "all_gather"}
  assert not programs.compared(sound, less)["equal"]


def test_planted_fault_is_named_by_its_line(sound):
  found, facts = programs.read(
    PYTHON, "flax", "sharded", kind="all_reduce"
  )
  row = programs.judged(found, facts["lines"], sound)
  assert row["found"]
  (line,) = row["blamed"]
  file, _, number = line.partition(":")
  text = (HERE / file).read_text().splitlines()[int(number) - 1]
  assert planted.FAULTS["flax", "sharded"]["all_reduce"].old in text
  for other in (programs.judged(sound, facts["lines"], sound),
                programs.judged(found, ["other.py:1"], sound)):
    assert not other["found"]


@pytest.mark.parametrize("kind", ["dtype", "gather"])
def test_fault_in_an_installed_module_is_named_there(kind):
  program = PYTHON, "flax", "batch_norm"
  sound, _ = programs.read(*program, devices=16)
  assert dict(sound.axes) == {"data": 16}
  expected = closed_forms.programs(16)["flax"]["batch_norm"]
  assert programs.compared(sound, expected)["equal"]
  found, facts = programs.read(*program, kind, 16)
  (line,) = facts["lines"]
  assert "flax/linen/normalization.py:" in line
  assert {e.source for e in programs.added(found, sound)} == {line}


def test_texts_of_faults_occur_once(monkeypatch):
  """Modules that are not installed are left out."""
  monkeypatch.setenv("KERAS_BACKEND", "jax")
  checked = 0
  for faults in planted.FAULTS.values():
    assert faults.keys() <= {*tables.FAULTS}
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
  for project, sends in programs.PROGRAMS.items():
    module = programs._module(project)
    assert module.PACKAGES
    for name in sends:
      assert callable(getattr(module, name))


def test_environment_is_made_once(tmp_path):
  for project, name in (
    ("flax", "shared"), ("ringattention", "ringattention"),
  ):
    _, packages = programs._environment(project)
    (tmp_path / name).mkdir()
    (tmp_path / name / "installed").write_text("\n".join(packages))
    own = programs._module(project).PACKAGES
    assert {*own} <= {*packages}
    assert any("==" in p for p in packages) == any("==" in p for p in own)
    made = programs.environment(project, tmp_path, "no such python")
    assert made == tmp_path / name / "bin/python"


def test_python_that_cannot_make_environments_is_one_line(tmp_path):
  with pytest.raises(ValueError, match="no such python: No such file"):
    programs.environment("flax", tmp_path / "a/b", "no such python")
  # An environment with other packages is made again.
  (tmp_path / "shared").mkdir()
  (tmp_path / "shared/installed").write_text("other")
  with pytest.raises(ValueError, match="no such python: No such file"):
    programs.environment("flax", tmp_path, "no such python")
  assert not (tmp_path / "shared").exists()
  script = tmp_path / "python"
  script.write_text(
    "#!/bin/sh\necho 'python: not installed' >&2; echo hint >&2; exit 127\n"
  )
  script.chmod(0o755)
  with pytest.raises(ValueError, match=r"python: not installed$"):
    programs.environment("flax", tmp_path, str(script))
