"""CAAT-Net 130M of the paper, arXiv 2506.19645, with the sizes of its code.

  python -m launch.train --config=configs/caatnet/130m.py --config.sync.p=0.5

The paper trains on RedPajama with a SentencePiece vocabulary of 32,000. Without
`config.data.tokenizer`, tokens are bytes, which use only 256 entries of the
vocabulary, and the loss is not comparable to the paper's.
"""

import ml_collections

from configs.caatnet import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.name = "130m"
  config.model.vocab_size = 32_000
  config.model.num_layers = 12
  config.model.width = 768
  config.model.num_heads = 16
  config.model.num_kv_heads = 16
  config.model.ffn_width = 2048
  config.model.dtype = "bfloat16"
  config.model.remat = "reduced"
  # One rank for each of 256 chips; fewer devices hold several ranks each.
  config.parallel.data = 32
  config.parallel.tensor = 8
  config.data.seq_len = 1024
  config.data.batch_size = 256
  config.optimizer.learning_rate = 6e-4
  config.optimizer.warmup_steps = 2_000
  # The learning-rate schedule has 500,000 steps; training stops at step 30,010,
  # at 0.993 of the peak rate.
  config.optimizer.decay_steps = 500_000
  config.train.num_steps = 30_010
  config.train.log_every = 10
  config.train.eval_every = 1_000
  config.train.checkpoint_every = 1_000
  return config
