r"""Sweep of quantised partitions: loss at equal tokens, 3 seeds.

Runs have 300 steps of 1,024 bytes, 8 data-parallel ranks (2 nodes x 2 x 2) and
0.87M parameters. Points are: no partition, ZeRO-3, ZeRO-3 with int8 weights or
with int8 gradients, and two schemes with int8 weights and int4 gradients, which
are rounded once per level. Blocks have 256 elements, and parameters of all
sizes are encoded. A run takes about two minutes on one core.

  python -m launch.sweep --config=configs/zero/sweep.py \
    --cpu_devices=8 --mesh=tensor:1

The same command resumes a stopped sweep. `sweep.py:test` has a few steps.
Expected result: log/2026-11-21-zero-loss.md.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny

POINTS = (
  "zero.scheme=ddp",
  "zero.scheme=zero3",
  "zero.scheme=zero3 zero.weight_codec=int8 zero.coded_blocks=0",
  "zero.scheme=zero3 zero.gradient_codec=int8 zero.coded_blocks=0",
  "zero.scheme=zeropp_by_level zero.coded_blocks=0",
  "zero.scheme=frontier3_quantised zero.coded_blocks=0",
)


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """Returns `study`, or `test` for a few steps of two points."""
  if size not in ("study", "test"):
    raise ValueError(f"sweep.py:{size}: the sizes are study and test")
  config = tiny.get_config("test" if size == "test" else "demo")
  config.name = "zero_sweep"
  config.parallel.data = 8
  config.parallel.tensor = 1
  config.zero.levels = "node:2,gpu:2,gcd:2"
  if size != "test":
    config.train.num_steps = 300
    config.data.seq_len = 128
    config.data.validation_windows = 512
    config.train.eval_every = config.train.num_steps
    config.train.checkpoint_every = 150
  config.sweep = defaults("sweep")
  config.sweep.points = POINTS[-2:] if size == "test" else POINTS
  config.sweep.seeds = (0,) if size == "test" else (0, 1, 2)
  return config
