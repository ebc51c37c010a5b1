"""Decoder: a model with a paged cache on a mesh, and its step program.

A step reads tokens of many sequences at once: the newest token of each decoding
sequence, and chunks of prompts (`caatnet.models.paged.Batch`). It draws the
next token of each sequence. Programs differ only in the shapes of the batch,
which are bucketed.

Data-parallel ranks are replicas: each has the whole model, sharded over the
tensor axis, and separate sequences and caches. All replicas run in lockstep.

Shape legend: D = replicas, S = sequences of a replica in a step, *levels = the
data-parallel axes, whose product is D, ranks = tensor ranks.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.inference import buckets
from caatnet.inference.sampling import Sampling, TopTokens, sample, top_logprobs
from caatnet.inference.weights import Weights
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import Batch, Cache, CacheShape
from caatnet.program import Program


@dataclasses.dataclass(frozen=True)
class Capacity:
  """Capacity of a replica.

  Attributes:
    batch: Maximum number of concurrent sequences.
    context: Maximum number of positions of a sequence, including the prompt.
    page_size: Positions per page.
    chunk: Maximum number of prompt tokens that a step reads.
    batch_invariant: Whether all steps run one program, in which each of
      ``batch`` rows reads one token: a sequence's newest token, or one of a
      prompt. No sum then depends on what else a step reads.

  Example:
    >>> capacity = Capacity(batch=8, context=1000, page_size=16, chunk=256)
    >>> capacity.pages_per_sequence
    63
  """

  batch: int
  context: int
  page_size: int
  chunk: int
  batch_invariant: bool = False

  @property
  def step_tokens(self) -> int:
    """Maximum number of tokens that a step reads."""
    return self.batch + (0 if self.batch_invariant else self.chunk)

  @property
  def pages_per_sequence(self) -> int:
    """Number of pages of a sequence that fills the context."""
    return -(-self.context // self.page_size)


class Decoder:
  """Decoding steps of a model on a mesh, with the cache that they update.

  Attributes:
    program: The model on a mesh.
    capacity: Capacity of a replica.
    num_replicas: D, the number of replicas.
    cache_shape: Cache of one rank.
    weights: Parameters of the model; only their shapes if each step gets its
      own parameters.
    shapes: Shapes of batches whose programs are compiled.
    before_compile: Called before a program is compiled, which takes seconds.
    compile_seconds: Total seconds of the first `step` of each shape, which
      compiles the program unless `compile` was called before.
  """

  def __init__(
    self,
    program: Program,
    weights: Weights,
    capacity: Capacity,
    cache_shape: CacheShape,
    nanobatches: NanobatchRule | None = None,
  ) -> None:
    """Allocates an empty cache; a program is compiled at its first step.

    Args:
      program: The model on a mesh, with one worker and no ZeRO partition.
      weights: Parameters in the format of inference. With shapes instead of
        arrays, the cache is allocated when it is first used.
      capacity: Capacity of a replica.
      cache_shape: Cache of one rank.
      nanobatches: Rule that cuts a step's tokens into nano-batches; None for no
        cuts.

    Raises:
      ValueError: The cache does not fit in memory; with shapes instead of
        arrays, this is raised when it is first used.
    """
    self.program, self.capacity = program, capacity
    self.num_replicas = program.layout.num_data_ranks
    self.shapes: set[Any] = set()
    self.before_compile: Callable[[], None] = lambda: None
    self.compile_seconds = 0.0
    self.cache_shape = cache_shape
    self.weights = weights
    self._run = _make_packed_step(
      make_step(program, weights, cache_shape, nanobatches), self.num_replicas,
      program.layout.compiler_options(nanobatches is not None),
    )
    if isinstance(jax.tree.leaves(weights.params)[0], jax.Array):
      self._state  # noqa: B018 (raises here if the memory does not suffice)

  @functools.cached_property
  def _state(self) -> tuple[Cache, jax.Array]:
    """Cache and newest token of each sequence, replaced by each step."""
    return _allocate(self.program, self.capacity, self.cache_shape)

  @property
  def cache(self) -> Cache:
    """Cache, arrays ``[*levels, ranks, ...]``, which the next step donates.

    Levels are those of data-parallel ranks; ranks are tensor ranks.
    """
    return self._state[0]

  @cache.setter
  def cache(self, cache: Cache) -> None:
    self._state = cache, self._state[1]

  @property
  def chunk_limits(self) -> tuple[tuple[int, int], ...]:
    """Alternative limits of a step: (number of chunks, tokens per chunk)."""
    capacity = self.capacity
    if not capacity.batch_invariant:
      return tuple(buckets.chunk_sizes(capacity.chunk, capacity.batch))
    # With batch invariance each row of a step reads one token. Rows of one
    # sequence can read its pages, but only one can read its recurrent state.
    most = 1 if self.cache_shape.states else capacity.batch
    return ((capacity.batch, most),)

  @property
  def state_bytes(self) -> int:
    """Bytes of one sequence's recurrent state over all layers and ranks."""
    num_states = self.cache_shape.num_states
    return sum(x.nbytes for x in self.cache.states) // max(1, num_states)

  def step(
    self, batch: Batch, sampling: Sampling, filters: bool,
    asked: np.ndarray | None = None, params: Any = None,
  ) -> tuple[jax.Array, jax.Array, TopTokens | None]:
    """Reads a batch and draws the next token of each of its sequences.

    Args:
      batch: Numpy arrays ``[D, ...]``.
      sampling: Sampling parameters, arrays ``[D, S]``.
      filters: Whether filters that gather logits, such as top-k, apply; selects
        the program.
      asked: Nonzero for sequences that need the most probable tokens, int32
        ``[D, S]``; None selects a program that does not compute them.
      params: Parameters that the program reads, in the format of `weights`;
        None for those of `weights`.

    Returns:
      The tokens int32 ``[D, S]``, their log-probabilities float32 ``[D, S]``,
      and the most probable tokens ``[D, S, k]`` or None, as asynchronously
      computed arrays.
    """
    shape, packed, types = self._inputs(batch, sampling, filters, asked)
    if params is None:
      params = self.weights.params
    if shape not in self.shapes:
      self.before_compile()
    start = time.perf_counter()
    tokens, logprobs, self._state, top = self._run(
      params, self._state, packed, types=types, filters=filters
    )
    if shape not in self.shapes:
      self.shapes.add(shape)
      self.compile_seconds += time.perf_counter() - start
    return tokens, logprobs, top

  def compile(
    self, batch: Batch, sampling: Sampling, filters: bool,
    asked: np.ndarray | None = None,
  ) -> None:
    """Compiles the program of a `step`, without weights and without a cache.

    Steps with these sizes then execute it, if their parameters have the shapes
    and shardings of `weights`. Another thread may use the devices meanwhile.

    Args:
      batch: Batch with the shapes that `step` will get. The values of this and
        of the other arrays have no effect.
      sampling: Sampling parameters, arrays ``[D, S]``.
      filters: Whether filters that gather logits apply.
      asked: int32 ``[D, S]``, or None.
    """
    shape, packed, types = self._inputs(batch, sampling, filters, asked)
    state = abstract_state(self.program, self.capacity, self.cache_shape)
    self._run.lower(
      self.weights.params, state, packed, types=types, filters=filters
    ).compile()
    self.shapes.add(shape)

  def is_compiled(
    self, batch: Batch, sampling: Sampling, filters: bool,
    asked: np.ndarray | None = None,
  ) -> bool:
    """Returns whether the program for these arguments has been compiled."""
    return self._inputs(batch, sampling, filters, asked)[0] in self.shapes

  def _inputs(
    self, batch: Batch, sampling: Sampling, filters: bool,
    asked: np.ndarray | None,
  ) -> tuple[Any, np.ndarray, Any]:
    """Returns a step's key in `shapes`, its packed inputs, and their types.

    The packed inputs are an int32 array ``[*levels, n]``, with the levels of
    data-parallel ranks; the types are the static description that unpacks them.
    """
    if not self.cache_shape.states:
      batch = dataclasses.replace(batch, states=None)
    leaves, tree = jax.tree.flatten((batch, sampling, asked))
    types = tuple((x.shape[1:], x.dtype.name) for x in leaves), tree
    sizes = tuple(x.shape for x in jax.tree.leaves(batch))
    dims = self.program.layout.batch_dims[1:]  # without workers
    # All inputs in one array: the transfer time is per array, not per byte.
    packed = _packed(leaves).reshape(*dims, -1)
    shape = sizes, batch.num_decodes, filters, asked is not None
    return shape, packed, types


def _allocate(
  program: Program, capacity: Capacity, cache_shape: CacheShape
) -> tuple[Cache, jax.Array]:
  """Allocates `empty_state` on the mesh.

  Raises:
    ValueError: The memory does not suffice.
  """
  specs = state_specs(program, cache_shape)
  make = jax.jit(
    functools.partial(empty_state, program, capacity, cache_shape),
    out_shardings=program.layout.shardings(specs),
  )
  try:
    return make()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise ValueError(
      f"the cache of a rank takes {cache_shape.size_bytes / 1e9:,.1f} GB, more "
      f"than is available: {cache_shape.num_pages:,} pages of "
      f"{cache_shape.page_size} positions; set config.inference.pages, or "
      f"reduce batch={capacity.batch} or context={capacity.context}"
    ) from error


def _packed(leaves: Sequence[np.ndarray]) -> np.ndarray:
  """Concatenates arrays ``[D, ...]`` of 4-byte elements to int32 ``[D, n]``."""
  return np.concatenate(
    [np.reshape(x, (len(x), -1)).view(np.int32) for x in leaves], axis=1
  )


def _make_packed_step(
  step: Callable[..., Any], num_replicas: int,
  compiler_options: dict[str, bool | str],
) -> Callable[..., Any]:
  """Returns a jitted step that takes batch and sampling as one packed array.

  Args:
    step: Result of `make_step`.
    num_replicas: D.
    compiler_options: XLA options of the step's programs.

  Returns:
    A function ``(params, state, packed, types, filters) -> (tokens [D, S],
    logprobs [D, S], state, top)``; ``top`` is as in `Decoder.step`. ``types``
    describes the arrays of one replica: a tuple of pairs (shape, dtype name),
    and the tree whose leaves they are.
  """

  @functools.partial(
    jax.jit, static_argnames=("types", "filters"), donate_argnums=1,
    compiler_options=compiler_options,
  )
  def run(params, state, packed, types, filters):
    arrays, tree = types
    found, start = [], 0
    for shape, dtype in arrays:
      x = packed[..., start : start + math.prod(shape)]
      start += math.prod(shape)
      x = lax.bitcast_convert_type(x, dtype)
      found.append(x.reshape(*packed.shape[:-1], *shape))
    tokens, logprobs, state, top = step(
      params, state, *tree.unflatten(found), filters=filters
    )
    tokens, logprobs, top = jax.tree.map(
      lambda x: x.reshape(num_replicas, *x.shape[packed.ndim - 1 :]),
      (tokens, logprobs, top),
    )
    return tokens, logprobs, state, top

  return run


def replica_spec(program: Program) -> P:
  """Returns the partition spec of arrays whose first dims are the replicas'."""
  return P(*(axis.name for axis in program.layout.data))


def empty_state(
  program: Program, capacity: Capacity, cache_shape: CacheShape
) -> tuple[Cache, jax.Array]:
  """Returns the state of a decoder: cache, and newest token of each sequence.

  Returns:
    The cache with arrays ``[*levels, ranks, ...]``, and the newest tokens,
    int32 ``[*levels, batch]``, with the levels of data-parallel ranks and the
    tensor ranks.
  """
  dims = program.layout.batch_dims[1:]
  lead = (*dims, program.layout.tensor.size)
  pages, states = jax.tree.map(
    lambda x: jnp.zeros((*lead, *x.shape), x.dtype),
    (cache_shape.pages(), cache_shape.state_arrays()),
  )
  latest = jnp.zeros((*dims, capacity.batch), jnp.int32)
  return Cache(pages, cache_shape, states), latest


def abstract_state(
  program: Program, capacity: Capacity, cache_shape: CacheShape
) -> tuple[Cache, Any]:
  """Returns the shapes and shardings of `empty_state`."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(lambda: empty_state(program, capacity, cache_shape)),
    program.layout.shardings(state_specs(program, cache_shape)),
  )


def state_specs(program: Program, cache_shape: CacheShape) -> Any:
  """Returns the partition specs of `empty_state`."""
  levels = replica_spec(program)
  of_cache = P(*levels, program.layout.tensor.name)
  pages, states = jax.tree.map(
    lambda _: of_cache, (cache_shape.pages(), cache_shape.state_arrays())
  )
  return Cache(pages, cache_shape, states), levels


def make_step(
  program: Program, weights: Weights, cache_shape: CacheShape,
  nanobatches: NanobatchRule | None = None,
):
  """Returns the jitted step, which donates the cache and the newest tokens.

  ``nanobatches`` cuts a step's tokens into nano-batches
  (`caatnet.models.lm.pieces`).

  Returns:
    A function ``(params, state, batch, sampling, asked, filters) -> (tokens,
    logprobs, state, top)``; ``asked`` and ``top`` may be None, see
    `Decoder.step`.
  """
  layout, model = program.layout, program.model
  num_levels = len(layout.data)

  def of_replica(params, state, batch, sampling, asked, filters):
    cache, latest = state
    d = batch.num_decodes
    known = batch.tokens[:d]
    # A token of -1, not known to the host yet, is the newest one of its slot.
    newest = latest[jnp.maximum(batch.sequences[:d], 0)]
    tokens = batch.tokens.at[:d].set(jnp.where(known < 0, newest, known))
    logits, cache = model.decode(
      params, cache, dataclasses.replace(batch, tokens=tokens), weights.access,
      nanobatches,
    )
    drawn, logprobs = sample(
      logits, model.token_ids(), batch.positions[batch.rows], sampling,
      layout.tensor, filters,
    )
    top = None if asked is None else (
      top_logprobs(logits, model.token_ids(), layout.tensor, asked)
    )
    # Rows without a sequence get an index out of range: `set` drops them.
    kept = jnp.where(batch.sequences < 0, latest.shape[0], batch.sequences)
    latest = latest.at[kept].set(drawn, mode="drop")
    return drawn, logprobs, (cache, latest), top

  def step(params, state, batch, sampling, asked, filters):
    f = functools.partial(of_replica, params, filters=filters)
    args = state, batch, sampling, asked
    lanes = jax.tree.leaves(batch)[0].shape[:num_levels]
    if math.prod(lanes) == 1:  # one replica per device needs no vmap
      args = _map_except_pages(lambda x: x.reshape(x.shape[num_levels:]), args)
      return _map_except_pages(lambda x: x.reshape(*lanes, *x.shape), f(*args))
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[num_levels:]), args)
    out = jax.vmap(f)(*merged)
    return jax.tree.map(lambda x: x.reshape(*lanes, *x.shape[1:]), out)

  levels = replica_spec(program)
  specs = state_specs(program, cache_shape)

  @functools.partial(
    jax.jit, static_argnames="filters", donate_argnums=1,
  )
  def run(params, state, batch, sampling, asked=None, *, filters):
    return jax.shard_map(
      functools.partial(step, filters=filters),
      mesh=layout.mesh,
      in_specs=(weights.specs, specs, levels, levels, levels),
      out_specs=(levels, levels, specs, levels),
    )(params, state, batch, sampling, asked)

  return run


def _map_except_pages(f: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
  """Maps a tree's arrays by `f`, except pages of caches with `keeps_dims`."""

  def of_cache(x):
    if not isinstance(x, Cache) or not x.shape.keeps_dims:
      return jax.tree.map(f, x)
    return dataclasses.replace(
      jax.tree.map(f, dataclasses.replace(x, pages=())), pages=x.pages
    )

  return jax.tree.map(of_cache, tree, is_leaf=lambda x: isinstance(x, Cache))


def make_forward(
  program: Program, weights: Weights, cache_shape: CacheShape,
  nanobatches: NanobatchRule | None = None,
) -> Callable[..., tuple[jax.Array, Cache]]:
  """Returns a jitted step that returns logits instead of drawing tokens.

  Returns:
    A function ``(params, cache, batch) -> (logits, cache)`` that donates the
    cache, arrays ``[*levels, ranks, ...]``, with the levels of data-parallel
    ranks and the tensor ranks. The logits are float32 ``[*levels, ranks, n,
    V]``: n tokens in ``batch.rows``, V tokens of a rank's vocabulary.
  """
  levels = replica_spec(program)
  specs = state_specs(program, cache_shape)[0]

  def forward(params, cache, batch):
    f = functools.partial(
      program.model.decode, params, access=weights.access,
      nanobatches=nanobatches,
    )
    for _ in program.layout.data:
      f = jax.vmap(f)
    return f(cache, batch)

  return jax.jit(
    jax.shard_map(
      forward,
      mesh=program.layout.mesh,
      in_specs=(weights.specs, specs, levels),
      out_specs=(P(*levels, program.layout.tensor.name), specs),
    ),
    donate_argnums=1,
    compiler_options=program.layout.compiler_options(nanobatches is not None),
  )
