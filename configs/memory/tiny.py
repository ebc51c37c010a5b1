r"""Byte-level model with moments and saved activations in host memory.

  python -m launch.train --config=configs/memory/tiny.py
  python -m launch.compile --config=configs/memory/tiny.py \
    --target=tpu:v5p:2x2x2

On GPUs and TPUs, pinned host memory holds the moments between steps, and the
inputs of layers and the sums over tensor ranks between forward and backward.
XLA:CPU has one memory and ignores the placement, so the run has the losses of
`configs/caatnet/tiny.py` with `--config.model.remat=reduced`.

Alternatively, the host updates the parameters, with half of its arrays in DRAM
and half in a file in the folder /tmp (optional dependencies `memory`):

  python -m launch.train --config=configs/memory/tiny.py \
    --config.memory.moments=device --config.memory.optimizer=host \
    --config.memory.tiers='(("0", 0.5), ("/tmp", 0.5))'

Losses are then equal to those of the optimizer on the device up to rounding. A
policy of `launch.place` can choose the fractions of each array on this
machine's tiers, and of the layers that save activations or recompute them:

  python -m launch.measure memory --output=tiers.json --file=/tmp/tier
  python -m launch.place --config=configs/memory/12b_32k.py:7b \
    --config.model.num_layers=4 --config.placement.state=run \
    --config.memory.activations=placement --tiers=tiers.json \
    --output=placement.json
  python -m launch.train --config=configs/memory/tiny.py \
    --config.memory.moments=device --config.memory.optimizer=host \
    --config.memory.activations=placement \
    --config.memory.placement=placement.json --config.memory.policy=optimum

With placement.state=run the plan has the float32 weights and gradients of a
run, and the policy "optimum" updates all parameters on the host. The run's
first lines name the tensors that it does not place as planned: XLA cannot
choose the NUMA node of pinned memory.
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
