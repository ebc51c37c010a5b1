r"""Model of 20B parameters on 64 chips, for `launch.compile`.

The number of parameters is that of Xu et al. (arXiv 2501.04266). Layers, width,
heads and sequences are those of GPT-NeoX-20B (arXiv 2204.06745; its
configs/20B.yml). With SwiGLU of width 16,384 instead of its MLP, the model has
20.3e9 parameters. Levels are Frontier's: 2 chips per pair, 4 pairs per node,
and 8 nodes. Vocabulary and batch are ours.

  python -m launch.compile --config=configs/zero/20b.py \
    --target=tpu:v5p:4x4x4 --config.zero.scheme=frontier3

Expected result (log/2026-11-21-zero-20b-program.md): the bytes that the program
sends over each level equal those of `parallel/plans/zero/cost.py`, and the
program fits into the memory of a chip. `--config.zero.scheme=zeropp_by_level`
needs a third of the memory and half of the time on the links. Each compilation
takes a minute or two.
"""

import ml_collections

from configs.caatnet import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.name = "20b"
  config.model.vocab_size = 32_000
  config.model.num_layers = 44
  config.model.width = 6144
  config.model.num_heads = 64
  config.model.num_kv_heads = 64
  config.model.ffn_width = 16_384
  config.model.dtype = "bfloat16"
  config.model.remat = "full"
  config.parallel.data = 64
  config.parallel.tensor = 1
  config.zero.levels = "node:8,pair:4,chip:2"
  config.zero.scheme = "frontier3"
  config.train.accumulation = 4
  config.data.seq_len = 2048
  config.data.batch_size = 256
  config.optimizer.learning_rate = 1e-4
  config.optimizer.warmup_steps = 2_000
  config.train.num_steps = 100_000
  config.train.log_every = 10
  config.train.eval_every = 1_000
  config.train.checkpoint_every = 1_000
  return config
