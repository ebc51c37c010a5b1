"""Embedding and head of a language model, cut over ranks by the vocabulary.

Over the tensor axis the embedding makes one reduction of full width and the
head none; the losses of `caatnet.models.lm.losses` send a few numbers per
token. Stages of a pipeline may cut the vocabulary, too.

Shape legend: R = lanes (ranks outside shard_map), B = batch, T = position,
H = width, V = vocabulary of one rank, G = stages of a device.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.lm.losses import Targets
from caatnet.models.lm.parameters import cut_size
from parallel.axes import Axis
from parallel.tensor.projections import column_parallel
from parallel.tensor.stream import Stream


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The tokens of a model, on the ranks that share them.

  Methods run inside ``jax.shard_map``.

  Attributes:
    size: The number of tokens.
    tensor: The tensor axis.
    dtype: The dtype of activations.
    tied: Whether the head is the embedding's transpose.
    norm_eps: Epsilon of the norm before the head.
    kernels: Implementations of that norm in order of preference, as
      `parallel.kernels.selection` has them.
    stage: The stages that cut the vocabulary, too; None if none do.
  """

  size: int
  tensor: Axis
  dtype: str
  tied: bool = False
  norm_eps: float = 1e-5
  kernels: tuple[str, ...] = ("reference",)
  stage: Axis | None = None

  def scored(
    self,
    score: Callable[[jax.Array, Targets], Any],
    last: Any,
    x: Stream,
    targets: jax.Array,
  ) -> Any:
    """Scores targets ``[B, T]`` by the stream after the last layer.

    Args:
      score: A function of `caatnet.models.lm.losses`, of logits and targets.
      last: The final norm's gain, and the table of the head.
      x: The stream.
      targets: The tokens that should have followed.
    """
    logits = self.logits(last, x)
    with jax.named_scope("cross_entropy"):
      return score(logits, Targets(targets, self.token_ids(), self.names))

  def logits(self, last: Any, x: Stream) -> jax.Array:
    """Computes each rank's slice of the logits, float32 ``[R, B, T, V]``.

    Each rank reads its own stream, so the logits at p < 1 are those of streams
    that differ in their private channels.

    Args:
      last: The final norm's gain, and the table of the head.
      x: The stream after the last block.
    """
    table = self._of_stages(last["table"], 1 if self.tied else 2)
    if self.tied:
      table = jnp.swapaxes(table, 1, 2)
    with jax.named_scope("head"):
      _, y = column_parallel(
        x, last["norm"], table, self.norm_eps, self.kernels
      )
    y = y.astype(jnp.float32)
    # Padding of the vocabulary must have no share of the normaliser.
    num_tokens = cut_size(self.size, self.tensor.size)
    if self.stage or num_tokens * self.tensor.size > self.size:
      padded = self.token_ids() >= self.size
      y = jnp.where(padded[:, None, None, :], -jnp.inf, y)
    return y

  def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks tokens ``[B, T]`` up in the ranks' tables: ``[B, T, H]``.

    Each rank looks up the tokens that it owns, and the sum over ranks has all.
    """
    if self.stage is not None:
      return self._embed_by_stages(self._of_stages(table, 1), tokens)
    lanes, num_tokens, width = table.shape
    # Lanes of a device are neighbours, so their tables join to one.
    rows = table.reshape(lanes * num_tokens, width)
    first = lax.axis_index(self.tensor.name) * (lanes * num_tokens)
    local = tokens - first
    mine = (local >= 0) & (local < lanes * num_tokens)
    with jax.named_scope("embedding"):
      # In float32, since the transpose of a lookup adds up the cotangents of a
      # token wherever it occurs: thousands, of which bfloat16 would lose most.
      found = jnp.take(
        rows.astype(jnp.float32), jnp.where(mine, local, 0), axis=0
      )
      found = jnp.where(mine[..., None], found, 0.0)
      # All summands but one are zero, so the sum is exact in any dtype.
      return lax.psum(found.astype(self.dtype), self.tensor.name)

  def _embed_by_stages(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Does the same with tables ``[R, V, H]`` that stages cut, too."""
    with jax.named_scope("embedding"):

      def look_up(table, ids):
        place = tokens - ids[0]
        # A slice may end in rows that stand for no token.
        mine = (place >= 0) & (place < len(ids))
        place = jnp.where(mine, place, 0)
        found = jnp.take(table.astype(jnp.float32), place, axis=0)
        mine &= ids[place] == tokens
        return jnp.where(mine[..., None], found, 0.0)

      found = jax.vmap(look_up)(table, self.token_ids()).sum(axis=0)
      return lax.psum(found.astype(self.dtype), self.names)

  @property
  def names(self) -> str | tuple[str, ...]:
    """The mesh axes that cut the vocabulary."""
    if self.stage is None:
      return self.tensor.name
    return self.tensor.name, self.stage.name

  def _of_stages(self, table: jax.Array, dim: int) -> jax.Array:
    """Joins the slices of a device's stages: ``[G, R, ...] -> [R, ...]``."""
    if self.stage is None:
      return table
    table = jnp.moveaxis(table, 0, dim)
    shape = table.shape
    return table.reshape(*shape[:dim], -1, *shape[dim + 2 :])

  def token_ids(self) -> jax.Array:
    """Returns which token each logit of this device stands for, ``[R, V]``.

    Where stages cut a rank's tokens, the last slices may be padded: with the
    size of the vocabulary, which is no token.
    """
    lanes = self.tensor.lanes
    num_tokens = cut_size(self.size, self.tensor.size)
    first = lax.axis_index(self.tensor.name) * (lanes * num_tokens)
    if self.stage is None:
      return first + jnp.arange(lanes * num_tokens).reshape(lanes, num_tokens)
    size = cut_size(num_tokens, self.stage.size) * self.stage.lanes
    place = lax.axis_index(self.stage.name) * size + jnp.arange(size)
    ids = first + jnp.arange(lanes)[:, None] * num_tokens + place
    return jnp.where(place < num_tokens, ids, self.size)
