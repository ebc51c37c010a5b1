"""Weights of experts in device slots, in host memory and in files.

A load copies an expert's weights from its file to host memory, unless they are
there, and from there to a slot of the device. Weights are read-only, so nothing
is copied back. A slot consists of buffers of its own: the step's program takes
them as arguments, whereas an index into a stacked pool would copy the selected
weights in every step. A slot has no weights until all of them have arrived.

A step cannot start before the last layer has arrived: one program computes all
layers, and a program starts when all of its arguments are there.
"""

import collections
from collections.abc import Callable
import dataclasses
import statistics
import threading
import time
from typing import Any

import jax
import numpy as np

# Recent loads whose median time estimates the next one.
_WINDOW = 64


@dataclasses.dataclass
class Moved:
  """Counters of an expert's loads.

  Attributes:
    loads: Completed loads.
    failures: Failed loads.
    bytes: Bytes that were copied to slots.
    files: Loads that read the file, since host memory had no copy.
    exposed_s: Seconds in which a load ran and no step was computed.
  """

  loads: int = 0
  failures: int = 0
  bytes: int = 0
  files: int = 0
  exposed_s: float = 0.0


class ExpertWeights:
  """Weights by slot, and copies of recently loaded weights in host memory.

  One thread calls `load`, and another one the other methods.

  Attributes:
    shardings: Shardings of an expert's arrays.
    slot_bytes: Bytes of a slot over all devices.
    moved: Counters by name of the expert, without its revision.
  """

  def __init__(
    self, shapes: Any, num_slots: int, num_host: int,
    read: Callable[[str], Any],
  ) -> None:
    """Makes empty slots.

    Args:
      shapes: Arrays of an expert in the format of inference, as
        `jax.ShapeDtypeStruct` with a sharding.
      num_slots: Number of slots.
      num_host: Number of experts that are kept in host memory.
      read: Returns the weights of the expert with a key, numpy arrays in the
        format of inference. Any exception makes the load fail.
    """
    self.shardings = jax.tree.map(lambda x: x.sharding, shapes)
    self.slot_bytes = sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)
    )
    self.moved: dict[str, Moved] = collections.defaultdict(Moved)
    self._types = jax.tree.map(_type, shapes)
    self._slots: list[Any] = [None] * num_slots
    self._num_host, self._read = num_host, read
    # Least recently loaded first.
    self._host: dict[str, Any] = {}
    self._lock = threading.Lock()
    self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)

  @property
  def on_host(self) -> tuple[str, ...]:
    """Keys of the experts in host memory, the most recently loaded last."""
    with self._lock:
      return tuple(self._host)

  @property
  def load_s(self) -> float:
    """Median seconds of recent loads; 0 without any."""
    return statistics.median(self._seconds) if self._seconds else 0.0

  def params(self, slot: int) -> Any:
    """Returns the arrays of a slot whose load has ended."""
    found = self._slots[slot]
    assert found is not None, f"slot {slot} has no weights"
    return found

  def clear(self, slot: int) -> None:
    """Frees a slot's buffers; steps under way that read them are not affected.

    Must be called before `load`, so that a slot never has two experts.
    """
    self._slots[slot] = None

  def forget(self, key: str) -> None:
    """Removes an expert from host memory."""
    with self._lock:
      self._host.pop(key, None)

  def load(self, key: str, slot: int) -> str:
    """Copies an expert's weights to a slot that was cleared, and waits.

    Returns:
      "" for success; otherwise the reason of the failure, in one line.
    """
    counters = self.moved[key.partition("@")[0]]
    begun = time.perf_counter()
    try:
      host = self._from_host(key, counters)
      # A copy, even where the device could read numpy's memory: a slot then
      # takes the same memory everywhere.
      arrays = jax.block_until_ready(
        jax.device_put(host, self.shardings, may_alias=False)
      )
    # Any failure, also of memory, ends only the requests of this expert.
    except BaseException as error:
      counters.failures += 1
      return " ".join(str(error).split()) or type(error).__name__
    self._slots[slot] = arrays
    counters.loads += 1
    counters.bytes += self.slot_bytes
    self._seconds.append(time.perf_counter() - begun)
    return ""

  def _from_host(self, key: str, counters: Moved) -> Any:
    """Returns an expert's arrays in host memory, read from its file if needed.

    Raises:
      ValueError: The arrays of the file are not those of the model.
    """
    with self._lock:
      found = self._host.pop(key, None)
    if found is None:
      found = self._read(key)
      counters.files += 1
      self._check(key, found)
    if self._num_host:
      with self._lock:
        while len(self._host) >= self._num_host:
          del self._host[next(iter(self._host))]
        self._host[key] = found
    return found

  def _check(self, key: str, found: Any) -> None:
    """Raises ValueError unless arrays have the model's shapes and dtypes."""
    types = jax.tree.map(_type, found)
    if types == self._types:
      return
    ours, theirs = (
      {jax.tree_util.keystr(path): x for path, x in
       jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_type)}
      for tree in (self._types, types)
    )
    name = min(
      name for name in ours | theirs if ours.get(name) != theirs.get(name)
    )
    raise ValueError(
      f"expert {key}: {name} is {theirs.get(name, 'missing')}, the model has "
      f"{ours.get(name, 'no such array')}"
    )


def _type(x: Any) -> tuple[str, tuple[int, ...]]:
  """Returns dtype and shape of an array."""
  return np.dtype(x.dtype).name, x.shape


def _is_type(x: Any) -> bool:
  """Returns whether a node is a result of `_type`."""
  return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str)
