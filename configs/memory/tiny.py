r"""Byte-level model whose moments and saved activations are in host memory.

  python -m launch.train --config=configs/memory/tiny.py
  python -m launch.compile --config=configs/memory/tiny.py \
    --target=tpu:v5p:2x2x2

On GPUs and TPUs the moments are in pinned host memory between steps, and the
inputs of layers and the sums over tensor ranks between forward and backward.
XLA:CPU has one memory and elides the placement, so the run has the losses of
`configs/caatnet/tiny.py` with `--config.model.remat=reduced`.
"""

import ml_collections

from configs.caatnet import tiny


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
  """Returns the run; sizes as in `configs/caatnet/tiny.py`."""
  config = tiny.get_config(size)
  config.name = "memory_tiny"
  config.model.remat = "reduced"
  config.memory.moments = "pinned_host"
  config.memory.activations = "pinned_host"
  return config
