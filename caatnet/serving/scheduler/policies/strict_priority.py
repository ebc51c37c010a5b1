"""Preemptive strict priority: the request with the lowest number runs first."""

import heapq
import operator

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Policy
from caatnet.serving.scheduler.running import RunningRequests


class StrictPriority(Policy):
  """Policy: lowest priority number first; ties in the order of arrival.

  Many priorities change at once, so the queue is sorted lazily, when `peek`
  reads the next request.
  """

  value = operator.attrgetter("priority")

  def __init__(self) -> None:
    """Makes an empty queue."""
    super().__init__()
    self._ordered = True

  def update(self, request: Request) -> None:
    """Updates the key of a queued request whose priority has changed."""
    if request.number in self._entries:
      entry = (self.key(request), request.number, request)
      self._entries[request.number] = entry
      self._ordered = False

  def peek(self) -> Request | None:
    """Returns the next request to admit; None if the queue is empty."""
    if not self._ordered:
      self._heap = list(self._entries.values())
      heapq.heapify(self._heap)
      self._ordered = True
    return super().peek()

  def displaces(self, waiting: Request, running: RunningRequests) -> bool:
    """Returns whether a running request has a higher priority number."""
    values = running.values[running.slots]
    return bool((values > self.value(waiting)).any())
