"""Weights of experts in weight slots, in host memory and in files.

A load copies an expert's weights from its file to host memory, unless they are
there, and from there to a weight slot on the device. Weights are read-only, so
nothing is copied back. A weight slot consists of separate buffers: the step's
program takes them as arguments, whereas an index into a stacked pool would copy
the selected weights in every step. A slot has no weights until all of them have
arrived.

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

from caatnet.serving.engine.device_weights import WeightUploader
from caatnet.serving.experts import WHOLE_FORM

# Number of recent loads, whose median time is the estimate for the next load.
_WINDOW = 64


@dataclasses.dataclass(frozen=True)
class StoredExpert:
  """Arrays of an expert as its file stores them.

  Attributes:
    form: One of `caatnet.serving.experts.FORMS`.
    arrays: Nested dict of numpy arrays: parameters, or a difference.
    base: Key of the base, for a difference.
    read_base: Returns the base's parameters, for a difference.
  """

  form: str
  arrays: Any
  base: str = ""
  read_base: Callable[[], Any] | None = None


@dataclasses.dataclass
class LoadCounters:
  """Counters of an expert's loads.

  Attributes:
    loads: Completed loads.
    failures: Failed loads.
    bytes: Bytes that were copied to weight slots on the device.
    files: Loads that read the file, since host memory had no copy.
    exposed_s: Seconds in which a load ran and no step was computed.
  """

  loads: int = 0
  failures: int = 0
  bytes: int = 0
  files: int = 0
  exposed_s: float = 0.0


class ExpertWeights:
  """Loader of experts' weights into weight slots, with a cache on the host.

  One thread calls `load`, and another one the other methods.

  Attributes:
    device: Copies weights to the device.
    moved: Counters of loads by the expert's name, without its revision.
    load_s: Median seconds of recent loads; 0 without any.
  """

  def __init__(
    self, device: WeightUploader, num_slots: int, num_host: int,
    read: Callable[[str], StoredExpert],
  ) -> None:
    """Makes empty weight slots.

    Args:
      device: Copies weights to the device.
      num_slots: Number of weight slots on the device.
      num_host: Number of experts that are kept in host memory.
      read: Reads the file of the expert with a key. Any exception makes the
        load fail.
    """
    self.device = device
    self.moved: dict[str, LoadCounters] = {}
    self.load_s = 0.0
    self._slots: list[Any] = [None] * num_slots
    self._num_host, self._read = num_host, read
    # Least recently loaded first; whole experts in the format of inference.
    self._host: dict[str, StoredExpert] = {}
    self._lock = threading.Lock()
    # Key of the base of differences, and its parameters on the device.
    self._base: tuple[str, Any] = ("", None)
    self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)

  @property
  def on_host(self) -> tuple[str, ...]:
    """Keys of the experts in host memory, the most recently loaded last."""
    with self._lock:
      return tuple(self._host)

  def params(self, slot: int) -> Any:
    """Returns the weights in a weight slot whose load has ended."""
    found = self._slots[slot]
    assert found is not None, f"slot {slot} has no weights"
    return found

  def clear(self, slot: int) -> None:
    """Frees a weight slot's buffers; steps that read them now are unaffected.

    Must be called before `load`, so that a slot never has two experts.
    """
    self._slots[slot] = None

  def counters(self, key: str) -> LoadCounters:
    """Returns the counters of the expert with a key."""
    with self._lock:
      return self.moved.setdefault(name_of(key), LoadCounters())

  def forget(self, key: str) -> None:
    """Removes an expert from host memory."""
    with self._lock:
      self._host.pop(key, None)

  def load(self, key: str, slot: int) -> str:
    """Copies an expert's weights to a cleared weight slot, and waits.

    Returns:
      "" for success; otherwise the reason of the failure, in one line.
    """
    counters = self.counters(key)
    begun = time.perf_counter()
    try:
      stored = self._from_host(key, counters)
      arrays = self._put(stored)
    except KeyboardInterrupt:
      raise
    # Any other failure, even lack of memory, ends only this expert's requests.
    except BaseException as error:
      counters.failures += 1
      reason = " ".join(str(error).split()) or type(error).__name__
      return f"expert {key} could not be loaded: {reason}"
    self._slots[slot] = arrays
    counters.loads += 1
    counters.bytes += sum(x.nbytes for x in jax.tree.leaves(stored.arrays))
    self._seconds.append(time.perf_counter() - begun)
    self.load_s = statistics.median(self._seconds)
    return ""

  def _from_host(self, key: str, counters: LoadCounters) -> StoredExpert:
    """Returns an expert from host memory, reading its file if necessary."""
    with self._lock:
      found = self._host.pop(key, None)
    if found is None:
      found = self._read(key)
      if found.form == WHOLE_FORM:
        found = StoredExpert(WHOLE_FORM, self.device.on_host(found.arrays))
      counters.files += 1
    if self._num_host:
      with self._lock:
        while len(self._host) >= self._num_host:
          del self._host[next(iter(self._host))]
        self._host[key] = found
    return found

  def _put(self, stored: StoredExpert) -> Any:
    """Returns an expert's weights as device arrays, after waiting for them."""
    if stored.form == WHOLE_FORM:
      return self.device.put(stored.arrays)
    if self._base[0] != stored.base:
      assert stored.read_base is not None
      self._base = "", None  # never two bases on the device
      self._base = stored.base, self.device.put_base(stored.read_base())
    return self.device.put_difference(
      self._base[1], stored.arrays, stored.form
    )


def name_of(key: str) -> str:
  """Returns the name of the expert with the key "NAME@REVISION"."""
  return key.partition("@")[0]
