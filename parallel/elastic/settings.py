"""How a peer takes part in a swarm."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a peer takes part.

  Attributes:
    alone_s: t_c: without a coordinator for so long it halts.
    lanes: Data connections from each peer to each other.
    checked: Whether blocks that are exchanged have checksums.
    samples: How many samples a part draws; 0 for no leases.
    measured: Whether rings go by measured links; all peers alike.
  """

  alone_s: float = 300.0
  lanes: int = 1
  checked: bool = False
  samples: int = 0
  measured: bool = False

  def __post_init__(self) -> None:
    if not self.alone_s > 0:
      raise ValueError(f"alone_s={self.alone_s:g} must be positive")
    if self.samples < 0:
      raise ValueError(f"samples={self.samples} must not be negative")
