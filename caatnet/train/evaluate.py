"""Evaluation of given parameters on validation data, on any mesh."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.models.protocol import Score, WeightedScore
from caatnet.program import Layout, Program
from caatnet.train import gradients
from parallel.memory.features import Lookup


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Mean scores of an evaluation.

  Attributes:
    means: Mean of each score over examples and all other dims, by name.
    per_place: Mean of each score over examples only, float32 ``[...]``: ``[T]``
      for the loss of texts with T positions, a scalar ``[]`` for images; NaN
      where no example has an element.
    counts: Number of elements of each mean in ``per_place``.
    num_examples: The number of examples that were evaluated.
  """

  means: Mapping[str, float]
  per_place: Mapping[str, np.ndarray]
  counts: Mapping[str, np.ndarray]
  num_examples: int

  @property
  def loss(self) -> float:
    """Mean loss in nats."""
    return self.means["loss"]


def put_batch(layout: Layout, batch: Any) -> Any:
  """Puts a global batch on the devices of the mesh.

  Every process holds the whole batch and transfers the part of its devices.

  Args:
    layout: Mesh, workers and data-parallel ranks.
    batch: Tree of arrays or `Lookup`s ``[batch, ...]``.

  Returns:
    A tree of arrays ``[workers, *levels, batch per rank, ...]``, with a dim per
    level of data-parallel ranks; integers as int32.
  """
  return prepare_batch(layout, batch)()


def prepare_batch(layout: Layout, batch: Any) -> Callable[[], Any]:
  """Prepares a batch on the host for its transfer to devices.

  This may run in a thread, since it dispatches nothing to devices.

  Args:
    layout: Mesh, workers and data-parallel ranks.
    batch: Tree of arrays or `Lookup`s ``[batch, ...]``.

  Returns:
    A function without arguments that returns the result of `put_batch`.
  """
  sharding = layout.shardings(layout.batch_spec)

  def prepare(x: np.ndarray | Lookup) -> Callable[[], jax.Array]:
    if isinstance(x, Lookup):
      return x.prepare(layout.batch_dims, sharding)
    if np.issubdtype(x.dtype, np.integer):
      x = x.astype(np.int32)
    shaped = x.reshape(*layout.batch_dims, -1, *x.shape[1:])
    return lambda: jax.make_array_from_callback(
      shaped.shape, sharding, lambda index: shaped[index]
    )

  prepared = jax.tree.map(prepare, batch)
  return lambda: jax.tree.map(lambda put: put(), prepared)


def _padded(x: np.ndarray | Lookup, size: int) -> np.ndarray | Lookup:
  """Pads an array with zeros, or a lookup with id 0, to ``size`` examples."""
  if isinstance(x, Lookup):
    return x.padded(size)
  return np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])


def make_scores(
  program: Program, batch_size: int
) -> Callable[[Any, Any], dict[str, Any]]:
  """Returns a function that computes the scores of each example.

  Args:
    program: The model on a mesh.
    batch_size: Examples per step, a multiple of workers x data-parallel ranks.

  Returns:
    A function ``(params, examples) -> scores``; ``params`` have no worker dim,
    ``examples`` is a tree of arrays ``[N, ...]``, and a score is float32
    ``[N, ...]``, or a `WeightedScore` of such arrays.
  """
  step = make_eval_step(program)
  num_dims = len(program.layout.batch_dims)

  def scores(params: Any, examples: Any) -> dict[str, Any]:
    num_examples = len(jax.tree.leaves(examples)[0])
    found: list[dict[str, Any]] = []
    for start in range(0, num_examples, batch_size):
      rows = jax.tree.map(lambda x: x[start : start + batch_size], examples)  # noqa: B023
      count = min(batch_size, num_examples - start)
      # The last batch is padded, so that only one batch size is compiled;
      # scores of the padding are dropped.
      padded = jax.tree.map(lambda x: _padded(x, batch_size), rows)
      part = jax.device_get(step(params, put_batch(program.layout, padded)))
      found.append(jax.tree.map(
        lambda x: x.reshape(batch_size, *x.shape[num_dims + 1 :])[:count],  # noqa: B023
        part,
      ))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

  return scores


def make_evaluate(
  program: Program, batch_size: int
) -> Callable[[Any, Any], Evaluation]:
  """Returns a function that evaluates parameters on examples.

  Args:
    program: The model on a mesh.
    batch_size: Examples per step, a multiple of workers x data-parallel ranks.

  Returns:
    A function ``(params, examples) -> Evaluation`` with the arguments of
    `make_scores`.
  """
  make = make_scores(program, batch_size)

  def evaluate(params: Any, examples: Any) -> Evaluation:
    scores = make(params, examples)
    return Evaluation(
      # In float64, to avoid rounding errors of sums over many examples.
      means={
        name: float(_mean(x, dtype=np.float64)) for name, x in scores.items()
      },
      per_place={name: _mean(x, axis=0) for name, x in scores.items()},
      counts={
        name: x.count.sum(axis=0) if isinstance(x, WeightedScore)
        else np.full(x.shape[1:], len(x)) for name, x in scores.items()
      },
      num_examples=len(jax.tree.leaves(examples)[0]),
    )

  return evaluate


def _mean(score: Score, **options: Any) -> Any:
  """Returns the mean of a score; ``options`` are those of ``np.sum``."""
  if isinstance(score, WeightedScore):
    total, count = (np.asarray(x).sum(**options) for x in score)
    with np.errstate(invalid="ignore"):  # a place without elements has no mean
      return total / count
  return score.mean(**options)


def make_eval_step(program: Program) -> Callable[[Any, Any], Any]:
  """Returns a jitted function that computes the scores of a batch.

  Args:
    program: The model on a mesh.

  Returns:
    A function ``(params, batch) -> scores``. Parameters have no worker dim; the
    batch is ``[workers, *levels, batch per rank, ...]``, with a dim per level
    of data-parallel ranks. Scores are float32 arrays with the same leading
    dims, or `WeightedScore`.
  """
  layout, num_dims = program.layout, len(program.layout.batch_dims)

  def evaluate(params, batch):
    workers, *lanes, size = jax.tree.leaves(batch)[0].shape[: num_dims + 1]
    # All workers evaluate the same parameters. These have one shard per lane of
    # the data levels and no worker dim, so the batch becomes [D, W * B, ...].
    def joined(x):
      x = jnp.moveaxis(x, 0, num_dims - 1)
      return x.reshape(-1, workers * size, *x.shape[num_dims + 1 :])

    def apart(x):
      x = x.reshape(*lanes, workers, size, *x.shape[2:])
      return jnp.moveaxis(x, num_dims - 1, 0)

    batch = jax.tree.map(joined, batch)
    found = gradients.scores(program, params, batch, num_lead=1)
    return jax.tree.map(apart, found)

  mapped = jax.shard_map(
    evaluate,
    mesh=layout.mesh,
    in_specs=(program.specs, layout.batch_spec),
    out_specs=layout.batch_spec,
  )

  def replicated(params, batch):
    leaves, tree = jax.tree.flatten(mapped(params, batch))
    lead = leaves[0].shape[: num_dims + 1]
    # Gathered as one array: the gathers of several arrays over several axes
    # would be unordered (`parallel.collectives.order_after`).
    joined = jnp.concatenate([x.reshape(*lead, -1) for x in leaves], axis=-1)
    joined = lax.with_sharding_constraint(joined, layout.shardings(P()))
    sizes = [math.prod(x.shape[num_dims + 1 :]) for x in leaves]
    parts = jnp.split(joined, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    return tree.unflatten(
      part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)
    )

  # Replicated, so that every process can read all scores.
  return jax.jit(
    replicated, out_shardings=layout.shardings(P()),
    compiler_options=layout.compiler_options(),
  )
