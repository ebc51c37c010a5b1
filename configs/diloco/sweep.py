r"""Sweep of the outer loops: loss at equal tokens, 3 seeds.

`study`, the default, has 600 steps of 1,024 bytes over all workers. Every outer
loop runs with 2 workers and 30 inner steps per round. DiLoCo and full Streaming
DiLoCo (one step of overlap, E3M0) also run with 4 and 8 workers, and with 100
inner steps. `long` has 3,000 steps of 2,048 bytes, with data parallelism and
full Streaming DiLoCo. `short` has 120 steps, to try a new loop
(docs/your_own.md). Models have 0.87M parameters. A run of `study` takes over
one minute on one core, a run of `long` over ten.

The outer optimizer has rate 1 and momentum 0.3, and workers replace their
parameters by the received mean (keep = 0). The published rate 0.7, momentum 0.9
and keep = 0.5 give a higher loss after so few rounds
(log/2026-11-21-outer-loops-3000-steps.md). For the same reason, NoLoCo does not
have its published settings.

  python -m launch.sweep --config=configs/diloco/sweep.py \
    --cpu_devices=8 --mesh=tensor:1
  python -m launch.sweep --config=configs/diloco/sweep.py:long \
    --cpu_devices=8 --mesh=tensor:1

The same command resumes a stopped sweep. `sweep.py:test` has a few steps.
Expected results: log/2026-11-21-outer-loops-600-steps.md and
log/2026-11-21-outer-loops-3000-steps.md.
"""

import ml_collections

from caatnet.schema.tree import choices, defaults
from configs.caatnet import tiny

OVERLAPPED = "outer.algorithm=streaming outer.overlap=(1,)"
FULL = f"{OVERLAPPED} outer.codec=e3m0"
SGD = "optimizer.name=sgd"
POINTS = (
  "outer.algorithm=data_parallel",
  "outer.algorithm=diloco",
  "outer.algorithm=streaming",
  OVERLAPPED,
  FULL,
  "outer.algorithm=eager",
  f"outer.algorithm=data_parallel {SGD}",
  f"outer.algorithm=dc_s3gd {SGD}",
  f"outer.algorithm=dc_s3gd outer.compensation=0.0 {SGD}",
  "outer.sync_every=100 outer.algorithm=diloco",
  f"outer.sync_every=100 {FULL}",
  "parallel.worker=4 outer.algorithm=diloco",
  f"parallel.worker=4 {FULL}",
  "parallel.worker=8 outer.algorithm=diloco",
  f"parallel.worker=8 {FULL}",
  "outer.algorithm=local_sgd",
  "outer.algorithm=sparseloco",
  "outer.algorithm=noloco",
)
PAIR = (POINTS[0], FULL)
# Numbers of steps, and of sequences per step.
SIZES = {"study": (600, 8), "long": (3000, 16), "short": (120, 8)}


def _sections(size: str) -> ml_collections.ConfigDict:
  """Returns the sections of all outer loops, with the sweep's settings."""
  loops = ml_collections.ConfigDict(
    {name: defaults("outer", name) for name in choices("outer")}
  )
  for loop in loops.values():
    if size != "test" and "learning_rate" in loop:
      loop.learning_rate = 1.0
    if size != "test" and "momentum" in loop:
      loop.momentum = 0.3
  loops.noloco.pull = 0.5
  return ml_collections.ConfigDict({"outer": loops})


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """Returns `study`, `long`, `short`, or `test` for a few steps."""
  if size not in (*SIZES, "test"):
    raise ValueError(
      f"sweep.py:{size}: the sizes are {', '.join(SIZES)} and test"
    )
  config = tiny.get_config("test" if size == "test" else "demo")
  config.name = "outer_loops"
  config.parallel.worker = 2
  config.parallel.tensor = 1
  if size != "test":
    config.train.num_steps, config.data.batch_size = SIZES[size]
    config.data.seq_len = 128
    config.data.validation_windows = 128 if size == "short" else 512
    config.train.eval_every = config.train.num_steps
    config.train.checkpoint_every = 300
  config.sweep = defaults("sweep")
  config.sweep.sections = _sections(size)
  config.sweep.points = POINTS if size == "study" else PAIR
  config.sweep.seeds = (0,) if size == "test" else (0, 1, 2)
  return config
