"""One queue per client, for policies that select a client first."""

import collections
from collections.abc import Hashable
import heapq
from typing import Any

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Policy

# Number of clients without a request above which their service is forgotten.
_REMEMBERED = 10_000


class ClientQueues(Policy):
  """Base of policies with one queue per client, each ordered by `key`.

  A subclass with queues of something else, such as experts, overrides `line`.
  """

  def __init__(self) -> None:
    """Starts without queues."""
    super().__init__()
    self._lines: dict[Hashable, list[tuple[Any, int, Request]]] = {}
    self._served: dict[Hashable, float] = collections.defaultdict(float)
    self._present: collections.Counter[Hashable] = collections.Counter()

  def line(self, request: Request) -> Hashable:
    """Returns the key of a request's queue: its client."""
    return request.client

  def arrived(self, request: Request) -> None:
    """Counts a request; forgets clients without requests if there are many."""
    self._present[self.line(request)] += 1
    if len(self._served) > _REMEMBERED + len(self._present):
      for client in [c for c in self._served if c not in self._present]:
        del self._served[client]

  def ended(self, request: Request) -> None:
    """Decrements the client's number of requests that have not ended."""
    line = self.line(request)
    self._present[line] -= 1
    if not self._present[line]:
      del self._present[line]

  def push(self, request: Request) -> None:
    """Adds a request to its client's queue, or moves it if its key changed."""
    entry = (self.key(request), request.number, request)
    self._entries[request.number] = entry
    line = self.line(request)
    heapq.heappush(self._lines.setdefault(line, []), entry)
    self._prune(line)

  def remove(self, request: Request) -> None:
    """Removes a request from its client's queue."""
    super().remove(request)
    self._prune(self.line(request))

  def _prune(self, key: Hashable) -> None:
    """Pops removed requests off the head of queue `key`; drops it if empty."""
    line = self._lines[key]
    while line and self._entries.get(line[0][1]) is not line[0]:
      heapq.heappop(line)
    if not line:
      del self._lines[key]
