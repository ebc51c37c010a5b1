"""Schedule of Streaming DiLoCo: the fragments of each step; no jax.

Streaming DiLoCo (`parallel.outer.streaming`) executes this schedule, and the
model of compute utilisation (`caatnet.studies.utilisation.predictor`) prices
it.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, Algorithm 2: fragment f of F is sent every H steps, starting
at t_f = f (H // F), and applied tau steps later.
"""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class FragmentSchedule:
  """Schedule of fragments, evenly spread over the H steps of a round.

  Updates are counted from 1 and steps from 0, so "after update t" is the end of
  step t - 1 and the start of step t.

  Attributes:
    sync_every: H, the number of steps per round.
    num_fragments: F, the number of fragments; each is sent once per round.

  Raises:
    ValueError: There are more fragments than steps in a round.

  Example:
    Three fragments; every two steps one of them is sent. Nothing is sent in the
    first round.

    >>> times = FragmentSchedule(sync_every=6, num_fragments=3)
    >>> [times.sent(step) for step in range(12)]
    [None, None, None, None, None, None, 0, None, 1, None, 2, None]
  """

  sync_every: int
  num_fragments: int

  def __post_init__(self) -> None:
    if self.sync_every < self.num_fragments:
      raise ValueError(
        f"sync_every={self.sync_every} is less than the "
        f"{self.num_fragments} fragments: "
        "at most one fragment is sent per step"
      )

  @property
  def spacing(self) -> int:
    """Number of steps between the sends of two consecutive fragments."""
    return self.sync_every // self.num_fragments

  def due_fragment(self, step: int) -> int | None:
    """Returns the fragment to be sent after update ``step``, also in round 0.

    None if no fragment is due then.
    """
    # If the number of fragments does not divide the number of steps, no
    # fragment is due in the last steps of a round.
    fragment, left = divmod(step % self.sync_every, self.spacing)
    return fragment if not left and fragment < self.num_fragments else None

  def sent(self, step: int) -> int | None:
    """Returns the fragment that is sent after update ``step``, or None.

    Nothing is sent in round 0: every fragment first trains for a whole round.
    """
    return self.due_fragment(step) if step >= self.sync_every else None


class SendVariant(NamedTuple):
  """Compile-time values of a send; steps with equal values share a program.

  Attributes:
    kind: Key of the stack of layers that contains the fragment; "(rest)" for
      the parameters outside of stacks, "(whole)" for all parameters.
    slot: Index of the buffer in which the averaged delta will wait, among the
      buffers of this kind.
    starts: Whether this step starts the exchange, which may span several steps.
  """

  kind: str
  slot: int
  starts: bool


class ReceiveVariant(NamedTuple):
  """Compile-time values of a receive; steps with equal values share a program.

  Attributes:
    kind: Kind of the fragment, a key as in `SendVariant`.
    slot: Index of the averaged delta's buffer, among buffers of this kind.
    first: Whether the receiving workers are the first to get the average and
      thus take the outer step; workers with more overlap get it later.
  """

  kind: str
  slot: int
  first: bool


class StepVariant(NamedTuple):
  """Compile-time values of a step, which select its compiled program."""

  send: SendVariant | None
  receives: tuple[ReceiveVariant, ...]


class SendArguments(NamedTuple):
  """Run-time values of a send, which are arguments of the compiled program.

  Fragments of one kind have equal shapes and share one program.

  Attributes:
    place: Index of the fragment among those of its kind.
    exchange: Number of updates before the exchange; seeds its random numbers.
    piece: Slice of the fragment that this step sends, from 0.
  """

  place: int
  exchange: int
  piece: int


class ReceiveArguments(NamedTuple):
  """Run-time values of a receive, which are arguments of the compiled program.

  Attributes:
    place: Index of the fragment among those of its kind.
    exchange: Number of updates before the exchange; seeds its random numbers.
    tau: Overlap, in steps, of the workers that receive in this step.
  """

  place: int
  exchange: int
  tau: int


class StepArguments(NamedTuple):
  """Run-time values of a step: of its send, and of each of its receives."""

  send: SendArguments | None
  receives: tuple[ReceiveArguments, ...]
