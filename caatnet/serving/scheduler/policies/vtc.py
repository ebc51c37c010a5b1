"""Virtual token counters: the client with the least service is next.

A client's counter grows by w_p / weight per token that its requests read at
admission and by w_q / weight per token that they draw, where w_p and w_q are
the costs of input and output. When a client without queued requests sends one,
its counter is raised at least to the smallest counter of the clients with
queued requests, so that no client accumulates credit while idle.

Deviations: tokens whose pages are cached are not read and cost nothing; a
request that was preempted is charged for its prompt once.

Source: Sheng et al., Fairness in serving large language models, OSDI 2024
(arXiv 2401.00588), algorithm 2.
"""

from collections.abc import Sequence

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.base import Clients
from caatnet.serving.scheduler.policies.clients import ClientQueues


class VirtualTokenCounter(ClientQueues):
  """Policy: client with the smallest counter first, then order of arrival.

  Attributes:
    counters: Weighted service of each client so far.
  """

  def __init__(self, input_cost: float = 1.0, output_cost: float = 2.0) -> None:
    """Makes an empty queue.

    Args:
      input_cost: w_p, cost per token of a prompt.
      output_cost: w_q, cost per token drawn.
    """
    super().__init__()
    self.counters = self._served
    self._costs = input_cost, output_cost

  def arrived(self, request: Request) -> None:
    """Raises the counter of a client that had no queued requests."""
    super().arrived(request)
    if request.client not in self._lines and self._lines:
      # Credit from the time without queued requests is lost.
      least = min(self.counters[c] for c in self._lines)
      own = self.counters[request.client]
      self.counters[request.client] = max(own, least)

  def peek(self) -> Request | None:
    """Returns the oldest request of the client with the smallest counter."""
    if not self._lines:
      return None
    counters, lines = self.counters, self._lines
    least = min(map(counters.__getitem__, lines))
    able = [line[0] for c, line in lines.items() if counters[c] == least]
    return min(able)[2]

  def admitted(self, request: Request, num_read: int) -> None:
    """Charges the client for tokens read at a request's first admission."""
    if not request.num_preempted:
      cost = self._costs[0] * num_read / request.weight
      self.counters[request.client] += cost

  def served(self, clients: Clients, counts: Sequence[int]) -> None:
    """Charges clients for the tokens that a step draws."""
    counters, cost = self.counters, self._costs[1]
    for (client, weight), count in zip(clients, counts, strict=True):
      if count:
        counters[client] += cost * count / weight
