"""A line for each client, of policies that choose a client first."""

import collections
from collections.abc import Hashable
import heapq
from typing import Any

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Policy

# How many clients without a request are remembered at least.
_REMEMBERED = 10_000


class ClientLines(Policy):
  """A line for each client who has somebody in it, each ordered by `key`."""

  def __init__(self) -> None:
    """Makes no lines."""
    super().__init__()
    self._lines: dict[Hashable, list[tuple[Any, int, Request]]] = {}
    self._served: dict[Hashable, float] = collections.defaultdict(float)
    self._present: collections.Counter[Hashable] = collections.Counter()

  def arrived(self, request: Request) -> None:
    """Forgets clients who have no request, if there are very many."""
    self._present[request.client] += 1
    if len(self._served) > _REMEMBERED + len(self._present):
      for client in [c for c in self._served if c not in self._present]:
        del self._served[client]

  def ended(self, request: Request) -> None:
    """Notes that a client has one request less."""
    self._present[request.client] -= 1
    if not self._present[request.client]:
      del self._present[request.client]

  def push(self, request: Request) -> None:
    """Puts a request in its client's line; again, if its key has changed."""
    entry = (self.key(request), request.number, request)
    self._entries[request.number] = entry
    heapq.heappush(self._lines.setdefault(request.client, []), entry)
    self._prune(request.client)

  def remove(self, request: Request) -> None:
    """Takes a request out of its client's line."""
    super().remove(request)
    self._prune(request.client)

  def _prune(self, client: Hashable) -> None:
    """Drops what is no more from the head of a line."""
    line = self._lines[client]
    while line and self._entries.get(line[0][1]) is not line[0]:
      heapq.heappop(line)
    if not line:
      del self._lines[client]
