"""A training run as objects, whatever config they came from."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import optax

from caatnet.data.protocol import Data
from caatnet.program import Program
from caatnet.train.state import TrainState, init_state, state_shardings
from caatnet.train.step import make_evaluated, make_train_step
from parallel.outer.base import OuterLoop, Plan


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """``config.train``; all counts are steps.

  Attributes:
    num_steps: Length of the run.
    accumulation: Microbatches per step.
    log_every: Steps between records of the metrics.
    eval_every: Steps between evaluations.
    checkpoint_every: Steps between checkpoints.
    keep_checkpoints: How many of the newest checkpoints are kept.
  """

  num_steps: int
  accumulation: int
  log_every: int
  eval_every: int
  checkpoint_every: int
  keep_checkpoints: int


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Everything that a training run needs, nothing of it run yet.

  Attributes:
    config: The whole config as plain data, for ``config.json``.
    program: The model on a mesh.
    optimizer: The inner optimizer; it works on each rank's slice.
    outer: What workers tell each other, and when.
    learning_rate: Step -> learning rate of the inner optimizer.
    clip_norm: Largest gradient norm of a worker; 0 does not clip.
    data: What to read.
    train: How long, and how often what.
    seed: Decides the parameters and the order of the data.
  """

  config: dict[str, Any]
  program: Program
  optimizer: optax.GradientTransformation
  outer: OuterLoop
  learning_rate: optax.Schedule
  clip_norm: float
  data: Data
  train: TrainOptions
  seed: int

  @property
  def units_per_step(self) -> int:
    """How many ``data.unit`` one step reads, over all workers."""
    return self.data.batch_size * self.data.units_per_example

  @property
  def flops_per_step(self) -> float:
    """FLOPs of the model in one step, over all workers."""
    flops = self.program.model.flops(self.data.example)
    return self.data.batch_size * flops

  def init_state(self) -> TrainState:
    """The state before the first step."""
    return init_state(self.program, self.optimizer, self.outer, self.seed)

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the training state."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      jax.eval_shape(self.init_state),
      state_shardings(self.program, self.optimizer, self.outer),
    )

  def abstract_batch(self) -> Any:
    """Shapes, dtypes and sharding of one step's batch, ``batch_dims`` first."""
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
    """``(params, outer state) -> params`` that stand for the run."""
    return make_evaluated(self.program, self.outer)

  def lower_step(self, plan: Plan | None = None) -> jax.stages.Lowered:
    """The very training step that runs, lowered without any data.

    Args:
      plan: What its outer loop does; None: as in the first step.
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
