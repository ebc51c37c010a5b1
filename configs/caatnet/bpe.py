r"""Model of `tiny.py` with the tokens of a trained tokenizer instead of bytes.

  python -m launch.tokenizer --config=configs/caatnet/bpe.py
  python -m launch.train --config=configs/caatnet/bpe.py --cpu_devices=8

The first command trains the tokenizer that the second one reads. The loss is in
nats per token; bits per byte are comparable to those of tiny.py. `bpe.py:test`
has a few steps of a smaller model.
"""

import ml_collections

from configs.caatnet import tiny


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
  """Returns the run: `demo`, or `test`, which takes seconds."""
  config = tiny.get_config(size)
  config.name = "bpe"
  config.data.tokenizer = "runs/tokenizer"
  config.model.vocab_size = 1024
  return config
