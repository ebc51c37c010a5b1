r"""Pipeline schedules compared with implementations without branches.

  python -m launch.benchmark --config=configs/benchmark/lockstep.py \
    --cpu_devices=4

Virtual devices share the processor, so times measure the total compute and not
bubbles. The column "work in turn" estimates the latter: the products of a
device plus those for which it waits if all stages synchronise at each tick. It
takes a minute on two cores.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns the benchmark: `small`, or `test` for one that takes seconds."""
  if size not in ("small", "test"):
    raise ValueError(f"lockstep.py:{size}: the sizes are small and test")
  config = ml_collections.ConfigDict()
  config.name = "lockstep"
  config.benchmark = defaults("benchmark", "lockstep")
  if size == "test":
    config.benchmark.microbatches, config.benchmark.width = 5, 16
    config.benchmark.tokens, config.benchmark.rounds = 4, 1
  return config
