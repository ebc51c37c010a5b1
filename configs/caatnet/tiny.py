r"""Byte-level model for a laptop CPU: for the demo, tests and first steps.

  python -m launch.train --config=configs/caatnet/tiny.py \
    --config.sync.p=0.5 --cpu_devices=8

Expected result: a validation loss well below that of a bigram model, in two
minutes on two cores. `tiny.py:test` has a few steps of a smaller model.
"""

import ml_collections

from configs.caatnet import base


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
  """Returns the run: `demo`, or `test`, which takes seconds."""
  config = base.get_config()
  config.name = "tiny"
  config.model.init_std = 0.06
  config.data.batch_size = 8
  config.train.num_steps = 220
  config.train.eval_every = 55
  config.train.checkpoint_every = 55
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 2
    config.model.ffn_width = 88
    config.data.seq_len = 32
    config.data.batch_size = 8
    config.data.validation_windows = 32
    config.train.num_steps = 12
    config.train.eval_every = 6
    config.train.checkpoint_every = 4
    config.optimizer.warmup_steps = 2
  elif size != "demo":
    raise ValueError(f"tiny.py:{size}: the sizes are demo and test")
  return config
