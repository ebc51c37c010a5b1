"""DC-S3GD, arXiv 1911.02516: one step stale, delay-compensated.

  python -m launch.train --config=configs/diloco/dc_s3gd.py --cpu_devices=8

Larger sizes: `dc_s3gd.py:35m`, see `base.py`. Results: LOG.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("dc_s3gd", size)
  config.optimizer.name = "sgd"
  config.optimizer.beta_1 = 0.9
  config.optimizer.learning_rate = 0.3
  config.optimizer.weight_decay = 0.0
  return config
