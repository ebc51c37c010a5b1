r"""The planner's estimates of memory beside what a compiler says.

  python -m launch.benchmark --config=configs/benchmark/planner_memory.py

Training steps of random transformers, drawn with a seed, are compiled for eight
chips, one process for each; half of them are drawn so that the estimate is
within 15% of a device's memory, where errors decide. A row is in
`config.benchmark.results` as soon as its program has been compiled, and those
that are there are not compiled again: the command goes on where it was stopped.
Of the programs every other one is for the fit, the rest is held out. Needs the
extra `tpu`; a program takes a minute. With the extra `cuda`, a quarter of one:

  JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m launch.benchmark \
    --config=configs/benchmark/planner_memory.py \
    --config.benchmark.target=gpu:h200:1x8 \
    --config.benchmark.results=results/planner_memory_h200.json
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns the benchmark."""
  config = ml_collections.ConfigDict()
  config.name = "planner_memory"
  config.benchmark = defaults("benchmark", "planner_memory")
  return config
