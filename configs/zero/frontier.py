r"""Partitions of a training state on Frontier: step time against memory.

Xu et al., Scaling LLM Training on Frontier with Low-Bandwidth Partitioning
(arXiv 2501.04266): a 20B model on 48 nodes of 4 MI250X of 2 GCDs. Every named
scheme and all 20 partitions of three levels, times the second copies of the
weights and the codecs; the front under a memory cap; the best one for each
model size.

  python -m launch.simulate --config=configs/zero/frontier.py --plot=zero.png
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.gradient_bytes=2 --config.accumulation=1   # as papers count
  python -m launch.simulate --config=configs/zero/frontier.py \
    --config.cluster=h100 --config.zero.levels=node:16,gpu:8 \
    --config.parallel.data=128 --config.memory_gb=80

Nothing is trained; seconds on one core. Expected result: the memory of each
scheme is arithmetic; its speed is a model, whose assumptions are printed and
which does not reproduce the paper's speedups.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The paper's 20B model on 384 GCDs."""
  config = ml_collections.ConfigDict()
  config.name = "zero_frontier"
  config.study = "partitions"
  # Of parallel/hardware/clusters.py.
  config.cluster = "frontier"
  # As a training run has them: data-parallel ranks, their levels.
  config.parallel = ml_collections.ConfigDict()
  config.parallel.data = 384
  config.zero = ml_collections.ConfigDict()
  config.zero.levels = "node:48,gpu:4,gcd:2"
  config.zero.block = 256
  # In place of the cluster's: GB/s that a device receives, as in "gpu:100".
  config.bandwidths = ""
  # Of a device, all of it for the training state: activations are left out.
  config.memory_gb = 64.0
  # Share of the bfloat16 peak that compute alone reaches: assumed.
  config.utilisation = 0.4

  config.parameters = 20e9
  # Each is partitioned by itself; only padding depends on how many.
  config.num_layers = 50
  # Of a device and microbatch, and microbatches per step: assumed. With 384
  # devices a step has 3.1e6 tokens.
  config.tokens = 2048
  config.accumulation = 4
  # Bytes of a gathered weight and of an accumulated gradient. The trainer
  # accumulates and reduces float32; papers count 2.
  config.weight_bytes = 2
  config.gradient_bytes = 4
  # Whether gathers and scatters of microbatches run under their compute.
  config.overlap = False

  # What is tried beside the 20 triples. () as secondary_codecs: no copy.
  config.weight_codecs = ("none", "int8", "int4")
  config.gradient_codecs = ("none", "int8", "int4")
  config.secondary_codecs = ("none", "int8")
  # Microbatches per step for which the best partition is told.
  config.accumulations = (1, 2, 4, 8, 16)
  return config
