"""``config.outer`` -> an outer loop."""

import functools
from typing import Any

import jax
import optax

from caatnet.checks import one_of, positive
from caatnet.train.state import Program, is_spec
from caatnet.train.step import global_norm
from parallel import quantize
from parallel.collectives import each_lane
from parallel.outer.base import OuterLoop
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo, Nesterov
from parallel.outer.eager import Eager
from parallel.outer.exchange import Exchange
from parallel.outer.fragments import Fragments
from parallel.outer.noloco import NoLoCo
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming

# Learning rate, momentum -> optimizer.
OPTIMIZERS = {
  "nesterov": Nesterov,
  "sgd": lambda rate, _: optax.sgd(rate),
  "adam": lambda rate, momentum: optax.adam(rate, b1=momentum),
}


def build(config: Any, program: Program, seed: int) -> OuterLoop:
  """Checks ``config.outer`` and builds what it describes.

  Args:
    config: ``config.outer``.
    program: Model and mesh.
    seed: Decides draws: clients, pairs, stochastic rounding.

  Raises:
    ValueError: A value that does not fit, with its key and what would.
  """
  one_of("config.outer.algorithm", config.algorithm, tuple(BUILDERS))
  positive("config.outer.every", config.every)
  for key, (neutral, users) in _ONLY_OF.items():
    value = config[key]
    value = tuple(value) if isinstance(value, list | tuple) else value
    if value != neutral and config.algorithm not in users:
      raise ValueError(
        f"config.outer.{key}={value!r} has no effect with "
        f"config.outer.algorithm={config.algorithm!r}; it is for "
        f"{', '.join(users)}"
      )
  return BUILDERS[config.algorithm](config, program, seed)


_EXCHANGING = (
  "local_sgd", "fedavg", "diloco", "streaming", "eager", "dc_s3gd"
)
# Keys that would change nothing elsewhere: their neutral value, their users.
_ONLY_OF = {
  "codec": ("float32", _EXCHANGING),
  "error_feedback": (False, _EXCHANGING),
  "stochastic_rounding": (False, _EXCHANGING),
  "weights": ((), ("fedavg",)),
  "clients": (0, ("fedavg",)),
  "overlap": ((0,), ("streaming",)),
  "keep": (0.0, ("streaming",)),
  "pieces": (1, ("streaming",)),
}


def _data_parallel(config: Any, program: Program, seed: int) -> OuterLoop:
  return DataParallel(program.worker)


def _local_sgd(config: Any, program: Program, seed: int) -> OuterLoop:
  """Plain averages of parameters."""
  return DiLoCo(
    program.worker, config.every, optax.sgd(1.0),
    _exchange(config, program, seed),
  )


def _fedavg(config: Any, program: Program, seed: int) -> OuterLoop:
  workers = program.worker.size
  if not 0 <= config.clients <= workers:
    raise ValueError(
      f"config.outer.clients={config.clients} must lie in "
      f"[0, config.parallel.worker={workers}]"
    )
  if len(config.weights) not in (0, workers) or any(
    w <= 0 for w in config.weights
  ):
    raise ValueError(
      f"config.outer.weights={tuple(config.weights)} must be "
      f"config.parallel.worker={workers} positive numbers, or none"
    )
  if config.clients and config.error_feedback:
    raise ValueError(
      "config.outer.error_feedback=True with config.outer.clients="
      f"{config.clients}: a worker that is not heard has nothing to correct"
    )
  return DiLoCo(
    program.worker, config.every, optax.sgd(1.0),
    _exchange(config, program, seed, tuple(map(float, config.weights))),
    config.clients or None,
  )


def _diloco(config: Any, program: Program, seed: int) -> OuterLoop:
  return DiLoCo(
    program.worker, config.every, _optimizer(config),
    _exchange(config, program, seed),
  )


def _streaming(config: Any, program: Program, seed: int) -> OuterLoop:
  one_of("config.outer.pattern", config.pattern, ("strided", "sequential"))
  return Streaming(
    program.worker, config.every, _optimizer(config),
    _exchange(config, program, seed),
    Fragments(
      program.config.num_layers,
      config.fragment_layers,
      config.pattern == "strided",
    ),
    tuple(config.overlap),
    config.keep,
    config.pieces,
  )


def _eager(config: Any, program: Program, seed: int) -> OuterLoop:
  return Eager(
    program.worker, config.every, _optimizer(config),
    _exchange(config, program, seed),
  )


def _dc_s3gd(config: Any, program: Program, seed: int) -> OuterLoop:
  if config.compensation < 0:
    raise ValueError(
      f"config.outer.compensation={config.compensation} must not be negative"
    )
  norm = functools.partial(
    each_lane, lambda tree: global_norm(tree, program), program.worker
  )
  return DCS3GD(
    program.worker, _exchange(config, program, seed), config.compensation, norm
  )


def _sparseloco(config: Any, program: Program, seed: int) -> OuterLoop:
  return SparseLoCo(
    program.worker, config.every, config.learning_rate,
    _exchange(config, program, seed), config.error_decay, config.chunk,
    config.top_k,
  )


def _noloco(config: Any, program: Program, seed: int) -> OuterLoop:
  return NoLoCo(
    program.worker, config.every, config.learning_rate, config.momentum,
    config.pull, seed,
  )


BUILDERS = {
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


def _optimizer(config: Any) -> optax.GradientTransformation:
  one_of("config.outer.optimizer", config.optimizer, tuple(OPTIMIZERS))
  return OPTIMIZERS[config.optimizer](config.learning_rate, config.momentum)


def _exchange(
  config: Any, program: Program, seed: int, weights: tuple[float, ...] = ()
) -> Exchange:
  codec = config.codec
  if codec in ("float32", "bfloat16"):
    for key, neutral in (("route", "all_gather"),
                         ("stochastic_rounding", False)):
      if config[key] != neutral:
        raise ValueError(
          f"config.outer.{key}={config[key]!r} has no effect with "
          f"config.outer.codec={codec!r}"
        )
    wire = quantize.Wire(dtype=codec)
  else:
    wire = quantize.Wire(
      codec, config.block, config.route, config.stochastic_rounding,
      implementation=program.config.kernels,
    )
  # Specs end with the last dim that is cut: no block crosses a rank's slice.
  block_dims = jax.tree.map(len, program.specs, is_leaf=is_spec)
  return Exchange(
    program.worker, wire, block_dims, weights, config.error_feedback, seed
  )
