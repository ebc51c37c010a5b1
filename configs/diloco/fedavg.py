"""FedAvg, arXiv 1602.05629: weighted averages of sampled workers.

  python -m launch.train --config=configs/diloco/fedavg.py --cpu_devices=8

`fedavg.py:35m` and so on are the larger sizes of `base.py`. Results:
log/2026-11-21-outer-loops-600-steps.md.
"""

import ml_collections

from configs.diloco import base


def get_config(size: str = "tiny") -> ml_collections.ConfigDict:
  config = base.get_config("fedavg", size)
  config.parallel.worker = 4
  config.outer.weights = (1.0, 2.0, 3.0, 4.0)
  config.outer.clients = 3
  return config
