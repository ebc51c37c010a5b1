"""Examples in docstrings, executed."""

import doctest
import importlib
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


def _modules() -> list[str]:
  """Names of the modules with an example in a docstring."""
  found = []
  for top in ("parallel", "caatnet"):
    for path in sorted((_ROOT / top).rglob("*.py")):
      if ">>> " in path.read_text():
        parts = path.relative_to(_ROOT).with_suffix("").parts
        found.append(".".join(p for p in parts if p != "__init__"))
  return found


def test_each_directory_has_examples():
  modules = _modules()
  assert len(modules) > 60
  directories = [
    path.parent.relative_to(_ROOT)
    for path in _ROOT.glob("parallel/*/__init__.py")
  ]
  directories += [
    pathlib.Path("caatnet", name)
    for name in ("models", "data", "inference", "serving", "config")
  ]
  for directory in directories:
    prefix = ".".join(directory.parts)
    assert any(name.startswith(f"{prefix}.") for name in modules), directory


@pytest.mark.parametrize("name", _modules())
def test_examples_print_the_shown_output(name):
  module = importlib.import_module(name)
  found = doctest.testmod(
    module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  )
  assert found.attempted
  assert not found.failed
