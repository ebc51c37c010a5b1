"""What a policy decides, and nothing else: who is next, and who gives way.

A policy has the line of the requests that are not running. Its three choices
are values: the order of admission (`peek`), the victim among running requests
(`victim`, `displaces`), and which requests may share a step (`batch_key`). The
scheduler asks and does all the rest.
"""

from collections.abc import Hashable, Sequence
import heapq
import math
from typing import Any

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.running import Running

Clients = Sequence[tuple[Hashable, float]]  # with their weights


class Policy:
  """First come, first served, and the base of other orders.

  A policy with another order by a value of each request overrides `value`. One
  whose line has another order than preemption overrides `key`, too, and one
  whose order changes with what is served overrides the line.
  """

  def value(self, request: Request) -> float:
    """Returns the number by which requests are ordered, the smallest first.

    It is called when a request joins the line, gets a slot, or has its priority
    changed (`update`). Running requests are preempted in the opposite order.
    """
    del request
    return 0.0

  def key(self, request: Request) -> Any:
    """Returns the key of a request in line: its value, then its number.

    Raises:
      ValueError: The value is not a number.
    """
    return checked_value(self, request), request.number

  def __init__(self) -> None:
    """Makes an empty line."""
    self._heap: list[tuple[Any, int, Request]] = []
    self._entries: dict[int, tuple[Any, int, Request]] = {}

  def batch_key(self, request: Request) -> Hashable:
    """Returns a value that all requests of a step have in common."""
    del request
    return None

  def victim(self, running: Running) -> Request:
    """Returns the request to preempt when pages are short: the last one."""
    return running.last()

  def displaces(self, waiting: Request, running: Running) -> bool:
    """Returns whether a waiting request may take the place of who is last."""
    del waiting, running
    return False

  def push(self, request: Request) -> None:
    """Puts a request in line, a new one or one that was preempted."""
    entry = (self.key(request), request.number, request)
    self._entries[request.number] = entry
    heapq.heappush(self._heap, entry)
    if len(self._heap) > 2 * len(self._entries) + 64:  # most are no more
      self._heap = list(self._entries.values())
      heapq.heapify(self._heap)

  def remove(self, request: Request) -> None:
    """Takes a request out of the line."""
    del self._entries[request.number]

  def update(self, request: Request) -> None:
    """Notes that a request's priority has changed, which need not count."""

  def peek(self) -> Request | None:
    """Returns who is next; None if nobody is in line."""
    while self._heap:
      entry = self._heap[0]
      if self._entries.get(entry[1]) is entry:
        return entry[2]
      heapq.heappop(self._heap)
    return None

  def __len__(self) -> int:
    return len(self._entries)

  def waiting(self) -> list[Request]:
    """Returns all in line, in no order."""
    return [entry[2] for entry in self._entries.values()]

  def arrived(self, request: Request) -> None:
    """Notes a request that is new; `push` follows."""

  def admitted(self, request: Request, num_read: int) -> None:
    """Notes that a request runs, and how many tokens it reads for that."""

  def served(self, clients: Clients, counts: Sequence[int]) -> None:
    """Notes tokens that a step draws.

    Args:
      clients: Whose they are.
      counts: How many each of these gets, which may be none.
    """

  def published(self, names: bytes) -> None:
    """Notes names, one after another, of pages that can be found now."""

  def ended(self, request: Request) -> None:
    """Notes that a request has ended or was cancelled."""


def checked_value(policy: Policy, request: Request) -> float:
  """Returns the value of a request; inf is one.

  Raises:
    ValueError: It is no number.
  """
  value = policy.value(request)
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if number != number:
    raise ValueError(
      f"{type(policy).__name__}.value={value!r} of request {request.number} "
      "must be a number"
    )
  return number
