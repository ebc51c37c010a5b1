r"""Sweep of E3M0 rounding modes in DiLoCo's exchanges, 3 seeds.

Rounding to nearest in E3M0 shrinks Gaussian differences: in blocks of 256, the
projection of the rounded on the original differences is 0.965 of the original.
Stochastic rounding is unbiased and has 1.45 times the error. The outer step is
linear in the mean, so a correction by 1 / 0.965 is equivalent to an outer
learning rate larger by that factor, which is the last point of the sweep.

Runs have 2 workers, 10 rounds of 30 steps of 1,024 bytes, a model of 0.87M
parameters, and outer Nesterov with rate 1 and momentum 0.3, as in `sweep.py`.

  python -m launch.sweep --config=configs/diloco/rounding.py \
    --cpu_devices=2 --mesh=tensor:1

A run takes half a minute on one core. `rounding.py:test` has a few steps.
Expected result: log/2026-11-22-outer-rounding.md.
"""

import ml_collections

from configs.diloco import sweep

E3M0 = "outer.codec=e3m0"
POINTS = (
  "outer.codec=float32",
  E3M0,
  f"{E3M0} outer.stochastic_rounding=True",
  f"{E3M0} outer.learning_rate=1.036",
)


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """Returns `study`, or `test` for a few steps."""
  config = sweep.get_config(size)
  config.name = "rounding"
  config.outer = config.sweep.sections.outer.diloco
  if size != "test":
    config.train.num_steps = config.train.eval_every = 300
  config.sweep.points = POINTS
  return config
