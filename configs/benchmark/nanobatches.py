r"""Steps of 25M parameters in nano-batches on this machine.

  python -m launch.benchmark --config=configs/benchmark/nanobatches.py \
    --cpu_devices=2 --output=results/nanobatches.json

The first table has the engine's tokens per second with two tensor ranks and 1,
2 and 4 pieces, and those of a plan. Within a program XLA:CPU overlaps nothing,
so a plan is one batch; aim: within 2% of it. The second has steps of two
processes, each a tensor rank, whose sums go over a shaped link in threads of
`parallel.elastic`, as the host runs the stages of a step. The predicted time is
that of `parallel.nanobatches.nanobatch` from products and sums alone; aim:
within 15%. Links are shaped by root only. The third copies the pages of one
sequence to the host in parts, during steps. It takes about five minutes;
`nanobatches.py:test` takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
  config = decoding.get_config(size)
  config.name = "nanobatches_benchmark"
  config.parallel.tensor = 2
  config.benchmark = defaults("benchmark", "nanobatches")
  if size == "test":
    config.benchmark.rounds, config.benchmark.pieces = 1, ("1", "2")
    config.benchmark.batch, config.benchmark.mbit = 2, ()
    config.benchmark.prompt, config.benchmark.tokens = 8, 8
    config.benchmark.copied = 32
  return config
