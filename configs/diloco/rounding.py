r"""A sweep: how E3M0 rounds the differences of DiLoCo's exchanges, 3 seeds.

Rounding to the nearest number of E3M0 shrinks Gaussian differences: what is
decoded, projected on what was sent, is 0.965 of it in blocks of 256. Stochastic
rounding has no such bias and 1.45 times the error. A scale corrected by 1 /
0.965 is the same as an outer learning rate larger by that factor, since the
outer step is linear in the mean; so that point needs no codec of its own.

300 steps of 1,024 bytes, 2 workers, 10 rounds of 30 steps, a model of 0.87M
parameters, outer Nesterov(1, 0.3) as in `sweep.py`.

  python -m launch.sweep --config=configs/diloco/rounding.py \
    --cpu_devices=2 --mesh=tensor:1

A run takes half a minute on a core. `rounding.py:test` is a few steps of it.
Expected result: LOG.md.
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
