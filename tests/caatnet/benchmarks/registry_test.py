"""Each config of a benchmark is run by the module that documents it."""

import importlib
import pathlib

import pytest

from caatnet.benchmarks import registry

FOLDER = pathlib.Path(__file__).parents[3] / "configs/benchmark"
NAMES = sorted(
  path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", NAMES)
def test_config_names_the_module_that_documents_it(name):
  config = importlib.import_module(f"configs.benchmark.{name}").get_config()
  assert f"configs/benchmark/{name}.py" in registry.find(config).__doc__


def test_all_files_of_keys_are_imported():
  root = pathlib.Path(registry.__file__).parent
  assert {*registry.FOLDERS} == {p.parent.name for p in root.glob("*/keys.py")}
