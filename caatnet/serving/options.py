"""The keys of ``config.serving``."""

import dataclasses

from caatnet.checks import one_of
from caatnet.serving.scheduler.limits import PREEMPT
from caatnet.serving.scheduler.policies.registry import POLICIES


@dataclasses.dataclass(frozen=True)
class ServingOptions:
  """How a server serves; times are in seconds.

  Sequences that run at a time are ``config.inference.batch``, and the pages
  that they share ``config.inference.pages``: 0 for as many as they can fill, in
  half of the memory that is free.

  Attributes:
    policy: Who is served next, one of ``POLICIES``.
    preempt: How pages are taken when they are short: "swap", "recompute", or
      "cost", whichever is cheaper.
    host_pages: Pages of the host's memory for what is swapped; 0 for as many as
      the device has, in a quarter of the memory that is free.
    growth: Pages that a sequence takes at a time.
    wait_s: A step waits for copies that take no longer.
    reuse: Whether sequences that begin alike share pages.
    keep_turns: Whether the turns of a conversation are kept on the host.
    queue: Sequences that may wait for a slot.
    choices: Answers that one request may ask for.
    max_tokens: Tokens of an answer at most; 0 for no bound but the context.
    body_bytes: The length of a request's body at most.
    read_s: By when a client must have sent a request.
    write_s: By when a client must have read what was sent.
    drain_s: For how long requests may go on after a signal to end.
  """

  policy: str
  preempt: str
  host_pages: int
  growth: int
  wait_s: float
  reuse: bool
  keep_turns: bool
  queue: int
  choices: int
  max_tokens: int
  body_bytes: int
  read_s: float
  write_s: float
  drain_s: float

  def __post_init__(self) -> None:
    one_of("policy", self.policy, tuple(POLICIES))
    one_of("preempt", self.preempt, PREEMPT)


DEFAULTS = ServingOptions(
  policy="strict_priority", preempt="cost", host_pages=0, growth=1,
  wait_s=2e-3, reuse=True, keep_turns=True, queue=1024, choices=64,
  max_tokens=0, body_bytes=4 << 20, read_s=20.0, write_s=60.0, drain_s=30.0,
)
