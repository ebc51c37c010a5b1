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

from collections.abc import Callable, Hashable

from caatnet.serving.policies.clients import ClientLines
from caatnet.serving.requests import Request


def _root(request: Request) -> bytes:
  return request.names[0] if request.names else b""


class DeficitLongestPrefix(ClientLines):
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
    self.deficits = self._served
    self._hits, self._quantum, self._cost = hits, quantum, output_cost
    self._roots: dict[bytes, dict[int, Request]] = {}

  def key(self, request: Request) -> int:
    """Returns how many pages are cached, the most first."""
    return -self._hits(request)

  def push(self, request: Request) -> None:
    """Puts a request in line, beside those that begin with the same page."""
    super().push(request)
    self._roots.setdefault(_root(request), {})[request.number] = request

  def remove(self, request: Request) -> None:
    """Takes a request out of line."""
    super().remove(request)
    alike = self._roots[_root(request)]
    del alike[request.number]
    if not alike:
      del self._roots[_root(request)]

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

  def admitted(self, request: Request, num_read: int) -> None:
    """Charges what is read, and looks up again who begins alike."""
    self.deficits[request.client] -= num_read
    for other in list(self._roots.get(_root(request), {}).values()):
      if self.key(other) != self._entries[other.number][0]:
        self.push(other)

  def served(self, clients: list[tuple[Hashable, int, float]]) -> None:
    """Charges what is drawn."""
    for client, count, _ in clients:
      self.deficits[client] -= self._cost * count
