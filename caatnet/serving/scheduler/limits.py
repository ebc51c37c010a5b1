"""Limits of a step, and options of page allocation and preemption."""

import dataclasses

from parallel.base.checks import known

PREEMPTION_MODES = ("recompute", "swap", "cost")


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a step, and options of page allocation and preemption.

  Attributes:
    slots: Maximum number of running requests.
    tokens: Maximum number of tokens that a step reads.
    chunks: Alternatives (maximum number of chunks, maximum tokens of a prompt
      chunk), few long chunks first; a step satisfies one of them. () for no
      bound.
    whole_prompt: Whether admission requires pages for all known tokens of a
      request; otherwise only for its first chunk.
    growth: Number of pages that a request is allocated when its last page is
      full, if available: more pages give fewer contiguous ranges of pages and
      more unused positions.
    preempt: Handling of a preempted request's pages: "recompute", "swap", or
      "cost" (the cheaper of both).
    wait_s: Longest copy, in seconds, that a step waits for; longer copies run
      concurrently with later steps.
    keep_turns: Whether a conversation's turn is copied to the host at its end.
    copy_on_write: Whether a cached page that a prompt fills to its last token
      is copied instead of recomputed.
  """

  slots: int = 256
  tokens: int = 2048
  chunks: tuple[tuple[int, int], ...] = ()
  whole_prompt: bool = True
  growth: int = 1
  preempt: str = "recompute"
  wait_s: float = 0.0
  keep_turns: bool = False
  copy_on_write: bool = True

  def __post_init__(self) -> None:
    known("preempt=", self.preempt, PREEMPTION_MODES)
