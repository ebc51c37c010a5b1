"""DiLoCo, arXiv 2311.08105: outer Nesterov at rate 0.7 with momentum 0.9.

  python -m launch.train --config=configs/diloco/diloco.py --cpu_devices=8

`diloco.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("diloco", size)
  return config
