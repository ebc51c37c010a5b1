r"""Compute utilisation of replicas that talk over a slow link.

Streaming DiLoCo with Overlapping Communication (arXiv 2501.18512), table 4:
the bandwidth at which data parallelism, DiLoCo and Streaming DiLoCo keep the
devices busy. Beside it: the setting that one's own model needs on a link.

  python -m launch.simulate --config=configs/diloco/utilisation.py
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.recommend.link=ethernet_1g --config.recommend.parameters=1e9 \
    --config.recommend.num_layers=24 --config.recommend.step_seconds=0.1

Nothing is trained; seconds on one core. Expected result: of the paper's 75
cells 3 equal and 72 within one of the grid's 50 points; with
--config.fitted_factor=True, a factor fitted on these very cells, 70 and 75.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The paper's 10B model between New York and London."""
  config = ml_collections.ConfigDict()
  config.name = "utilisation"
  config.study = "utilisation"
  config.fitted_factor = False
  config.recommend = ml_collections.ConfigDict()
  # A constant of parallel/hardware/links.py, in lower case.
  config.recommend.link = "wide_area_10g"
  config.recommend.parameters = 10e9
  config.recommend.num_layers = 48
  config.recommend.step_seconds = 0.8
  config.recommend.target = 0.95
  # What a replica sends per bit of its parameters: 2 (M - 1) / M in a ring
  # of M replicas, M - 1 where each sends all others its own (4 bit).
  config.recommend.volume_factor = 1.0
  # Candidates; smaller H, then smaller overlap, then more bits are preferred.
  config.recommend.sync_every = (1, 10, 30, 50, 100, 200, 500)
  config.recommend.overlap_steps = (0, 1, 2, 5)
  config.recommend.bits = (16, 8, 4)
  return config
