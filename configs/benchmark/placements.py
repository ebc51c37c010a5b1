r"""Placement policies on random models and tiers, compared with the optimum.

  python -m launch.benchmark --config=configs/benchmark/placements.py
  python -m launch.benchmark --config=configs/benchmark/placements.py:test
  python -m launch.benchmark --config=configs/benchmark/placements.py \
    --config.benchmark.python=/tmp/rivals/bin/python

benchmark.python is a Python with accelerate and DeepSpeed (`python -m venv
/tmp/rivals && /tmp/rivals/bin/pip install torch accelerate deepspeed`); no GPU
is needed. `infer_auto_device_map` then places the same random problems, and
DeepSpeed's estimator of memory is compared for the config's model, that of
configs/memory/12b_32k.py. Nothing is trained; it takes a minute on one core.
"""

import importlib

import ml_collections

from caatnet.config.schema.tree import defaults

# A name that begins with a digit cannot be imported by a statement.
_12B = importlib.import_module("configs.memory.12b_32k")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"placements.py:{size}: the sizes are all and test")
  config = _12B.get_config()
  del config.study, config.placement
  config.name = "placements"
  config.benchmark = defaults("benchmark", "placements")
  if size == "test":
    config.benchmark.problems = 5
  return config
