r"""ZeRO-3 step on 8 devices, compared with XLA's automatic partitioning.

  python -m launch.benchmark --config=configs/benchmark/zero.py --cpu_devices=8

The automatic step is plain `jax.jit` without shard_map, with batch and
activations sharded over the 8 devices, and every array of the training state
sharded along its largest dim. All variants run in alternation. Virtual devices
share the machine's cores, so this measures compute and copies, not a network.

Aim: at most 1.1 times the time of the automatic step. Result:
log/2026-11-21-zero-step-time.md.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.caatnet import base


def get_config(size: str = "6m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `6m`, or `test` for a model that takes seconds."""
  if size not in ("6m", "test"):
    raise ValueError(f"zero.py:{size}: the sizes are 6m and test")
  config = base.get_config()
  config.name = "zero_step"
  config.model.width = 256
  config.model.num_layers = 8
  config.model.ffn_width = 704
  config.parallel.data = 8
  config.parallel.tensor = 1
  config.data.seq_len = 256
  config.data.batch_size = 16
  config.benchmark = defaults("benchmark", "zero")
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 2
    config.model.ffn_width = 48
    config.data.seq_len = 16
    config.benchmark.rounds = 2
  return config
