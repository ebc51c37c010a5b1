"""What Streaming DiLoCo sends and applies in each step; no jax.

Streaming DiLoCo (`parallel.outer.streaming`) runs by this timetable, and the
model of compute utilisation (`caatnet.studies.utilisation.predictor`) prices
it, so what is priced is what runs.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, Algorithm 2: fragment f of F is sent every H steps from
t_f = f (H // F) on, and applied tau steps later.
"""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class FragmentTimes:
  """The timetable of fragments, evenly spread over the H steps of a round.

  Updates are counted from 1 and steps from 0, so "after update t" is the end of
  step t - 1 and the head of step t.

  Attributes:
    every: H, the number of steps in a round.
    num_fragments: F, the number of fragments; each is sent once in a round.
  """

  every: int
  num_fragments: int

  def __post_init__(self) -> None:
    if self.every < self.num_fragments:
      raise ValueError(
        f"every={self.every} is less than the {self.num_fragments} fragments, "
        "which are sent after different steps"
      )

  @property
  def spacing(self) -> int:
    """The number of steps between the sends of two fragments."""
    return self.every // self.num_fragments

  def in_round(self, step: int) -> int | None:
    """Returns the fragment whose turn is after update ``step``, or None."""
    # Where F does not divide H, a round ends with steps that belong to none.
    fragment, left = divmod(step % self.every, self.spacing)
    return fragment if not left and fragment < self.num_fragments else None

  def sent(self, step: int) -> int | None:
    """Returns the fragment that is sent after update ``step``, or None.

    In round 0 nothing is sent: every fragment trains for H steps first.
    """
    return self.in_round(step) if step >= self.every else None


class SendVariant(NamedTuple):
  """The part of a send that is compiled into the program.

  Attributes:
    kind: The fragment's kind, as `parallel.outer.fragments` has them.
    slot: Where the fragment's mean waits, among others of its kind.
    starts: Whether this is the first piece of the exchange.
  """

  kind: str
  slot: int
  starts: bool


class ReceiveVariant(NamedTuple):
  """The part of a receive that is compiled into the program.

  Attributes:
    kind: The fragment's kind, as `parallel.outer.fragments` has them.
    slot: Where the fragment's mean waits, among others of its kind.
    first: Whether no worker has received this mean yet, so that the outer step
      is due.
  """

  kind: str
  slot: int
  first: bool


class Variant(NamedTuple):
  """The `Plan.variant` of a step: what it sends, and what it applies after."""

  send: SendVariant | None
  receives: tuple[ReceiveVariant, ...]


class SendNumbers(NamedTuple):
  """The part of a send that the program takes as an argument.

  Fragments of one kind have equal shapes, so one program serves them all.

  Attributes:
    place: The fragment's place among those of its kind.
    exchange: The number of the exchange, which decides its random draws.
    piece: The number of the piece that is sent, from 0.
  """

  place: int
  exchange: int
  piece: int


class ReceiveNumbers(NamedTuple):
  """The part of a receive that the program takes as an argument.

  Attributes:
    place: The fragment's place among those of its kind.
    exchange: The number of the exchange, which decides its random draws.
    tau: The overlap in steps of the workers that receive now.
  """

  place: int
  exchange: int
  tau: int


class Numbers(NamedTuple):
  """The `Plan.numbers` of a step, with as many receives as its variant has."""

  send: SendNumbers | None
  receives: tuple[ReceiveNumbers, ...]
