r"""Prices partitions of a training state on Frontier: step time against memory.

The setting is that of Xu et al., "Scaling LLM Training on Frontier with
Low-Bandwidth Partitioning" (arXiv 2501.04266): a 20B model on 48 nodes of 4
MI250X with 2 GCDs each. Priced are all named schemes, and all 20 partitions of
three levels with all second copies of the weights and all codecs. The study has
the front under a memory cap and the best partition for each size of a model.

  python -m launch.simulate --config=configs/zero/frontier.py --plot=zero.png
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.gradient_bytes=2 --config.accumulation=1   # as papers count
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.cluster=h100 --config.zero.levels=node:16,gpu:8 \
    --config.parallel.data=128 --config.memory_gb=80

Nothing is trained; it takes seconds on one core. Expected result: the memory of
each scheme is arithmetic. Its speed comes from a model of time, whose
assumptions are printed, and which does not reproduce the paper's speedups.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the paper's 20B model on 384 GCDs."""
  config = ml_collections.ConfigDict()
  config.name = "zero_frontier"
  config.study = "partitions"
  # A cluster of parallel/hardware/clusters.py.
  config.cluster = "frontier"
  # The data-parallel ranks and their levels, as a training run has them.
  config.parallel = ml_collections.ConfigDict()
  config.parallel.data = 384
  config.zero = ml_collections.ConfigDict()
  config.zero.levels = "node:48,gpu:4,gcd:2"
  config.zero.block = 256
  # GB/s that a device receives over a level, in place of the cluster's, as in
  # "gpu:100".
  config.bandwidths = ""
  # The memory of a device, all of it for the training state: activations are
  # left out.
  config.memory_gb = 64.0
  # The share of the bfloat16 peak that compute alone reaches, an assumption.
  config.utilisation = 0.4

  config.parameters = 20e9
  # Each layer is partitioned by itself; only padding depends on their number.
  config.num_layers = 50
  # Tokens of a microbatch on a device, and microbatches per step, both
  # assumptions. With 384 devices a step has 3.1e6 tokens.
  config.tokens = 2048
  config.accumulation = 4
  # The bytes of a gathered weight and of an accumulated gradient. The trainer
  # accumulates and reduces gradients in float32; papers count 2 bytes.
  config.weight_bytes = 2
  config.gradient_bytes = 4
  # Whether gathers and scatters of microbatches run under their compute.
  config.overlap = False

  # What is tried with each of the 20 partitions. With () as secondary_codecs no
  # second copy is tried.
  config.weight_codecs = ("none", "int8", "int4")
  config.gradient_codecs = ("none", "int8", "int4")
  config.secondary_codecs = ("none", "int8")
  # The microbatches per step for which the best partition is reported.
  config.accumulations = (1, 2, 4, 8, 16)
  return config
