r"""Byte-level model whose moments and saved activations are in host memory.

  python -m launch.train --config=configs/memory/tiny.py
  python -m launch.compile --config=configs/memory/tiny.py \
    --target=tpu:v5p:2x2x2

On GPUs and TPUs the moments are in pinned host memory between steps, and the
inputs of layers and the sums over tensor ranks between forward and backward.
XLA:CPU has one memory and elides the placement, so the run has the losses of
`configs/caatnet/tiny.py` with `--config.model.remat=reduced`.

The moments can instead be updated on the host, with half of their bytes in
DRAM and half in a file of the folder /tmp (extra `memory`):

  python -m launch.train --config=configs/memory/tiny.py \
    --config.memory.moments=device --config.memory.optimizer=host \
    --config.memory.tiers='(("0", 0.5), ("/tmp", 0.5))'

Losses are then those of the optimizer on the device within rounding. Shares of
each array, and of the layers that save their activations or recompute them, can
be those of a policy, on tiers that this machine has:

  python -m launch.measure memory --output=tiers.json --file=/tmp/tier
  python -m launch.place --config=configs/memory/12b_32k.py:7b \
    --config.model.num_layers=4 --config.placement.state=run \
    --config.memory.activations=placement --tiers=tiers.json \
    --output=placement.json
  python -m launch.train --config=configs/memory/tiny.py \
    --config.memory.moments=device --config.memory.optimizer=host \
    --config.memory.activations=placement \
    --config.memory.placement=placement.json --config.memory.policy=optimum

With state=run the plan has the float32 weights and gradients of a run, and the
optimum updates all parameters on the host. The run's first lines name the
tensors whose tiers it does not execute: XLA has one kind of pinned memory, of
any NUMA node.
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
