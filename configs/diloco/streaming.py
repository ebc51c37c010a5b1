"""Streaming DiLoCo, arXiv 2501.18512: 4 bits, one step of overlap (tau = 1).

E3M0 shrinks Gaussian differences by 3.5% (`rounding.py` measures the effect).

  python -m launch.train --config=configs/diloco/streaming.py --cpu_devices=8

`streaming.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("streaming", size)
  config.outer.learning_rate = 0.4
  config.outer.overlap = (1,)
  config.outer.keep = 0.5
  config.outer.codec = "e3m0"
  return config
