r"""LLaMA 7B with one long sequence on one device.

  python -m launch.compile --config=configs/memory/7b_long.py \
    --target=gpu:h200:1x1 --config.data.seq_len=32768
  python -m launch.compile --config=configs/memory/7b_long.py \
    --target=tpu:v5p:2x2x1 --mesh=data:1 --config.data.seq_len=32768

Sizes are those of `configs/caatnet/7b.py`. Parameters, gradients and moments
are float32, matrix products bfloat16. `config.memory` places the moments and
the inputs of layers in pinned host memory. The longest contexts that fit,
according to the compiler, are in log/2026-11-26-longest-context.md.
"""

import importlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = importlib.import_module("configs.caatnet.7b").get_config()
  config.name = "7b_long"
  config.model.remat = "full"
  config.parallel.data = 1
  config.parallel.tensor = 1
  config.train.accumulation = 1
  config.data.seq_len = 32_768
  config.data.batch_size = 1
  config.memory.moments = "pinned_host"
  config.memory.activations = "pinned_host"
  return config
