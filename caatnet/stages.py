"""Model parameters over the stages of a pipeline.

Between steps, a parameter that is split over stages has a leading dim of
stages. A stage holds the layers of its chunks, in order, and a slice of the
vocabulary. All devices run one program, so each part (one chunk of one stage)
needs the same number of layers: shorter parts are padded at the end with layers
of zeros, which compute the identity and remain zero during training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from parallel.axes import Axis
from parallel.plans.pipeline.pipeline_schedule import PipelineSchedule


@dataclasses.dataclass(frozen=True)
class Stages:
  """Split of a model's parameters over pipeline stages, and the schedules.

  Attributes:
    axis: Axis of stages.
    schedule: Pipeline schedule of a training step.
    evaluation: Pipeline schedule of an evaluation, without backward passes.
    keeps: Whether the forward of a chunk of layers saves its residuals for the
      backward; otherwise it saves only its input.
  """

  axis: Axis
  schedule: PipelineSchedule
  evaluation: PipelineSchedule
  keeps: bool = False

  def layers(self, num_layers: int) -> np.ndarray:
    """Returns the layer indices of each stage, int ``[stages, n]``; -1 pads.

    If the layers do not divide evenly, chunks in the middle of the model get
    one layer more than those at its ends, which also compute the embedding or
    the output head.
    """
    parts = self.schedule.num_parts
    least, more = divmod(num_layers, parts)
    from_ends = np.minimum(np.arange(parts), np.arange(parts)[::-1])
    counts = np.full(parts, least)
    # The remaining layers go to the parts furthest from both ends.
    counts[np.argsort(-from_ends, kind="stable")[:more]] += 1
    found = np.full((parts, counts.max()), -1)
    for part, stop in enumerate(np.cumsum(counts)):
      found[part, : counts[part]] = np.arange(stop - counts[part], stop)
    chunks = found[self.schedule.parts]  # [chunks, stages, layers]
    return np.swapaxes(chunks, 0, 1).reshape(self.axis.size, -1)

  def _stage_indices(self, dim: int, size: int) -> np.ndarray:
    """Returns the indices in ``dim``, of ``size``, of each stage.

    They are ``[stages, n]``; -1 pads. Dim 0 is that of layers.
    """
    if dim == 0:
      return self.layers(size)
    count = -(-size // self.axis.size)
    places = np.arange(self.axis.size * count)
    return np.where(places < size, places, -1).reshape(self.axis.size, count)

  def store(self, x: jax.Array, dim: int, lead: int = 0) -> jax.Array:
    """Splits an array over stages.

    Args:
      x: ``[*lead, ..., size, ...]``.
      dim: Dim to split, not counting ``lead``; 0 for layers.
      lead: Number of dims before those of the parameter.

    Returns:
      ``[*lead, stages, ..., n, ...]``, n per stage, padded with zeros.
    """
    at = dim + lead
    places = self._stage_indices(dim, x.shape[at])
    x = jnp.take(x, np.maximum(places, 0).ravel(), axis=at)
    if (places < 0).any():
      there = (places >= 0).reshape(-1, *[1] * (x.ndim - at - 1))
      x = jnp.where(there, x, 0)
    x = x.reshape(*x.shape[:at], *places.shape, *x.shape[at + 1 :])
    return jnp.moveaxis(x, at, lead)

  def restore(
    self, x: jax.Array, dim: int, size: int, lead: int = 0
  ) -> jax.Array:
    """Joins the slices of the stages; the inverse of `store`.

    Args:
      x: ``[*lead, stages, ..., n, ...]``.
      dim: Dim that was split, not counting ``lead``.
      size: Size of that dim before splitting.
      lead: Number of dims before that of stages.
    """
    at = dim + lead
    places = self._stage_indices(dim, size).ravel()
    x = jnp.moveaxis(x, lead, at)
    x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
    # Padding has index -1 and is sorted first.
    return jnp.take(x, np.argsort(places)[np.sum(places < 0) :], axis=at)
