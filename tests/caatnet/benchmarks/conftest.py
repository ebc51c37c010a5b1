"""Fixtures of tests of benchmarks."""

import io
import json
import sys
import types

import pytest


@pytest.fixture
def install(monkeypatch):
  """Returns a function that makes modules importable."""
  def install(**modules):
    for name, values in modules.items():
      name = name.replace("__", ".")
      module = types.ModuleType(name)
      vars(module).update(values)
      monkeypatch.setitem(sys.modules, name, module)

  return install


@pytest.fixture
def answers(monkeypatch, capsys):
  """Returns a function from the lines of stdin to those of stdout."""
  def answers(main, *lines):
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    main()
    return list(map(json.loads, capsys.readouterr().out.splitlines()))

  return answers
