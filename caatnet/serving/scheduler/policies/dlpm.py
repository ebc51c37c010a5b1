"""Deficit longest prefix match: prefix reuse within a fairness bound.

Among the clients with a positive deficit, the request with the longest cached
prefix is next. A client's service is subtracted from its deficit. When no
client with a queued request has a positive deficit, each of them gets a
quantum, so that no client is ahead by more than one quantum. The cached prefix
is looked up when a request joins the queue, when the first page that it lacks
is cached, and, since pages are evicted, when it is about to be selected.

Source: Cao et al., Locality-aware fair scheduling in LLM serving (arXiv
2501.14312), algorithm 1.
"""

from collections.abc import Callable, Sequence

from caatnet.serving.cache import prefixes
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Clients
from caatnet.serving.scheduler.policies.clients import ClientQueues


class DeficitLongestPrefix(ClientQueues):
  """Policy: longest cached prefix first, of clients with a positive deficit."""

  def __init__(
    self, hits: Callable[[Request], int], quantum: float = 8192.0,
    output_cost: float = 2.0,
  ) -> None:
    """Makes an empty queue.

    Args:
      hits: Returns the number of a request's pages that are cached.
      quantum: Refill of the deficit of a client of weight 1; reading a token
        costs 1.
      output_cost: Cost of drawing a token.
    """
    super().__init__()
    self.deficits = self._served  # remaining service per client, in tokens
    self._hits, self._quantum, self._cost = hits, quantum, output_cost
    # Queued requests by the block hash of the first page that they lack.
    self._lacking: dict[bytes, dict[int, Request]] = {}

  def key(self, request: Request) -> int:
    """Returns the negated number of cached pages."""
    return -self._hits(request)

  def push(self, request: Request) -> None:
    """Adds a request to the queue, indexed by the first page that it lacks."""
    super().push(request)
    lacks = self._first_missing_hash(request)
    if lacks is not None:
      self._lacking.setdefault(lacks, {})[request.number] = request

  def _first_missing_hash(self, request: Request) -> bytes | None:
    """Returns the first block hash that was not cached at the last lookup."""
    first = -self._entries[request.number][0] * prefixes.HASH_BYTES
    return request.block_hashes[first : first + prefixes.HASH_BYTES] or None

  def remove(self, request: Request) -> None:
    """Removes a request from the queue."""
    lacks = self._first_missing_hash(request)
    alike = self._lacking.get(lacks, {})
    alike.pop(request.number, None)
    if not alike:
      self._lacking.pop(lacks, None)
    super().remove(request)

  def published(self, block_hashes: bytes) -> None:
    """Repeats the lookup of requests whose first missing page is cached now."""
    found = prefixes.split(block_hashes)
    for block_hash in filter(self._lacking.__contains__, found):
      for request in self._lacking.pop(block_hash).values():
        self.push(request)

  def peek(self) -> Request | None:
    """Returns the next request to admit; None if no request is queued."""
    deficits, lines = self.deficits, self._lines
    while lines:
      able = [line[0] for c, line in lines.items() if deficits[c] > 0]
      if not able:
        # One quantum for all; repeated until a deficit is positive.
        for client, line in lines.items():
          deficits[client] += self._quantum * line[0][2].weight
        continue
      # The number of cached pages may be stale since pages are evicted: a
      # changed request is queued again.
      hits, _, request = min(able)
      if self.key(request) == hits:
        return request
      self.remove(request)
      self.push(request)
    return None

  def admitted(self, request: Request, num_read: int) -> None:
    """Charges the client for the tokens that its request reads."""
    self.deficits[request.client] -= num_read

  def served(self, clients: Clients, counts: Sequence[int]) -> None:
    """Charges clients for the tokens that a step draws."""
    deficits, cost = self.deficits, self._cost
    for (client, _), count in zip(clients, counts, strict=True):
      if count:
        deficits[client] -= cost * count
