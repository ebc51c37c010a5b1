"""Builds ``config.optimizer``: the inner optimizer and its learning rate."""

import dataclasses
from typing import Any

import optax


@dataclasses.dataclass(frozen=True)
class Inner:
  """The inner optimizer of every worker.

  Attributes:
    optimizer: The optax optimizer, elementwise in the parameters. It does not
      clip, which takes the norm over all ranks.
    learning_rate: Maps a step to the learning rate.
    clip_norm: The largest gradient norm of a worker; 0 does not clip.
  """

  optimizer: optax.GradientTransformation
  learning_rate: optax.Schedule
  clip_norm: float


def _adamw(
  num_steps: int,
  decays: Any,
  *,
  learning_rate: float,
  warmup_steps: int,
  decay_steps: int,
  final_fraction: float,
  beta_1: float,
  beta_2: float,
  eps: float,
  weight_decay: float,
  clip_norm: float,
) -> Inner:
  rate = _warmup_cosine(
    num_steps, learning_rate, warmup_steps, decay_steps, final_fraction
  )
  optimizer = optax.adamw(
    rate, b1=beta_1, b2=beta_2, eps=eps, weight_decay=weight_decay, mask=decays
  )
  return Inner(optimizer, rate, clip_norm)


def _sgd(
  num_steps: int,
  decays: Any,
  *,
  learning_rate: float,
  warmup_steps: int,
  decay_steps: int,
  final_fraction: float,
  momentum: float,
  weight_decay: float,
  clip_norm: float,
) -> Inner:
  rate = _warmup_cosine(
    num_steps, learning_rate, warmup_steps, decay_steps, final_fraction
  )
  optimizer = optax.chain(
    optax.add_decayed_weights(weight_decay, mask=decays),
    optax.sgd(rate, momentum or None),
  )
  return Inner(optimizer, rate, clip_norm)


# Builders, by the names that configs use. Their positional arguments are
# config.train.num_steps, and for each parameter whether weight decay applies.
OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


def _warmup_cosine(
  num_steps: int,
  peak: float,
  warmup_steps: int,
  decay_steps: int,
  final_fraction: float,
) -> optax.Schedule:
  """Makes a linear warm-up to ``peak``, then a cosine to a fraction of it.

  The cosine ends at step ``decay_steps``, or ``num_steps`` if that is 0, and
  its last value stays.
  """
  end = decay_steps or num_steps
  if not 0 <= warmup_steps < end:
    name = "decay_steps" if decay_steps else "config.train.num_steps"
    raise ValueError(
      f"warmup_steps={warmup_steps} must lie in [0, {name}={end})"
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if warmup_steps else peak,
    peak_value=peak,
    warmup_steps=warmup_steps,
    decay_steps=end,
    end_value=peak * final_fraction,
  )
