"""The load of a server: requests of a trace, or synthetic conversations."""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from caatnet.serving import traces
from caatnet.serving.server import client
from parallel.base import checks


@dataclasses.dataclass(frozen=True)
class Load:
  """Load to send to a server: a trace or synthetic conversations.

  Attributes:
    trace: Requests of a trace; None for `traces.Sessions`.
    sessions: Number of conversations without a trace.
    rate: Requests per second; 0 for the arrival times of the trace or, without
      a trace, for one per second.
    think_s: Mean seconds between an answer and the next turn of a conversation.
    max_tokens: Longest answer in tokens; 0 for the lengths of the trace or,
      without a trace, for 1,000. Without a trace, at most half of the context.
    num_requests: Number of requests, from the first; 0 for all.
    seed: Seed of random arrivals and lengths.

  Raises:
    ValueError: A rate or a time is negative or not finite.
  """

  trace: Sequence[traces.Arrival] | None = None
  sessions: int = 20
  rate: float = 0.0
  think_s: float = 30.0
  max_tokens: int = 0
  num_requests: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    checks.not_negative("rate", self.rate)
    checks.not_negative("think_s", self.think_s)

  def questions(
    self, card: dict[str, Any]
  ) -> tuple[list[client.TimedRequest], int]:
    """Returns the requests that fit into a model's context.

    Args:
      card: The server's description of its model, from
        `client.read_model_card`.

    Returns:
      The requests, and the number of those that are too long.

    Raises:
      ValueError: No request fits, or the rate of a trace cannot be changed.
    """
    context = card["max_model_len"]
    if self.trace is not None:
      arrivals, most = list(self.trace), self.max_tokens
      if most:
        arrivals = [
          dataclasses.replace(a, output=min(a.output, most)) for a in arrivals
        ]
      if self.rate:
        arrivals = traces.scaled(arrivals, self.rate)
    else:
      # Conversations end when the context is full.
      arrivals = traces.Sessions(
        self.sessions, self.rate or 1.0, self.seed, think_s=self.think_s,
        longest_answer=min(self.max_tokens or 1000, context // 2),
        longest=context,
      ).arrivals()
    arrivals = arrivals[: self.num_requests or None]
    found = client.requests_of_trace(arrivals, card)
    return found, len(arrivals) - len(found)


def replay(
  url: str, load: Load, key: str, begun: Callable[[int, int], None],
  on_end: Callable[[], None],
) -> dict[str, Any]:
  """Sends a load to a server.

  Args:
    url: URL of the server.
    load: The requests.
    key: API key; "" for none.
    begun: Called with the number of requests to send, and the number of those
      that are too long.
    on_end: Called when a response has ended.

  Returns:
    Result of `client.summary`, with ``left_out``, the number of requests that
    are too long.

  Raises:
    ValueError: The server does not answer, or `Load.questions` raises one.
  """
  card = asyncio.run(client.read_model_card(url, key))
  questions, left_out = load.questions(card)
  begun(len(questions), left_out)
  found = asyncio.run(client.send_requests(url, questions, key, on_end=on_end))
  return client.summary(found) | {"left_out": left_out}
