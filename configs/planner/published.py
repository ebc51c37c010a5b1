r"""Predicted step times of configurations that published planners choose.

  python -m launch.simulate --config=configs/planner/published.py \
    --plot=published.png
  python -m launch.simulate --config=configs/planner/published.py \
    --config.choosers='("amp","pipette","same")' --config.seeds='(7,)'

The time model of `launch.plan` predicts times of configurations that Megatron's
rules, AMP and Pipette choose (caatnet/studies/published/choosers.py), on two
clusters with published link bandwidths and with randomly slower links. Clusters
and numbers of parameters, sequences and tokens are those of Pipette (arXiv
2405.18093); layers, widths and the batch are ours. It takes 20 minutes on one
core, and half a minute without the choosers "same" and "whole", which run the
planner of `launch.plan`. `published.py:test` takes a second.
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

