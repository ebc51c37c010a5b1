"""The running requests as arrays, so that a step costs no loop over them.

Shape legend: S = slots, P = pages of a sequence, D = decodes of a step.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from caatnet.serving.requests import Request


class Running:
  """Requests that have a slot, in the order in which they got it.

  Attributes:
    requests: The request of each slot.
    computed: How many of its tokens steps have read, those under way among
      them; int64 ``[S]``, as all arrays by slot.
    context: How many were known when it was admitted: those read in chunks.
    longest: How many will have been read at its end.
    known: How many tokens it has that the host knows.
    held: How many pages it has.
    epochs: How often the slot was given.
    tables: Its pages, int32 ``[S, P]``.
  """

  def __init__(self, num_slots: int, num_pages: int) -> None:
    """Makes empty slots with room for so many pages each."""
    self.requests: list[Request | None] = [None] * num_slots
    zeros = np.zeros(num_slots, np.int64)
    self.computed, self.context, self.longest = (zeros.copy() for _ in "abc")
    self.known, self.held, self.epochs = (zeros.copy() for _ in "abc")
    self.tables = np.zeros((num_slots, num_pages), np.int32)
    self._free = list(range(num_slots - 1, -1, -1))
    self._order: dict[int, None] = {}
    self._slots: np.ndarray | None = None
    self._last: tuple[np.ndarray, list[Request], list] | None = None

  def __len__(self) -> int:
    return len(self._order)

  def __iter__(self):
    return iter([self.requests[slot] for slot in self._order])

  @property
  def full(self) -> bool:
    """Whether no slot is free."""
    return not self._free

  @property
  def slots(self) -> np.ndarray:
    """The slots in the order in which they were given, int64 ``[n]``."""
    if self._slots is None:
      self._slots = np.fromiter(self._order, np.int64, len(self._order))
    return self._slots

  def add(self, request: Request, computed: int, context: int) -> None:
    """Gives a request a slot; its pages are set by `extend`."""
    slot = self._free.pop()
    request.slot, request.context = slot, context
    self.requests[slot] = request
    self._order[slot] = None
    self._slots = None
    self.computed[slot], self.context[slot] = computed, context
    self.longest[slot], self.known[slot] = request.longest, request.length
    self.held[slot] = 0
    self.epochs[slot] += 1
    self.extend(request, request.pages)

  def extend(self, request: Request, pages: Sequence[int]) -> None:
    """Notes the next pages of a request."""
    slot, first = request.slot, int(self.held[request.slot])
    self.tables[slot, first : first + len(pages)] = pages
    self.held[slot] = first + len(pages)

  def remove(self, request: Request) -> None:
    """Takes a request's slot back."""
    slot, request.slot = request.slot, -1
    self.requests[slot] = None
    del self._order[slot]
    self._slots = None
    self._free.append(slot)
    self.epochs[slot] += 1

  def decoding(self) -> np.ndarray:
    """Returns the slots whose newest token a step can read."""
    slots = self.slots
    computed = self.computed[slots]
    return slots[
      (computed >= self.context[slots]) & (computed < self.longest[slots])
    ]

  def reading(self) -> list[Request]:
    """Returns the requests whose tokens are still read in chunks."""
    slots = self.slots
    found = slots[self.computed[slots] < self.context[slots]]
    return [self.requests[slot] for slot in found.tolist()]

  def of(
    self, slots: np.ndarray
  ) -> tuple[list[Request], list[tuple[Hashable, int, float]]]:
    """Returns the requests of slots, and how many of them each client has.

    Steps that follow one another mostly have the same ones.
    """
    epochs = self.epochs[slots]
    key = slots * (1 << 40) + epochs
    if self._last is None or not np.array_equal(self._last[0], key):
      requests = [self.requests[slot] for slot in slots.tolist()]
      counts: dict[tuple[Hashable, float], int] = {}
      for request in requests:
        pair = request.client, request.weight
        counts[pair] = counts.get(pair, 0) + 1
      clients = [(client, n, weight) for (client, weight), n in counts.items()]
      self._last = key, requests, clients
    return self._last[1], self._last[2]
