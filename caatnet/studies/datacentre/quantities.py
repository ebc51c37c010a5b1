"""A number of the world outside, with its unit, its range and its source."""

import dataclasses
import math

# How a number is known: read in the "paper" that it is of or in its abstract,
# in a "published" document, in others' copies ("reported"), backed out of a
# paper's outputs ("derived"), recalled ("unverified"), or a "choice" of ours.
MARKS = ("paper", "published", "reported", "derived", "unverified", "choice")


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A number that may be otherwise.

  Attributes:
    value: What is taken.
    low: The least that is likely.
    high: The most that is likely.
    unit: Its unit; "" for a plain number.
    meaning: What it is, in a few words.
    source: Where it comes from.
    mark: How well it is known, one of ``MARKS``.
    least: Below this it makes no sense.
    most: Nor above this.
    whole: Whether it is a number of things.
  """

  value: float
  low: float
  high: float
  unit: str
  meaning: str
  source: str = "ours"
  mark: str = "choice"
  least: float = 0.0
  most: float = math.inf
  whole: bool = False

  def __post_init__(self) -> None:
    if self.mark not in MARKS:
      raise ValueError(f"mark={self.mark!r} must be one of {', '.join(MARKS)}")
    if not self.least <= self.low <= self.value <= self.high <= self.most:
      raise ValueError(
        f"{self.meaning}: {self.least:g} <= low={self.low:g} <= "
        f"value={self.value:g} <= high={self.high:g} <= {self.most:g} must hold"
      )
