"""Update of a training step: in the device's program, or on the host.

`DeviceUpdate` is the default: one program computes gradients and new weights.
With `HostUpdate` the program ends with the clipped gradients. They are copied
to the host, all at the same time, and the update of a parameter starts when
its gradient has arrived. Master weights and moments are in memory tiers of the
host (`parallel.memory.host_optimizer`): NUMA nodes and memory-mapped files.
Each new weight is sent to the device as soon as it is computed.

Checkpoints of both updates have the same arrays, so a run can change the
update, the tiers and the number of threads when it resumes. Tiers and threads
do not change results; the host rounds as optax does outside of `jax.jit`.

The host's buffer has 12 bytes per parameter, or 16 if gradients are placed on
tiers, too. Gradients that have arrived take 4 more bytes per parameter during a
step, and copies of the moments take 8 more until a checkpoint is written. Each
process updates the shards of its devices on its own tiers. Parameters that no
partition cuts are updated by every process, from equal gradients.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
import numpy as np
import optax

from caatnet.program import Program
from caatnet.train.inner import Metrics
from caatnet.train.state import TrainState
from caatnet.train.step import make_gradient_step, make_train_step
from parallel.memory.host_optimizer import ARRAYS, AdamW, HostOptimizer
from parallel.memory.placed_buffer import Tier

# A compiled program of a step.
CompiledStep = Callable[..., Any]
# Range of a shard in each dim: its first index, and the index after its last.
_ShardRange = tuple[tuple[int, int], ...]
# Arrays that the host's optimizer always has; gradients are optional.
STATE_ARRAYS = ("weights", "first", "second")


@dataclasses.dataclass(frozen=True)
class DeviceUpdate:
  """Update of parameters within the device's program."""

  make_step = staticmethod(make_train_step)

  def open(
    self, program: Program, learning_rate: optax.Schedule
  ) -> "DeviceUpdate":
    """Returns the object that runs the steps, which is this one."""
    return self

  def load(self, state: TrainState) -> TrainState:
    """Returns the state from which the first step starts, unchanged."""
    return state

  def run(
    self, compiled: CompiledStep, state: TrainState, batch: Any, numbers: Any
  ) -> tuple[TrainState, Metrics]:
    """Runs a step of `make_train_step`, which donates the state."""
    return compiled(state, batch, numbers)

  def whole(self, state: TrainState) -> TrainState:
    """Returns the state for a checkpoint, unchanged."""
    return state

  def on_device(self, state: TrainState) -> TrainState:
    """Returns the part of a state that the program reads: the whole state."""
    return state


@dataclasses.dataclass(frozen=True)
class HostUpdate:
  """Update of one worker's parameters by AdamW on the host.

  Attributes:
    settings: Hyperparameters of AdamW; the device clips gradients.
    placement: For each of `parallel.memory.host_optimizer.ARRAYS`, the fraction
      of its bytes on each tier. An array of the state without an entry is on
      the first NUMA node. Without an entry for gradients, these stay where jax
      copies them; with an entry, they are copied once more, to their tiers.
    num_threads: Largest number of threads; None for all cores.
  """

  settings: AdamW
  placement: Mapping[str, Mapping[Tier, float]]
  num_threads: int | None = None

  make_step = staticmethod(make_gradient_step)

  def on_device(self, state: TrainState) -> TrainState:
    """Returns the part of a state that the program reads: all but moments."""
    return state._replace(opt_state=())

  def open(
    self, program: Program, learning_rate: optax.Schedule
  ) -> "HostSteps":
    """Allocates master weights and moments; returns what runs the steps.

    Raises:
      ValueError: If a tier does not exist or lacks space, fractions of an array
        do not sum to 1, or numba is not installed.
      OSError: If the operating system refuses to allocate the memory.
    """
    return HostSteps(self, program, learning_rate)


class HostSteps:
  """Steps of a run whose state, except for weights, is on the host.

  Each process has the shards of its devices; a shard that several of its
  devices hold is stored once.

  Attributes:
    optimizer: Master weights and moments, arrays float32 ``[N]`` of all shards:
      those of the first parameter, then those of the second, and so on.
  """

  def __init__(
    self, update: HostUpdate, program: Program, learning_rate: optax.Schedule
  ) -> None:
    layout = program.layout
    if program.has_explicit_state:
      raise ValueError(
        "config.memory.optimizer='host' cannot update the model's explicit "
        "training state (Parameter.update); use 'device'"
      )
    shapes, self._structure = jax.tree.flatten(program.stored_shapes)
    shardings = layout.shardings(layout.add_worker_dim(program.specs))
    end, decayed = 0, []
    self._leaves: list[_ParameterShards] = []
    for shape, sharding, decays in zip(
      shapes, jax.tree.leaves(shardings), jax.tree.leaves(program.decays),
      strict=True,
    ):
      leaf = _ParameterShards((1, *shape.shape), sharding, end)
      decayed += [(end, leaf.stop)] if decays else []
      self._leaves.append(leaf)
      end = leaf.stop
    # Names of the first and second moment in the state of the optimizer.
    self._moments = [name for name, _ in program.moments]
    self._kind = layout.moments
    self._learning_rate = learning_rate
    self.optimizer = HostOptimizer(
      end, update.settings, update.placement,
      arrays=[x for x in ARRAYS if x in STATE_ARRAYS or x in update.placement],
      num_threads=update.num_threads, decayed=decayed,
    )
    self._gradients = (
      self.optimizer.gradients if "gradients" in update.placement else None
    )

  def load(self, state: TrainState) -> TrainState:
    """Copies master weights and moments of a state to the host's memory.

    Args:
      state: Initial or restored training state.

    Returns:
      The state without moments, until `whole` adds them.
    """
    host, get = self.optimizer, optax.tree_utils.tree_get
    host.count = int(state.step)
    first, second = self._moments
    for there, here in (
      (state.params, host.weights),
      (get(state.opt_state, first), host.first),
      (get(state.opt_state, second), host.second),
    ):
      for x, leaf in zip(jax.tree.leaves(there), self._leaves, strict=True):
        for view, shard in leaf.views(here, x):
          view[:] = shard
    host.written()
    self._others = optax.tree_utils.tree_set(
      state.opt_state, **dict.fromkeys(self._moments)
    )
    return state._replace(opt_state=())

  def run(
    self, compiled: CompiledStep, state: TrainState, batch: Any, numbers: Any
  ) -> tuple[TrainState, Metrics]:
    """Runs a step's gradient program, and updates parameters on the host."""
    grads, metrics = compiled(state, batch, numbers)
    grads = jax.tree.leaves(grads)
    for grad, leaf in zip(grads, self._leaves, strict=True):
      for _, shard in leaf.parts(grad):
        shard.copy_to_host_async()
    host, params = self.optimizer, []
    host.begin(float(self._learning_rate(host.count)))
    for grad, leaf in zip(grads, self._leaves, strict=True):
      for start, shard in leaf.parts(grad):
        gradient = np.asarray(shard).ravel()  # waits for it
        if self._gradients is not None:
          placed = self._gradients[start : start + gradient.size]
          placed[:] = gradient
          gradient = placed
        host.update(start, gradient)
      params.append(leaf.array(host.weights))
    host.end()
    return state._replace(
      step=_make_replicated(np.int32(host.count), state.step.sharding),
      params=self._structure.unflatten(params),
    ), metrics

  def whole(self, state: TrainState) -> TrainState:
    """Returns the state with copies of the moments, for a checkpoint.

    Raises:
      ValueError: Weights or moments in files have changed since the last step.
    """
    host = self.optimizer
    host.verify()
    moments = {
      name: self._structure.unflatten(
        leaf.array(array, self._kind) for leaf in self._leaves
      ) for name, array in zip(
        self._moments, (host.first, host.second), strict=True
      )
    }
    count = optax.tree_utils.tree_get_all_with_path(self._others, "count")
    return state._replace(opt_state=optax.tree_utils.tree_set(
      self._others, **moments, count=_make_replicated(
        np.full(1, host.count, np.int32), count[0][1].sharding
      ),
    ))


class _ParameterShards:
  """Shards of a stored parameter on the devices of this process.

  Attributes:
    stop: End of the parameter's range in the optimizer's arrays.
  """

  def __init__(
    self, shape: tuple[int, ...], sharding: NamedSharding, start: int
  ) -> None:
    """Assigns a range of the optimizer's arrays to each shard.

    Args:
      shape: Shape of one worker's parameter, ``[1, ...]``.
      sharding: Sharding of the parameter.
      start: Index of the first shard's first element in the arrays.
    """
    self._shape, self._sharding = shape, sharding
    # Shard -> first element, and shape.
    self._places: dict[_ShardRange, tuple[int, tuple[int, ...]]] = {}
    for index in sharding.addressable_devices_indices_map(shape).values():
      key = self._key(index)
      if key not in self._places:
        size = tuple(end - first for first, end in key)
        self._places[key] = start, size
        start += math.prod(size)
    self.stop = start

  def _key(self, index: tuple[slice, ...]) -> _ShardRange:
    """Returns a shard's (start, stop) in each dim; slices are not hashable."""
    return tuple(
      x.indices(size)[:2] for x, size in zip(index, self._shape, strict=True)
    )

  def parts(self, x: jax.Array) -> list[tuple[int, jax.Array]]:
    """Returns (start in the optimizer's arrays, device array) of each shard."""
    found = {self._key(s.index): s.data for s in x.addressable_shards}
    return [(start, found[key]) for key, (start, _) in self._places.items()]

  def views(
    self, array: np.ndarray, x: jax.Array
  ) -> list[tuple[np.ndarray, jax.Array]]:
    """Returns each shard's (view of a host array ``[N]``, device array)."""
    return [
      (array[start : start + shard.size].reshape(shard.shape), shard)
      for start, shard in self.parts(x)
    ]

  def array(self, array: np.ndarray, kind: str = "device") -> jax.Array:
    """Copies the parameter from a host array ``[N]`` to a sharded jax array.

    ``kind`` is the memory kind of the jax array.
    """

    def shard(index: tuple[slice, ...]) -> np.ndarray:
      start, shape = self._places[self._key(index)]
      # Copied, since arrays of XLA:CPU can share the memory of their argument.
      return array[start : start + math.prod(shape)].reshape(shape).copy()

    return jax.make_array_from_callback(
      self._shape, self._sharding.with_memory_kind(kind), shard
    )


def _make_replicated(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Returns a jax array of a value that is equal on all processes.

  `jax.device_put` would compare the processes' values, which communicates.
  """
  return jax.make_array_from_callback(
    value.shape, sharding, lambda index: value[index]
  )
