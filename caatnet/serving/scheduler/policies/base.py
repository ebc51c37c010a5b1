"""Interface of scheduling policies: admission order and preemption victims.

A policy owns the queue of requests that are not running. It answers three
questions: the next request to admit (`peek`), the running request to preempt
(`victim`, `displaces`), and which requests may share a step (`batch_key`,
`keys`). The scheduler does everything else. A policy whose steps read different
weights also selects weight slots and loads (`begin_step`, `take_loads`).
"""

from collections.abc import Hashable, Sequence
import heapq
import math
from typing import Any

from caatnet.serving.engine.executor import WeightLoad
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.running import RunningRequests

Clients = Sequence[tuple[Hashable, float]]  # (client, weight)


class Policy:
  """Base class of policies; by itself it serves in the order of arrival.

  A policy that orders requests by a number overrides `value`. One whose queue
  order differs from its preemption order also overrides `key`. One whose order
  depends on the service of clients overrides `push`, `remove` and `peek`.

  Attributes:
    current: Batch key of the step that is being made; set by the scheduler.
    loading: Whether a load of weights is under way.
  """

  current: Hashable = None
  loading: bool = False

  def value(self, request: Request) -> float:
    """Returns the number that orders requests, the smallest first.

    It is evaluated when a request joins the queue, starts to run, or changes
    its priority (`update`). Running requests are preempted in the opposite
    order.
    """
    del request
    return 0.0

  def key(self, request: Request) -> Any:
    """Returns the sort key of a queued request: its value, then its number.

    Raises:
      ValueError: The value is not a number.
    """
    return checked_value(self, request), request.number

  def __init__(self) -> None:
    """Makes an empty queue."""
    self._heap: list[tuple[Any, int, Request]] = []
    self._entries: dict[int, tuple[Any, int, Request]] = {}

  def batch_key(self, request: Request) -> Hashable:
    """Returns a value that all requests of a step must share.

    A policy that overrides it also overrides `keys`. `peek` then returns a
    request of the batch key `current`.
    """
    del request
    return None

  def keys(self, now: float) -> Sequence[Hashable]:
    """Returns the batch keys that the next step may have, the best first.

    Args:
      now: Time in seconds.
    """
    del now
    return (None,)

  def begin_step(self, num_drawn: int) -> int:
    """Returns the weight slot that the step of batch key `current` reads.

    Args:
      num_drawn: Number of tokens that the step draws.
    """
    del num_drawn
    return 0

  def end_step(self, weights: int) -> None:
    """Handles the end of a step that has read the weight slot `weights`."""

  def take_loads(self) -> Sequence[WeightLoad]:
    """Returns the loads of weights to begin."""
    return ()

  def loaded(self, load: WeightLoad, error: str) -> None:
    """Handles the end of a load; `error` is not empty if it has failed."""

  def victim(self, running: RunningRequests) -> Request:
    """Returns the request to preempt if pages are short: `running.last()`."""
    return running.last()

  def displaces(self, waiting: Request, running: RunningRequests) -> bool:
    """Returns whether a waiting request may preempt the `victim`."""
    del waiting, running
    return False

  def push(self, request: Request) -> None:
    """Adds a new or a preempted request to the queue."""
    entry = (self.key(request), request.number, request)
    self._entries[request.number] = entry
    heapq.heappush(self._heap, entry)
    # Removed requests stay in the heap until they are popped; a heap that
    # consists mostly of them is rebuilt.
    if len(self._heap) > 2 * len(self._entries) + 64:
      self._heap = list(self._entries.values())
      heapq.heapify(self._heap)

  def remove(self, request: Request) -> None:
    """Removes a request from the queue."""
    del self._entries[request.number]

  def update(self, request: Request) -> None:
    """Handles a changed request priority; ignored by default."""

  def peek(self) -> Request | None:
    """Returns the next request to admit; None if the queue is empty."""
    while self._heap:
      entry = self._heap[0]
      if self._entries.get(entry[1]) is entry:
        return entry[2]
      # An entry that `remove` or a second `push` has invalidated.
      heapq.heappop(self._heap)
    return None

  def __len__(self) -> int:
    return len(self._entries)

  def waiting(self) -> list[Request]:
    """Returns all queued requests, in no particular order."""
    return [entry[2] for entry in self._entries.values()]

  def arrived(self, request: Request) -> None:
    """Handles the arrival of a new request; `push` follows."""

  def admitted(self, request: Request, num_read: int) -> None:
    """Handles the admission of a request, with the number of tokens to read."""

  def served(self, clients: Clients, counts: Sequence[int]) -> None:
    """Handles the tokens that a step draws.

    Args:
      clients: Clients with their weights.
      counts: Number of tokens drawn for each of these clients; may be 0.
    """

  def published(self, block_hashes: bytes) -> None:
    """Handles newly cached pages, given as concatenated block hashes."""

  def ended(self, request: Request) -> None:
    """Handles the end or the cancellation of a request."""


def checked_value(policy: Policy, request: Request) -> float:
  """Returns the value of a request as a float; infinity is allowed.

  Raises:
    ValueError: The value is not a number or is NaN.
  """
  value = policy.value(request)
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if number != number:  # NaN
    raise ValueError(
      f"{type(policy).__name__}.value={value!r} of request {request.number} "
      "must be a number"
    )
  return number
