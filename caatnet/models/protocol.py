"""Model protocol: the interface between models and all other code.

Training, partitions, outer loops, checkpoints, ledgers and studies use a model
through this protocol only. A model has no state besides its parameters, which
include explicit training state (`Parameter.update`). Therefore averaging
parameters averages models, and a partition of the parameters partitions the
model.

A new architecture is one file or folder here with a class that has these
members, and one row in `caatnet.config.model`.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import PartitionSpec

from caatnet.models.access import DEFAULT_ACCESS, Access
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import Batch, Cache, CacheShape, CacheSizes


@dataclasses.dataclass(frozen=True)
class Parameter:
  """Properties of one parameter for layouts, partitions and optimizers.

  Attributes:
    spec: Names, at each dim that is cut into one slice per rank, the axis of
      these ranks, before any ZeRO partition; ``PartitionSpec()`` if every rank
      has the whole parameter.
    num_lead: Number of leading dims that a partition does not cut: layers of a
      stack, then tensor ranks. The remaining dims are one tensor, which a
      partition flattens and cuts.
    dtype: The dtype in which the model's functions read it; a partition gathers
      it in this dtype. The stored parameter is float32.
    decays: Whether weight decay applies: to matrices, except those such as the
      decay rates of a state; not to gains and biases.
    uses: Number of functions of the model that read the parameter in a forward
      pass; a partition gathers it once for each function.
    regathered: Number of these functions that read the parameter again in the
      backward pass. A table lookup does not.
    stage_dim: The dim that pipeline stages cut: 0 for the layers of a stack,
      which stages own in the order of the pipeline's chunks; a later dim is cut
      into contiguous slices in stage order. None if every stage has the whole
      parameter.
    cast: Whether `Access` casts the parameter to ``dtype``. If False, functions
      read float32 and cast it themselves, so that, for example, cotangents of
      an embedding table are summed in float32.
    form: Form of a partition's shards, one of
      `parallel.plans.zero.partition.FORMS`; "rows" for an optimizer that needs
      whole rows of a matrix.
    update: Rule of explicit training state, such as a router's bias: a function
      ``(value, statistic) -> value`` of one worker's arrays. None for trained
      parameters. Only this rule changes the state, once per step and without
      communication; no gradient, clipping or decay does. The statistic is what
      the model reports (`caatnet.models.training_state.report`), summed over
      the step's microbatches and the worker's data-parallel ranks. A partition
      does not cut the state (its form is "whole"). Outer loops average it
      over workers when they exchange parameters, except loops of pairs.
  """

  spec: PartitionSpec
  num_lead: int
  dtype: str
  decays: bool = True
  uses: int = 1
  regathered: int = 1
  stage_dim: int | None = None
  cast: bool = True
  form: str = "flat"
  update: Callable[[jax.Array, jax.Array], jax.Array] | None = None

  @property
  def tensor_form(self) -> str:
    """Form of the shards of the stored array."""
    return "whole" if self.update else self.form


class WeightedScore(NamedTuple):
  """Score of examples with different numbers of elements, such as tokens.

  Means are sums of ``total`` over the examples of all ranks of a worker,
  divided by the sum of ``count``: not means of means, in which a rank with few
  elements would have as much weight as one with many. Outer loops weight
  workers as they define, by default equally.

  Attributes:
    total: float32 ``[B, ...]``, the sum over the elements of each entry.
    count: float32 ``[B, ...]``, their number, or the sum of their weights.
  """

  total: jax.Array
  count: jax.Array


# A score is weighted, or an array ``[B, ...]`` whose entries count equally.
Score = jax.Array | WeightedScore


class Reduction(NamedTuple):
  """Collective over the tensor axis, predicted by a closed formula.

  Attributes:
    phase: "forward", "backward" or "update".
    dtype: The dtype of the transferred elements.
    shape: Shape of the operand on one device.
    kind: The kind of collective, with the names of `parallel.ledger.ledger`.
  """

  phase: str
  dtype: str
  shape: tuple[int, ...]
  kind: str = "all_reduce"


class PipelineParts(NamedTuple):
  """A model as a stack of equal layers between an input and an output part.

  All functions run inside ``jax.shard_map``. Their parameters are those of
  `Model.scores`, with a subset of the layers in the stack. A layer whose
  parameters are all zero is the identity.

  Attributes:
    stack: The key of the stack in the parameters.
    enter: ``(params, batch, access) -> x``, the input of the first layer.
    layers: ``(stack params, x, access) -> x``; x keeps its type.
    judge: ``(params, x, batch, access) -> scores``, as `Model.scores` returns.
    together: Whether ``enter`` and ``judge`` are collective over stages: each
      stage has a slice of their parameters, and all stages get the result.
  """

  stack: str
  enter: Callable[[Any, Any, Access], Any]
  layers: Callable[[Any, Any, Access], Any]
  judge: Callable[[Any, Any, Any, Access], dict[str, Score]]
  together: bool = False


class Model(Protocol):
  """Model whose parameters are a nested dict of arrays.

  Attributes:
    dtype: The dtype of matrix products, which determines the peak FLOP/s.
    num_params: Number of logical parameters, without padding.
    stacks: Top-level keys of the parameters whose leaves are stacked over
      equal layers, ``[layers, ...]``, with their number of layers. Outer loops
      cut fragments between layers, and partitions gather one layer at a time.
    parameters: A `Parameter` for each leaf of the parameters.
  """

  dtype: str
  num_params: int
  stacks: Mapping[str, int]
  parameters: Any

  def init(self, key: jax.Array) -> Any:
    """Returns initial parameters of all tensor ranks.

    Args:
      key: A random key; equal keys give equal parameters on every mesh.

    Returns:
      Nested dict of float32 arrays; a parameter that is cut over tensor ranks
      has a dim of all ranks, ``[..., ranks, ...]``.
    """
    ...

  def scores(
    self, params: Any, batch: Any, access: Access = DEFAULT_ACCESS
  ) -> dict[str, Score]:
    """Computes the scores of examples, inside ``jax.shard_map``.

    Args:
      params: This device's slices of the parameters, in the representation that
        ``access`` reads.
      batch: Tree of arrays ``[B, ...]``, one row per example. The access of a
        partition adds a leading dim of data-parallel ranks.
      access: Reads the parameters for the model's functions.

    Returns:
      float32 arrays ``[B, ...]`` by name, equal on all tensor ranks, or
      `WeightedScore`. Training minimises the mean of "loss"; evaluations report
      all means.
    """
    ...

  def parts(self) -> PipelineParts:
    """Returns input part, layers and output part, for pipeline stages.

    Raises:
      ValueError: If the model is not one stack of layers whose inputs and
        outputs have the same type.
    """
    ...

  def flops(self, example: Any) -> float:
    """Returns the FLOPs of training on one example, forward and backward.

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
    """Counts one step's collectives over the tensor axis, in closed form.

    Args:
      example: Tree of ``jax.ShapeDtypeStruct``, one example of a batch.
      batch_size: Examples of one microbatch of one data-parallel rank.
      data_lanes: Data-parallel ranks on one device.
      accumulation: Microbatches per step.

    Returns:
      Number of runs per step of each collective; empty for a model that is not
      cut over tensor ranks.
    """
    ...


class LanguageModel(Model, Protocol):
  """Model that continues text: the interface for inference.

  Attributes:
    vocab_size: Number of tokens of the vocabulary.
  """

  vocab_size: int

  def logits(
    self, params: Any, tokens: jax.Array, access: Access = DEFAULT_ACCESS
  ) -> jax.Array:
    """Computes logits of the next token, inside ``jax.shard_map``.

    Args:
      params: This device's slices of the parameters, in the representation that
        ``access`` reads.
      tokens: int ``[B, T]``.
      access: Reads the parameters for the model's functions.

    Returns:
      Each rank's slice, float32 ``[R, B, T, V]`` with V tokens per rank. A rank
      has consecutive tokens; padding of the vocabulary has -inf.
    """
    ...

  def target_scores(
    self, params: Any, batch: jax.Array, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    """Scores each token given its prefix, inside ``jax.shard_map``.

    Args:
      params: Parameters, see `logits`.
      batch: int ``[B, T + 1]``; see `scores`.
      access: Reads the parameters for the model's functions.

    Returns:
      ``{"log_probability": float32 [B, T], "greedy": bool [B, T]}``, equal on
      all tensor ranks: the log-probability of tokens 1 to T in nats, and
      whether the token has the largest logit (the lowest such token, if there
      are several).
    """
    ...

  def token_ids(self) -> jax.Array:
    """Returns the token of each of this device's logits, int32 ``[R, V]``.

    R is the number of tensor ranks on the device, V that of tokens per rank.
    """
    ...

  def cache_shape(self, sizes: CacheSizes) -> CacheShape:
    """Returns the shape of the cache that `decode` reads and writes.

    Raises:
      ValueError: If the model does not support ``sizes.dtype``.
    """
    ...

  def decode(
    self,
    params: Any,
    cache: Cache,
    batch: Batch,
    access: Access = DEFAULT_ACCESS,
    nanobatches: NanobatchRule | None = None,
  ) -> tuple[jax.Array, Cache]:
    """Runs one step of inference, inside ``jax.shard_map``.

    Args:
      params: Parameters, see `logits`. A stack may be a tuple of each layer's
        parameters instead of stacked arrays.
      cache: Cache of earlier tokens, with the shape of `cache_shape`.
      batch: The step's tokens.
      access: Reads the parameters for the model's functions.
      nanobatches: Rule that cuts the step into nano-batches, so that the
        all-reduces of one overlap with the matrix products of another, or None.

    Returns:
      Each rank's slice of the logits of ``batch.rows``, float32 ``[R, S, V]``,
      and the cache with the step's tokens.
    """
    ...


def continues_text(model: Model) -> bool:
  """Returns whether a model is a `LanguageModel`."""
  # Members in addition to those of `Model`.
  members = set(dir(LanguageModel)) - set(dir(Model))
  return all(hasattr(model, name) for name in members)
