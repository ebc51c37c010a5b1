"""``config.optimizer``: one section per inner optimizer."""

from collections.abc import Mapping

from caatnet.schema.fields import (
  COUNT_OR_ZERO,
  DECAY,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  field,
  section,
)

# Optimizers declare the arrays of their state: name -> shape, which is "same"
# for arrays of the parameter's shape, "row" or "column" for a value per row
# (first dim of the matrix) or column, "low_rank" for a factor with two dims
# that no partition cuts, "scalar" for a value per matrix.
Moments = Mapping[str, str]


@section
class WarmupCosine:
  """Keys of the learning-rate schedule (warm-up, cosine) and of clipping."""

  learning_rate: float = field(3e-3, "Peak learning rate.", POSITIVE)
  warmup_steps: int = field(20, "Steps of linear warm-up.", COUNT_OR_ZERO)
  decay_steps: int = field(
    0, "Step at which the cosine ends; 0 for config.train.num_steps.",
    COUNT_OR_ZERO,
  )
  final_fraction: float = field(
    0.1, "Learning rate after the decay, as a fraction of the peak.", FRACTION
  )
  clip_norm: float = field(
    1.0, "Gradient norm of a worker above which gradients are clipped; 0 "
    "disables clipping.", NOT_NEGATIVE,
  )


@section
class AdamW(WarmupCosine):
  """AdamW: Adam with decoupled weight decay."""

  beta_1: float = field(0.9, "Decay of the first moment.", DECAY)
  beta_2: float = field(0.95, "Decay of the second moment.", DECAY)
  eps: float = field(1e-8, "Epsilon in the denominator.", POSITIVE)
  weight_decay: float = field(0.1, "Decoupled weight decay.", NOT_NEGATIVE)

  @property
  def moments(self) -> Moments:
    """Shape of each array of the state, by name."""
    return {"mu": "same", "nu": "same"}


@section
class SGD(WarmupCosine):
  """SGD with momentum and L2 weight decay."""

  learning_rate: float = field(0.3, "Peak learning rate.", POSITIVE)
  momentum: float = field(0.9, "Momentum; 0 for none.", DECAY)
  weight_decay: float = field(
    0.0, "Weight decay, added to the gradient (L2).", NOT_NEGATIVE
  )

  @property
  def moments(self) -> Moments:
    """Shape of each array of the state, by name."""
    return {"trace": "same"} if self.momentum else {}


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}
