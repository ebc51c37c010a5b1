"""NoLoCo, arXiv 2506.10911: random pairs of workers instead of an all-reduce.

  python -m launch.train --config=configs/diloco/noloco.py --cpu_devices=8

`noloco.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("noloco", size)
  config.parallel.worker = 4
  return config
