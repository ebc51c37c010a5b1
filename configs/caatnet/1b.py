"""CAAT-Net 1.1B of the paper, arXiv 2506.19645, with the sizes of its code.

  python -m launch.train --config=configs/caatnet/1b.py --config.sync.p=0.5

The paper trains on RedPajama with a SentencePiece vocabulary of 32,000. Without
`config.data.tokenizer`, tokens are bytes, which use only 256 entries of the
vocabulary, and the loss is not comparable to the paper's.
"""

import ml_collections

from configs.caatnet import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.name = "1b"
  config.model.vocab_size = 32_000
  config.model.num_layers = 22
  config.model.width = 2048
  config.model.num_heads = 32
  config.model.num_kv_heads = 8
  config.model.ffn_width = 5632
  config.model.dtype = "bfloat16"
  config.model.remat = "reduced"
  # One rank for each of 64 chips; fewer devices hold several ranks each.
  config.parallel.data = 8
  config.parallel.tensor = 8
  config.train.accumulation = 16
  config.data.seq_len = 2048
  config.data.batch_size = 1024
  config.optimizer.learning_rate = 4e-4
  config.optimizer.warmup_steps = 2_000
  config.train.num_steps = 937_500
  config.train.log_every = 10
  config.train.eval_every = 1_000
  config.train.checkpoint_every = 1_000
  return config
