"""Who is heard in an exchange: a worker that has diverged is left out of it.

A worker's difference, what it would tell the others, is judged by its norm. The
worker is left out if that norm is not finite, or if it is more than *factor*
times the median of all workers' finite norms. Of an even number of norms the
lower middle one is the median, so that of two workers the larger norm is the
suspect. At least one worker with a finite norm is heard.

Whoever is left out counts nothing in the mean, and goes on from the outer
parameters with a new inner optimizer. If no norm is finite, nothing healthy is
left: the mean is NaN, as without this rule, and the run ends with an error.

An exchange sends 4 bytes more for each worker, its norm, and reads the
differences once more to compute it.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import after, all_gather, ranks_here
from parallel.outer.base import Params, State

# Maps a tree [W, ...], whose leaves have the paths of parameters, to each
# worker's norm [W], over all ranks and each logical element counted once.
Norm = Callable[[Params], jax.Array]


class Verdict(NamedTuple):
  """Who is heard.

  Attributes:
    heard: float32 ``[workers]``, 1 for who is heard and else 0; the same on all
      devices.
    norms: float32 ``[W]``, the norms of this device's workers.
    mine: bool ``[W]``, which of this device's workers are heard.
  """

  heard: jax.Array
  norms: jax.Array
  mine: jax.Array


def norms_here(tree: Params) -> jax.Array:
  """Returns each worker's norm ``[W]``, where no other axis cuts parameters."""
  return jnp.sqrt(sum(
    jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)))
    for x in jax.tree.leaves(tree)
  ))


@dataclasses.dataclass(frozen=True)
class Rule:
  """By what workers are judged.

  Attributes:
    norm: Computes their norms.
    outlier_factor: How many times the median of all norms a worker's may be;
      0 for any finite norm.
    ordered: Whether what follows the norms, which are sent over other axes,
      too, is ordered after them by data flow, which XLA:CPU needs
      (`parallel.collectives.after`).
  """

  norm: Norm = norms_here
  outlier_factor: float = 0.0
  ordered: bool = False

  def judge(self, deltas: Params, worker: Axis) -> Verdict:
    """Decides whose differences are heard.

    Args:
      deltas: The workers' differences ``[W, ...]``.
      worker: The worker axis.
    """
    norms = self.norm(deltas)
    norms_of_all = all_gather(norms[:, None], worker)
    heard = healthy(norms_of_all, self.outlier_factor)
    return Verdict(
      heard.astype(jnp.float32), norms, heard[ranks_here(worker)]
    )

  def then(self, tree: Params, told: jax.Array) -> Params:
    """Returns the tree, to be sent after what the norms have told."""
    return after(tree, told, self.ordered)


# Only a norm that is not finite is sick.
ANY_FINITE = Rule()


def healthy(norms: jax.Array, factor: float) -> jax.Array:
  """Returns which norms ``[n, ...]`` are healthy among these n, as booleans."""
  finite = jnp.isfinite(norms)
  if not factor:
    return finite
  ascending = jnp.sort(jnp.where(finite, norms, jnp.inf), axis=0)
  middle = jnp.maximum(jnp.sum(finite, axis=0, keepdims=True) - 1, 0) // 2
  median = jnp.take_along_axis(ascending, middle, axis=0)
  # Where most have not moved at all, moving is no sign of sickness.
  return finite & ((norms <= factor * median) | (median == 0))


def init(worker: Axis) -> dict[str, jax.Array]:
  """Returns what is told of each worker, under "workers" of a loop's state.

  Returns:
    "delta_norm", the norm at the last exchange, and "left_out", the number of
    exchanges that the worker was left out of; each ``[workers]``.
  """
  return {
    "delta_norm": jnp.zeros(worker.size),
    "left_out": jnp.zeros(worker.size, jnp.int32),
  }


def noted(workers: State, norms: jax.Array, mine: jax.Array) -> State:
  """Returns the part "workers" of a state after an exchange.

  Args:
    workers: That part before.
    norms: The norms of this device's workers ``[W]``.
    mine: Which of them were heard, bool ``[W]``.
  """
  left_out = workers["left_out"] + ~mine
  return workers | {"delta_norm": norms, "left_out": left_out}


def choose(mine: jax.Array, this: Params, that: Params) -> Params:
  """Returns, for each worker, its part of one of two trees ``[W, ...]``.

  What is not chosen may be NaN.

  Args:
    mine: bool ``[W]``: whether to take ``this``.
    this: A tree of ``[W, ...]``.
    that: A tree of ``[W, ...]``.
  """
  pick = jax.vmap(jnp.where)
  return jax.tree.map(lambda x, y: pick(mine, x, y), this, that)


def weights_of(
  weights: tuple[float, ...], heard: jax.Array | None, worker: Axis
) -> Any:
  """Returns the weights in a mean, float32 ``[workers]``; None if all are 1.

  Args:
    weights: One weight per worker, such as its number of tokens; empty for
      equal ones.
    heard: float32 ``[workers]``, 1 for who is heard and else 0; None for all.
    worker: The worker axis.
  """
  if not weights and heard is None:
    return None
  found = jnp.asarray(weights or (1.0,) * worker.size, jnp.float32)
  return found if heard is None else found * heard


def sent_bytes(worker: Axis) -> dict[str, int]:
  """Returns the operand bytes of a verdict, per device, by dtype."""
  return {} if worker.devices == 1 else {"float32": 4 * worker.lanes}
