"""Asynchronous transfer of a step's metrics to the host.

With one process, the host never waits for the step that it has just dispatched.
With several, metrics of other processes' workers are gathered for several steps
at once, so that workers that communicate rarely do not wait for each other in
every step.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

# Number of a step, and its metrics [workers] by name.
StepMetrics = tuple[int, dict[str, Any]]


class MetricsQueue:
  """Queue of metrics that the host has not read yet, in the order of steps."""

  def __init__(self) -> None:
    # Metrics that this process can read, and those of other processes' workers.
    self._here: list[StepMetrics] = []
    self._elsewhere: list[StepMetrics] = []

  def add(self, step: int, metrics: dict[str, jax.Array], due: bool) -> None:
    """Adds a step's metrics; may wait until this or an earlier step has ended.

    Args:
      step: The number of updates made.
      metrics: Arrays ``[workers]``, which may not be computed yet.
      due: Whether to gather the metrics of all steps so far from other
        processes, which waits for this step. The gather is a collective, so
        ``due`` must be equal on all processes.
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
      # The next step does not depend on this program. On CPUs the collectives
      # of both, if run concurrently, could deadlock.
      everywhere = jax.block_until_ready(_make_replicate(mesh)(trees))
      self._here += zip(steps, everywhere, strict=True)
      self._elsewhere = []

  def take(self) -> list[StepMetrics]:
    """Removes and returns the steps and metrics that the host can read."""
    found = [
      (step, {name: np.asarray(x) for name, x in metrics.items()})
      for step, metrics in self._here
    ]
    self._here = []
    return found


@functools.cache
def _make_replicate(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  """Returns a jitted function that replicates metrics on all devices."""
  everywhere = NamedSharding(mesh, P())

  def gathered(trees):
    leaves, structure = jax.tree.flatten(trees)
    # Stacked to one array, so that there is one collective.
    stacked = jax.lax.with_sharding_constraint(jnp.stack(leaves), everywhere)
    return jax.tree.unflatten(structure, list(stacked))

  return jax.jit(gathered, out_shardings=everywhere)
