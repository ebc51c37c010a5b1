"""Local SGD: parameters averaged every 30 steps.

  python -m launch.train --config=configs/diloco/local_sgd.py --cpu_devices=8

`local_sgd.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("local_sgd", size)
  return config
