"""What Streaming DiLoCo sends and applies in each step; no jax.

Streaming DiLoCo runs by this plan and the model of compute utilisation
(`parallel.network.utilisation`) prices it: both ask the same object. Source:
Douillard et al., arXiv 2501.18512, Algorithm 2: fragment f of F is sent every
H steps from t_f = f (H // F) on, and applied tau steps later.
"""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class FragmentTimes:
  """Fragments in turn, evenly spread over the H steps of a round.

  Updates are counted from 1: "after update t" is the end of step t - 1.

  Attributes:
    every: H, the steps of a round.
    num_fragments: F; each is sent once in a round.
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
    """Steps between the sends of two fragments."""
    return self.every // self.num_fragments

  def in_round(self, step: int) -> int | None:
    """The fragment whose turn is after update ``step``; None if no one's."""
    fragment, left = divmod(step % self.every, self.spacing)
    return fragment if not left and fragment < self.num_fragments else None

  def sent(self, step: int) -> int | None:
    """The fragment that is sent after update ``step``; none in round 0."""
    return self.in_round(step) if step >= self.every else None


class SendVariant(NamedTuple):
  """What of a send is compiled into the program.

  Attributes:
    kind: The fragment's kind, see `Fragments`.
    slot: Where its mean waits among others of its kind.
    starts: Whether this is its first piece.
  """

  kind: str
  slot: int
  starts: bool


class ReceiveVariant(NamedTuple):
  """What of a receive is compiled into the program.

  Attributes:
    kind: The fragment's kind, see `Fragments`.
    slot: Where its mean waits among others of its kind.
    first: Whether no worker has received it yet: the outer step is due.
  """

  kind: str
  slot: int
  first: bool


class Variant(NamedTuple):
  """`Plan.variant` of a step: what it sends at its head, applies at its end."""

  send: SendVariant | None
  receives: tuple[ReceiveVariant, ...]


class SendNumbers(NamedTuple):
  """What of a send is given to the program.

  Attributes:
    place: The fragment's place among those of its kind.
    exchange: The number of the exchange, which decides its random draws.
    piece: Which piece of it is sent.
  """

  place: int
  exchange: int
  piece: int


class ReceiveNumbers(NamedTuple):
  """What of a receive is given to the program.

  Attributes:
    place: The fragment's place among those of its kind.
    exchange: The number of the exchange, which decides its random draws.
    tau: Workers with this overlap receive.
  """

  place: int
  exchange: int
  tau: int


class Numbers(NamedTuple):
  """`Plan.numbers` of a step; as many receives as its variant has."""

  send: SendNumbers | None
  receives: tuple[ReceiveNumbers, ...]
