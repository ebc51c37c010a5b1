"""Counters of a scheduler: steps, preemptions, and copies of pages."""

import collections
import dataclasses

from caatnet.serving.engine.executor import Copy

# Number of recent decisions that are kept: a server runs for months.
_KEPT = 100_000


@dataclasses.dataclass
class Decision:
  """Choice between swapping and recomputing a preempted request.

  Attributes:
    swap_s: Seconds to copy its pages out and back.
    recompute_s: Seconds to read its tokens again.
    swapped: Whether the pages were copied.
    able: Whether swapping was possible; if not, ``swap_s`` is 0.
  """

  swap_s: float
  recompute_s: float
  swapped: bool
  able: bool


@dataclasses.dataclass
class Counts:
  """Counters of a scheduler.

  Attributes:
    steps: Number of steps.
    decisions: Most recent preemptions, each with its costs.
    preemptions: Number of preemptions by kind, "swap" or "recompute".
    stalls: Number of times that a running request was left out of a step
      because its pages were still being copied.
    waited: Number of copies that a step waited for.
    pages: Number of copied pages by the kind of copy.
    states: Number of copied recurrent states by the kind of copy.
    runs: Number of copied ranges of contiguous pages, by kind of copy and by
      length in pages.
  """

  steps: int = 0
  decisions: collections.deque[Decision] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_KEPT)
  )
  preemptions: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  stalls: int = 0
  waited: int = 0
  pages: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  states: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  runs: dict[str, collections.Counter[int]] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(collections.Counter)
  )

  def add_decision(self, decision: Decision) -> None:
    """Counts a preemption, and keeps the decision."""
    self.decisions.append(decision)
    self.preemptions["swap" if decision.swapped else "recompute"] += 1

  def add(self, copy: Copy) -> None:
    """Counts a copy."""
    self.pages[copy.kind] += len(copy.source)
    self.states[copy.kind] += copy.state is not None
    self.runs[copy.kind].update(copy.runs)
