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


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for the 10B model between New York and London."""
  config = ml_collections.ConfigDict()
  config.name = "utilisation"
  config.study = "utilisation"
  config.fitted_factor = False
  config.recommend = ml_collections.ConfigDict()
  # The name of a link in parallel/hardware/links.py, in lower case.
  config.recommend.link = "wide_area_10g"
  # Your model: its number of parameters and of layers, and the seconds of a
  # step that never waits.
  config.recommend.parameters = 10e9
  config.recommend.num_layers = 48
  config.recommend.step_seconds = 0.8
  config.recommend.target = 0.95
  # The bits that a replica sends for each bit of its parameters: 2 (M - 1) / M
  # in a ring of M replicas, M - 1 if each sends its own to all others, as codes
  # of 4 bits are sent.
  config.recommend.volume_factor = 1.0
  # Candidates. Smaller H is preferred, then smaller overlap, then more bits.
  config.recommend.sync_every = (1, 10, 30, 50, 100, 200, 500)
  config.recommend.overlap_steps = (0, 1, 2, 5)
  config.recommend.bits = (16, 8, 4)
  return config
