r"""Sweep of p, the number of tensor ranks r, and the scale of private channels.

The sweep has p = 1, 0.75, 0.5, 0.25 and 0 at r = 4, and r = 2, 4 and 8 at p =
0.5, with and without private channels scaled by sqrt(r), and 3 seeds: 39 runs,
each of slightly over a minute on one core.

  python -m launch.sweep --config=configs/caatnet/sweep.py \
    --cpu_devices=8 --mesh=tensor:1

The same command resumes a stopped sweep. `sweep.py:test` has a few steps.
Expected result: log/2026-11-21-partial-sync-160-steps.md.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny


def _points() -> tuple[str, ...]:
  points = ["parallel.tensor=4 sync.p=1.0"]
  for scale in ("forward", "none"):
    points += [
      f"parallel.tensor={r} sync.p={p} sync.private_scale={scale}"
      for r, p in ((4, 0.75), (4, 0.5), (4, 0.25), (4, 0.0), (2, 0.5),
                   (8, 0.5))
    ]
  return tuple(points)


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """Returns the sweep: `study`, or `test` for a few steps of two points."""
  if size not in ("study", "test"):
    raise ValueError(f"sweep.py:{size}: the sizes are study and test")
  config = tiny.get_config("test" if size == "test" else "demo")
  config.name = "sweep"
  if size == "study":
    config.data.seq_len = 128
    config.data.batch_size = 16
    config.data.validation_windows = 512
    config.train.num_steps = 160
    config.train.eval_every = 160
    config.train.checkpoint_every = 80
  config.sweep = defaults("sweep")
  config.sweep.points = _points()
  config.sweep.seeds = (0, 1, 2)
  if size == "test":
    config.sweep.points = _points()[:2]
    config.sweep.seeds = (0,)
  return config
