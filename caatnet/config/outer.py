"""Builds ``config.outer``: an outer loop.

The keys of an algorithm are the fields of its class here, which inherits those
that it shares with other algorithms. ``configs/sections.py`` explains them.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import optax

from caatnet.checks import one_of
from caatnet.program import Program, is_spec
from caatnet.train.norms import worker_norms
from parallel.outer import health
from parallel.outer.base import OuterLoop
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.exchange import Exchange
from parallel.outer.fragments import Fragments, fragments
from parallel.outer.noloco import NoLoCo
from parallel.outer.optimizers import Nesterov, Optax, OuterOptimizer
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming
from parallel.wire import Wire

DEFAULT_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rounds:
  """The key of algorithms that exchange every H steps."""

  every: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OuterStep:
  """The keys of algorithms with an outer optimizer."""

  optimizer: str
  learning_rate: float
  momentum: float

  def outer_optimizer(self) -> OuterOptimizer:
    one_of("optimizer", self.optimizer, ("nesterov", "sgd", "adam"))
    match self.optimizer:
      case "nesterov":
        return Nesterov(self.learning_rate, self.momentum)
      case "adam":
        return Optax(optax.adam(self.learning_rate, b1=self.momentum))
    if self.momentum:
      raise ValueError(
        f"momentum={self.momentum} has no effect with optimizer="
        f"{self.optimizer!r}; set it to 0"
      )
    return Optax(optax.sgd(self.learning_rate))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Judging:
  """The key of algorithms that leave out a worker that has diverged."""

  outlier_factor: float

  def rule(self, program: Program) -> health.Rule:
    factor = self.outlier_factor
    if factor and not 1 < factor < math.inf:
      raise ValueError(
        f"outlier_factor={factor:g} must be 0 or above 1: a norm over the "
        "median of all"
      )
    return health.Rule(
      functools.partial(worker_norms, program=program), factor,
      program.layout.on_cpu,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Weighted:
  """The key of algorithms whose means can have weights."""

  weights: tuple[float, ...]

  def checked_weights(self, program: Program) -> tuple[float, ...]:
    worker = program.layout.worker
    weights = tuple(map(float, self.weights))
    if len(weights) not in (0, worker.size) or not all(
      0 < w < math.inf for w in weights
    ):
      raise ValueError(
        f"weights={weights} must be config.parallel.worker={worker.size} "
        "positive numbers, or none"
      )
    return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchanging(_Judging, _Weighted):
  """The keys of algorithms that send a mean in few bits."""

  codec: str
  block: int
  route: str
  stochastic_rounding: bool
  error_feedback: bool

  def exchange(self, program: Program, seed: int) -> Exchange:
    return Exchange(
      program.layout.worker, self._wire(program.layout.kernels),
      _block_dims(program), self.checked_weights(program),
      self.error_feedback, seed, rule=self.rule(program),
    )

  def _wire(self, kernels: tuple[str, ...]) -> Wire:
    if self.codec not in ("float32", "bfloat16"):
      return Wire(
        self.codec, self.block or DEFAULT_BLOCK, self.route,
        self.stochastic_rounding, implementation=kernels,
      )
    # An all-reduce: nothing is cut into blocks, and float32 loses nothing.
    neutral = {"block": 0, "route": "all_gather", "stochastic_rounding": False}
    if self.codec == "float32":
      neutral["error_feedback"] = False
    for key, value in neutral.items():
      if getattr(self, key) != value:
        raise ValueError(
          f"{key}={getattr(self, key)!r} has no effect with codec="
          f"{self.codec!r}"
        )
    return Wire(dtype=self.codec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DataParallel:
  """Gradients averaged in every step; it has no keys."""

  def build(self, program: Program, seed: int) -> OuterLoop:
    return DataParallel(program.layout.worker)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalSGD(_Rounds, _Exchanging):
  """Local SGD: averages of parameters, which is DiLoCo with SGD at rate 1."""

  def build(self, program: Program, seed: int) -> OuterLoop:
    return DiLoCo(
      program.layout.worker, self.every, Optax(optax.sgd(1.0)),
      self.exchange(program, seed),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FedAvg(_Rounds, _Exchanging):
  """FedAvg: weighted averages of the parameters of a sample of workers."""

  clients: int

  def build(self, program: Program, seed: int) -> OuterLoop:
    worker = program.layout.worker
    if self.clients > worker.size:
      raise ValueError(
        f"clients={self.clients} must lie in "
        f"[0, config.parallel.worker={worker.size}]"
      )
    if self.clients and self.error_feedback:
      raise ValueError(
        f"error_feedback=True with clients={self.clients}: a worker that is "
        "not heard has nothing to correct"
      )
    return DiLoCo(
      worker, self.every, Optax(optax.sgd(1.0)),
      self.exchange(program, seed), self.clients or None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DiLoCo(_Rounds, _OuterStep, _Exchanging):
  """DiLoCo."""

  def build(self, program: Program, seed: int) -> OuterLoop:
    return DiLoCo(
      program.layout.worker, self.every, self.outer_optimizer(),
      self.exchange(program, seed),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Streaming(_Rounds, _OuterStep, _Exchanging):
  """Streaming DiLoCo."""

  fragment_layers: int
  pattern: str
  overlap: tuple[int, ...]
  keep: float
  pieces: int

  def build(self, program: Program, seed: int) -> OuterLoop:
    one_of("pattern", self.pattern, ("strided", "sequential"))
    return Streaming(
      program.layout.worker, self.every, self.outer_optimizer(),
      self.exchange(program, seed), self.fragments(program),
      tuple(self.overlap), self.keep, self.pieces,
    )

  def fragments(self, program: Program) -> Fragments:
    """Cuts the layers, on each stage alike if there are stages.

    Raises:
      ValueError: Some stages would have more of a fragment's layers.
    """
    stages, layers = program.layout.stages, self.fragment_layers
    stacks, strided = program.model.stacks, self.pattern == "strided"
    if stages is None or not layers:
      return fragments(stacks, layers, strided)
    parts = stages.timetable.num_parts
    if not strided or layers % parts:
      raise ValueError(
        f"fragment_layers={layers} must be 0 or a multiple of the {parts} "
        f"parts of config.parallel.stage={stages.axis.size} stages, with "
        "pattern='strided': each has as many layers of a fragment"
      )
    fragments(stacks, layers, strided)  # refuses what does not divide
    # Parts have whole rounds of strides, so a stage's layers are strided, too.
    here = {key: count // stages.axis.size for key, count in stacks.items()}
    return fragments(here, layers // stages.axis.size, strided, num_lead=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Eager(_Rounds, _OuterStep, _Exchanging):
  """Eager updates."""

  def build(self, program: Program, seed: int) -> OuterLoop:
    return Eager(
      program.layout.worker, self.every, self.outer_optimizer(),
      self.exchange(program, seed),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DCS3GD(_Exchanging):
  """Delay-compensated stale-synchronous SGD."""

  compensation: float

  def build(self, program: Program, seed: int) -> OuterLoop:
    return DCS3GD(
      program.layout.worker, self.exchange(program, seed), self.compensation
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SparseLoCo(_Rounds, _Judging, _Weighted):
  """SparseLoCo."""

  learning_rate: float
  chunk: int
  top_k: int
  error_decay: float

  def build(self, program: Program, seed: int) -> OuterLoop:
    return SparseLoCo(
      program.layout.worker, self.every, self.learning_rate,
      _block_dims(program), self.error_decay, self.chunk, self.top_k,
      self.checked_weights(program), rule=self.rule(program),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoLoCo(_Rounds, _Judging):
  """NoLoCo."""

  learning_rate: float
  momentum: float
  pull: float

  def build(self, program: Program, seed: int) -> OuterLoop:
    return NoLoCo(
      program.layout.worker, self.every, self.learning_rate, self.momentum,
      self.pull, seed, rule=self.rule(program),
    )


# The algorithms, by the names that configs use. Their `build` takes the program
# and the seed of what they draw: clients, pairs, stochastic rounding.
OUTER = {
  "data_parallel": _DataParallel,
  "local_sgd": _LocalSGD,
  "fedavg": _FedAvg,
  "diloco": _DiLoCo,
  "streaming": _Streaming,
  "eager": _Eager,
  "dc_s3gd": _DCS3GD,
  "sparseloco": _SparseLoCo,
  "noloco": _NoLoCo,
}


def _block_dims(program: Program) -> Any:
  """Returns for each parameter how many leading dims no block crosses.

  A spec ends with the last dim that is cut over devices. Blocks lie behind that
  dim, so none crosses from one rank's slice into the next one's.
  """
  return jax.tree.map(len, program.specs, is_leaf=is_spec)
