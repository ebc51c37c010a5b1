"""Builds ``config.optimizer``: the inner optimizer and its learning rate."""

import dataclasses
from typing import Any

import optax

from caatnet.config.schema import optimizer as schema


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


def _adamw(section: schema.AdamW, num_steps: int, decays: Any) -> Inner:
  rate = _warmup_cosine(section, num_steps)
  optimizer = optax.adamw(
    rate, b1=section.beta_1, b2=section.beta_2, eps=section.eps,
    weight_decay=section.weight_decay, mask=decays,
  )
  return Inner(optimizer, rate, section.clip_norm)


def _sgd(section: schema.SGD, num_steps: int, decays: Any) -> Inner:
  rate = _warmup_cosine(section, num_steps)
  optimizer = optax.chain(
    optax.add_decayed_weights(section.weight_decay, mask=decays),
    optax.sgd(rate, section.momentum or None),
  )
  return Inner(optimizer, rate, section.clip_norm)


# Builders, by the names that configs use. They receive the section,
# config.train.num_steps, and for each parameter whether weight decay applies.
OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


def _warmup_cosine(
  section: schema.WarmupCosine, num_steps: int
) -> optax.Schedule:
  """Makes a linear warm-up to the peak, then a cosine to a fraction of it.

  The cosine ends at step ``decay_steps``, or ``num_steps`` if that is 0, and
  its last value stays.
  """
  peak, warmup_steps = section.learning_rate, section.warmup_steps
  end = section.decay_steps or num_steps
  if not 0 <= warmup_steps < end:
    name = "decay_steps" if section.decay_steps else "config.train.num_steps"
    raise ValueError(
      f"warmup_steps={warmup_steps} must lie in [0, {name}={end})"
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if warmup_steps else peak,
    peak_value=peak,
    warmup_steps=warmup_steps,
    decay_steps=end,
    end_value=peak * section.final_fraction,
  )
