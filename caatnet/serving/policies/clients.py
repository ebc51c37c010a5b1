"""A line for each client, of policies that choose a client first."""

from collections.abc import Hashable
import heapq
from typing import Any

from caatnet.serving.policies.base import Policy
from caatnet.serving.requests import Request


class ClientLines(Policy):
  """A line for each client who has somebody in it, each ordered by `key`."""

  def __init__(self) -> None:
    """Makes no lines."""
    super().__init__()
    self._lines: dict[Hashable, list[tuple[Any, int, Request]]] = {}

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
