"""Deficit longest prefix match: reuse first, within what fairness allows.

Of the clients whose deficit is positive the request with the longest cached
prefix is next. Service is taken from the deficit; when no client in line has
any left, all get a quantum, so none gets more than that ahead. What is cached
is looked up when a request joins the line, when the first page that it lacks
gets a name, and, since pages are evicted, when it is about to be next.

Source: Cao et al., Locality-aware fair scheduling in LLM serving (arXiv
2501.14312), algorithm 1.
"""

from collections.abc import Callable, Sequence

from caatnet.serving.cache import prefixes
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Clients
from caatnet.serving.scheduler.policies.clients import ClientLines


class DeficitLongestPrefix(ClientLines):
  """The longest cached prefix first, of clients that have deficit left."""

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
    self.deficits = self._served  # what each client may still be served
    self._hits, self._quantum, self._cost = hits, quantum, output_cost
    # Who waits for a page of a name to be cached.
    self._lacking: dict[bytes, dict[int, Request]] = {}

  def key(self, request: Request) -> int:
    """Returns how many pages are cached, the most first."""
    return -self._hits(request)

  def push(self, request: Request) -> None:
    """Puts a request in line."""
    super().push(request)
    lacks = self._lacks(request)
    if lacks is not None:
      self._lacking.setdefault(lacks, {})[request.number] = request

  def _lacks(self, request: Request) -> bytes | None:
    """Returns the first name that was not found when it was looked up."""
    first = -self._entries[request.number][0] * prefixes.SIZE
    return request.names[first : first + prefixes.SIZE] or None

  def remove(self, request: Request) -> None:
    """Takes a request out of line."""
    lacks = self._lacks(request)
    alike = self._lacking.get(lacks, {})
    alike.pop(request.number, None)
    if not alike:
      self._lacking.pop(lacks, None)
    super().remove(request)

  def published(self, names: bytes) -> None:
    """Looks up again who lacked these."""
    for name in filter(self._lacking.__contains__, prefixes.split(names)):
      for request in self._lacking.pop(name).values():
        self.push(request)

  def peek(self) -> Request | None:
    """Returns the longest cached prefix of a client with deficit left."""
    deficits, lines = self.deficits, self._lines
    while lines:
      able = [line[0] for c, line in lines.items() if deficits[c] > 0]
      if not able:
        for client, line in lines.items():
          deficits[client] += self._quantum * line[0][2].weight
        continue
      hits, _, request = min(able)
      if self.key(request) == hits:
        return request
      self.remove(request)
      self.push(request)
    return None

  def admitted(self, request: Request, num_read: int) -> None:
    """Charges what is read."""
    self.deficits[request.client] -= num_read

  def served(self, clients: Clients, counts: Sequence[int]) -> None:
    """Charges what is drawn."""
    deficits, cost = self.deficits, self._cost
    for (client, _), count in zip(clients, counts, strict=True):
      if count:
        deficits[client] -= cost * count
