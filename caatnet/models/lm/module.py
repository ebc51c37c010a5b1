"""Language model module under partially synchronised tensor parallelism.

The module has an embedding, a stack of equal layers, a norm and a head.
Embedding, head and cross-entropy are cut over tensor ranks along the
vocabulary. A forward has one all-reduce of all channels at the embedding, two
all-reduces of a fraction of the channels per layer, and none at the head. The
backward's all-reduce of full width is at the entry of the stack of layers.

A subclass defines its blocks and their sequence mixer (`mixer`): attention or a
recurrence.

Source, for the placement of the reductions: Lamprecht et al., arXiv 2506.19645.

Shape legend: L = layers, R = lanes, the tensor ranks of one device (outside
shard_map: all ranks), B = batch, T = position, H = width, V = vocabulary of one
rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from flax import nnx
import jax
import jax.numpy as jnp

from caatnet.models.access import Access
from caatnet.models.lm import pieces, stack
from caatnet.models.lm.config import REMAT_POLICIES, StackConfig
from caatnet.models.lm.losses import Targets
from caatnet.models.lm.parameters import (
  Sharded,
  check_padding,
  cut_columns,
  cut_size,
  row_scales,
)
from caatnet.models.lm.vocabulary import Vocabulary
from caatnet.models.nanobatches import NanobatchRule, split
from caatnet.models.paged import Batch, Cache
from parallel.axes import Axis
from parallel.tensor.stream import Stream, concatenate, enter


class LanguageModule(nnx.Module):
  """Embedding, scanned stack of blocks, norm and head.

  The module runs inside ``jax.shard_map``, since it communicates over the
  tensor axis. There its parameters have a leading dim of the tensor ranks on
  this device.

  Attributes:
    block_type: The class of a block. Its constructor takes config, axis, the
      factors ``[2, H]`` of the columns of its output projections, and random
      streams. Its call ``(x, state, syncs, mix) -> (x, state)`` updates the
      stream through two row-parallel projections.
  """

  block_type: ClassVar[Callable[..., nnx.Module]]

  def __init__(
    self, config: StackConfig, axis: Axis, rngs: nnx.Rngs
  ) -> None:
    """Draws the parameters of all ranks.

    Args:
      config: The sizes.
      axis: The tensor axis.
      rngs: The random streams.

    Raises:
      ValueError: If padding would double the number of features or tokens.
    """
    for key in ("ffn_width", "vocab_size"):
      check_padding(getattr(config, key), key, axis.size)
    self.config, self.axis = config, axis
    # The stage axis if pipeline stages cut the vocabulary; set by the model.
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
      lambda scales, rngs: self.block_type(config, axis, scales, rngs),
      in_axes=(0, 0),
    )
    self.blocks = make_block(
      row_scales(config.syncs, width, axis), rngs.split(config.num_layers)
    )

  def mixer(self, batch: Batch | None = None) -> Any:
    """Returns the sequence mixer of a block, its argument ``mix``.

    Args:
      batch: The tokens of an inference step, in which the state is ``(cache,
        layer index)``; None for whole sequences without a cache, in which the
        state is ().
    """
    raise NotImplementedError

  def carries(self, syncs: stack.SyncPolicies) -> bool:
    """Returns whether the next block may do the all-reduce of a block's MLP."""
    return False

  @property
  def vocabulary(self) -> Vocabulary:
    """The vocabulary-parallel embedding and head functions."""
    config = self.config
    return Vocabulary(
      config.vocab_size, self.axis, config.dtype, config.tied_embeddings,
      config.norm_eps, config.kernels, self.stage,
    )

  def logits(
    self, params: Any, tokens: jax.Array, access: Access
  ) -> jax.Array:
    """Computes each rank's slice of the logits.

    Args:
      params: The parameters, see `decode`.
      tokens: int ``[B, T]``, in the representation that ``access`` reads.
      access: Reads the parameters.

    Returns:
      float32 ``[R, B, T, V]``; -inf for the padding of the vocabulary.
    """
    last, x, _ = self._before_head(params, tokens, (), self.mixer(), access)
    return access.apply(self.vocabulary.logits, last, x)

  def decode(
    self, params: Any, cache: Cache, batch: Batch, access: Access,
    nanobatches: NanobatchRule | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Runs one step of inference on the cache.

    Args:
      params: The parameters; the module itself holds abstract ones. Those of
        the blocks may be a tuple of each block's parameters instead of stacked
        arrays.
      cache: Cache of earlier tokens.
      batch: The tokens.
      access: Reads the parameters.
      nanobatches: Rule that cuts the step into nano-batches; None for no cut.

    Returns:
      Each rank's slice of the logits of ``batch.rows``, float32 ``[R, S, V]``,
      and the cache with the step's tokens.
    """
    sizes = nanobatches.sizes(batch) if nanobatches else ()
    if len(sizes) > 1:
      last, x, cache = self._run_nanobatches(
        params, cache, split(batch, sizes), access, nanobatches.ordered
      )
    else:
      # All tokens are one row of the stream: [1, N, H].
      last, x, (cache, _) = self._before_head(
        params, batch.tokens[None], (cache, 0), self.mixer(batch), access
      )
    x = access.apply(lambda _, x: x.take(batch.rows), None, x)
    return access.apply(self.vocabulary.logits, last, x)[:, 0], cache

  def _run_nanobatches(
    self, params: Any, cache: Cache, batches: Sequence[Batch], access: Access,
    ordered: bool,
  ) -> tuple[Any, Stream, Cache]:
    """Runs embedding and blocks on the nano-batches of a step.

    ``ordered`` is `NanobatchRule.ordered`.

    Returns:
      The head's parameters, the stream of all tokens, and the cache.
    """
    config, graph = self.config, nnx.graphdef(self.blocks)
    order = pieces.OrderedReducer(self.axis, ordered)

    def enter(table, *tokens):
      return pieces.embed_nanobatches(
        lambda x: self._embed(table, x), tokens, order
      )

    xs = access.apply(
      enter, params["embedding"], *(batch.tokens for batch in batches)
    )
    xs, (cache, _) = pieces.run(
      lambda params, syncs: nnx.merge(graph, params).halves(syncs),
      params["blocks"], xs, (cache, 0),
      [self.mixer(batch) for batch in batches],
      config=config, access=access, order=order,
    )
    return self._head_params(params), concatenate(xs), cache

  def judge(
    self,
    params: Any,
    score: Callable[[jax.Array, Targets], Any],
    tokens: jax.Array,
    access: Access,
  ) -> Any:
    """Scores each token given its prefix.

    Args:
      params: The parameters, see `decode`.
      score: A function ``(logits, targets)`` of `caatnet.models.lm.losses`.
      tokens: int ``[B, T + 1]``, in the representation that ``access`` reads.
      access: Reads the parameters.

    Returns:
      The result of ``score`` for tokens 1 to T.
    """
    _, x, _ = self._before_head(
      params, tokens[..., :-1], (), self.mixer(), access
    )
    return self.after_blocks(params, x, score, tokens[..., 1:], access)

  def before_blocks(
    self, params: Any, tokens: jax.Array, access: Access
  ) -> Stream:
    """Returns the stream before the first block, for tokens ``[B, T]``."""
    x = access.apply(self._embed, params["embedding"], tokens)
    return stack.narrow_stream(
      x, self.config.syncs[0], self.config.width, access
    )

  def run_blocks(self, params: Any, x: Stream, access: Access) -> Stream:
    """Runs the blocks in ``params``, which must have equal sync policies."""
    graph = nnx.graphdef(self.blocks)
    syncs, policy = self.config.syncs[0], REMAT_POLICIES[self.config.remat]

    def block(params, x):
      block = nnx.merge(graph, params)
      return block(x, (), syncs, self.mixer())[0]

    with jax.named_scope("blocks"):
      return access.scan(block, params, x, self.config.unroll, policy)

  def after_blocks(
    self,
    params: Any,
    x: Stream,
    score: Callable[[jax.Array, Targets], Any],
    targets: jax.Array,
    access: Access,
  ) -> Any:
    """Scores targets ``[B, T]`` given the stream after the last block."""

    def judged(last: Any, x: Stream, targets: jax.Array) -> Any:
      return self.vocabulary.scored(score, last, x, targets)

    return access.apply(judged, self._head_params(params), x, targets)

  def _head_params(self, params: Any) -> dict[str, Any]:
    """Returns "norm", the final norm's gain, and "table", the head's weights.

    A model with tied embeddings has the embedding table as the head.
    """
    table = params.get("head", params["embedding"])
    return {"norm": params["norm"], "table": table}

  def _before_head(
    self,
    params: Any,
    tokens: jax.Array,
    state: Any,
    mix: Any,
    access: Access,
  ) -> tuple[Any, Stream, Any]:
    """Runs embedding and blocks, whose sequence mixer is ``mix``.

    Returns:
      The head's parameters, the stream after the last block, and the mixer's
      state.
    """
    config, graph = self.config, nnx.graphdef(self.blocks)

    def block(params, carried, syncs):
      return nnx.merge(graph, params)(*carried, syncs, mix)

    x = access.apply(self._embed, params["embedding"], tokens)
    x, state = stack.run(
      block, params["blocks"], x, state, syncs=config.syncs,
      width=config.width, access=access, unroll=config.unroll,
      policy=REMAT_POLICIES[config.remat], carries=self.carries,
    )
    return self._head_params(params), x, state

  def _embed(self, table: jax.Array, tokens: jax.Array) -> Stream:
    """Embeds tokens ``[B, T]`` into the residual stream."""
    return enter(
      self.vocabulary.embed(table, tokens), self.axis, self.config.syncs[0][0]
    )
