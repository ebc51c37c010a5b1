"""Running requests as arrays, so that a step needs no loop over requests.

Drawn tokens are buffered here and move to their `Request` when its tokens are
accessed. The operations of each step on all slots are functions on arrays,
compiled by numba where it is installed.

Shape legend: S = slots (places of running requests), P = pages of a sequence,
D = decodes of a step, K = buffered steps.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from caatnet.serving.compiling import compiled
from caatnet.serving.requests import Request

# Number of steps whose tokens are buffered before they move to their requests.
_KEPT = 512
# Maximum number of stop tokens of a request that are compared as arrays; larger
# sets are looked up per token.
_MAX_STOP_TOKENS = 16
_NO_TOKEN, _NEVER = -1, np.iinfo(np.int64).max  # no token; no step


@compiled("(int64[::1], int64[::1], int64[::1], int64[::1])")
def _ready(slots, computed, context, longest):
  """Returns the `slots` that decode and those that still read chunks.

  The other arrays are those of `RunningRequests`.
  """
  read = computed[slots]
  reading = read < context[slots]
  return slots[~reading & (read < longest[slots])], slots[reading]


@compiled("(int64[::1], int64[::1], int64[::1], int64[::1])")
def _advance(decodes, chunked, computed, epochs):
  """Implements `RunningRequests.advance`, with its arrays as arguments."""
  positions = computed[decodes]
  computed[decodes] = positions + 1
  drawing = np.concatenate((decodes, chunked))
  return (
    decodes.astype(np.int32), positions.astype(np.int32), drawing,
    epochs[drawing],
  )


@compiled("(int64[::1], int64, int64)")
def _omit(order, length, slot):
  """Removes a slot from `order[:length]`, and keeps the other slots' order."""
  at = np.argmax(order[:length] == slot)
  order[at : length - 1] = order[at + 1 : length].copy()


@compiled(
  "(int32[:, ::1], int64, int64[::1], int32[:, ::1], int64[::1], int64[::1], "
  "int64[::1], int32[::1])"
)
def _buffer_tokens(kept, at, left, stops, epochs, slots, then, tokens):
  """Buffers tokens of `slots` whose `epochs` still equal those of the step.

  Args:
    kept: Ring buffer of drawn tokens, ``[K, S]``; row `at` is written.
    at: Number of the step modulo K.
    left: Number of tokens that each slot may still draw, ``[S]``; updated.
    stops: Stop tokens of each slot, ``[k, S]``.
    epochs: `RunningRequests.epochs`.
    slots: Slots of the drawn tokens, ``[n]``.
    then: Epochs of these slots when the step was made, ``[n]``.
    tokens: Drawn tokens, ``[n]``.

  Returns:
    The slots whose sequences end, and the indices of tokens not buffered.
  """
  same = epochs[slots] == then
  late = np.flatnonzero(~same)
  if len(late):
    slots, tokens = slots[same], tokens[same]
  row = kept[at]
  row[:] = _NO_TOKEN
  row[slots] = tokens
  remaining = left[slots] - 1
  left[slots] = remaining
  ended = remaining <= 0
  for k in range(len(stops)):
    ended |= tokens == stops[k][slots]
  return slots[ended], late


@compiled(
  "(int32[:, ::1], float64[::1], int64, int64, int32[::1], float64[::1])"
)
def _read_buffered_tokens(kept, times, slot, first, tokens, token_times):
  """Copies a slot's tokens and their times from the ring buffer.

  Args:
    kept: Ring buffer of drawn tokens, ``[K, S]``.
    times: Times of the buffered steps, ``[K]``.
    slot: The slot.
    first: Number of the first step to copy.
    tokens: Output, one entry for each step to copy.
    token_times: Output, likewise.

  Returns:
    The number of tokens written; some steps have drawn none for the slot.
  """
  at, count = first % len(times), len(tokens)
  # Up to the end of the ring buffer, then from its beginning.
  end = min(count, len(times) - at)
  tokens[:end] = kept[at : at + end, slot]
  token_times[:end] = times[at : at + end]
  tokens[end:] = kept[: count - end, slot]
  token_times[end:] = times[: count - end]
  drawn = tokens != _NO_TOKEN
  num_drawn = np.count_nonzero(drawn)
  if num_drawn < count:
    tokens[:num_drawn] = tokens[drawn]
    token_times[:num_drawn] = token_times[drawn]
  return num_drawn


class RunningRequests:
  """Table of the running requests: arrays indexed by a request's slot.

  Iteration yields the requests in the order of their admission.

  Attributes:
    requests: Request of each slot, or None; object ``[S]``.
    computed: Number of a request's tokens that steps have read, including steps
      under way; int64 ``[S]``, as are the arrays below without a dtype.
    context: Number of tokens known at admission, which are read in chunks.
    longest: Number of tokens that will have been read at the sequence's end.
    number: `Request.number` of the slot's request.
    values: Value of the slot's request (`policies.base.Policy.value`), float64
      ``[S]``.
    room: Number of positions in the slot's pages.
    epochs: Number of times that the slot was assigned or freed.
    tables: Page table, int32 ``[S, P]``.
  """

  def __init__(self, num_slots: int, num_pages: int, page_size: int) -> None:
    """Makes empty slots.

    Args:
      num_slots: S, the maximum number of running requests.
      num_pages: P, the maximum number of pages of a sequence.
      page_size: Tokens per page.
    """
    self._page_size = page_size
    self.requests = np.full(num_slots, None, object)
    zeros = np.zeros(num_slots, np.int64)
    self.computed, self.context, self.longest = (zeros.copy() for _ in "abc")
    self.room, self.epochs, self._left = (zeros.copy() for _ in "abc")
    self._payers, self.number = zeros.copy(), zeros.copy()
    self.values = np.zeros(num_slots)
    # Stop tokens, int32 [max stop tokens of a request, S], and stop functions.
    self._stops = np.full((0, num_slots), _NO_TOKEN, np.int32)
    self._asked: dict[int, Callable[[int], bool]] = {}
    # Ring buffer of the tokens that steps have drawn, int32 [K, S], and their
    # times; `_since` is the first step whose token a slot's request lacks.
    self._tokens = np.full((_KEPT, num_slots), _NO_TOKEN, np.int32)
    self._times = np.zeros(_KEPT)
    self._steps, self._since = 0, np.full(num_slots, _NEVER)
    self._clients: list[tuple[Hashable, float]] = []
    self._numbers: dict[tuple[Hashable, float], int] = {}
    self.tables = np.zeros((num_slots, num_pages), np.int32)
    self._free = list(range(num_slots - 1, -1, -1))
    self._order, self._len = zeros.copy(), 0

  def __len__(self) -> int:
    return self._len

  def __iter__(self):
    return iter(self.requests[self.slots].tolist())

  @property
  def full(self) -> bool:
    """Whether every slot has a running request."""
    return not self._free

  @property
  def slots(self) -> np.ndarray:
    """Slots of the running requests, in admission order, int64 ``[n]``."""
    return self._order[: self._len]

  def add(
    self, request: Request, computed: int, context: int, value: float
  ) -> None:
    """Assigns a slot to a request; appends its pages to the page table.

    Args:
      request: Admitted request.
      computed: Number of its tokens whose keys and values are cached.
      context: Number of its known tokens.
      value: Number by which the policy orders requests.
    """
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
    self._order[self._len] = slot
    self._len += 1
    self.computed[slot], self.context[slot] = computed, context
    self.longest[slot], self.number[slot] = request.longest, request.number
    self.values[slot] = value
    self._left[slot] = request.longest + 1 - request.length  # to be drawn
    self._since[slot] = self._steps
    self._set_stop(slot, request)
    request.buffer = self._flush
    self.epochs[slot] += 1
    self.extend(request, request.pages, held=0)

  def _set_stop(self, slot: int, request: Request) -> None:
    """Stores the stop condition of a slot's request."""
    stop = request.stop
    few = isinstance(stop, frozenset) and len(stop) <= _MAX_STOP_TOKENS
    stops = sorted(stop) if few else []
    # Adds rows for all slots, in which `_NO_TOKEN` is padding.
    if len(stops) > len(self._stops):
      more = len(stops) - len(self._stops), len(self.requests)
      self._stops = np.concatenate(
        [self._stops, np.full(more, _NO_TOKEN, "i4")]
      )
    self._stops[:, slot] = stops + [_NO_TOKEN] * (len(self._stops) - len(stops))
    if not few:
      self._asked[slot] = request.is_end

  def _forget_clients(self) -> None:
    """Drops clients without a running request, to bound the table's size."""
    # Renumber the clients of running requests from 0.
    used, numbers = np.unique(self._payers[self.slots], return_inverse=True)
    self._payers[self.slots] = numbers
    self._clients = [self._clients[i] for i in used]
    self._numbers = {payer: i for i, payer in enumerate(self._clients)}

  def extend(self, request: Request, pages: np.ndarray, held: int) -> None:
    """Writes pages to a request's page table after the first `held` ones."""
    slot, last = request.slot, held + len(pages)
    self.tables[slot, held:last] = pages
    self.room[slot] = last * self._page_size
    request.pages = self.tables[slot, :last]

  def grown(self, slots: Sequence[int]) -> None:
    """Updates `Request.pages` of slots whose page tables have grown."""
    for slot in slots:
      last = self.room[slot] // self._page_size
      self.requests[slot].pages = self.tables[slot, :last]

  def last(self) -> Request:
    """Returns the request with the largest value; of equals, the newest."""
    slots = self.slots
    for by in (self.values, self.number):
      values = by[slots]
      slots = slots[values == values.max()]
    return self.requests[slots[0]]

  def remove(self, request: Request) -> None:
    """Frees a request's slot."""
    self._flush(request)
    request.buffer = None
    slot, request.slot = request.slot, -1
    # Tokens that steps under way draw; negative while chunks are read.
    pending = self.computed[slot] + self._left[slot] - self.longest[slot]
    request.num_pending = max(0, int(pending))
    self.requests[slot] = None
    self._asked.pop(slot, None)
    self._since[slot] = _NEVER
    _omit(self._order, self._len, slot)
    self._len -= 1
    self._free.append(slot)
    self.epochs[slot] += 1

  def ready(self) -> tuple[np.ndarray, list[Request]]:
    """Returns the requests that can be part of the next step.

    Returns:
      The slots that decode, int64 ``[D]``, and the requests whose known tokens
      are still being read in chunks.
    """
    decodes, reading = _ready(
      self.slots, self.computed, self.context, self.longest
    )
    if not len(reading):  # as in most steps
      return decodes, []
    return decodes, self.requests[reading].tolist()

  def advance(
    self, decodes: np.ndarray, chunked: Sequence[int]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Advances the positions of decoding slots by one token.

    Args:
      decodes: Slots that decode, int64 ``[D]``.
      chunked: Slots of the chunks that draw a token.

    Returns:
      `decodes` and the positions of the tokens read, int32 ``[D]`` each; all
      slots that draw a token and their epochs, int64 ``[n]`` each.
    """
    return _advance(
      decodes, np.array(chunked, np.int64), self.computed, self.epochs
    )

  def record(
    self, slots: np.ndarray, epochs: np.ndarray, tokens: np.ndarray, now: float
  ) -> tuple[list[Request], list[int]]:
    """Buffers the tokens of a step.

    A slot with another epoch was freed, and perhaps reassigned, since the step
    was made: its token belongs to the previous request, and is not buffered.

    Args:
      slots: Slots of the tokens, int64 ``[D]``.
      epochs: Epochs of the slots when the step was made, int64 ``[D]``.
      tokens: Drawn tokens, int32 ``[D]``.
      now: Time of the step's end in seconds.

    Returns:
      The requests that end with their token, and the indices of the tokens that
      are not buffered.
    """
    at = self._steps % _KEPT
    self._times[at] = now
    ended, late = _buffer_tokens(
      self._tokens, at, self._left, self._stops, self.epochs, slots, epochs,
      tokens,
    )
    self._steps += 1
    # Every K / 8 steps, slots whose oldest entries would soon be overwritten
    # are flushed.
    looks = max(1, _KEPT // 8)
    if not self._steps % looks:
      oldest = self._since <= self._steps - _KEPT + looks
      for slot in np.flatnonzero(oldest).tolist():
        self._flush(self.requests[slot])
    if self._asked:
      slots, tokens = np.delete(slots, late), np.delete(tokens, late)
      ends = {
        *ended.tolist(),
        *self._call_stop_functions(slots.tolist(), tokens.tolist())
      }
      ended = slots[[slot in ends for slot in slots.tolist()]]
    return self.requests[ended].tolist(), late.tolist()

  def _call_stop_functions(
    self, slots: list[int], tokens: list[int]
  ) -> list[int]:
    """Returns the slots whose token ends a sequence with a stop function."""
    asked = map(self._asked.get, slots)
    return [
      slot for slot, stop, token in zip(slots, asked, tokens, strict=True)
      if stop is not None and stop(token)
    ]

  def _flush(self, request: Request) -> None:
    """Moves a request's buffered tokens to the request."""
    slot, steps = request.slot, self._steps
    first, self._since[slot] = int(self._since[slot]), steps
    if first < steps:
      tokens, times = np.empty(steps - first, np.int32), np.empty(steps - first)
      count = _read_buffered_tokens(
        self._tokens, self._times, slot, first, tokens, times
      )
      request.take(tokens[:count], times[:count])

  def clients(
    self, slots: np.ndarray
  ) -> tuple[Sequence[tuple[Hashable, float]], list[int]]:
    """Returns (client, weight) of all clients, and how many `slots` each has.

    Some of the numbers may be 0.
    """
    counts = np.bincount(self._payers[slots], minlength=len(self._clients))
    return self._clients, counts.tolist()
