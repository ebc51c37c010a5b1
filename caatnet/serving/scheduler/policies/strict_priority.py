"""Strict priority: the lowest number first, and it takes pages from others."""

import heapq
import operator

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Policy
from caatnet.serving.scheduler.running import Running


class StrictPriority(Policy):
  """The lowest priority number first, and among equals who came first.

  Many priorities change at once, so the line is put in order when it is asked
  for the next one.
  """

  value = operator.attrgetter("priority")

  def __init__(self) -> None:
    """Makes an empty line."""
    super().__init__()
    self._ordered = True

  def update(self, request: Request) -> None:
    """Notes that a request's priority has changed."""
    if request.number in self._entries:
      entry = (self.key(request), request.number, request)
      self._entries[request.number] = entry
      self._ordered = False

  def peek(self) -> Request | None:
    """Returns who is next; None if nobody is in line."""
    if not self._ordered:
      self._heap = list(self._entries.values())
      heapq.heapify(self._heap)
      self._ordered = True
    return super().peek()

  def displaces(self, waiting: Request, running: Running) -> bool:
    """A running request gives way to one of a lower number."""
    values = running.values[running.slots]
    return bool((values > self.value(waiting)).any())
