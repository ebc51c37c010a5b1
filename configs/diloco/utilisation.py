r"""Predicts the compute utilisation of replicas on a slow link.

The study computes table 4 of "Streaming DiLoCo with overlapping communication"
(arXiv 2501.18512): the bandwidths that data parallelism, DiLoCo and Streaming
DiLoCo need for a given compute utilisation. It computes the same table for
Llama-405B, DeepSeek-V3 and a model of the config, and recommends an outer loop
for that model on a link.

  python -m launch.simulate --config=configs/diloco/utilisation.py
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.recommend.link=ethernet_1g --config.recommend.parameters=1e9 \
    --config.recommend.num_layers=24 --config.recommend.step_seconds=0.1

Nothing is trained; it takes seconds on one core. Expected result: 3 of the
paper's 75 cells are equal, and 72 differ by at most one point of the grid of 50
bandwidths. With --config.fitted_factor=True, a factor fitted to these cells, 70
are equal, and all differ by at most one point.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.utilisation.keys import Utilisation


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for the 10B model between New York and London."""
  config = defaults(Utilisation)
  return config
