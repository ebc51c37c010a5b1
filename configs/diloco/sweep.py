r"""The study: loss of the outer loops at equal tokens, 3 seeds.

2 workers and 30 inner steps for all; 4 and 8 workers, and 100 steps, for
DiLoCo and for Streaming with everything on. 0.87M parameters, 1,440 steps of
2,048 bytes in all workers together; a run takes over five minutes on a core.
Outer momentum is 0.3 at a rate of 1: with the published 0.9 at 0.7 so few
rounds are worse (LOG.md).

  python -m launch.sweep --config=configs/diloco/sweep.py \
    --cpu_devices=8 --mesh=tensor:1

Resumable: run it again after a stop. `sweep.py:test` is a few steps of it.
Expected result: LOG.md.
"""

import ml_collections

from configs.caatnet import tiny

FULL = (
  "outer.algorithm=streaming outer.overlap=(1,) outer.keep=0.5 "
  "outer.codec=e3m0"
)
SGD = (
  "optimizer.name=sgd optimizer.beta_1=0.9 optimizer.learning_rate=0.3 "
  "optimizer.weight_decay=0.0"
)
POINTS = (
  "outer.algorithm=data_parallel",
  "outer.algorithm=local_sgd",
  "outer.algorithm=diloco",
  "outer.algorithm=streaming",
  "outer.algorithm=streaming outer.overlap=(1,) outer.keep=0.5",
  FULL,
  "outer.algorithm=eager",
  "outer.algorithm=sparseloco",
  "outer.algorithm=noloco",
  f"outer.algorithm=data_parallel {SGD}",
  f"outer.algorithm=dc_s3gd {SGD}",
  f"outer.algorithm=dc_s3gd outer.compensation=0.0 {SGD}",
  "parallel.worker=4 outer.algorithm=diloco",
  f"parallel.worker=4 {FULL}",
  "parallel.worker=8 outer.algorithm=diloco",
  f"parallel.worker=8 {FULL}",
  "outer.every=100 outer.algorithm=diloco",
  f"outer.every=100 {FULL}",
)


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """`study`, or `test` for a few steps of two points."""
  config = tiny.get_config("test" if size == "test" else "demo")
  config.name = "outer_loops"
  config.parallel.worker = 2
  config.parallel.tensor = 1
  if size == "study":
    config.data.seq_len = 128
    config.data.batch_size = 16
    config.data.validation_windows = 512
    config.train.num_steps = 1440
    config.train.eval_every = 1440
    config.train.checkpoint_every = 360
    config.outer.learning_rate = 1.0
    config.outer.momentum = 0.3
  config.sweep = ml_collections.ConfigDict()
  config.sweep.points = POINTS if size == "study" else POINTS[:1] + (FULL,)
  config.sweep.seeds = (0, 1, 2) if size == "study" else (0,)
  return config
