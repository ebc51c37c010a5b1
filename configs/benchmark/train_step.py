"""Training step of a 25M-parameter byte model, compared with plain JAX.

  python -m launch.benchmark --config=configs/benchmark/train_step.py

For one GPU or TPU, a model of 270M parameters in bfloat16, also without Pallas
kernels (1.5 minutes on an H100):

  python -m launch.benchmark --config=configs/benchmark/train_step.py:270m

All variants run in alternation on one device. The table has medians, ranges,
and times relative to the first variant of the same dtype. It takes about eight
minutes on two cores.

Aims: one rank takes as long as the plain step; eight ranks on the device take
at most 1.2 times as long as one at p = 1, and 1.6 times at p = 0.5.
"""

import ml_collections

from caatnet.benchmarks.training.keys import TrainStep
from caatnet.schema.tree import defaults
from configs.caatnet import base

# Label and overrides of each step of the size `270m`, for accelerators.
_ON_ACCELERATOR = (
  ("plain JAX step", ""),
  ("r=1", "parallel.tensor=1"),
  ("r=1, unrolled", "parallel.tensor=1 model.unroll=16"),
  ("r=1, XLA attention", "parallel.tensor=1 model.attention=xla"),
  ("r=1, no kernels", "parallel.tensor=1 kernels=reference"),
  ("r=1, moments on host", "parallel.tensor=1 memory.moments=pinned_host"),
  ("r=1, recomputed", "parallel.tensor=1 model.remat=full"),
  ("r=1, recomputed, activations on host",
   "parallel.tensor=1 model.remat=full memory.activations=pinned_host"),
  ("r=8 lanes, p=1", "parallel.tensor=8"),
  ("r=8 lanes, p=.5", "parallel.tensor=8 sync.p=0.5"),
  ("r=8 lanes, p=.5, no kernels",
   "parallel.tensor=8 sync.p=0.5 kernels=reference"),
)


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, `270m`, or `test`, which takes seconds."""
  if size not in ("25m", "270m", "test"):
    raise ValueError(f"train_step.py:{size}: the sizes are 25m, 270m and test")
  config = base.get_config()
  config.name = "train_step"
  config.model.width = 512
  config.model.num_layers = 8
  config.model.ffn_width = 1376
  config.data.seq_len = 256
  config.data.batch_size = 8
  config.benchmark = defaults(TrainStep)
  if size == "270m":
    config.model.vocab_size = 32_000
    config.model.width = 1024
    config.model.num_layers = 16
    config.model.ffn_width = 2816
    config.data.seq_len = 1024
    config.data.batch_size = 16
    config.benchmark.dtypes = ("bfloat16",)
    config.benchmark.variants = _ON_ACCELERATOR
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 2
    config.model.ffn_width = 48
    config.data.seq_len = 16
    config.benchmark.rounds = 2
  return config
