r"""Predicts the compute utilisation of replicas on a slow link.

It computes table 4 of "Streaming DiLoCo with overlapping communication" (arXiv
2501.18512): the bandwidths at which data parallelism, DiLoCo and Streaming
DiLoCo keep devices busy. It computes the same table for Llama-405B, DeepSeek-V3
and a model of your own, and recommends the setting that yours needs on a link.

  python -m launch.simulate --config=configs/diloco/utilisation.py
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.recommend.link=ethernet_1g --config.recommend.parameters=1e9 \
    --config.recommend.num_layers=24 --config.recommend.step_seconds=0.1

Nothing is trained; it takes seconds on one core. Expected result: of the
paper's 75 cells 3 are equal and 72 within one of the grid's 50 points. With
--config.fitted_factor=True, a factor that was fitted on these very cells, it is
70 and 75.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for the 10B model between New York and London."""
  config = defaults("study", "utilisation")
  return config
