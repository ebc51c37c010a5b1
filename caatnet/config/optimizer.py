"""Builders of ``config.optimizer``: inner optimizers and learning rates."""

import dataclasses
from typing import Any

import optax

from caatnet.schema import optimizer as schema


@dataclasses.dataclass(frozen=True)
class InnerOptimizer:
  """Inner optimizer of every worker.

  Attributes:
    optimizer: The optax optimizer, elementwise in the parameters, without
      clipping, which needs the norm over all ranks.
    learning_rate: Maps a step to the learning rate.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.
  """

  optimizer: optax.GradientTransformation
  learning_rate: optax.Schedule
  clip_norm: float


def _adamw(
  section: schema.AdamW, num_steps: int, decays: Any
) -> InnerOptimizer:
  rate = _warmup_cosine(section, num_steps)
  optimizer = optax.adamw(
    rate, b1=section.beta_1, b2=section.beta_2, eps=section.eps,
    weight_decay=section.weight_decay, mask=decays,
  )
  return InnerOptimizer(optimizer, rate, section.clip_norm)


def _sgd(section: schema.SGD, num_steps: int, decays: Any) -> InnerOptimizer:
  rate = _warmup_cosine(section, num_steps)
  optimizer = optax.chain(
    # Coupled weight decay: added to the gradient before momentum.
    optax.add_decayed_weights(section.weight_decay, mask=decays),
    optax.sgd(rate, section.momentum or None),
  )
  return InnerOptimizer(optimizer, rate, section.clip_norm)


# Builders by optimizer name. They receive the section, config.train.num_steps,
# and a tree with a boolean per parameter: whether weight decay applies to it.
OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


def _warmup_cosine(
  section: schema.WarmupCosine, num_steps: int
) -> optax.Schedule:
  """Returns a schedule: linear warm-up to the peak, then a cosine decay.

  The cosine ends at step ``decay_steps`` or, if this key is 0, ``num_steps``.
  Later steps keep the final learning rate, ``final_fraction`` of the peak.
  """
  peak, warmup_steps = section.learning_rate, section.warmup_steps
  end = section.decay_steps or num_steps
  if not 0 <= warmup_steps < end:
    name = "decay_steps" if section.decay_steps else "config.train.num_steps"
    raise ValueError(
      f"warmup_steps={warmup_steps} must lie in [0, {name}={end})"
    )
  return optax.warmup_cosine_decay_schedule(
    # Without warm-up, the first step has the peak rate.
    init_value=0.0 if warmup_steps else peak,
    peak_value=peak,
    warmup_steps=warmup_steps,
    decay_steps=end,
    end_value=peak * section.final_fraction,
  )
