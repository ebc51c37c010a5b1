"""Evaluates given parameters on validation data, on any mesh."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from caatnet.program import Layout, Program
from caatnet.train.step import make_eval_step
from parallel.memory.features import Lookup


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The mean scores of an evaluation.

  Attributes:
    means: For each score its mean over examples and over all other dims.
    per_place: For each score its mean over examples only, float32 ``[...]``:
      ``[T]`` for the loss of text, one number ``[]`` for an image.
    num_examples: The number of examples that were evaluated.
  """

  means: Mapping[str, float]
  per_place: Mapping[str, np.ndarray]
  num_examples: int

  @property
  def loss(self) -> float:
    """The mean loss, in nats."""
    return self.means["loss"]


def put_batch(layout: Layout, batch: Any) -> Any:
  """Lays a global batch out on the mesh.

  Every process holds the whole batch and puts its own part on its devices.

  Args:
    layout: Mesh, workers and data-parallel ranks.
    batch: Tree of arrays or `Lookup`s ``[batch, ...]``.

  Returns:
    A tree of arrays ``[workers, *levels, batch per rank, ...]``; integers as
    int32.
  """
  return prepare_batch(layout, batch)()


def prepare_batch(layout: Layout, batch: Any) -> Callable[[], Any]:
  """Does what the host has to do before a batch is laid out.

  This may run in a thread, as nothing is dispatched.

  Args:
    layout: As of `put_batch`.
    batch: As of `put_batch`.

  Returns:
    A function that returns what `put_batch` does.
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
  """Pads examples with zeros, or those of a lookup with any rows."""
  if isinstance(x, Lookup):
    return x.padded(size)
  return np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])


def make_evaluate(
  program: Program, batch_size: int
) -> Callable[[Any, Any], Evaluation]:
  """Makes a function that evaluates parameters on examples.

  Args:
    program: The model on a mesh.
    batch_size: Examples at a time, a multiple of workers x data-parallel ranks.

  Returns:
    A function ``(params, examples) -> Evaluation`` of parameters without worker
    dim and a tree of examples ``[N, ...]``.
  """
  step = make_eval_step(program)
  num_dims = len(program.layout.batch_dims)

  def evaluate(params: Any, examples: Any) -> Evaluation:
    num_examples = len(jax.tree.leaves(examples)[0])
    found: list[dict[str, np.ndarray]] = []
    for start in range(0, num_examples, batch_size):
      rows = jax.tree.map(lambda x: x[start : start + batch_size], examples)  # noqa: B023
      count = min(batch_size, num_examples - start)
      # The last batch is padded to full size, which is the only one that is
      # compiled; scores of the padding are dropped.
      padded = jax.tree.map(lambda x: _padded(x, batch_size), rows)
      scores = jax.device_get(step(params, put_batch(program.layout, padded)))
      found.append({
        name: x.reshape(batch_size, *x.shape[num_dims + 1 :])[:count]
        for name, x in scores.items()
      })
    scores = {
      name: np.concatenate([part[name] for part in found]) for name in found[0]
    }
    return Evaluation(
      # In float64: a float32 sum over many examples would round.
      means={
        name: float(x.mean(dtype=np.float64)) for name, x in scores.items()
      },
      per_place={name: x.mean(axis=0) for name, x in scores.items()},
      num_examples=num_examples,
    )

  return evaluate
