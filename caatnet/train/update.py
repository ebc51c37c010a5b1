"""Update of a training step: in the device's program, or on the host.

`DeviceUpdate` is the default: one program computes gradients and new weights.
With `HostUpdate` the program ends with the clipped gradients. They are copied
to the host, all at the same time, and the update of a parameter starts when
its gradient has arrived. Master weights and moments are in memory of the host
that is placed on tiers (`parallel.memory.host_optimizer`), and each new weight
is sent to the device at once.

Checkpoints of both have the same arrays, so a run can change the update, the
tiers and the number of threads when it resumes. Tiers and threads change no
bit; the update on the host rounds as optax does outside of `jax.jit`.

The buffer has 12 bytes per parameter; gradients that have arrived take 4 more
during a step.
"""

from collections.abc import Callable, Mapping
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import optax

from caatnet.program import Program
from caatnet.train.state import TrainState
from caatnet.train.step import Metrics, make_gradient_step, make_train_step
from parallel.memory.host_optimizer import AdamW, HostOptimizer
from parallel.memory.placed_buffer import Tier

# A compiled program of a step.
Compiled = Callable[..., Any]
# Arrays of the host's optimizer. A gradient stays in the memory to which it was
# copied from the device.
ARRAYS = ("weights", "first", "second")


@dataclasses.dataclass(frozen=True)
class DeviceUpdate:
  """Update in the device's program."""

  make_step = staticmethod(make_train_step)

  def open(
    self, program: Program, learning_rate: optax.Schedule
  ) -> "DeviceUpdate":
    """Returns the steps of a run, which need nothing from the host."""
    return self

  def load(self, state: TrainState) -> TrainState:
    """Returns the state from which the first step starts, unchanged."""
    return state

  def run(
    self, compiled: Compiled, state: TrainState, batch: Any, numbers: Any
  ) -> tuple[TrainState, Metrics]:
    """Runs a step of `make_train_step`, which donates the state."""
    return compiled(state, batch, numbers)


@dataclasses.dataclass(frozen=True)
class HostUpdate:
  """Update by AdamW on the host, of one worker in one process.

  Attributes:
    settings: Hyperparameters, without clipping, which the device does.
    placement: Array of ``ARRAYS`` -> tier -> fraction of its bytes; arrays that
      are missing are on the first NUMA node.
    num_threads: Largest number of threads; None for all cores.
  """

  settings: AdamW
  placement: Mapping[str, Mapping[Tier, float]]
  num_threads: int | None = None

  make_step = staticmethod(make_gradient_step)

  def open(
    self, program: Program, learning_rate: optax.Schedule
  ) -> "HostSteps":
    """Allocates master weights and moments.

    Raises:
      ValueError: A tier does not exist or lacks space, shares do not sum to 1,
        or numba is not installed.
      OSError: The system refuses.
    """
    return HostSteps(self, program, learning_rate)


class HostSteps:
  """Steps of a run whose state, except for weights, is on the host.

  Attributes:
    optimizer: Master weights and moments, float32 ``[N]``; stored parameters
      follow one another in the order of the tree's leaves, each with the parts
      of all ranks.
  """

  def __init__(
    self, update: HostUpdate, program: Program, learning_rate: optax.Schedule
  ) -> None:
    leaves, self._structure = jax.tree.flatten(program.stored_shapes)
    self._shapes = [(1, *leaf.shape) for leaf in leaves]  # of one worker
    ends = itertools.accumulate((leaf.size for leaf in leaves), initial=0)
    self._ranges = list(itertools.pairwise(ends))
    self._learning_rate = learning_rate
    self.optimizer = HostOptimizer(
      self._ranges[-1][1], update.settings, update.placement, arrays=ARRAYS,
      num_threads=update.num_threads,
      decayed=[
        found for found, decays in zip(
          self._ranges, jax.tree.leaves(program.decays), strict=True
        ) if decays
      ],
    )

  def load(self, state: TrainState) -> TrainState:
    """Copies master weights and moments of a state to the host's memory.

    Args:
      state: Initial or restored training state.

    Returns:
      The state, whose moments are views of that memory. Each step changes them.
    """
    host = self.optimizer
    host.count = int(state.step)
    get = optax.tree_utils.tree_get
    for there, here in (
      (state.params, host.weights),
      (get(state.opt_state, "mu"), host.first),
      (get(state.opt_state, "nu"), host.second),
    ):
      for x, view in zip(
        jax.tree.leaves(there), self._views(here), strict=True
      ):
        view[:] = x
    return self._after(state, state.params)

  def run(
    self, compiled: Compiled, state: TrainState, batch: Any, numbers: Any
  ) -> tuple[TrainState, Metrics]:
    """Runs a step of `make_gradient_step`, and updates the state."""
    grads, metrics = compiled(state, batch, numbers)
    grads = jax.tree.leaves(grads)
    for grad in grads:
      grad.copy_to_host_async()
    host, params = self.optimizer, []
    host.begin(float(self._learning_rate(host.count)))
    for grad, (start, _), weights in zip(
      grads, self._ranges, self._views(host.weights), strict=True
    ):
      host.update(start, np.asarray(grad).ravel())  # waits for this gradient
      # Copied, since arrays of XLA:CPU can share the memory of their argument.
      params.append(jax.device_put(weights.copy(), grad.sharding))
    host.end()
    return self._after(state, self._structure.unflatten(params)), metrics

  def _views(self, array: np.ndarray) -> list[np.ndarray]:
    """Returns views ``[1, ...]`` of an array ``[N]``, one per parameter."""
    return [
      array[start:stop].reshape(shape)
      for (start, stop), shape in zip(self._ranges, self._shapes, strict=True)
    ]

  def _after(self, state: TrainState, params: Any) -> TrainState:
    """Returns the state with new parameters, the step and views of moments."""
    host = self.optimizer
    count = np.int32(host.count)
    mu, nu = (
      self._structure.unflatten(self._views(array))
      for array in (host.first, host.second)
    )
    return state._replace(
      step=jax.device_put(count, state.step.sharding), params=params,
      opt_state=optax.tree_utils.tree_set(
        state.opt_state, mu=mu, nu=nu, count=np.full(1, count)
      ),
    )
