r"""Data parallelism: gradients averaged in every step, the baseline.

  python -m launch.train --config=configs/diloco/data_parallel.py \
    --cpu_devices=8

`data_parallel.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("data_parallel", size)
  return config
