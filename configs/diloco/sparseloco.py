"""SparseLoCo, arXiv 2508.15706: chunked top-k at 2 bits, error feedback.

  python -m launch.train --config=configs/diloco/sparseloco.py --cpu_devices=8

`sparseloco.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("sparseloco", size)
  config.outer.learning_rate = 1.0
  return config
