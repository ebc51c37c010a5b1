"""From a config to objects: the last place that knows ml_collections.

Everything below this file takes frozen dataclasses.
"""

import ast
from collections.abc import Callable, Mapping
import dataclasses
import difflib
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from caatnet import model_config, outer_loops, zero
from caatnet.checks import one_of, positive
from caatnet.data import pipeline, sources
from caatnet.train.records import flatten
from caatnet.train.state import Program, TrainState, init_state
from caatnet.train.step import make_evaluated, make_train_step
from parallel.axes import assign_devices, make_mesh
from parallel.outer.base import OuterLoop, Plan

# Outermost first; data may be several levels (config.zero).
AXES = ("worker", "data", "tensor")


@dataclasses.dataclass(frozen=True)
class DataOptions:
  """See ``config.data``; ``batch_size`` counts sequences per step."""

  path: str
  seq_len: int
  batch_size: int
  validation_percent: float
  validation_windows: int


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """See ``config.train``; all counts are steps."""

  num_steps: int
  accumulation: int
  log_every: int
  eval_every: int
  checkpoint_every: int
  keep_checkpoints: int


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A config turned into objects on a mesh.

  Attributes:
    config: The whole config as plain data, for ``config.json``.
    program: Model and mesh.
    optimizer: Works on each rank's slice.
    outer: What workers tell each other.
    schedule: Step -> learning rate.
    clip_norm: Largest gradient norm.
    data: What to read.
    train: How long, and how often what.
    seed: Decides parameters and order of the data.
  """

  config: dict[str, Any]
  program: Program
  optimizer: optax.GradientTransformation
  outer: OuterLoop
  schedule: optax.Schedule
  clip_norm: float
  data: DataOptions
  train: TrainOptions
  seed: int

  def corpus(self) -> sources.Corpus:
    """Reads the text."""
    return sources.load_corpus(self.data.path, self.data.validation_percent)

  def batches(self, corpus: sources.Corpus) -> Any:
    """The endless iterator over training batches, from its start."""
    return pipeline.train_batches(
      corpus,
      seq_len=self.data.seq_len,
      batch_size=self.data.batch_size,
      seed=self.seed,
    )

  def validation(self, corpus: sources.Corpus) -> np.ndarray:
    """int ``[windows, T + 1]``: what every evaluation reads."""
    return pipeline.validation_windows(
      corpus,
      seq_len=self.data.seq_len,
      num_windows=self.data.validation_windows,
    )

  @property
  def batch_shape(self) -> tuple[int, ...]:
    """``[workers, *levels, batch per rank, T + 1]``."""
    program = self.program
    ranks = program.worker.size * program.num_data_ranks
    return (
      program.worker.size,
      *(axis.size for axis in program.data),
      self.data.batch_size // ranks,
      self.data.seq_len + 1,
    )

  def init_state(self) -> TrainState:
    """The state before the first step."""
    return init_state(self.program, self.optimizer, self.outer, self.seed)

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the training state."""
    shardings = self.program.state_shardings(self.optimizer, self.outer)
    shapes = jax.eval_shape(self.init_state)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
    )

  def abstract_tokens(self) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of one step's batch."""
    return jax.ShapeDtypeStruct(
      self.batch_shape,
      jnp.int32,
      sharding=self.program.shardings(self.program.batch_spec),
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
      plan.program,
    )
    numbers = jax.tree.map(
      lambda _: jax.ShapeDtypeStruct((), jnp.int32), plan.numbers
    )
    return step.lower(self.abstract_state(), self.abstract_tokens(), numbers)


def build(
  config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None = None,
  devices: list[jax.Device] | None = None,
) -> Experiment:
  """Checks a config and builds what it describes.

  Args:
    config: As ``configs/caatnet/base.py`` has it.
    requested_mesh: Devices per axis (``--mesh``); None chooses.
    devices: Devices to use; all of this machine's by default.

  Returns:
    The experiment, nothing of it run yet.

  Raises:
    ValueError: A value that does not fit, with its key and what would.
  """
  devices = devices or jax.devices()
  sizes = {name: config.parallel[name] for name in AXES}
  for name, size in sizes.items():
    positive(f"config.parallel.{name}", size)
  partition = zero.build(config.zero, sizes.pop("data"))
  sizes = (
    {"worker": sizes["worker"]}
    | {level.name: level.size for level in partition.levels}
    | {"tensor": sizes["tensor"]}
  )
  axes = assign_devices(sizes, len(devices), requested_mesh)
  model = model_config.build(
    config.model, devices[0].platform, axes["tensor"].devices
  )
  data = DataOptions(**config.data)
  train = TrainOptions(**config.train)
  _check_batch(data, train, axes["worker"].size * partition.num_ranks)
  program = Program(
    model,
    axes["worker"],
    tuple(axes[level.name] for level in partition.levels),
    axes["tensor"],
    make_mesh(axes, devices),
    partition,
    config.zero.offload,
    config.zero.prefetch,
  )
  schedule = _schedule(config.optimizer, train.num_steps)
  return Experiment(
    config=json.loads(config.to_json()),
    program=program,
    optimizer=_optimizer(config.optimizer, schedule, program),
    outer=outer_loops.build(config.outer, program, config.seed),
    schedule=schedule,
    clip_norm=config.optimizer.clip_norm,
    data=data,
    train=train,
    seed=config.seed,
  )


def from_dict(
  config: dict[str, Any], requested_mesh: Mapping[str, int] | None = None
) -> Experiment:
  """Builds from the plain data of a run's ``config.json``."""
  return build(ml_collections.ConfigDict(config), requested_mesh)


@dataclasses.dataclass(frozen=True)
class Sweep:
  """``config.sweep``: override strings such as ``"model.p=0.5"``, seeds."""

  points: tuple[str, ...]
  seeds: tuple[int, ...]


def take_sweep(config: ml_collections.ConfigDict) -> Sweep:
  """Removes ``config.sweep`` and returns it; one run where there is none."""
  if "sweep" not in config:
    return Sweep(("",), (config.seed,))
  sweep = Sweep(tuple(config.sweep.points), tuple(config.sweep.seeds))
  with config.unlocked():
    del config.sweep
  return sweep


def override(
  config: ml_collections.ConfigDict, overrides: str
) -> ml_collections.ConfigDict:
  """A copy with ``key=value key=value ...`` applied.

  Raises:
    ValueError: An unknown key, with the nearest one, or a value of another
      type than the config's.
  """
  config = config.copy_and_resolve_references()
  flat = {
    ".".join(path): value
    for path, value in flatten(config.to_dict()).items()
  }
  for part in overrides.split():
    key, _, text = part.partition("=")
    if key not in flat:
      near = difflib.get_close_matches(key, flat, 1)
      hint = f"; did you mean {near[0]}?" if near else ""
      raise ValueError(f"no config key {key!r}{hint}")
    kind = type(flat[key])
    try:
      value = text if kind is str else ast.literal_eval(text)
      value = float(value) if kind is float else value
    except (SyntaxError, TypeError, ValueError):
      value = None
    if type(value) is not kind:
      raise ValueError(f"{part!r}: the value must be a {kind.__name__}")
    config.update_from_flattened_dict({key: value})
  return config


def _schedule(
  optimizer: ml_collections.ConfigDict, num_steps: int
) -> optax.Schedule:
  if not 0 <= optimizer.warmup_steps < num_steps:
    raise ValueError(
      f"config.optimizer.warmup_steps={optimizer.warmup_steps} must lie in "
      f"[0, config.train.num_steps={num_steps})"
    )
  one_of("config.optimizer.name", optimizer.name, ("adamw", "sgd"))
  peak = optimizer.learning_rate
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if optimizer.warmup_steps else peak,
    peak_value=peak,
    warmup_steps=optimizer.warmup_steps,
    decay_steps=num_steps,
    end_value=peak * optimizer.final_fraction,
  )


def _optimizer(
  config: ml_collections.ConfigDict,
  schedule: optax.Schedule,
  program: Program,
) -> optax.GradientTransformation:
  matrices = jax.tree.map(
    lambda spec: program.tensor.name in spec,
    program.specs,
    is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
  )
  if config.name == "sgd":
    return optax.chain(
      optax.add_decayed_weights(config.weight_decay, mask=matrices),
      optax.sgd(schedule, config.beta_1 or None),
    )
  return optax.adamw(
    schedule,
    b1=config.beta_1,
    b2=config.beta_2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=matrices,
  )


def _check_batch(data: DataOptions, train: TrainOptions, shards: int) -> None:
  for key in ("seq_len", "batch_size"):
    positive(f"config.data.{key}", getattr(data, key))
  for field in dataclasses.fields(train):
    positive(f"config.train.{field.name}", getattr(train, field.name))
  unit = shards * train.accumulation
  if data.batch_size % unit:
    raise ValueError(
      f"config.data.batch_size={data.batch_size} must be a multiple of "
      "config.parallel.worker x config.parallel.data x "
      f"config.train.accumulation = {unit}"
    )
