"""Language models with a fixed-size state per sequence.

The sequence mixer of a block is a *unit*: a named tuple of one rank's
parameters, whose call ``(y [S, T, F], states, written bool [S, T]) -> (out,
states)`` continues each sequence from its states.

Shape legend: R = lanes, B and S = sequences, T = positions, F = features.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from caatnet.models.lm.model import StackedLanguageModel
from caatnet.models.lm.module import LanguageModule
from caatnet.models.paged import Batch, CacheShape, CacheSizes, StateShape
from parallel.collectives import varying, varying_axes


class Stateful(Protocol):
  """Fields of a stateful model's config in addition to `StackConfig`."""

  num_layers: int

  def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
    """Returns the states of one layer, sequence and rank."""
    ...


class StatefulModule(LanguageModule):
  """Module whose blocks call ``mix(unit, y, state)``."""

  def mixer(self, batch: Batch | None = None) -> Callable[..., Any]:
    shapes = self.config.state_shapes(self.axis.size)

    def lifted(unit):  # over lanes; the mask of written positions is shared
      return jax.vmap(type(unit).__call__, (0, 0, 0, None))

    def from_zeros(unit, y, state):
      lanes, size, length, _ = y.shape
      zeros = [
        varying(jnp.zeros((lanes, size, *s.shape), s.dtype), *varying_axes(y))
        for s in shapes
      ]
      written = jnp.ones((size, length), bool)
      return lifted(unit)(unit, y, tuple(zeros), written)[0], state

    def from_cache(unit, y, state):
      cache, layer = state
      y, cache = cache.recur(
        layer, y[:, 0], batch, lambda *args: lifted(unit)(unit, *args)
      )
      return y[:, None], (cache, layer + 1)

    return from_zeros if batch is None else from_cache


@dataclasses.dataclass(frozen=True)
class StatefulLanguageModel(StackedLanguageModel):
  """Language model with a `StatefulModule`; its cache has states only.

  Attributes:
    config: Sizes of the model and of its states.
  """

  config: Stateful

  def cache_shape(self, sizes: CacheSizes) -> CacheShape:
    if sizes.dtype:
      raise ValueError(
        f"config.inference.cache={sizes.dtype!r} must be 'float': states are "
        "not quantised"
      )
    return CacheShape(
      self.config.num_layers, sizes.num_pages, sizes.page_size, 0, 0, "float32",
      "heads", sizes.kernels, self.config.state_shapes(self.tensor.size),
      sizes.num_sequences,
    )
