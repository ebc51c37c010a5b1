r"""Places a fine-tuning step of 12B parameters at 32,768 tokens of context.

  python -m launch.place --config=configs/memory/12b_32k.py
  python -m launch.place --config=configs/memory/12b_32k.py --tiers=one-cxl
  python -m launch.place --config=configs/memory/12b_32k.py:7b \
    --config.data.seq_len=4096 --plot=tiers.png
  python -m launch.place --config=configs/memory/12b_32k.py:7b \
    --config.placement.state=run --config.memory.activations=placement \
    --output=placement.json

Numbers of parameters and context lengths are those of arXiv 2507.03305
(CXL-aware allocation): 7B and 12B, 4,096 to 32,768 tokens, one GPU. The paper's
layer sizes were not available; those of Mistral Nemo and Llama 2 7B, with as
many parameters, are used instead. All times are predictions.

With placement.state=run, the placed tensors are those of `launch.train` with
this config: the host updates float32 parameters, and layers save named
activations or recompute them.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.placement.keys import Placement
from configs.caatnet import base

SIZES = {
  "12b": {
    "vocab_size": 131_072, "width": 5120, "num_layers": 40, "num_heads": 32,
    "num_kv_heads": 8, "head_width": 128, "ffn_width": 14_336,
  },
  "7b": {
    "vocab_size": 32_000, "width": 4096, "num_layers": 32, "num_heads": 32,
    "num_kv_heads": 32, "ffn_width": 11_008,
  },
}


def get_config(size: str = "12b") -> ml_collections.ConfigDict:
  """Returns the config of a placement.

  Args:
    size: A key of ``SIZES``.
  """
  if size not in SIZES:
    raise ValueError(
      f"configs/memory/12b_32k.py:{size}: the sizes are {', '.join(SIZES)}"
    )
  config = base.get_config()
  config.name = f"placement_{size}"
  config.model.update(SIZES[size])
  config.model.dtype = "bfloat16"
  config.model.remat = "named"
  config.parallel.tensor = 1
  config.memory.optimizer = "host"
  config.data.seq_len = 32_768
  config.data.batch_size = 1
  config.update(defaults(Placement))
  return config
