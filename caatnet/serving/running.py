"""The running requests as arrays, so that a step costs no loop over them.

Shape legend: S = slots, P = pages of a sequence, D = decodes of a step.
"""

from collections.abc import Hashable, Sequence
import operator

import numpy as np

from caatnet.serving.requests import Request, never

# Tokens of a slot that are kept here before they go to their request.
_KEPT = 256


class Running:
  """Requests that have a slot, in the order in which they got it.

  Attributes:
    requests: The request of each slot, or None; object ``[S]``.
    computed: How many of its tokens steps have read, those under way among
      them; int64 ``[S]``, as all arrays by slot.
    context: How many were known when it was admitted: those read in chunks.
    longest: How many will have been read at its end.
    known: How many tokens it has that the host knows.
    room: How many positions its pages have.
    pending: How many of its tokens are being drawn.
    epochs: How often the slot was given, and taken back.
    tables: Its pages, int32 ``[S, P]``.
  """

  def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
    """Makes empty slots with room for so many pages each."""
    self._page_size = page_size
    self.requests = np.full(num_slots, None, object)
    zeros = np.zeros(num_slots, np.int64)
    self.computed, self.context, self.longest = (zeros.copy() for _ in "abc")
    self.known, self.room, self.epochs = (zeros.copy() for _ in "abc")
    self.pending, self._payers, self._count = (zeros.copy() for _ in "abc")
    # `Request.ends`, and whether it is to be asked about each token.
    self._ends = np.full(num_slots, never, object)
    self._asked = np.zeros(num_slots, bool)
    self._tokens = np.zeros((num_slots, _KEPT), np.int64)
    self._times = np.zeros((num_slots, _KEPT))
    self._clients: list[tuple[Hashable, float]] = []
    self._numbers: dict[tuple[Hashable, float], int] = {}
    self.tables = np.zeros((num_slots, num_pages), np.int32)
    self._free = list(range(num_slots - 1, -1, -1))
    self._order: dict[int, None] = {}
    self._slots: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self._order)

  def __iter__(self):
    return iter(self.requests[self.slots].tolist())

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
    payer = request.client, request.weight
    if payer not in self._numbers:
      if len(self._clients) >= 2 * len(self.requests):
        self._forget_clients()
      self._numbers[payer] = len(self._clients)
      self._clients.append(payer)
    slot = self._free.pop()
    self._payers[slot] = self._numbers[payer]
    request.slot, request.context = slot, context
    self.requests[slot] = request
    self._order[slot] = None
    self._slots = None
    self.computed[slot], self.context[slot] = computed, context
    self.longest[slot], self.known[slot] = request.longest, request.length
    self.room[slot] = self._count[slot] = 0
    self.pending[slot] = request.num_pending
    self._ends[slot] = request.ends
    self._asked[slot] = request.ends is not never
    request.buffer = self._flush
    self.epochs[slot] += 1
    self.extend(request, request.pages)

  def _forget_clients(self) -> None:
    """Forgets the clients of whom nobody runs, of which there is no end."""
    used, numbers = np.unique(self._payers[self.slots], return_inverse=True)
    self._payers[self.slots] = numbers
    self._clients = [self._clients[i] for i in used]
    self._numbers = {payer: i for i, payer in enumerate(self._clients)}

  def extend(self, request: Request, pages: Sequence[int]) -> None:
    """Notes the next pages of a request."""
    slot, size = request.slot, self._page_size
    first = int(self.room[slot]) // size
    last = first + len(pages)
    self.tables[slot, first:last] = pages
    self.room[slot] = last * size

  def remove(self, request: Request) -> None:
    """Takes a request's slot back."""
    self._flush(request)
    request.buffer = None
    request.num_pending = int(self.pending[request.slot])
    slot, request.slot = request.slot, -1
    self.requests[slot] = None
    del self._order[slot]
    self._slots = None
    self._free.append(slot)
    self.epochs[slot] += 1

  def ready(self) -> tuple[np.ndarray, list[Request]]:
    """Returns what the next step can go on with.

    Returns:
      The slots whose newest token it can read, and the requests whose tokens
      are still read in chunks.
    """
    slots = self.slots
    computed = self.computed[slots]
    decodes = computed >= self.context[slots]
    reading = self.requests[slots[~decodes]].tolist()
    return slots[decodes & (computed < self.longest[slots])], reading

  def record(
    self, slots: np.ndarray, tokens: np.ndarray, now: float
  ) -> list[Request]:
    """Notes a token of each of some slots, and when it came.

    Returns:
      The requests that their tokens end.
    """
    at = self._count[slots]
    self._tokens[slots, at], self._times[slots, at] = tokens, now
    self._count[slots] = at + 1
    self.known[slots] += 1
    self.pending[slots] -= 1
    for slot in slots[at + 1 == _KEPT].tolist():
      self._flush(self.requests[slot])
    ended = self.known[slots] > self.longest[slots]
    asked = np.flatnonzero(self._asked[slots])
    ends = self._ends[slots[asked]].tolist()
    answers = list(map(operator.call, ends, tokens[asked].tolist()))
    if True in answers:  # seldom; most steps make no array of them
      ended[asked] |= answers
    return self.requests[slots[ended]].tolist()

  def _flush(self, request: Request) -> None:
    """Moves what was recorded of a request to it."""
    slot = request.slot
    count, self._count[slot] = int(self._count[slot]), 0
    if count:
      request.take(
        self._tokens[slot, :count].tolist(), self._times[slot, :count].tolist()
      )

  def clients(self, slots: np.ndarray) -> list[tuple[Hashable, int, float]]:
    """Returns how many of some slots each client has, and its weight."""
    counts = np.bincount(self._payers[slots])
    return [
      (self._clients[i][0], n, self._clients[i][1])
      for i, n in enumerate(counts.tolist()) if n
    ]
