"""Packages: docstrings, lazy public names, and what loads no jax."""

import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

from parallel.base import lazy

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = sorted(
  ".".join(path.parent.relative_to(ROOT).parts)
  for top in ("parallel", "caatnet")
  for path in (ROOT / top).rglob("__init__.py")
)
# Packages that list public names.
WITH_NAMES = (
  "parallel", "parallel.ledger", "parallel.outer", "parallel.plans.placement",
  "parallel.tensor",
)
# Packages of which no module loads jax.
WITHOUT_JAX = ("parallel.base", "parallel.peers", "parallel.plans")


def test_every_package_has_a_docstring():
  for name in PACKAGES:
    assert importlib.import_module(name).__doc__, name


@pytest.mark.parametrize("name", WITH_NAMES)
def test_public_names_are_importable_and_documented(name):
  package = importlib.import_module(name)
  place = f"{name.replace('.', '/')}/__init__.py"
  submodules = {
    path.stem for path in pathlib.Path(package.__file__).parent.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
  }
  for public in package.__all__:
    # An import of the submodule would replace the name.
    assert public not in submodules, f"{place}: {public} is a submodule"
    try:
      value = getattr(package, public)
    except (AttributeError, ImportError) as error:
      pytest.fail(f"{place} lists {public}, which cannot be imported: {error}")
    own = inspect.isclass(value) or inspect.isroutine(value)
    if own:
      assert value.__doc__, f"{name}.{public} has no docstring"
  assert dir(package) == package.__all__


def modules_after(program):
  """Returns the top-level modules loaded in a new process by a program."""
  ended = subprocess.run(
    [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  )
  return {name.split(".")[0] for name in ended.stdout.split()}


def test_importing_packages_loads_no_dependencies():
  loaded = modules_after(f"import {', '.join(PACKAGES)}")
  assert {"parallel", "caatnet"} <= loaded
  assert not loaded & {"jax", "flax", "numpy", "scipy", "networkx", "absl"}


def test_packages_without_jax_do_not_load_it():
  """Loads all of their modules."""
  modules = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name in WITHOUT_JAX
    for path in (ROOT / name.replace(".", "/")).rglob("*.py")
  ]
  loaded = modules_after(f"import {', '.join(modules)}")
  assert "numpy" in loaded
  assert not loaded & {"jax", "flax"}
  assert "jax" in modules_after("from parallel.axes import Axis")


def test_former_name_of_the_ledger_is_the_same_module():
  program = (
    "import sys; sys.modules['pytest'] = None  # not installed\n"
    "from parallel.xla.reading import read; import parallel.xla\n"
    "from parallel.ledger import reading\n"
    "assert read is reading.read is parallel.xla.read"
  )
  ended = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
    check=True,
  )
  assert ended.stderr.count("parallel.xla is now parallel.ledger") == 1


def test_generation_does_not_load_slow_packages_that_it_does_not_use():
  """Each takes 0.1 to 0.3 s of the time to the first token."""
  loaded = modules_after(
    "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n"
    "from caatnet.config import inference\n"
    "from caatnet.serving import generate"
  )
  assert {"jax", "flax"} <= loaded
  assert not loaded & {"grain", "networkx", "numba", "scipy"}


def test_unknown_name_is_an_attribute_error():
  _, get, _ = lazy.attach("parallel", {"axes": ["Axis"]})
  assert get("Axis").__name__ == "Axis"
  with pytest.raises(AttributeError, match=r"'parallel' has no .* 'Axes'"):
    get("Axes")
