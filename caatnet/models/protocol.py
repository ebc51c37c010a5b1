"""What all code outside `caatnet.models` knows of a model.

Training, partitions, outer loops, checkpoints, ledgers and studies see a model
through this protocol only. A model is a function of its parameters and carries
no other state from step to step, such as running means. So averaging parameters
averages models, and a partition of the parameters is a partition of the model.

A new architecture is one file or folder here with a class that has these
members, and one row in `caatnet.config.model`.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from caatnet.models.access import AS_THEY_ARE, Access
from caatnet.models.paged import Batch, Cache, CacheShape, CacheSizes


@dataclasses.dataclass(frozen=True)
class Parameter:
  """What a layout, a partition and an optimizer must know of one parameter.

  Attributes:
    spec: The dims that are cut into one slice per tensor rank, before any
      partition; ``PartitionSpec()`` where every rank has the whole parameter.
    num_lead: How many leading dims stay apart: layers of a stack, then tensor
      ranks. What follows them is one tensor, which a partition cuts.
    dtype: The dtype in which the model's functions read it, with and without a
      partition, which gathers it in this dtype; the stored parameter is
      float32.
    decays: Whether weight decay applies: to matrices, not to gains and biases.
    uses: How many of the model's functions read it in a forward pass; a
      partition gathers it for each of them.
    regathered: How many of these functions read it again in the backward pass.
      Looking up rows of a table does not.
    stage_dim: The dim that stages of a pipeline cut, where there are stages: 0
      for layers of a stack, whose order is that of the parts; a later one for
      slices in turn. None where every stage has the whole parameter.
    cast: Whether an access without a partition casts it to ``dtype``. False
      for functions that cast it themselves where they use it: without a
      partition they read float32, so that a table's cotangents, for example,
      are summed in float32.
  """

  spec: PartitionSpec
  num_lead: int
  dtype: str
  decays: bool = True
  uses: int = 1
  regathered: int = 1
  stage_dim: int | None = None
  cast: bool = True


class Reduction(NamedTuple):
  """A collective over the tensor axis that a step runs, by closed formula.

  Attributes:
    phase: "forward", "backward" or "update".
    dtype: The dtype on the wire.
    shape: The operand's shape on one device.
    kind: The kind of collective, as in the ledger.
  """

  phase: str
  dtype: str
  shape: tuple[int, ...]
  kind: str = "all_reduce"


class Parts(NamedTuple):
  """A model as a stack of equal layers, and what is around it.

  All run inside ``jax.shard_map``. Params are those of `Model.scores`; of the
  stack they are some of its layers. A layer of zeros is the identity.

  Attributes:
    stack: The key of the stack.
    enter: ``(params, batch, access) -> x``, what the first layer reads.
    layers: ``(the stack's params, x, access) -> x``, with x of the same type.
    judge: ``(params, x, batch, access) -> scores``, those of `Model.scores`.
    together: Whether all stages compute ``enter`` and ``judge`` together, each
      with its slice of the parameters, so that the results are those of all.
  """

  stack: str
  enter: Callable[[Any, Any, Access], Any]
  layers: Callable[[Any, Any, Access], Any]
  judge: Callable[[Any, Any, Any, Access], dict[str, jax.Array]]
  together: bool = False


class Model(Protocol):
  """A model; its parameters are a nested dict of arrays.

  Attributes:
    dtype: The dtype of its products, for peak rates.
    num_params: How many logical parameters it has, padding not counted.
    stacks: Top-level keys of the parameters whose leaves are stacked over
      equal layers, ``[layers, ...]``, with their number of layers. Outer loops
      that exchange fragments cut there, and partitions gather layer by layer.
    parameters: A `Parameter` for each leaf of the parameters.
  """

  dtype: str
  num_params: int
  stacks: Mapping[str, int]
  parameters: Any

  def init(self, key: jax.Array) -> Any:
    """Draws float32 parameters with all tensor ranks, ``[..., ranks, ...]``.

    Args:
      key: A random key; equal keys give equal parameters on every mesh.
    """
    ...

  def scores(
    self, params: Any, batch: Any, access: Access = AS_THEY_ARE
  ) -> dict[str, jax.Array]:
    """Computes the scores of examples, inside ``jax.shard_map``.

    Args:
      params: This device's slices of the parameters, or what ``access`` reads
        in their place.
      batch: Tree of arrays ``[B, ...]``, one row per example. A partition,
        which has an access of its own, adds a leading dim of data-parallel
        ranks.
      access: How the model's functions read their parameters.

    Returns:
      float32 arrays ``[B, ...]`` by name, the same on all tensor ranks.
      Training minimises the mean of "loss"; evaluations report all means.
    """
    ...

  def parts(self) -> Parts:
    """Returns the model in parts, for the stages of a pipeline.

    Raises:
      ValueError: It has no stack of layers that read and return the same.
    """
    ...

  def flops(self, example: Any) -> float:
    """Returns the floating-point operations of training on one example.

    Args:
      example: Tree of ``jax.ShapeDtypeStruct``, one example of a batch.
    """
    ...

  def reductions(
    self,
    example: Any,
    *,
    batch_size: int,
    data_lanes: int,
    accumulation: int = 1,
  ) -> collections.Counter[Reduction]:
    """Counts what one step reduces over the tensor axis, in closed form.

    Args:
      example: Tree of ``jax.ShapeDtypeStruct``, one example of a batch.
      batch_size: Examples of one microbatch of one data-parallel rank.
      data_lanes: Data-parallel ranks on one device.
      accumulation: Microbatches per step.

    Returns:
      How often each reduction runs; empty for a model without a tensor axis.
    """
    ...


class LanguageModel(Model, Protocol):
  """A model that continues text; what inference knows of it.

  Attributes:
    vocab_size: How many tokens it knows.
  """

  vocab_size: int

  def logits(
    self, params: Any, tokens: jax.Array, access: Access = AS_THEY_ARE
  ) -> jax.Array:
    """Computes the logits of what follows, inside ``jax.shard_map``.

    Args:
      params: This device's slices of the parameters, or what ``access`` reads
        in their place.
      tokens: int ``[B, T]``.
      access: How the model's functions read their parameters.

    Returns:
      Each rank's slice, float32 ``[R, B, T, V]`` with V tokens per rank. A rank
      has successive tokens; -inf stands for those beyond the vocabulary.
    """
    ...

  def target_scores(
    self, params: Any, batch: jax.Array, access: Access = AS_THEY_ARE
  ) -> dict[str, jax.Array]:
    """Judges each token by those before it, inside ``jax.shard_map``.

    Args:
      params: As of `logits`.
      batch: int ``[B, T + 1]``; see `scores`.
      access: How the model's functions read their parameters.

    Returns:
      ``{"log_probability": float32 [B, T], "greedy": bool [B, T]}``, the same
      on all tensor ranks: of tokens 1 to T in nats, and whether the token has
      the largest logit (the lowest such token, if there are several).
    """
    ...

  def token_ids(self) -> jax.Array:
    """Returns which token each logit of this device stands for, ``[R, V]``."""
    ...

  def cache_shape(self, sizes: CacheSizes) -> CacheShape:
    """Returns the components of the cache that `decode` reads and writes.

    Raises:
      ValueError: The cache cannot be kept in this dtype.
    """
    ...

  def decode(
    self,
    params: Any,
    cache: Cache,
    batch: Batch,
    access: Access = AS_THEY_ARE,
  ) -> tuple[jax.Array, Cache]:
    """Reads a step's tokens into a cache, inside ``jax.shard_map``.

    Args:
      params: As of `logits`. What is stacked over layers may be a tuple of each
        layer's parameters.
      cache: Cache of earlier tokens, of `cache_shape`.
      batch: The step's tokens.
      access: How the model's functions read their parameters.

    Returns:
      Each rank's slice of the logits of ``batch.rows``, float32 ``[R, S, V]``,
      and the cache with the step's tokens.
    """
    ...


def continues_text(model: Model) -> bool:
  """Returns whether a model is a `LanguageModel`."""
  members = set(dir(LanguageModel)) - set(dir(Model))
  return all(hasattr(model, name) for name in members)
