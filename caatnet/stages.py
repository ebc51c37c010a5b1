"""A model's parameters over the stages of a pipeline.

What stages cut has a leading dim of stages between steps: of a stack, the
layers of a stage's parts in turn; of a vocabulary, a slice of it. A program has
one shape on all devices, so parts have equally many layers: those of fewer end
with layers of zeros, which are the identity and stay so.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from parallel.axes import Axis
from parallel.pipeline.timetable import Timetable


@dataclasses.dataclass(frozen=True)
class Stages:
  """The stages of a program, and what they run.

  Attributes:
    axis: The stages.
    timetable: What they run in a step.
    evaluation: What they run in an evaluation, without any backward.
    keeps: Whether a forward keeps its residuals for the backward, or its input
      alone.
  """

  axis: Axis
  timetable: Timetable
  evaluation: Timetable
  keeps: bool = False

  def layers(self, num_layers: int) -> np.ndarray:
    """Returns which layers a stage has, int ``[stages, layers]``; -1 for none.

    Parts in the middle have one more than those at the ends if they do not
    divide evenly, since embedding and head are at the ends.
    """
    parts = self.timetable.num_parts
    least, more = divmod(num_layers, parts)
    from_ends = np.minimum(np.arange(parts), np.arange(parts)[::-1])
    counts = np.full(parts, least)
    counts[np.argsort(-from_ends, kind="stable")[:more]] += 1
    found = np.full((parts, counts.max()), -1)
    for part, stop in enumerate(np.cumsum(counts)):
      found[part, : counts[part]] = np.arange(stop - counts[part], stop)
    # Part chunk * stages + stage is a stage's chunk.
    chunks = found.reshape(self.timetable.num_chunks, self.axis.size, -1)
    return np.swapaxes(chunks, 0, 1).reshape(self.axis.size, -1)

  def _places(self, dim: int, size: int) -> np.ndarray:
    """Returns what each stage has of a dim, ``[stages, n]``; -1 for none."""
    if dim == 0:
      return self.layers(size)
    count = -(-size // self.axis.size)
    places = np.arange(self.axis.size * count)
    return np.where(places < size, places, -1).reshape(self.axis.size, count)

  def store(self, x: jax.Array, dim: int, lead: int = 0) -> jax.Array:
    """Cuts an array over stages.

    Args:
      x: ``[*lead, ..., size, ...]``.
      dim: The dim that is cut, 0 for layers; ``lead`` not counted.
      lead: How many dims are before those of the parameter.

    Returns:
      ``[*lead, stages, ..., n, ...]``, with zeros where a stage has less.
    """
    at = dim + lead
    places = self._places(dim, x.shape[at])
    x = jnp.take(x, np.maximum(places, 0).ravel(), axis=at)
    if (places < 0).any():
      there = (places >= 0).reshape(-1, *[1] * (x.ndim - at - 1))
      x = jnp.where(there, x, 0)
    x = x.reshape(*x.shape[:at], *places.shape, *x.shape[at + 1 :])
    return jnp.moveaxis(x, at, lead)

  def restore(
    self, x: jax.Array, dim: int, size: int, lead: int = 0
  ) -> jax.Array:
    """Puts the stages' slices together again; the inverse of `store`.

    Args:
      x: ``[*lead, stages, ..., n, ...]``.
      dim: The dim that was cut, with ``lead`` not counted.
      size: The size that it had.
      lead: How many dims are before that of stages.
    """
    at = dim + lead
    places = self._places(dim, size).ravel()
    x = jnp.moveaxis(x, lead, at)
    x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
    return jnp.take(x, np.argsort(places)[np.sum(places < 0) :], axis=at)
