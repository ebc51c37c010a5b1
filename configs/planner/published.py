r"""Predicted step times of published configurators' choices.

  python -m launch.simulate --config=configs/planner/published.py \
    --plot=published.png
  python -m launch.simulate --config=configs/planner/published.py \
    --config.choosers='("amp","pipette","same")' --config.seeds='(7,)'

The choices of Megatron's rules, AMP and Pipette
(caatnet/studies/published/choosers.py) on Pipette's two clusters are simulated
by the model of `launch.plan`, for published link bandwidths and for randomly
slower links. All times are predictions. Clusters and numbers of parameters,
sequences and tokens are Pipette's (arXiv 2405.18093); layers, widths and the
batch are ours. It takes 20 minutes on one core; without "whole" and "same" half
a minute. `published.py:test` takes a second.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.published.keys import Published


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for one that takes a second."""
  if size not in ("all", "test"):
    raise ValueError(f"published.py:{size}: the sizes are all and test")
  config = defaults(Published)
  if size == "test":
    config.clusters = ("pipette-a100:2",)
    config.even, config.seeds = False, (1,)
    config.models = ("3.1B",)
    config.batch_size = 32
    config.choosers = ("rule", "megatron", "trials", "amp", "pipette")
    config.annealed, config.steps = 2, 50
  return config

