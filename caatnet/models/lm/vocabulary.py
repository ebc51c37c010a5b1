"""Embedding and head of a language model, cut over ranks by the vocabulary.

The embedding has one all-reduce of full width over the tensor axis and the head
has none; the losses of `caatnet.models.lm.losses` reduce a few numbers per
token. Pipeline stages may cut the vocabulary further.

Shape legend: R = lanes (the tensor ranks of one device), B = batch, T =
position, H = width, V = vocabulary of one rank, G = stages of a device.
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
  """Vocabulary-parallel embedding and head.

  Methods run inside ``jax.shard_map``.

  Attributes:
    size: The number of tokens.
    tensor: The tensor axis.
    dtype: The dtype of activations.
    tied: Whether the head is the embedding's transpose.
    norm_eps: Epsilon of the norm before the head.
    kernels: Implementations of that norm in order of preference, names of
      `parallel.kernels.selection`.
    stage: The stage axis, if pipeline stages cut the vocabulary in addition to
      tensor ranks; else None.
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
    """Scores targets ``[B, T]`` given the stream after the last layer.

    Args:
      score: A function ``(logits, targets)`` of `caatnet.models.lm.losses`.
      last: The final norm's gain, and the table of the head.
      x: The stream.
      targets: The target tokens.

    Returns:
      The result of ``score``.
    """
    logits = self.logits(last, x)
    with jax.named_scope("cross_entropy"):
      return score(logits, Targets(targets, self.token_ids(), self.names))

  def logits(self, last: Any, x: Stream) -> jax.Array:
    """Computes each rank's slice of the logits, float32 ``[R, B, T, V]``.

    Each rank computes its slice from its own stream; streams differ between
    ranks in channels that are not synchronised.

    Args:
      last: The final norm's gain, and the table of the head.
      x: The stream after the last block.
    """
    table = self._merge_stages(last["table"], 1 if self.tied else 2)
    if self.tied:
      table = jnp.swapaxes(table, 1, 2)
    with jax.named_scope("head"):
      _, y = column_parallel(
        x, last["norm"], table, self.norm_eps, self.kernels
      )
    y = y.astype(jnp.float32)
    # Padding of the vocabulary must not contribute to the normaliser.
    num_tokens = cut_size(self.size, self.tensor.size)
    if self.stage or num_tokens * self.tensor.size > self.size:
      padded = self.token_ids() >= self.size
      y = jnp.where(padded[:, None, None, :], -jnp.inf, y)
    return y

  def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings ``[B, T, H]`` of tokens ``[B, T]``.

    Each rank looks up its own tokens and has zeros for all other tokens; an
    all-reduce sums over ranks.
    """
    if self.stage is not None:
      return self._embed_by_stages(self._merge_stages(table, 1), tokens)
    lanes, num_tokens, width = table.shape
    # Lanes of a device own consecutive tokens, so their tables form one table.
    rows = table.reshape(lanes * num_tokens, width)
    first = lax.axis_index(self.tensor.name) * (lanes * num_tokens)
    local = tokens - first
    mine = (local >= 0) & (local < lanes * num_tokens)
    with jax.named_scope("embedding"):
      # In float32, since the transpose of a lookup sums the cotangents of all
      # occurrences of a token: with thousands of summands, bfloat16 would lose
      # most of them to rounding.
      found = jnp.take(
        rows.astype(jnp.float32), jnp.where(mine, local, 0), axis=0
      )
      found = jnp.where(mine[..., None], found, 0.0)
      # All summands except one are zero, so the sum is exact in any dtype.
      return lax.psum(found.astype(self.dtype), self.tensor.name)

  def _embed_by_stages(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Implements `embed` for tables ``[R, V, H]`` that stages cut further."""
    with jax.named_scope("embedding"):

      def look_up(table, ids):
        place = tokens - ids[0]
        # The last rows of a slice may be padding.
        mine = (place >= 0) & (place < len(ids))
        place = jnp.where(mine, place, 0)
        found = jnp.take(table.astype(jnp.float32), place, axis=0)
        mine &= ids[place] == tokens
        return jnp.where(mine[..., None], found, 0.0)

      found = jax.vmap(look_up)(table, self.token_ids()).sum(axis=0)
      return lax.psum(found.astype(self.dtype), self.names)

  @property
  def names(self) -> str | tuple[str, ...]:
    """Names of the mesh axes over which the vocabulary is cut."""
    if self.stage is None:
      return self.tensor.name
    return self.tensor.name, self.stage.name

  def _merge_stages(self, table: jax.Array, dim: int) -> jax.Array:
    """Joins the slices of a device's G stages, ``[G, R, ...] -> [R, ...]``.

    Args:
      table: The slices of the embedding or head, of R tensor ranks each.
      dim: Dim of the tokens in the result.
    """
    if self.stage is None:
      return table
    table = jnp.moveaxis(table, 0, dim)
    shape = table.shape
    return table.reshape(*shape[:dim], -1, *shape[dim + 2 :])

  def token_ids(self) -> jax.Array:
    """Returns the token of each of this device's logits, int32 ``[R, V]``.

    If stages cut a rank's tokens, the last slices may be padded with the size
    of the vocabulary, which is not a token.
    """
    lanes = self.tensor.lanes
    num_tokens = cut_size(self.size, self.tensor.size)
    first = lax.axis_index(self.tensor.name) * (lanes * num_tokens)
    if self.stage is None:
      return first + jnp.arange(lanes * num_tokens).reshape(lanes, num_tokens)
    size = cut_size(num_tokens, self.stage.size) * self.stage.lanes
    place = lax.axis_index(self.stage.name) * size + jnp.arange(size)[None]
    ids = first + jnp.arange(lanes)[:, None] * num_tokens + place
    return jnp.where(place < num_tokens, ids, self.size)
