"""Builders of ``config.outer``: outer loops.

`caatnet.schema.outer` declares the keys of each algorithm.
"""

import functools
import math
from typing import Any

import jax
import optax

from caatnet.program import Program, is_spec
from caatnet.schema import outer as schema
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


def _optimizer(section: schema.OuterStep) -> OuterOptimizer:
  """Builds the outer optimizer."""
  match section.optimizer:
    case "nesterov":
      return Nesterov(section.learning_rate, section.momentum)
    case "adam":
      return Optax(optax.adam(section.learning_rate, b1=section.momentum))
  if section.momentum:
    raise ValueError(
      f"momentum={section.momentum} has no effect with optimizer="
      f"{section.optimizer!r}; set it to 0"
    )
  return Optax(optax.sgd(section.learning_rate))


def _outlier_rule(
  section: schema.OutlierExclusion, program: Program
) -> health.ExclusionRule:
  """Builds the rule that masks diverged workers out of an exchange."""
  factor = section.outlier_factor
  if factor and not 1 < factor < math.inf:
    raise ValueError(
      f"outlier_factor={factor:g} must be 0 or above 1, since it multiplies "
      "the median norm of all workers"
    )
  return health.ExclusionRule(
    functools.partial(worker_norms, program=program), factor,
    program.layout.on_cpu,
  )


def _worker_weights(
  section: schema.Weighted, program: Program
) -> tuple[float, ...]:
  """Returns one weight per worker for means; () for equal weights."""
  worker = program.layout.worker
  weights = tuple(map(float, section.weights))
  if len(weights) not in (0, worker.size):  # () means equal weights
    raise ValueError(
      f"weights={weights} must be empty, or one positive number for each of "
      f"config.parallel.worker={worker.size} workers"
    )
  return weights


def _exchange(
  section: schema.Exchanging, program: Program, seed: int
) -> Exchange:
  """Builds the exchange that averages values over workers."""
  return Exchange(
    program.layout.worker, _wire(section, program.layout.kernels),
    _num_lead_dims(program), _worker_weights(section, program),
    section.error_feedback, seed, rule=_outlier_rule(section, program),
  )


def _wire(section: schema.Exchanging, kernels: tuple[str, ...]) -> Wire:
  """Builds the format in which an exchange sends values."""
  if section.codec not in ("float32", "bfloat16"):
    return Wire(
      section.codec, section.block or DEFAULT_BLOCK, section.route,
      section.stochastic_rounding, implementation=kernels,
    )
  # Other values have no effect: an all-reduce has no blocks, and float32 has no
  # rounding error.
  neutral = {"block": 0, "route": "all_gather", "stochastic_rounding": False}
  if section.codec == "float32":
    neutral["error_feedback"] = False
  for key, value in neutral.items():
    if getattr(section, key) != value:
      raise ValueError(
        f"{key}={getattr(section, key)!r} has no effect with codec="
        f"{section.codec!r}"
      )
  return Wire(dtype=section.codec)


def _data_parallel(
  section: schema.DataParallel, program: Program, seed: int
) -> OuterLoop:
  return DataParallel(program.layout.worker)


def _local_sgd(
  section: schema.LocalSGD, program: Program, seed: int
) -> OuterLoop:
  # DiLoCo with outer SGD at rate 1 replaces parameters by their mean.
  return DiLoCo(
    program.layout.worker, section.sync_every, Optax(optax.sgd(1.0)),
    _exchange(section, program, seed),
  )


def _fedavg(section: schema.FedAvg, program: Program, seed: int) -> OuterLoop:
  worker, clients = program.layout.worker, section.clients
  if clients > worker.size:
    raise ValueError(
      f"clients={clients} must lie in [0, config.parallel.worker={worker.size}]"
    )
  if clients and section.error_feedback:
    raise ValueError(
      f"error_feedback=True with clients={clients} is not supported: workers "
      "that are not clients of a round have nothing to correct"
    )
  return DiLoCo(
    worker, section.sync_every, Optax(optax.sgd(1.0)),
    _exchange(section, program, seed), clients or None,
  )


def _diloco(section: schema.DiLoCo, program: Program, seed: int) -> OuterLoop:
  return DiLoCo(
    program.layout.worker, section.sync_every, _optimizer(section),
    _exchange(section, program, seed),
  )


def _streaming(
  section: schema.Streaming, program: Program, seed: int
) -> OuterLoop:
  return Streaming(
    program.layout.worker, section.sync_every, _optimizer(section),
    _exchange(section, program, seed), _fragments(section, program),
    section.overlap, section.keep, section.pieces,
  )


def _fragments(section: schema.Streaming, program: Program) -> Fragments:
  """Builds model fragments with equally many layers on each pipeline stage.

  Raises:
    ValueError: If a fragment would have more layers on some stages than others.
  """
  stages, layers = program.layout.stages, section.fragment_layers
  stacks, strided = program.model.stacks, section.pattern == "strided"
  if stages is None or not layers:
    return fragments(stacks, layers, strided)
  parts = stages.schedule.num_parts
  if not strided or layers % parts:
    raise ValueError(
      f"fragment_layers={layers} must be 0 or a multiple of {parts}, the parts "
      f"of config.parallel.stage={stages.axis.size} stages, with "
      "pattern='strided', so that each stage has equally many layers of a "
      "fragment"
    )
  fragments(stacks, layers, strided)  # raises if layers are not divisible
  # Each stage has whole periods of the stride, so its layers are strided, too.
  here = {key: count // stages.axis.size for key, count in stacks.items()}
  return fragments(here, layers // stages.axis.size, strided, num_lead=1)


def _eager(section: schema.Eager, program: Program, seed: int) -> OuterLoop:
  return Eager(
    program.layout.worker, section.sync_every, _optimizer(section),
    _exchange(section, program, seed),
  )


def _dc_s3gd(section: schema.DCS3GD, program: Program, seed: int) -> OuterLoop:
  return DCS3GD(
    program.layout.worker, _exchange(section, program, seed),
    section.compensation,
  )


def _sparseloco(
  section: schema.SparseLoCo, program: Program, seed: int
) -> OuterLoop:
  return SparseLoCo(
    program.layout.worker, section.sync_every, section.learning_rate,
    _num_lead_dims(program), section.error_decay, section.chunk, section.top_k,
    _worker_weights(section, program), rule=_outlier_rule(section, program),
  )


def _noloco(section: schema.NoLoCo, program: Program, seed: int) -> OuterLoop:
  return NoLoCo(
    program.layout.worker, section.sync_every, section.learning_rate,
    section.momentum, section.pull, seed, rule=_outlier_rule(section, program),
  )


# Builders by config.outer.algorithm. They receive the section, the program, and
# the seed of sampled clients, random pairs and stochastic rounding.
OUTER = {
  "data_parallel": _data_parallel,
  "local_sgd": _local_sgd,
  "fedavg": _fedavg,
  "diloco": _diloco,
  "streaming": _streaming,
  "eager": _eager,
  "dc_s3gd": _dc_s3gd,
  "sparseloco": _sparseloco,
  "noloco": _noloco,
}


def _num_lead_dims(program: Program) -> Any:
  """Returns each parameter's number of dims before those cut into code blocks.

  A parameter's spec ends with the last dim that is sharded over devices. Only
  later dims are cut into blocks of codes, so that no block spans two ranks.
  """
  specs = program.split(program.specs).trained
  return jax.tree.map(len, specs, is_leaf=is_spec)
