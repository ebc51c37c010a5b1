"""Training run as an object; `caatnet.config` builds it from a config."""

from collections.abc import Callable, Hashable
import dataclasses
import functools
from typing import Any

import jax
import optax

from caatnet.data.protocol import Data
from caatnet.program import Program, SplitParams
from caatnet.schema.train import Train
from caatnet.train.explicit_state import mean_of_finite
from caatnet.train.state import (
  TrainState,
  init_state,
  outer_specs,
  state_shardings,
)
from caatnet.train.update import DeviceUpdate, HostUpdate
from parallel.outer.base import OuterLoop, Plan

# Maximum number of steps whose plans `Experiment.plans` counts, which takes 2 s
# for Streaming DiLoCo. In a longer run, only the first steps are counted.
_MAX_COUNTED_STEPS = 200_000


@dataclasses.dataclass(frozen=True)
class Experiment:
  """All components of a training run; creating it executes nothing.

  Attributes:
    config: The whole config as plain data, for ``config.json``.
    program: The model on a mesh.
    optimizer: The inner optimizer; it updates each rank's slice separately.
    outer: The outer loop, which defines the communication between workers.
    learning_rate: Maps a step to the learning rate of the inner optimizer.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.
    data: The training and validation data.
    train: Number of steps, and intervals of logs, evaluations and checkpoints.
    seed: Determines initial parameters and the order of the data.
    update: Update of parameters, in the device's program or on the host.
    unexecuted: Text that names the tensors for which the run does not use the
      memory tiers of ``config.memory.placement``; "" for none.
  """

  config: dict[str, Any]
  program: Program
  optimizer: optax.GradientTransformation
  outer: OuterLoop
  learning_rate: optax.Schedule
  clip_norm: float
  data: Data
  train: Train
  seed: int
  update: DeviceUpdate | HostUpdate = dataclasses.field(
    default_factory=DeviceUpdate
  )
  unexecuted: str = ""

  @property
  def units_per_step(self) -> int:
    """Data units (such as tokens) per step, over all workers."""
    return self.data.batch_size * self.data.units_per_example

  @property
  def flops_per_step(self) -> float:
    """FLOPs of forward and backward in one step, over all workers."""
    flops = self.program.model.flops(self.data.example)
    return self.data.batch_size * flops

  def init_state(self, params: Any = None) -> TrainState:
    """Returns the training state before the first step.

    Args:
      params: Stored parameters ``[workers, ...]``; all workers start with those
        of the first one. None to initialise parameters from the seed.
    """
    return init_state(
      self.program, self.optimizer, self.outer, self.seed, params
    )

  def abstract_state(self) -> TrainState:
    """Returns shapes, dtypes and shardings of the training state."""
    return self._abstract_state

  @functools.cached_property
  def _abstract_state(self) -> TrainState:
    # Cached, since tracing takes time and `lower_step` runs once per variant.
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      jax.eval_shape(self.init_state),
      state_shardings(self.program, self.optimizer, self.outer),
    )

  def abstract_batch(self) -> Any:
    """Returns shapes, dtypes and sharding of one step's batch.

    Arrays are ``[workers, *levels, batch per rank, ...]``, with a dim per level
    of data-parallel ranks.
    """
    layout = self.program.layout
    ranks = layout.worker.size * layout.num_data_ranks
    rows = (*layout.batch_dims, self.data.batch_size // ranks)
    sharding = layout.shardings(layout.batch_spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (*rows, *x.shape), x.dtype, sharding=sharding
      ),
      self.data.example,
    )

  def make_export_params(self) -> Callable[[Any, Any], Any]:
    """Returns a function that maps a state to the parameters to evaluate.

    Its arguments are the workers' parameters and the outer loop's state. The
    result has no worker dim: for example, the mean over workers.
    """
    program, layout = self.program, self.program.layout

    def export(params: Any, state: Any) -> Any:
      trained, explicit = program.split(params)
      return SplitParams(
        self.outer.export_params(trained, state),
        mean_of_finite(explicit, layout.worker),
      ).join()

    return jax.jit(
      jax.shard_map(
        export,
        mesh=layout.mesh,
        in_specs=(
          layout.add_worker_dim(program.specs), outer_specs(program, self.outer)
        ),
        out_specs=program.specs,
      )
    )

  @functools.cached_property
  def plans(self) -> dict[Hashable, tuple[Plan, int]]:
    """For each `Plan.variant`, its first plan and its number of steps.

    All steps of the run are counted. One period of the outer loop would not
    represent the run, which may end before an exchange or have unequal rounds.
    """
    found: dict[Hashable, tuple[Plan, int]] = {}
    for step in range(min(self.train.num_steps, _MAX_COUNTED_STEPS)):
      plan = self.outer.plan(step)
      first, count = found.get(plan.variant, (plan, 0))
      found[plan.variant] = first, count + 1
    return found

  def lower_step(self, plan: Plan | None = None) -> jax.stages.Lowered:
    """Lowers the training step of a run, without any data.

    Args:
      plan: The outer loop's plan of the step; None for that of step 0.
    """
    plan = plan or self.outer.plan(0)
    step = self.update.make_step(
      self.program,
      self.optimizer,
      self.outer,
      self.clip_norm,
      self.train.accumulation,
      plan.variant,
    )
    numbers = jax.tree.map(
      lambda _: jax.ShapeDtypeStruct((), jax.numpy.int32), plan.numbers
    )
    state = self.update.on_device(self.abstract_state())
    return step.lower(state, self.abstract_batch(), numbers)
