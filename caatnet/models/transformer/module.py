"""A Llama-style transformer under partially synchronised tensor parallelism.

It has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Embedding,
head and cross-entropy are cut over ranks along the vocabulary. Over the tensor
axis a forward makes one reduction of full width at the embedding and two
partial ones per block, and none at the head. The transpose of the first one is
at the entry of the stack of blocks.

Sources: Touvron et al., arXiv 2302.13971; for the placement of the reductions
Lamprecht et al., arXiv 2506.19645.

Shape legend: L = layers, R = lanes (ranks outside shard_map), B = batch,
T = position, H = width, V = vocabulary of one rank.
"""

from collections.abc import Callable
import functools
import itertools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from caatnet.models.access import Access
from caatnet.models.paged import Batch, Cache
from caatnet.models.transformer import layers, vocabulary
from caatnet.models.transformer.block import (
  QKV_AXES,
  Attend,
  Block,
  Sharded,
  cut_columns,
  cut_size,
)
from caatnet.models.transformer.config import REMAT_POLICIES, TransformerConfig
from parallel.axes import Axis
from parallel.tensor.projections import column_parallel
from parallel.tensor.stream import Stream, enter


class Transformer(nnx.Module):
  """An embedding, a scanned stack of blocks, a norm and a head.

  It runs inside ``jax.shard_map``, since it communicates over the tensor axis.
  Its parameters then have this device's lanes as their leading dim.
  """

  def __init__(
    self, config: TransformerConfig, axis: Axis, rngs: nnx.Rngs
  ) -> None:
    """Draws the parameters of all ranks.

    Args:
      config: The sizes.
      axis: The tensor axis.
      rngs: The random streams.

    Raises:
      ValueError: A rank would own no head, feature or token.
    """
    for key in ("num_kv_heads", "ffn_width", "vocab_size"):
      _check_every_rank_owns(getattr(config, key), key, axis.size)
    self.config, self.axis = config, axis
    # The stages of a pipeline that cut the vocabulary, too.
    self.stage: Axis | None = None
    std, width = config.init_std, config.width
    vocab, cut = config.vocab_size, cut_size(config.vocab_size, axis.size)

    def table():
      dense = std * jax.random.normal(rngs.params(), (width, vocab))
      return cut_columns(dense, axis.size, cut)

    self.embedding = Sharded(jnp.swapaxes(table(), 1, 2))
    self.head = None if config.tied_embeddings else Sharded(table())
    self.norm = nnx.Param(jnp.ones(width))
    make_block = nnx.vmap(
      lambda scales, rngs: Block(config, axis, scales, rngs), in_axes=(0, 0)
    )
    self.blocks = make_block(
      _row_scales(config, axis), rngs.fork(split=config.num_layers)
    )

  def logits(
    self, params: Any, tokens: jax.Array, access: Access
  ) -> jax.Array:
    """Computes each rank's slice of the logits.

    Args:
      params: The parameters, as `decode` takes them.
      tokens: int ``[B, T]``, or what ``access`` takes in its place.
      access: How the model's functions read parameters.

    Returns:
      float32 ``[R, B, T, V]``; -inf for the padding of the vocabulary.
    """
    last, x, _ = self._before_head(
      params, tokens, (), self._attend_to_all, access
    )
    return access.apply(self._logits, last, x)

  def decode(
    self, params: Any, cache: Cache, batch: Batch, access: Access
  ) -> tuple[jax.Array, Cache]:
    """Reads a step's tokens, and what the cache has of their sequences.

    Args:
      params: The parameters, of which this module has the shapes only. Those
        of the blocks may be a tuple of each block's.
      cache: Keys and values of earlier tokens.
      batch: The tokens.
      access: How the model's functions read parameters.

    Returns:
      Each rank's slice of the logits of ``batch.rows``, float32 ``[R, S, V]``,
      and the cache with the keys and values of the step's tokens.
    """

    def attend(heads, qkv, params, state):
      cache, layer = state
      q, k, v = jax.vmap(
        lambda qkv, params: layers.split_heads(
          qkv, heads, params, batch.positions[None]
        ),
        in_axes=QKV_AXES,
      )(qkv, params)
      cache = cache.write(layer, k[:, 0], v[:, 0], batch)
      y = cache.attend(layer, q[:, 0], batch, heads.window)
      return y.reshape(*qkv.shape[:-1], -1), (cache, layer + 1)

    # All tokens are one row of the stream: [1, N, H].
    last, x, (cache, _) = self._before_head(
      params, batch.tokens[None], (cache, 0), attend, access
    )
    x = access.apply(lambda _, x: x.take(batch.rows), None, x)
    return access.apply(self._logits, last, x)[:, 0], cache

  def judge(
    self,
    params: Any,
    score: Callable[[jax.Array, vocabulary.Targets], Any],
    tokens: jax.Array,
    access: Access,
  ) -> Any:
    """Scores each token by those before it.

    Args:
      params: The parameters, as `decode` takes them.
      score: A function of `caatnet.models.transformer.vocabulary`, of logits
        and of the tokens that should have followed.
      tokens: int ``[B, T + 1]``, or what ``access`` takes in its place.
      access: How the model's functions read parameters.

    Returns:
      What ``score`` returns for tokens 1 to T.
    """
    _, x, _ = self._before_head(
      params, tokens[..., :-1], (), self._attend_to_all, access
    )
    return self.after_blocks(params, x, score, tokens[..., 1:], access)

  def before_blocks(
    self, params: Any, tokens: jax.Array, access: Access
  ) -> Stream:
    """Makes what the blocks of a stage read of tokens ``[B, T]``."""
    x = access.apply(self._enter, params["embedding"], tokens)
    return self._narrowed(x, self.config.syncs[0], access)

  def some_blocks(self, params: Any, x: Stream, access: Access) -> Stream:
    """Runs some of the blocks, which synchronise alike."""
    graph = nnx.graphdef(self.blocks)
    syncs, policy = self.config.syncs[0], REMAT_POLICIES[self.config.remat]

    def block(params, x):
      block = nnx.merge(graph, params)
      return block(x, (), syncs, self._attend_to_all)[0]

    with jax.named_scope("blocks"):
      return access.scan(block, params, x, self.config.unroll, policy)

  def after_blocks(
    self,
    params: Any,
    x: Stream,
    score: Callable[[jax.Array, vocabulary.Targets], Any],
    targets: jax.Array,
    access: Access,
  ) -> Any:
    """Scores what the last block returns, as `judge`."""

    def judged(last: Any, x: Stream, targets: jax.Array) -> Any:
      logits = self._logits(last, x)
      with jax.named_scope("cross_entropy"):
        return score(
          logits,
          vocabulary.Targets(targets, self.token_ids(), self._vocab_names),
        )

    return access.apply(judged, self._last(params), x, targets)

  def _last(self, params: Any) -> dict[str, Any]:
    """Returns the parameters that the head reads."""
    table = params.get("head", params["embedding"])
    return {"norm": params["norm"], "table": table}

  def _before_head(
    self,
    params: Any,
    tokens: jax.Array,
    state: Any,
    attend: Attend,
    access: Access,
  ) -> tuple[Any, Stream, Any]:
    """Runs all but the head.

    Returns:
      The head's parameters, the stream that it reads, and attention's state.
    """
    x = access.apply(self._enter, params["embedding"], tokens)
    x, state = self._through_blocks(params["blocks"], x, state, attend, access)
    return self._last(params), x, state

  def _attend_to_all(
    self,
    heads: layers.Heads,
    qkv: jax.Array,
    params: layers.QkvParams,
    state: Any,
  ) -> tuple[jax.Array, Any]:
    """Attends to all positions before a query's own, without any state."""
    attend = jax.vmap(
      functools.partial(
        layers.attend, heads=heads, implementation=self.config.attention
      ),
      in_axes=QKV_AXES,
    )
    return attend(qkv, params), state

  def _enter(self, table: jax.Array, tokens: jax.Array) -> Stream:
    """Makes the residual stream before the first block from ``[B, T]``."""
    return enter(
      self._embed(table, tokens), self.axis, self.config.syncs[0][0]
    )

  def _through_blocks(
    self, params: Any, x: Stream, state: Any, attend: Attend, access: Access
  ) -> tuple[Stream, Any]:
    """Returns the residual stream after the last block, before the final norm.

    Layers that synchronise alike are scanned together. What a scan carries must
    keep its type. Two things about a stream are part of its type: how many
    channels are shared, and which update is pending. So the stream is narrowed
    before the scan, to the fewest channels that the layers share. And where
    layers leave an update pending, the first of them runs before the scan, as
    it finds nothing pending, or an update of another policy.

    Args:
      params: The parameters of all blocks: arrays ``[L, ...]``, or a tuple of
        each block's own, which ``access`` runs one after another.
      x: The stream before the first block.
      state: What attention carries from layer to layer.
      attend: Attention.
      access: How the blocks read their parameters.

    Returns:
      The stream, and attention's state.
    """
    config, policy = self.config, REMAT_POLICIES[self.config.remat]
    graph = nnx.graphdef(self.blocks)
    for syncs, group in itertools.groupby(
      range(config.num_layers), key=lambda layer: config.syncs[layer]
    ):
      start, *others = group
      stop = start + 1 + len(others)

      def block(params, carried, syncs=syncs):
        return nnx.merge(graph, params)(*carried, syncs, attend)

      x = self._narrowed(x, syncs, access)
      with jax.named_scope("blocks"):
        if self.blocks.carries(syncs[1]):
          first = jax.tree.map(lambda p, i=start: p[i], params)
          x, state = access.apply(block, first, (x, state), policy=policy)
          start += 1
        if start < stop:
          # A slice of all layers would be a copy of them.
          chosen = params
          if isinstance(params, tuple):
            chosen = params[start:stop]
          elif stop - start < config.num_layers:
            chosen = jax.tree.map(lambda p: p[start:stop], params)  # noqa: B023
          x, state = access.scan(
            block, chosen, (x, state), config.unroll, policy
          )
    return x, state

  def _narrowed(self, x: Stream, syncs: Any, access: Access) -> Stream:
    """Shares no more channels than a layer does that the stream enters."""
    shared = min(s.num_shared(self.config.width) for s in syncs)
    return access.apply(
      lambda _, x: x.narrow(min(x.shared.shape[-1], shared)), None, x
    )

  def _logits(self, last: Any, x: Stream) -> jax.Array:
    """Computes each rank's slice of the logits, float32 ``[R, B, T, V]``.

    Each rank reads its own stream, so the logits at p < 1 are those of streams
    that differ in their private channels.

    Args:
      last: The final norm's gain, and the table of the head.
      x: The stream after the last block.
    """
    tied = self.config.tied_embeddings
    table = self._of_stages(last["table"], 1 if tied else 2)
    if tied:
      table = jnp.swapaxes(table, 1, 2)
    with jax.named_scope("head"):
      _, y = column_parallel(
        x, last["norm"], table, self.config.norm_eps, self.config.kernels
      )
    y = y.astype(jnp.float32)
    # Padding of the vocabulary must have no share of the normaliser.
    num_tokens = cut_size(self.config.vocab_size, self.axis.size)
    if self.stage or num_tokens * self.axis.size > self.config.vocab_size:
      padded = self.token_ids() >= self.config.vocab_size
      y = jnp.where(padded[:, None, None, :], -jnp.inf, y)
    return y

  def _embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks tokens ``[B, T]`` up in the ranks' tables: ``[B, T, H]``.

    Each rank looks up the tokens that it owns, and the sum over ranks has all.
    """
    if self.stage is not None:
      return self._embed_by_stages(self._of_stages(table, 1), tokens)
    lanes, num_tokens, width = table.shape
    # Lanes of a device are neighbours, so their tables join to one.
    rows = table.reshape(lanes * num_tokens, width)
    first = lax.axis_index(self.axis.name) * (lanes * num_tokens)
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
      return lax.psum(found.astype(self.config.dtype), self.axis.name)

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
      return lax.psum(found.astype(self.config.dtype), self._vocab_names)

  @property
  def _vocab_names(self) -> str | tuple[str, ...]:
    """The mesh axes that cut the vocabulary."""
    if self.stage is None:
      return self.axis.name
    return self.axis.name, self.stage.name

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
    lanes = self.axis.lanes
    num_tokens = cut_size(self.config.vocab_size, self.axis.size)
    first = lax.axis_index(self.axis.name) * (lanes * num_tokens)
    if self.stage is None:
      return first + jnp.arange(lanes * num_tokens).reshape(lanes, num_tokens)
    size = cut_size(num_tokens, self.stage.size) * self.stage.lanes
    place = lax.axis_index(self.stage.name) * size + jnp.arange(size)
    ids = first + jnp.arange(lanes)[:, None] * num_tokens + place
    return jnp.where(place < num_tokens, ids, self.config.vocab_size)


def _row_scales(config: TransformerConfig, axis: Axis) -> np.ndarray:
  """Returns by what the columns of output projections are scaled when drawn.

  Returns:
    ``[L, 2, H]``: sqrt(ranks) for private channels of doors whose
    `PartialSync.private_scale` is "init", else 1.
  """
  scales = np.ones((config.num_layers, 2, config.width), np.float32)
  for layer, syncs in enumerate(config.syncs):
    for door, sync in enumerate(syncs):
      if sync.private_scale == "init":
        first_private = sync.num_shared(config.width)
        scales[layer, door, first_private:] = math.sqrt(axis.size)
  return scales


def _check_every_rank_owns(size: int, key: str, ranks: int) -> None:
  """Refuses numbers of ranks that leave a rank with nothing but padding.

  The ranks before the last have ceil(size / ranks) each, which may be all.
  """
  if cut_size(size, ranks) * (ranks - 1) < size:
    return
  fitting = [
    r for r in range(1, size + 1) if cut_size(size, r) * (r - 1) < size
  ]
  raise ValueError(
    f"config.model.{key}={size} leaves a rank of "
    f"config.parallel.tensor={ranks} with nothing but padding; use a tensor "
    f"size in {fitting[:16]}, or config.model.{key} a multiple of {ranks}"
  )
