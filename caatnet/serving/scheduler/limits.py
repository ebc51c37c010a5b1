"""Limits of a step, and how pages are given and taken."""

import dataclasses

from caatnet.checks import one_of

PREEMPT = ("recompute", "swap", "cost")


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a step, and the handling of pages.

  Attributes:
    slots: Requests that run at a time.
    tokens: Tokens that a step reads.
    chunks: Pairs of how many chunks a step may have and how long each may be,
      few long ones first; a step keeps to one of them. () for no such bound.
    whole_prompt: Whether a request is admitted only when pages for all its
      known tokens are left; else for its first chunk.
    growth: Pages that a request takes at a time when its last one is full, if
      so many are left: more are fewer runs, and some that stand empty.
    admit_while_short: Whether requests are admitted in a step in which another
      one gave way since pages were short.
    preempt: Handling of preempted pages: "recompute", "swap", or "cost",
      whichever is cheaper.
    wait_s: A step waits for copies that take no longer; others run under the
      steps that follow.
    keep_turns: Whether a conversation's turn is copied to the host at its end.
    copy_on_write: Whether a page that a prompt fills to its last token is
      copied rather than read again.
  """

  slots: int = 256
  tokens: int = 2048
  chunks: tuple[tuple[int, int], ...] = ()
  whole_prompt: bool = True
  growth: int = 1
  admit_while_short: bool = False
  preempt: str = "recompute"
  wait_s: float = 0.0
  keep_turns: bool = False
  copy_on_write: bool = True

  def __post_init__(self) -> None:
    one_of("preempt", self.preempt, PREEMPT)
