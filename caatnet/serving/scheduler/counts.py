"""What a scheduler has done: steps, preemptions, and copies of pages."""

import collections
import dataclasses

from caatnet.serving.engine.executor import Copy

# How many of the last decisions are kept: a server runs for months.
_KEPT = 100_000


@dataclasses.dataclass
class Decision:
  """How a request's pages were taken.

  Attributes:
    swap_s: What it costs to copy them out and back.
    recompute_s: What it costs to read its tokens again.
    swapped: Whether they were copied.
    able: Whether both were possible.
  """

  swap_s: float
  recompute_s: float
  swapped: bool
  able: bool


@dataclasses.dataclass
class Counts:
  """What a scheduler has done.

  Attributes:
    steps: Steps that it made.
    decisions: The last preemptions, each with its costs.
    preemptions: How many there were of each kind, "swap" or "recompute".
    stalls: How often a running request was left out of a step, since the pages
      that it needs were still being copied.
    waited: Copies that a step waited for.
    pages: Pages that were copied, by the kind of copy.
    states: States that were copied, by kind.
    runs: Copies of each run length in pages, by kind.
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

  def decide(self, decision: Decision) -> None:
    """Counts a preemption."""
    self.decisions.append(decision)
    self.preemptions["swap" if decision.swapped else "recompute"] += 1

  def add(self, copy: Copy) -> None:
    """Counts a copy."""
    self.pages[copy.kind] += len(copy.source)
    self.states[copy.kind] += copy.state is not None
    self.runs[copy.kind].update(copy.runs)

  def num_ranges(self, per_run: int) -> int:
    """Returns how many contiguous byte ranges were moved to and from the host.

    Args:
      per_run: In how many ranges a run of pages lies: one for each layer and
        each of the cache's arrays.
    """
    return per_run * sum(sum(self.runs[k].values()) for k in ("out", "in"))
