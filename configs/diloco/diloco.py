"""DiLoCo, arXiv 2311.08105: Nesterov(0.7, 0.9) on the mean difference.

  python -m launch.train --config=configs/diloco/diloco.py --cpu_devices=8

Larger sizes: `diloco.py:35m`, see `base.py`. Results: LOG.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("diloco", size)
  return config
