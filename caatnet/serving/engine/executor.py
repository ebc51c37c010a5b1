"""Interface between a scheduler and an executor: steps, copies and loads.

Steps run in the order of submission, and so do the copies of one direction. A
step reads some pages and writes others; the caller guarantees that no copy
under way touches these pages, except for the copies that the step waits for.

With several experts, a load copies the weights of one expert to a weight slot.
The caller guarantees that no step under way reads the weight slot, and submits
steps that read it only after the load has ended.

If the model has recurrent state, the state of a sequence is stored at the
sequence's slot. A copy of a state to the host reads it before any later step
writes it, so the slot may be reassigned at once.

Shape legend: D = decodes of a step, S = slots of sequences, P = pages of a
sequence.
"""

from collections.abc import Hashable, Sequence
import dataclasses
from typing import Literal, NamedTuple, Protocol

import numpy as np

from caatnet.serving.requests import Request

CopyKind = Literal["out", "in", "within"]


class Chunk(NamedTuple):
  """Part of a sequence's known tokens that a step reads.

  Attributes:
    request: Request that the tokens belong to.
    start: Position of the first token.
    length: Number of tokens.
    draws: Whether the step draws the sequence's next token, since the chunk
      ends with the last known token.
  """

  request: Request
  start: int
  length: int
  draws: bool

  @property
  def tokens(self) -> np.ndarray:
    """Token ids of the chunk, int32 ``[length]``."""
    return self.request.all_tokens(self.start, self.start + self.length)


class EngineStep(NamedTuple):
  """One forward pass of the model: decodes, then chunks.

  Attributes:
    number: Number of the step, ascending from 0.
    decodes: Requests whose newest token the step reads; the token may not have
      reached the host yet.
    slots: Slots of the decodes, int32 ``[D]``. The executor keeps the newest
      token of each slot; the first step of a request in a slot is a chunk.
    positions: Position of each decode's newest token in its sequence, int32
      ``[D]``.
    chunks: Parts of prompts.
    tables: Page tables by slot, int32 ``[S, P]``. The scheduler keeps modifying
      the array, so `submit` must read the required rows at once.
    after: Numbers of the copies that must end before the step begins.
    drawing: Slots for which a token is drawn, int ``[n]``: those of the
      decodes, then those of the chunks that draw.
    epochs: `RunningRequests.epochs` of the slots in `drawing` when the step was
      made, int64 ``[n]``; read by the scheduler only.
    weights: Weight slot that the step reads
      (`parallel.plans.placement.slots.Slots`); 0 with one model.
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
  weights: int = 0

  @property
  def drawn(self) -> list[Request]:
    """Requests for which a token is drawn, in the order of `drawing`."""
    return [*self.decodes, *(c.request for c in self.chunks if c.draws)]

  def request(self, i: int) -> Request:
    """Returns the request of entry `i` of `drawing`."""
    if i < len(self.decodes):  # avoids building the whole list
      return self.decodes[i]
    return self.drawn[i]

  @property
  def num_tokens(self) -> int:
    """Number of tokens that the step reads."""
    return len(self.decodes) + sum(chunk.length for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class Copy:
  """Copy of pages and states between device and host, or within the device.

  Attributes:
    number: Number of the copy, ascending from 0 over copies of all kinds.
    kind: "out" (to the host), "in" (from the host) or "within" (the device).
    source: Pages that are read.
    target: Pages that are written, as many as in `source`.
    owner: Owner of the sequence.
    state: (source, target) of the recurrent state that is copied with the
      pages: a sequence's slot and an index in host memory for "out", the
      reverse for "in"; None for pages only.
  """

  number: int
  kind: CopyKind
  source: Sequence[int]
  target: Sequence[int]
  owner: Hashable
  state: tuple[int, int] | None = None

  @property
  def runs(self) -> list[int]:
    """Lengths in pages of the ranges contiguous in both source and target."""
    lengths: list[int] = []
    last = None
    for pair in zip(self.source, self.target, strict=True):
      # Both the source and the target must continue.
      if last is not None and pair == (last[0] + 1, last[1] + 1):
        lengths[-1] += 1
      else:
        lengths.append(1)
      last = pair
    return lengths


@dataclasses.dataclass(frozen=True)
class WeightLoad:
  """Copy of an expert's weights to a weight slot on the device.

  Attributes:
    expert: Key of the expert.
    slot: Number of the weight slot (`parallel.plans.placement.slots.Slots`).
  """

  expert: str
  slot: int


class CompletionEvent(NamedTuple):
  """End of a step, a copy or a load.

  Attributes:
    time_s: Time of the end in seconds.
    step: The step that has ended, or None.
    copy: The copy that has ended, or None.
    load: The load that has ended, or None. A step may then read the weight
      slot: all weights are there, or arrive before the step reads them.
    error: Reason of a failed load; "" if the load has succeeded.
    tokens: Drawn tokens, int ``[n]``, in the order of `EngineStep.drawing`.
    failed: Indices of invalid tokens, for which the model's logits are NaN.
  """

  time_s: float
  step: EngineStep | None = None
  copy: Copy | None = None
  load: WeightLoad | None = None
  error: str = ""
  tokens: Sequence[int] = ()
  failed: Sequence[int] = ()


class Costs(Protocol):
  """Estimated times of steps and copies, in seconds."""

  def prefill_s(self, start: int, length: int) -> float:
    """Returns the seconds that a chunk adds to the steps that read it.

    Args:
      start: Position of the chunk's first token.
      length: Tokens of the chunk.
    """
    ...

  def copy_s(self, kind: CopyKind, num_runs: int, num_pages: int) -> float:
    """Returns the seconds of a copy that runs alone.

    Args:
      kind: Kind of the copy, as in `Copy`.
      num_runs: Number of contiguous ranges of pages.
      num_pages: Number of pages of all ranges together.
    """
    ...


class Executor(Protocol):
  """Interface of an executor, which runs steps, copies and loads concurrently.

  An executor for one model has no `load`.

  Attributes:
    costs: Measured or modelled times of steps and copies.
  """

  costs: Costs

  def now(self) -> float:
    """Returns the time on the executor's clock, in seconds."""
    ...

  def submit(self, step: EngineStep) -> None:
    """Enqueues a step after all submitted steps."""
    ...

  def copy(self, copy: Copy) -> None:
    """Enqueues a copy after those of its kind and after all submitted steps.

    After the end of a copy "in" or "within", steps that are submitted read its
    result; after the end of a copy "out", they may overwrite its source.
    """
    ...

  def load(self, load: WeightLoad) -> None:
    """Enqueues a load after all submitted loads."""
    ...

  def wait(self, until_s: float) -> list[CompletionEvent]:
    """Waits until a step, load, or part of a copy ends, or until a time.

    Returns:
      Events since the last call, in order; empty after a timeout, a wake-up or
      a part of a copy.
    """
    ...
