"""A training run as objects; `caatnet.config` makes them from a config."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import optax

from caatnet.config.schema.train import Train
from caatnet.data.protocol import Data
from caatnet.program import Program
from caatnet.train.state import TrainState, init_state, state_shardings
from caatnet.train.step import make_evaluated, make_train_step
from parallel.outer.base import OuterLoop, Plan


@dataclasses.dataclass(frozen=True)
class Experiment:
  """All that a training run needs, none of it run yet.

  Attributes:
    config: The whole config as plain data, for ``config.json``.
    program: The model on a mesh.
    optimizer: The inner optimizer; it works on each rank's slice.
    outer: The outer loop: what workers send to each other, and when.
    learning_rate: Maps a step to the learning rate of the inner optimizer.
    clip_norm: The largest gradient norm of a worker; 0 does not clip.
    data: The data to train and to evaluate on.
    train: How long the run is and how often it does what.
    seed: Decides the parameters and the order of the data.
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

  @property
  def units_per_step(self) -> int:
    """How many of the data's units one step reads, over all workers."""
    return self.data.batch_size * self.data.units_per_example

  @property
  def flops_per_step(self) -> float:
    """FLOPs of the model in one step, over all workers."""
    flops = self.program.model.flops(self.data.example)
    return self.data.batch_size * flops

  def init_state(self, params: Any = None) -> TrainState:
    """Makes the state before the first step.

    Args:
      params: The workers' parameters ``[workers, ...]``, as they are stored, of
        which all workers get the first one's; None to draw them.
    """
    return init_state(
      self.program, self.optimizer, self.outer, self.seed, params
    )

  def abstract_state(self) -> TrainState:
    """Returns shapes, dtypes and shardings of the training state."""
    return self._abstract_state

  @functools.cached_property
  def _abstract_state(self) -> TrainState:  # traced once, not for each plan
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      jax.eval_shape(self.init_state),
      state_shardings(self.program, self.optimizer, self.outer),
    )

  def abstract_batch(self) -> Any:
    """Returns shapes, dtypes and sharding of one step's batch.

    Arrays are ``[workers, *levels, batch per rank, ...]``.
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

  def make_evaluated(self) -> Callable[[Any, Any], Any]:
    """Returns a function of parameters and the outer loop's state.

    It picks the parameters that stand for the run.
    """
    return make_evaluated(self.program, self.outer)

  def lower_step(self, plan: Plan | None = None) -> jax.stages.Lowered:
    """Lowers the training step that a run executes, without any data.

    Args:
      plan: What the outer loop does in the step; None: as in the first step.
    """
    plan = plan or self.outer.plan(0)
    step = make_train_step(
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
    return step.lower(self.abstract_state(), self.abstract_batch(), numbers)
