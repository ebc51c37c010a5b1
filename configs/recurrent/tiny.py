r"""Byte-level gated linear recurrence (Hawk) for a laptop CPU.

  python -m launch.train --config=configs/recurrent/tiny.py --cpu_devices=8 \
    --workdir=runs/recurrent
  python -m launch.generate --workdir=runs/recurrent --prompt="def "

Expected result: a validation loss well below that of a bigram model. The model
has a fixed-size state per sequence instead of keys and values, so the time per
generated token is independent of the position. `tiny.py:test` has a few steps
of a smaller model.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
  """Returns the run: `demo`, or `test`, which takes seconds."""
  config = tiny.get_config(size)
  config.name = "recurrent"
  changes = {
    key: config.model[key]
    for key in ("width", "num_layers", "ffn_width", "init_std")
  }
  config.model = defaults("model", "recurrent")
  config.model.update(changes)
  config.sync.p = 0.5
  if size == "test":
    config.model.rnn_width = 32
  return config
