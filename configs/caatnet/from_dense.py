r"""Loss of a model trained at p = 1 that continues to train at p = 0.5.

  for seed in 0 1 2; do
    for part in dense half half_unscaled full half_drawn full_drawn; do
      python -m launch.train --cpu_devices=1 \
        --config=configs/caatnet/from_dense.py:$part,$seed
    done
  done

`dense` trains 80 steps at p = 1. Three runs start with its parameters and train
80 further steps: `half` at p = 0.5, `half_unscaled` at p = 0.5 without the
factor sqrt(ranks) for private channels, and `full` at p = 1. Step 0 of their
metrics.jsonl is the loss before further training. `half_drawn` (p = 0.5) and
`full_drawn` (p = 1) start from random initialisation and train 160 steps. The
model is that of the demo, with 1,024 bytes per step. Expected result:
log/2026-11-22-partial-sync-from-dense.md.
"""

import ml_collections

from configs.caatnet import tiny

STEPS = 80
PARTS = ("dense", "half", "half_unscaled", "full", "half_drawn", "full_drawn")


def get_config(which: str = "dense,0") -> ml_collections.ConfigDict:
  """Returns one of the runs: the part, a comma, and the seed."""
  part, _, seed = which.partition(",")
  if part not in PARTS or not seed.isdecimal():
    raise ValueError(f"from_dense.py:{which}: PART,SEED of {', '.join(PARTS)}")
  config = tiny.get_config()
  config.data.seq_len = 128
  config.optimizer.warmup_steps = 10
  config.name = f"from_dense_{part}_{seed}"
  config.seed = int(seed)
  config.sync.p = 0.5 if part.startswith("half") else 1.0
  if part == "half_unscaled":
    config.sync.private_scale = "none"
  steps = 2 * STEPS if part.endswith("drawn") else STEPS
  config.train.num_steps = config.train.eval_every = steps
  config.train.checkpoint_every = steps
  if part in ("half", "half_unscaled", "full"):
    config.train.init_from = f"runs/from_dense_dense_{seed}"
  return config
