r"""Predicts step time and memory of partitions of a training state on Frontier.

The setting is that of Xu et al., "Scaling LLM Training on Frontier with
Low-Bandwidth Partitioning" (arXiv 2501.04266): a 20B model on 48 nodes of 4
MI250X with 2 GCDs each. The study evaluates all named schemes, and all 20
partitions of three levels with all second copies of the weights and all codecs.
It reports the Pareto front below a memory limit and the best partition for each
model size.

  python -m launch.simulate --config=configs/zero/frontier.py --plot=zero.png
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.gradient_bytes=2 --config.accumulation=1   # as papers count
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.cluster=h100 --config.zero.levels=node:16,gpu:8 \
    --config.parallel.data=128 --config.memory_gb=80

Nothing is trained; it takes seconds on one core. The memory of each scheme is
exact arithmetic. Step times come from a model whose assumptions are printed;
expected result: it does not reproduce the paper's speed-ups.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.partitions.keys import Partitions


def get_config() -> ml_collections.ConfigDict:
  """Returns the paper's 20B model on 384 GCDs."""
  config = defaults(Partitions)
  return config
