"""Eager updates, arXiv 2502.12996: DiLoCo with means of the previous round.

  python -m launch.train --config=configs/diloco/eager.py --cpu_devices=8

`eager.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("eager", size)
  return config
