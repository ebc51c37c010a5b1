"""Deficit longest prefix match: reuse first, within what fairness allows.

Of the clients whose deficit is positive the request with the longest cached
prefix is next. Service is taken from the deficit; when no client in line has
any left, all get a quantum. So the order follows the cache, and no client gets
more than a quantum ahead.

How much of a prompt is cached is looked up when a request joins the line, and
again when one that begins with the same page was admitted.

Source: Cao et al., Locality-aware fair scheduling in LLM serving (arXiv
2501.14312), algorithm 1.
"""

import collections
from collections.abc import Callable, Hashable
import heapq

from caatnet.serving.policies.base import Policy
from caatnet.serving.requests import Request


class DeficitLongestPrefix(Policy):
  """The longest cached prefix first, of clients that have deficit left.

  Attributes:
    deficits: What each client may still be served.
  """

  def __init__(
    self, hits: Callable[[Request], int], quantum: float = 8192.0,
    output_cost: float = 2.0,
  ) -> None:
    """Makes an empty line.

    Args:
      hits: Returns how many pages of a request are in the cache.
      quantum: What a client of weight 1 gets at a refill, in tokens read.
      output_cost: The cost of a token drawn, in tokens read.
    """
    super().__init__()
    self.deficits: dict[Hashable, float] = collections.defaultdict(float)
    self._hits, self._quantum, self._cost = hits, quantum, output_cost
    self._lines: dict[Hashable, list[tuple[int, int, Request]]] = {}
    self._queued: dict[int, tuple[int, int, Request]] = {}
    self._roots: dict[bytes, dict[int, Request]] = {}

  def push(self, request: Request) -> None:
    """Puts a request in its client's line, by what is cached of it."""
    entry = (-self._hits(request), request.number, request)
    self._queued[request.number] = entry
    heapq.heappush(self._lines.setdefault(request.client, []), entry)
    self._alike(request)[request.number] = request

  def _alike(self, request: Request) -> dict[int, Request]:
    """Returns those in line that begin with the same page."""
    return self._roots.setdefault(request.names[0] if request.names else b"",
                                  {})

  def remove(self, request: Request) -> None:
    """Takes a request out of its client's line."""
    del self._queued[request.number]
    alike = self._alike(request)
    alike.pop(request.number, None)
    if not alike:
      del self._roots[request.names[0] if request.names else b""]
    self._prune(request.client)

  def _prune(self, client: Hashable) -> None:
    line = self._lines[client]
    while line and self._queued.get(line[0][1]) is not line[0]:
      heapq.heappop(line)
    if not line:
      del self._lines[client]

  def update(self, request: Request) -> None:
    """Priorities do not count."""

  def peek(self) -> Request | None:
    """Returns the longest cached prefix of a client with deficit left."""
    if not self._lines:
      return None
    while True:
      able = [c for c in self._lines if self.deficits[c] > 0]
      if able:
        return min(self._lines[c][0] for c in able)[2]
      for client in self._lines:
        weight = self._lines[client][0][2].weight
        self.deficits[client] += self._quantum * weight

  def __len__(self) -> int:
    return len(self._queued)

  def waiting(self) -> list[Request]:
    """Returns all in line."""
    return [entry[2] for entry in self._queued.values()]

  def admitted(self, request: Request, num_read: int) -> None:
    """Charges what is read, and looks up again who begins alike."""
    self.deficits[request.client] -= num_read
    root = request.names[0] if request.names else None
    for other in list(self._roots.get(root, {}).values()):
      if -self._hits(other) != self._queued[other.number][0]:
        self.push(other)
        self._prune(other.client)

  def served(self, clients: list[tuple[Hashable, int, float]]) -> None:
    """Charges what is drawn."""
    for client, count, _ in clients:
      self.deficits[client] -= self._cost * count
