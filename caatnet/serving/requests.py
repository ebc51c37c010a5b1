"""Requests on their way through a server, and what is measured of them."""

from collections.abc import Callable, Hashable, Sequence, Set
import enum
import math

import numpy as np

from caatnet.serving.cache import prefixes


class State(enum.Enum):
  """Where a request is.

  WAITING: it has no pages. RUNNING: it has pages and a slot. LEAVING: its pages
  are copied to the host, and it keeps them until then. SWAPPED: the host alone
  has its pages. ARRIVING: they are copied back. The others are ends: FINISHED:
  it has all its tokens. CANCELLED: its client has gone. EXPIRED: its first
  token did not come before its deadline. REFUSED: it can never fit. FAILED: the
  model's logits for it are NaN.
  """

  WAITING = "waiting"
  RUNNING = "running"
  LEAVING = "leaving"
  SWAPPED = "swapped"
  ARRIVING = "arriving"
  FINISHED = "finished"
  CANCELLED = "cancelled"
  EXPIRED = "expired"
  REFUSED = "refused"
  FAILED = "failed"


ENDS = (
  State.FINISHED, State.CANCELLED, State.EXPIRED, State.REFUSED, State.FAILED
)


# A request's that has none.
NO_PAGES = np.zeros(0, np.int32)

# What ends a sequence: one of some tokens, or whatever a function says that is
# asked once about each token, in order.
Ends = frozenset[int] | Callable[[int], bool]


class Request:
  """A prompt, what ends its continuation, and how far it has come.

  Times are in seconds on the executor's clock.

  Attributes:
    number: Unique among the requests of a server; ascending with arrival.
    prompt: The tokens, int32 ``[n]``, n at least 1.
    max_tokens: How many tokens are drawn at most.
    longest: How many tokens it will have read at its end, the last one not.
    client: Who pays for it, by fair policies.
    priority: Lower is served earlier.
    arrival_s: When it came.
    deadline_s: By when its first token must have come.
    conversation: Of which conversation it is a turn; None for none. The prompt
      of a turn begins with the turn before it and its answer.
    more: Whether another turn of the conversation may follow.
    ends: The tokens that end the sequence, or a function that returns whether
      a token does; it is asked once about each token, in order.
    weight: The share of its client among clients, for fair policies.
    payload: What the executor needs to draw its tokens.
    state: Where it is.
    scheduled_s: When it was first scheduled; None if it was not.
    end_s: When it ended; None before.
    num_hits: Tokens of its prompt that were found when it was first scheduled.
    num_preempted: How often its pages were taken.
    names: The names of its full pages, as far as its tokens are known, one
      after another.
    slot: Its number among the running requests; -1 for none.
    context: How many tokens it had when it was last admitted; those are read in
      chunks, and what follows is decoded.
    pages: Its pages on the device, int32 ``[n]``; of one that has a slot they
      are that row of `Running.tables`.
    num_pending: How many of its tokens are being drawn, when it has no slot.
    buffer: Moves the newest tokens of a request that has a slot to it; None for
      one that has none.
    swapped: How many of its tokens the host alone has.
  """

  __slots__ = (
    "_num_drawn", "_times", "_tokens", "arrival_s", "buffer", "client",
    "context", "conversation", "deadline_s", "end_s", "ends", "longest",
    "max_tokens", "more", "names", "num_hits", "num_pending", "num_preempted",
    "number", "pages", "payload", "priority", "prompt", "scheduled_s", "slot",
    "state", "swapped", "weight",
  )

  def __init__(
    self,
    number: int,
    prompt: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    client: Hashable = "",
    priority: float = 0.0,
    arrival_s: float = 0.0,
    deadline_s: float = math.inf,
    conversation: Hashable | None = None,
    more: bool = False,
    ends: Ends = frozenset(),
    weight: float = 1.0,
    payload: object = None,
  ) -> None:
    """Makes a request that waits.

    Raises:
      ValueError: The prompt is empty, or nothing is to be drawn.
    """
    if not len(prompt):
      raise ValueError("the prompt is empty: it has no token")
    if max_tokens < 1:
      raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if isinstance(ends, Set):
      ends = frozenset(ends)
      if ends and not 0 <= min(ends) <= max(ends) < 2**31:
        raise ValueError(f"ends={set(ends)} has what is no token")
    if not weight > 0:
      raise ValueError(f"weight={weight:g} must be positive")
    self.number, self.max_tokens = number, max_tokens
    self.prompt = np.asarray(prompt, np.int32)
    self.longest = len(self.prompt) + max_tokens - 1
    self.client, self.priority, self.weight = client, priority, weight
    self.arrival_s, self.deadline_s = arrival_s, deadline_s
    self.conversation, self.more = conversation, more
    self.ends, self.payload = ends, payload
    self.state = State.WAITING
    # Both in pieces, as they were taken.
    self._tokens: list[np.ndarray] = []
    self._times: list[np.ndarray] = []
    self._num_drawn = 0
    self.buffer: Callable[[Request], None] | None = None
    self.scheduled_s: float | None = None
    self.end_s: float | None = None
    self.num_hits = self.num_preempted = self.context = 0
    self.names = b""
    self.slot = -1
    self.pages = NO_PAGES
    self.num_pending = self.swapped = 0

  @property
  def tokens(self) -> list[int]:
    """The tokens drawn so far that the host knows."""
    return [token for piece in self._drawn() for token in piece.tolist()]

  @property
  def token_times(self) -> list[float]:
    """When each of them came."""
    self._drawn()
    return [time for piece in self._times for time in piece.tolist()]

  def take(self, tokens: np.ndarray, times: np.ndarray) -> None:
    """Notes its next tokens, int32 ``[n]``, and when they came."""
    self._tokens.append(tokens)
    self._times.append(times)
    self._num_drawn += len(tokens)

  def _drawn(self) -> list[np.ndarray]:
    """Returns all tokens drawn, in pieces."""
    if self.buffer is not None:
      self.buffer(self)
    return self._tokens

  def is_end(self, token: int) -> bool:
    """Returns whether its next token ends it."""
    ends = self.ends
    return token in ends if isinstance(ends, frozenset) else ends(token)

  @property
  def owner(self) -> Hashable:
    """Whose copy on the host is the request's."""
    if self.conversation is None:
      return ("request", self.number)
    return ("conversation", self.conversation)

  @property
  def length(self) -> int:
    """How many tokens it has that the host knows."""
    if self.buffer is not None:
      self.buffer(self)
    return len(self.prompt) + self._num_drawn

  def all_tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Returns the tokens of some positions, those of the prompt first."""
    drawn = self._drawn()
    if not drawn:
      return self.prompt[start:stop]
    n = min(start, len(self.prompt))
    return np.concatenate([self.prompt[n:], *drawn])[
      start - n : None if stop is None else max(0, stop - n)
    ]

  def name_pages(self, page_size: int) -> None:
    """Names the pages that its known tokens fill."""
    self.names += prefixes.names(
      self.names[-prefixes.SIZE :] or prefixes.ROOT,
      self.all_tokens(self.num_named * page_size).tobytes(),
      page_size * self.prompt.itemsize,
    )

  @property
  def num_named(self) -> int:
    """How many pages its names are of."""
    return len(self.names) // prefixes.SIZE

  @property
  def ttft_s(self) -> float:
    """From arrival to the first token; NaN if there is none."""
    return self.token_times[0] - self.arrival_s if self.tokens else math.nan

  @property
  def tpot_s(self) -> float:
    """The mean time between its tokens; NaN if there are fewer than two."""
    if len(self.tokens) < 2:
      return math.nan
    times = self.token_times
    return (times[-1] - times[0]) / (len(times) - 1)

  @property
  def gaps_s(self) -> np.ndarray:
    """The times between its tokens, float64 ``[len(tokens) - 1]``."""
    return np.diff(self.token_times)
