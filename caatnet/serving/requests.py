"""Requests of a server: state, tokens, deadlines and measured times."""

from collections.abc import Callable, Hashable, Sequence, Set
import enum
import math

import numpy as np

from caatnet.serving.cache import prefixes
from parallel.base.checks import at_least


class State(enum.Enum):
  """State of a request.

  WAITING: queued without pages. RUNNING: has pages and a slot among the running
  requests. LEAVING: its pages are being copied to the host, and it holds them
  until the copy ends. SWAPPED: only the host has its pages. ARRIVING: the pages
  are being copied back. The other states are final. FINISHED: has all its
  tokens. CANCELLED: its client has disconnected. EXPIRED: its first token was
  not drawn before the deadline. REFUSED: it can never fit in the cache. FAILED:
  the model's logits for it are NaN, its expert could not be loaded, or no
  program for it could be compiled.
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


FINAL_STATES = (
  State.FINISHED, State.CANCELLED, State.EXPIRED, State.REFUSED, State.FAILED
)


# Page list of a request without pages.
NO_PAGES = np.zeros(0, np.int32)

# Stop condition of a sequence: a set of tokens, or a function that is called
# once with each token, in order.
StopCondition = frozenset[int] | Callable[[int], bool]


class Request:
  """Prompt, stop condition, priority and progress of one sequence.

  Times are in seconds on the executor's clock.

  Attributes:
    number: Unique among the requests of a server; ascending with arrival.
    prompt: Token ids, int32 ``[n]``, n at least 1.
    max_tokens: Maximum number of drawn tokens.
    longest: Maximum number of tokens that are read: prompt and drawn tokens
      except for the last one.
    client: Client charged by fair policies.
    priority: Lower is served earlier.
    arrival_s: Time of arrival.
    deadline_s: Time by which the first token must have been drawn.
    expert: Key of the expert that answers, "NAME@REVISION"; "" for a server
      with one model.
    conversation: Conversation that the request is a turn of; None for none. The
      prompt of a turn begins with the previous prompt and response.
    owner: Key of the request's copy in the host cache: its conversation and
      expert or, without a conversation, the request itself.
    more: Whether another turn of the conversation may follow.
    stop: Tokens that end the sequence, or a function that returns whether a
      token does; it is called once with each token, in order.
    weight: Weight of the client, to which its service in fair policies is
      proportional.
    payload: Sampling parameters for the executor.
    error: Reason of the state FAILED if the weights could not be loaded, or a
      program could not be compiled.
    state: Current state.
    scheduled_s: Time of the first admission; None before.
    end_s: Time of the end; None before.
    num_hits: Number of prompt tokens that were cached at the first admission.
    num_preempted: Number of preemptions.
    block_hashes: Concatenated block hashes of the full pages of its known
      tokens.
    slot: Index among the running requests; -1 for none.
    context: Number of known tokens at the last admission; these are read in
      chunks, and later tokens are decoded.
    pages: Pages on the device, int32 ``[n]``; for a request with a slot, a view
      of its row in `RunningRequests.tables`.
    num_pending: Number of tokens that steps under way draw for a request that
      no longer has a slot.
    buffer: Function that moves buffered tokens of a request with a slot to the
      request; None without a slot.
    swapped: Number of its tokens that only the host has.

  Example:
    >>> request = Request(0, prompt=[5, 6, 7], max_tokens=4, arrival_s=1.0)
    >>> request.take(np.array([8, 9], np.int32), np.array([1.25, 1.5]))
    >>> request.all_tokens().tolist(), request.ttft_s, request.tpot_s
    ([5, 6, 7, 8, 9], 0.25, 0.25)
  """

  __slots__ = (
    "_num_drawn", "_times", "_tokens", "arrival_s", "block_hashes", "buffer",
    "client", "context", "conversation", "deadline_s", "end_s", "error",
    "expert", "longest", "max_tokens", "more", "num_hits", "num_pending",
    "num_preempted", "number", "owner", "pages", "payload", "priority",
    "prompt", "scheduled_s", "slot", "state", "stop", "swapped", "weight",
  )

  def __init__(
    self,
    number: int,
    prompt: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    client: Hashable = "",
    expert: str = "",
    priority: float = 0.0,
    arrival_s: float = 0.0,
    deadline_s: float = math.inf,
    conversation: Hashable | None = None,
    more: bool = False,
    stop: StopCondition = frozenset(),
    weight: float = 1.0,
    payload: object = None,
  ) -> None:
    """Makes a waiting request.

    Raises:
      ValueError: The prompt is empty, ``max_tokens`` is not positive, ``stop``
        contains an invalid token id, or ``weight`` is not positive.
    """
    if not len(prompt):
      raise ValueError("the prompt is empty; it must have at least one token")
    at_least("max_tokens", max_tokens)
    if isinstance(stop, Set):
      stop = frozenset(stop)
      if stop and not 0 <= min(stop) <= max(stop) < 2**31:
        raise ValueError(f"stop={set(stop)} must be token ids in [0, 2**31)")
    if not weight > 0:
      raise ValueError(f"weight={weight:g} must be positive")
    self.number, self.max_tokens = number, max_tokens
    self.prompt = np.asarray(prompt, np.int32)
    self.longest = len(self.prompt) + max_tokens - 1
    self.client, self.priority, self.weight = client, priority, weight
    self.expert, self.error = expert, ""
    self.arrival_s, self.deadline_s = arrival_s, deadline_s
    self.more = more
    self.join_conversation(conversation)
    self.stop, self.payload = stop, payload
    self.state = State.WAITING
    # One array per call of `take`; concatenated on access.
    self._tokens: list[np.ndarray] = []
    self._times: list[np.ndarray] = []
    self._num_drawn = 0
    self.buffer: Callable[[Request], None] | None = None
    self.scheduled_s: float | None = None
    self.end_s: float | None = None
    self.num_hits = self.num_preempted = self.context = 0
    self.block_hashes = b""
    self.slot = -1
    self.pages = NO_PAGES
    self.num_pending = self.swapped = 0

  @property
  def tokens(self) -> list[int]:
    """Drawn tokens that are on the host."""
    return [token for piece in self._drawn() for token in piece.tolist()]

  @property
  def token_times(self) -> list[float]:
    """Times of the drawn tokens, in seconds."""
    self._drawn()
    return [time for piece in self._times for time in piece.tolist()]

  def take(self, tokens: np.ndarray, times: np.ndarray) -> None:
    """Appends drawn tokens, int32 ``[n]``, and their times in seconds."""
    self._tokens.append(tokens)
    self._times.append(times)
    self._num_drawn += len(tokens)

  def _drawn(self) -> list[np.ndarray]:
    """Returns all drawn tokens as a list of arrays."""
    if self.buffer is not None:
      self.buffer(self)
    return self._tokens

  def is_end(self, token: int) -> bool:
    """Returns whether a drawn token ends the sequence."""
    stop = self.stop
    return token in stop if isinstance(stop, frozenset) else stop(token)

  def join_conversation(self, conversation: Hashable | None) -> None:
    """Makes the request a turn of a conversation; None makes it independent.

    Turns of a conversation that different experts answer have different copies
    in the host cache.
    """
    self.conversation = conversation
    self.owner: Hashable = ("request", self.number)
    if conversation is not None:
      self.owner = ("conversation", conversation, self.expert)

  @property
  def length(self) -> int:
    """Number of known tokens: the prompt, and drawn tokens on the host."""
    if self.buffer is not None:
      self.buffer(self)
    return len(self.prompt) + self._num_drawn

  def all_tokens(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Returns prompt and drawn tokens at positions ``[start, stop)``, int32."""
    drawn = self._drawn()
    if not drawn:
      return self.prompt[start:stop]
    n = min(start, len(self.prompt))
    return np.concatenate([self.prompt[n:], *drawn])[
      start - n : None if stop is None else max(0, stop - n)
    ]

  def hash_pages(self, page_size: int) -> None:
    """Computes the block hashes of the pages that its known tokens fill."""
    self.block_hashes += prefixes.block_hashes(
      self.block_hashes[-prefixes.HASH_BYTES :] or prefixes.root(self.expert),
      self.all_tokens(self.num_hashed * page_size).tobytes(),
      page_size * self.prompt.itemsize,
    )

  @property
  def num_hashed(self) -> int:
    """Number of pages in `block_hashes`."""
    return len(self.block_hashes) // prefixes.HASH_BYTES

  @property
  def ttft_s(self) -> float:
    """Seconds from arrival to the first token; NaN without a token."""
    return self.token_times[0] - self.arrival_s if self.tokens else math.nan

  @property
  def tpot_s(self) -> float:
    """Mean seconds between its tokens; NaN for fewer than two tokens."""
    if len(self.tokens) < 2:
      return math.nan
    times = self.token_times
    return (times[-1] - times[0]) / (len(times) - 1)

  @property
  def gaps_s(self) -> np.ndarray:
    """Seconds between its tokens, float64 ``[len(tokens) - 1]``."""
    return np.diff(self.token_times)
