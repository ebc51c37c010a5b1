"""Training step of a config as a function of the layout.

`parallel.ledger.equal` compares the step on one device, which has all ranks as
lanes, with the step on the devices of a mesh.
"""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import Any

import jax
import ml_collections
import numpy as np

from caatnet.config import experiments
from caatnet.train.evaluate import put_batch
from parallel.ledger.equal.programs import Builder


def builder(
  config: ml_collections.ConfigDict, layouts: Sequence[Mapping[str, int]] = ()
) -> Builder:
  """Returns a function of a mesh that builds the first step of a run.

  Args:
    config: Training config.
    layouts: Meshes to compare. All of them have the same number of ranks on an
      axis: the least common multiple of the config's and of their devices.
  """
  config = config.copy_and_resolve_references()
  config.optimizer.warmup_steps = 0  # else the first step has a rate of 0
  for axis in {axis for layout in layouts for axis in layout}:
    if axis in config.parallel:  # others are levels of config.zero.levels
      config.parallel[axis] = math.lcm(
        config.parallel[axis], *(layout.get(axis, 1) for layout in layouts)
      )

  @functools.cache
  def initial() -> tuple[Any, Any]:
    """Returns the state and the first batch, on the host."""
    experiment = experiments.build(config, {})
    dataset = experiment.data.load(experiment.seed)
    return jax.device_get(experiment.init_state()), next(dataset.batches)

  def build(layout: Mapping[str, int]) -> tuple[Any, tuple[Any, ...]]:
    state, batch = initial()
    experiment = experiments.build(config, layout)
    plan = experiment.outer.plan(0)
    step = experiment.update.make_step(
      experiment.program, experiment.optimizer, experiment.outer,
      experiment.clip_norm, experiment.train.accumulation, plan.variant,
    )
    state = jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), state,
      experiment.abstract_state(),
    )
    return step, (
      experiment.update.on_device(state),
      put_batch(experiment.program.layout, batch),
      jax.tree.map(np.int32, plan.numbers),
    )

  return build
