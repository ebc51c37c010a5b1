r"""Gradients averaged in every step: the baseline of the others.

  python -m launch.train --config=configs/diloco/data_parallel.py \
    --cpu_devices=8

Larger sizes: `data_parallel.py:35m`, see `base.py`. Results: LOG.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("data_parallel", size)
  return config
