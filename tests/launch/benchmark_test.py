"""Each config of a benchmark is run by the module that documents it."""

import importlib
import pathlib

import pytest

from launch import benchmark

FOLDER = pathlib.Path(__file__).parents[2] / "configs/benchmark"
NAMES = sorted(
  path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", NAMES)
def test_config_names_the_module_that_documents_it(name):
  config = importlib.import_module(f"configs.benchmark.{name}").get_config()
  of = config.benchmark.name
  body = f"caatnet.benchmarks.{benchmark.BODIES[of]}.{of}"
  run = importlib.import_module(body).run
  assert f"configs/benchmark/{name}.py" in run.__doc__
