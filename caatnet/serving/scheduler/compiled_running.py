"""`caatnet.serving.scheduler.running` compiled by numba, of the extra `serve`.

What it does at each step for each slot is one loop here.

Shape legend: S = slots, D = decodes of a step, K = steps that are kept.
"""

from collections.abc import Sequence

from numba import boolean, float64, int32, int64
import numpy as np

from caatnet.serving.compiling import compiled
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.running import Running

_NONE = -1  # no token
_INT64 = int64[::1]


@compiled((_INT64, _INT64, _INT64, _INT64, int64[:, ::1]))
def _ready(slots, computed, context, longest, found):
  """Writes slots that decode into row 0, those that read into row 1."""
  decodes = reading = 0
  for slot in slots:
    if computed[slot] < context[slot]:
      found[1, reading] = slot
      reading += 1
    elif computed[slot] < longest[slot]:
      found[0, decodes] = slot
      decodes += 1
  return decodes, reading


@compiled((_INT64, _INT64, _INT64, int32[:, ::1], int64[:, ::1]))
def _advance(decodes, computed, epochs, read, drawn):
  """Writes slots and positions into read, slots and epochs into drawn."""
  for i in range(len(decodes)):
    slot = decodes[i]
    read[0, i], read[1, i] = slot, computed[slot]
    drawn[0, i], drawn[1, i] = slot, epochs[slot]
    computed[slot] += 1


@compiled((
  int32[:, ::1], int64, _INT64, int32[:, ::1], _INT64, int32[::1], boolean[::1]
))
def _keep(kept, at, left, stops, slots, tokens, ended):
  """Keeps a step's tokens, and writes which of them are the last ones."""
  kept[:, at] = _NONE
  for i in range(len(slots)):
    slot = slots[i]
    kept[slot, at] = tokens[i]
    left[slot] -= 1
    ended[i] = left[slot] <= 0
    for k in range(len(stops)):
      ended[i] |= tokens[i] == stops[k, slot]


@compiled((
  int32[:, ::1], float64[::1], int64, int64, int64, int32[::1], float64[::1]
))
def _kept(kept, times, slot, first, steps, tokens, came):
  """Writes what some steps have drawn for a slot; returns how much that is."""
  count = 0
  for step in range(first, steps):
    at = step % len(times)
    if kept[slot, at] != _NONE:
      tokens[count], came[count] = kept[slot, at], times[at]
      count += 1
  return count


class CompiledRunning(Running):
  """What `Running` is."""

  def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
    """Makes empty slots with room for so many pages each."""
    super().__init__(num_slots, num_pages, page_size)
    self._found = np.zeros((2, num_slots), np.int64)
    self._ended = np.zeros(num_slots, bool)

  def ready(self) -> tuple[np.ndarray, list[Request]]:
    """Returns what the next step can go on with, as `Running.ready` does."""
    decodes, reading = _ready(
      self.slots, self.computed, self.context, self.longest, self._found
    )
    slots = self._found[0, :decodes].copy()
    if not reading:  # as in most steps
      return slots, []
    return slots, self.requests[self._found[1, :reading]].tolist()

  def advance(
    self, decodes: np.ndarray, chunked: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Notes that a step reads the newest tokens of some slots, likewise."""
    count = len(decodes)
    read = np.empty((2, count), np.int32)
    drawn = np.empty((2, count + len(chunked)), np.int64)
    _advance(decodes, self.computed, self.epochs, read, drawn)
    for i, slot in enumerate(chunked, count):
      drawn[0, i], drawn[1, i] = slot, self.epochs[slot]
    return read[0], read[1], drawn[0], drawn[1]

  def _keep(
    self, slots: np.ndarray, tokens: np.ndarray, at: int
  ) -> np.ndarray:
    ended = self._ended[: len(slots)]
    _keep(
      self._tokens, at, self._left, self._stops, slots, tokens, ended
    )
    return ended

  def _kept(
    self, slot: int, first: int, steps: int
  ) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.empty(steps - first, np.int32)
    came = np.empty(steps - first)
    count = _kept(
      self._tokens, self._times, slot, first, steps, tokens, came
    )
    return tokens[:count], came[:count]
