"""Training step of a 25M-parameter byte model, compared with plain JAX.

  python -m launch.benchmark --config=configs/benchmark/train_step.py

All variants run in alternation on one device. The table has medians, ranges,
and times relative to the first variant of the same dtype. It takes about eight
minutes on two cores.

Aims: with one rank, the time of the plain step; with eight lanes at most 1.2
times the time of one rank at p = 1, and 1.6 times at p = 0.5.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.caatnet import base


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
  config = base.get_config()
  config.name = "train_step"
  config.model.width = 512
  config.model.num_layers = 8
  config.model.ffn_width = 1376
  config.data.seq_len = 256
  config.data.batch_size = 8
  config.benchmark = defaults("benchmark", "train_step")
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 2
    config.model.ffn_width = 48
    config.data.seq_len = 16
    config.benchmark.rounds = 2
  return config
