"""Shared config of this folder, with the model sizes of Streaming DiLoCo.

Numbers of layers and heads, hidden width, sequences of 1,024 tokens, 2 workers
and 30 inner steps per round are those of the paper's runs on C4 (arXiv
2501.18512). Its "hidden dim" is interpreted as four times the width, and heads
have 64 dims. Learning rate, batch, warm-up and number of steps are ours.
Deviations: SwiGLU with that hidden width, neither QK-norm nor z-loss, and bytes
as tokens, as in `configs/caatnet/130m.py`.

`tiny` is `configs/caatnet/tiny.py` with 2 workers of 4 tensor ranks each.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import base, tiny

# Numbers of layers and heads.
SIZES = {
  "35m": (6, 8),
  "100m": (9, 12),
  "200m": (12, 16),
  "300m": (15, 20),
  "500m": (18, 24),
  "1b": (24, 32),
  "4b": (36, 48),
}


def get_config(
  algorithm: str = "diloco", size: str = "tiny"
) -> ml_collections.ConfigDict:
  """Returns an outer loop's config, with size tiny, test or a key of SIZES."""
  if size in ("tiny", "test"):
    config = tiny.get_config("demo" if size == "tiny" else "test")
    config.parallel.tensor = 4
  elif size in SIZES:
    config = base.get_config()
    config.model.num_layers, heads = SIZES[size]
    config.model.num_heads = config.model.num_kv_heads = heads
    config.model.width = 64 * heads
    config.model.ffn_width = 256 * heads
    config.model.vocab_size = 32_000
    config.model.dtype = "bfloat16"
    config.model.remat = "reduced"
    config.parallel.tensor = 4
    config.data.seq_len = 1024
    config.data.batch_size = 256
    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 1_000
    config.train.num_steps = 20_000
    config.train.log_every = 10
    config.train.eval_every = 1_000
    config.train.checkpoint_every = 1_000
  else:
    raise ValueError(
      f"no size {size!r}; there are tiny, test, {', '.join(SIZES)}"
    )
  config.name = f"{algorithm}_{size}"
  config.parallel.worker = 2
  config.outer = defaults("outer", algorithm)
  if algorithm == "streaming" and size in SIZES:
    config.outer.fragment_layers = 3
  return config
