"""Files of results: data after the command, date and versions behind it."""

import datetime
import importlib.machinery
import importlib.metadata
import platform
import sys
import types

import pytest

from caatnet import commands
from caatnet.show import results


def run_as(monkeypatch, module, *arguments):
  """Makes this process look like a run of a module, or of a script."""
  main = types.ModuleType("__main__")
  if module:
    main.__spec__ = importlib.machinery.ModuleSpec(module, None)
  monkeypatch.setitem(sys.modules, "__main__", main)
  monkeypatch.setattr(sys, "argv", ["path/script.py", *arguments])


def test_result_is_recorded_with_its_origin(tmp_path, monkeypatch):
  run_as(monkeypatch, "launch.plan", "--config=a b")
  path = tmp_path / "new" / "result.json"
  before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
  results.write(path, {"rows": [1, 2.5], "name": None})
  found = results.read(path)
  assert list(found) == [
    "command", "date", "commit", "versions", "rows", "name", "sha256"
  ]
  assert found["sha256"] == results.digest(found)
  assert found["sha256"] != results.digest(found | {"name": "edited"})
  assert found["commit"] == commands.current_commit() != ""
  assert (found["rows"], found["name"]) == ([1, 2.5], None)
  assert found["command"] == "python -m launch.plan '--config=a b'"
  date = datetime.datetime.fromisoformat(found["date"])
  assert before <= date <= datetime.datetime.now(datetime.UTC)
  assert len(found["date"]) == len("2026-01-01T00:00:00+00:00")
  for package in ("jax", "jaxlib", "numpy", "scipy"):
    version = importlib.metadata.version(package)
    assert found["versions"].pop(package) == version
  assert found["versions"].pop("python") == platform.python_version()
  assert set(found["versions"]) <= {"libtpu"}  # optional
  # One value per line, so that versions of the file can be compared.
  assert (
    '\n "rows": [\n  1,\n  2.5\n ],\n "name": null,\n' in path.read_text()
  )


def test_versions_of_a_result_are_added(tmp_path):
  """A program compiled for another platform names its compiler."""
  results.write(tmp_path / "a.json", {"versions": {"jax-cuda12-plugin": "1"}})
  versions = results.read(tmp_path / "a.json")["versions"]
  assert versions["jax-cuda12-plugin"] == "1"
  assert versions["python"] == platform.python_version()


def test_file_that_does_not_exist_has_no_result(tmp_path):
  assert results.read(tmp_path / "none.json") == {}
  assert results.rows(tmp_path / "none.json") == []


@pytest.mark.parametrize(("text", "message"), [
  ("[" * 100_000, "maximum recursion"), ("[]", "it must contain a JSON object"),
  ('{"rows": {"a": 1}}', "its rows must be JSON objects"),
  ('{"rows": [1]}', "its rows must be JSON objects"),
])
def test_damaged_result_names_its_file(tmp_path, text, message):
  path = tmp_path / "a.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=f"a.json is damaged: {message}"):
    results.rows(path)


@pytest.mark.parametrize(("module", "arguments", "command"), [
  ("launch.plan", [], "python -m launch.plan"),
  ("launch.plan", ["--a", "$b"], "python -m launch.plan --a '$b'"),
  ("", ["--a=1"], "python path/script.py --a=1"),
])
def test_command_can_be_repeated(
  tmp_path, monkeypatch, module, arguments, command
):
  run_as(monkeypatch, module, *arguments)
  results.write(tmp_path / "x.json", {})
  assert results.read(tmp_path / "x.json")["command"] == command
