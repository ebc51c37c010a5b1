"""``config.elastic``: how a worker takes part in a swarm."""

import dataclasses

from parallel.elastic.ring import link_collectives


@dataclasses.dataclass(frozen=True)
class SwarmOptions:
  """How a worker takes part in a swarm: ``config.elastic``.

  Attributes:
    order: In which order floats are added: "direct" (by ranks) or "ring".
    alone_s: Without a coordinator for so many seconds a worker ends.
    lanes: Connections from each worker to each other.
    checksums: Whether what is exchanged has checksums.
  """

  order: str
  alone_s: float
  lanes: int
  checksums: bool

  def __post_init__(self) -> None:
    if self.order not in link_collectives.ORDERS:
      names = ", ".join(link_collectives.ORDERS)
      raise ValueError(f"order={self.order!r} must be one of {names}")


# Of configs without the section.
USUAL = SwarmOptions("direct", alone_s=300.0, lanes=1, checksums=False)
