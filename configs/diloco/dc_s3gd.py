"""DC-S3GD, delay-compensated stale-synchronous SGD, arXiv 1911.02516.

  python -m launch.train --config=configs/diloco/dc_s3gd.py --cpu_devices=8

`dc_s3gd.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("dc_s3gd", size)
  warmup_steps = config.optimizer.warmup_steps
  config.optimizer = defaults("optimizer", "sgd")
  config.optimizer.warmup_steps = warmup_steps
  return config
