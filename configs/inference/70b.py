r"""Inference with the sizes of Llama 2 70B on 8 devices, for `launch.compile`.

  python -m launch.compile --config=configs/inference/70b.py --phase=decode \
    --target=gpu:h200:1x8 --mesh=tensor:8 --compare=config.sync.p=0.5
  python -m launch.compile --config=configs/inference/70b.py --phase=prefill \
    --target=tpu:v5p:2x2x2 --mesh=tensor:8 --config.inference.chunk=2048

Source: Touvron et al., arXiv 2307.09288, and the published config.json. Weights
come from `launch.convert`; training with this config exceeds the memory.
"""

import importlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  # `import` does not support names that begin with a digit.
  config = importlib.import_module("configs.caatnet.7b").get_config()
  config.name = "70b"
  config.model.num_layers = 80
  config.model.width = 8192
  config.model.num_heads = 64
  config.model.num_kv_heads = 8
  config.model.ffn_width = 28672
  config.parallel.data = 1
  config.inference.batch = 32
  config.inference.context = 2048
  config.inference.chunk = 2048
  return config
