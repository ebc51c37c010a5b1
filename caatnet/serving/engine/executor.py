"""What a scheduler asks of whoever computes: steps, and copies of pages.

Steps run in the order in which they are submitted, and so do the copies of one
direction. A step that is submitted reads pages and writes others; who submits
it has made sure that no copy which is under way touches those, but for the
copies that the step itself is to wait for.

If the model keeps states, the state of a sequence is that of its slot. A copy
of a state to the host reads it before the steps that are submitted afterwards
write it, so a slot may be given to another sequence at once.

Shape legend: D = decodes of a step, S = slots, P = pages of a sequence.
"""

from collections.abc import Hashable, Sequence
import dataclasses
from typing import Literal, Protocol

import numpy as np

from caatnet.serving.requests import Request

Kind = Literal["out", "in", "within"]


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A part of a sequence that a step reads.

  Attributes:
    request: Whose.
    start: The position of its first token.
    length: How many tokens it has.
    draws: Whether the step draws the sequence's next token: the chunk is the
      end of what is known of it.
  """

  request: Request
  start: int
  length: int
  draws: bool

  @property
  def tokens(self) -> np.ndarray:
    """Its tokens, int32 ``[length]``."""
    return self.request.all_tokens(self.start, self.start + self.length)


@dataclasses.dataclass(frozen=True)
class Step:
  """What the model reads at once: decodes, then chunks.

  Attributes:
    number: Ascending from 0.
    decodes: The requests that read the token that they were given last, which
      need not be known to the host.
    slots: Their slots, int32 ``[D]``. A slot's newest token stays with the
      executor; a request that gets a slot has a chunk first.
    positions: Where these tokens are in their sequences, int32 ``[D]``.
    chunks: Parts of sequences.
    tables: Each slot's pages in the order of positions, int32 ``[S, P]``; the
      scheduler goes on writing it, so what is needed is read in `submit`.
    after: Numbers of copies that must have ended before the step begins.
    drawing: The slots that get a token, int ``[n]``: those of the decodes, then
      those of the chunks that draw.
    epochs: How often each of these had been given when the step was made, int64
      ``[n]``; for the scheduler.
  """

  number: int
  decodes: Sequence[Request] | np.ndarray
  slots: np.ndarray
  positions: np.ndarray
  chunks: tuple[Chunk, ...]
  tables: np.ndarray
  after: tuple[int, ...]
  drawing: np.ndarray
  epochs: np.ndarray

  @property
  def drawn(self) -> list[Request]:
    """The requests that get a token, as `drawing` has their slots."""
    return [*self.decodes, *(c.request for c in self.chunks if c.draws)]

  def request(self, i: int) -> Request:
    """Returns one of those that get a token."""
    if i < len(self.decodes):
      return self.decodes[i]
    return self.drawn[i]

  @property
  def num_tokens(self) -> int:
    """How many tokens it reads."""
    return len(self.decodes) + sum(chunk.length for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class Copy:
  """A copy of pages and states to the host, from there, or within the device.

  Attributes:
    number: Ascending from 0, over all kinds.
    kind: "out", "in" or "within".
    source: The pages that are read.
    target: The pages that are written, as many.
    owner: Whose sequence it is.
    state: The state that is copied with the pages, from and to which block: a
      slot and a block of the host, or the other way round; None for pages only.
  """

  number: int
  kind: Kind
  source: Sequence[int]
  target: Sequence[int]
  owner: Hashable
  state: tuple[int, int] | None = None

  @property
  def runs(self) -> list[int]:
    """The lengths of runs that are contiguous on both sides."""
    lengths: list[int] = []
    last = None
    for pair in zip(self.source, self.target, strict=True):
      if last is not None and pair == (last[0] + 1, last[1] + 1):
        lengths[-1] += 1
      else:
        lengths.append(1)
      last = pair
    return lengths


@dataclasses.dataclass(frozen=True)
class Event:
  """The end of a step or of a copy.

  Attributes:
    time_s: When it ended.
    step: The step; None for a copy.
    copy: The copy; None for a step.
    tokens: int ``[n]``, the drawn tokens of the step's decodes and then of its
      chunks that draw.
    failed: Which of these are no tokens, since the model's logits are NaN.
  """

  time_s: float
  step: Step | None = None
  copy: Copy | None = None
  tokens: Sequence[int] = ()
  failed: Sequence[int] = ()


class Costs(Protocol):
  """What the scheduler needs to know of times, in seconds."""

  def prefill_s(self, start: int, length: int) -> float:
    """Returns how much longer steps take that also read a chunk."""
    ...

  def copy_s(self, kind: Kind, num_runs: int, num_pages: int) -> float:
    """Returns how long a copy takes alone."""
    ...


class Executor(Protocol):
  """Who computes steps and copies, in the background.

  Attributes:
    costs: What it has measured, or what its model says.
  """

  costs: Costs

  def now(self) -> float:
    """Returns the time in seconds."""
    ...

  def submit(self, step: Step) -> None:
    """Begins a step behind those that were submitted before."""
    ...

  def copy(self, copy: Copy) -> None:
    """Begins a copy behind those of its kind, and behind submitted steps.

    A copy "in" or "within" ends when steps that are submitted from then on read
    what it wrote; one "out" when such steps may write what it read.
    """
    ...

  def wait(self, until_s: float) -> list[Event]:
    """Waits until something has ended, for a time, or until it is woken.

    Returns:
      What has ended since the last call, in order; nothing at the time given,
      or if it was woken.
    """
    ...
