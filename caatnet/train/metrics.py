"""Brings a step's metrics to the host while later steps run.

The host never waits for the step that it has just dispatched. Where workers are
on other processes, their metrics are sent here, those of several steps at once:
workers that hardly talk shall not meet in every step for a loss.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

# Of one step: its number, and each metric [workers] by its name.
Step = tuple[int, dict[str, Any]]


class LateMetrics:
  """Metrics on their way to the host, in the order of their steps."""

  def __init__(self) -> None:
    self._here: list[Step] = []
    self._elsewhere: list[Step] = []

  def add(self, step: int, metrics: dict[str, jax.Array], due: bool) -> None:
    """Adds what a step returned; waits for the step before it at most.

    Args:
      step: The number of updates made.
      metrics: Arrays ``[workers]``, which need not be computed yet.
      due: Whether all metrics so far are to be here soon; the same on all
        processes.
    """
    if all(
      x.is_fully_addressable or x.is_fully_replicated for x in metrics.values()
    ):
      self._here.append((step, metrics))
      return
    if self._elsewhere:  # keeps the host one step ahead of this device
      jax.block_until_ready(self._elsewhere[-1])
    self._elsewhere.append((step, metrics))
    if due:
      steps, trees = zip(*self._elsewhere, strict=True)
      mesh = next(iter(metrics.values())).sharding.mesh
      self._here += zip(steps, _to_all(mesh)(trees), strict=True)
      self._elsewhere = []

  def take(self) -> list[Step]:
    """Waits for the metrics that were due; returns and forgets them."""
    found = [
      (step, {name: np.asarray(x) for name, x in metrics.items()})
      for step, metrics in self._here
    ]
    self._here = []
    return found


@functools.cache
def _to_all(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  """Makes the function that gives all devices the metrics of some steps."""
  everywhere = NamedSharding(mesh, P())

  def gathered(trees):
    leaves, structure = jax.tree.flatten(trees)
    # One array, so that there is one collective.
    stacked = jax.lax.with_sharding_constraint(jnp.stack(leaves), everywhere)
    return jax.tree.unflatten(structure, list(stacked))

  return jax.jit(gathered, out_shardings=everywhere)
