"""Exclusion of diverged workers from the mean of an exchange.

The rule compares the norms of the workers' deltas, their contributions to the
mean. A worker is excluded if its norm is not finite, or if it is more than
*factor* times the median of all workers' finite norms. For an even number of
norms the median is the lower of the two middle ones, so that of two workers
only the one with the larger norm can be excluded. Of the workers with finite
norms, at least one is always included.

An excluded worker has zero weight in the mean and continues from the outer
parameters with a new inner optimizer. If no norm is finite, no healthy worker
is left: the mean is NaN, as without this rule, and the run ends with an error.

An exchange sends 4 more bytes per worker, its norm, and reads the deltas once
more to compute it.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import all_gather, order_after, ranks_here
from parallel.outer.base import Params, State

# Maps a tree [W, ...] with the paths of parameters to each worker's norm [W].
# If other axes shard or replicate parameters, each element counts once.
Norm = Callable[[Params], jax.Array]


class Verdict(NamedTuple):
  """Result of a judgment: the workers that are included in an exchange.

  Attributes:
    mask: float32 ``[workers]``, 1 for included workers and else 0; equal on
      all devices.
    norms: float32 ``[W]``, the norms of the deltas of this device's workers.
    mine: bool ``[W]``, whether each of this device's workers is included.
  """

  mask: jax.Array
  norms: jax.Array
  mine: jax.Array


def worker_norms(tree: Params) -> jax.Array:
  """Returns the norms of W workers' trees ``[W, ...]``, float32 ``[W]``.

  No axis other than that of the workers may shard the trees.
  """
  return jnp.sqrt(sum(
    jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)))
    for x in jax.tree.leaves(tree)
  ))


@dataclasses.dataclass(frozen=True)
class ExclusionRule:
  """Criterion that excludes diverged workers.

  Attributes:
    norm: Computes the norms of the workers.
    outlier_factor: Largest allowed ratio of a worker's norm to the median of
      all norms; 0 allows any finite norm.
    ordered: Whether a data dependency orders later collectives after those that
      compute the norms. XLA:CPU requires this if the norms are also reduced
      over other axes (`parallel.collectives.order_after`).
  """

  norm: Norm = worker_norms
  outlier_factor: float = 0.0
  ordered: bool = False

  def judge(self, deltas: Params, worker: Axis) -> Verdict:
    """Decides which workers' deltas the mean of an exchange includes.

    Args:
      deltas: Deltas of this device's W workers, ``[W, ...]``.
      worker: The worker axis.
    """
    norms = self.norm(deltas)
    norms_of_all = all_gather(norms[:, None], worker)
    mask = healthy(norms_of_all, self.outlier_factor)
    return Verdict(
      mask.astype(jnp.float32), norms, mask[ranks_here(worker)]
    )

  def order_after(self, tree: Params, mask: jax.Array) -> Params:
    """Returns the tree, ordered after the collectives that compute ``mask``.

    It is unchanged unless `ordered`.
    """
    return order_after(tree, mask, self.ordered)


# Excludes only workers with a norm that is not finite.
ANY_FINITE = ExclusionRule()


def healthy(norms: jax.Array, factor: float) -> jax.Array:
  """Returns which of the norms ``[n, ...]`` are healthy, as booleans.

  Args:
    norms: float32 ``[n, ...]``, one row per worker.
    factor: Largest allowed ratio to the median of the finite norms; 0 allows
      any finite norm.

  Example:
    The median of the finite norms is 2, so 50 and NaN are excluded.

    >>> healthy(jnp.array([1.0, 2.0, 50.0, jnp.nan]), factor=10.0).tolist()
    [True, True, False, False]
  """
  finite = jnp.isfinite(norms)
  if not factor:
    return finite
  ascending = jnp.sort(jnp.where(finite, norms, jnp.inf), axis=0)
  # [1, ...]: index of the lower middle one of the finite norms.
  middle = jnp.maximum(jnp.sum(finite, axis=0, keepdims=True) - 1, 0) // 2
  median = jnp.take_along_axis(ascending, middle, axis=0)
  # If the median is zero, most workers have not moved, and a nonzero norm does
  # not indicate divergence.
  return finite & ((norms <= factor * median) | (median == 0))


def init(worker: Axis) -> dict[str, jax.Array]:
  """Returns the health statistics of the workers, under "workers" of a state.

  Returns:
    "delta_norm", float32: norm of each delta at the last exchange; "left_out",
    int32: number of exchanges that excluded the worker; each ``[workers]``.
  """
  return {
    "delta_norm": jnp.zeros(worker.size),
    "left_out": jnp.zeros(worker.size, jnp.int32),
  }


def record_statistics(
  workers: State, norms: jax.Array, mine: jax.Array
) -> State:
  """Returns the part "workers" of a state with updated health statistics.

  Args:
    workers: That part before the exchange.
    norms: Norms of this device's workers, ``[W]``.
    mine: bool ``[W]``, whether each of them was included.
  """
  left_out = workers["left_out"] + (~mine).astype(jnp.int32)
  return workers | {"delta_norm": norms, "left_out": left_out}


def select_per_worker(mine: jax.Array, this: Params, that: Params) -> Params:
  """Selects one of two trees for each of this device's W workers.

  The values that are not selected may be NaN.

  Args:
    mine: bool ``[W]``: whether to take the worker's values of ``this``.
    this: Tree of ``[W, ...]``.
    that: Tree of ``[W, ...]``.
  """
  pick = jax.vmap(jnp.where)
  return jax.tree.map(lambda x, y: pick(mine, x, y), this, that)


def weights_of(
  weights: tuple[float, ...], mask: jax.Array | None, worker: Axis
) -> Any:
  """Returns the weights in a mean, float32 ``[workers]``; None if all are 1.

  Args:
    weights: One weight per worker, such as its number of tokens; empty for
      equal ones.
    mask: float32 ``[workers]``, 1 for included workers and else 0; None for
      all.
    worker: The worker axis.
  """
  if not weights and mask is None:
    return None
  found = jnp.asarray(weights or (1.0,) * worker.size, jnp.float32)
  return found if mask is None else found * mask


def sent_bytes(worker: Axis) -> dict[str, int]:
  """Returns dtype -> bytes that a device sends to the gather of all norms."""
  return {} if worker.devices == 1 else {"float32": 4 * worker.lanes}
