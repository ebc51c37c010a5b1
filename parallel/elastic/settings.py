"""How a peer takes part in a swarm, and how its links are made."""

from collections.abc import Callable
import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a peer takes part.

  Attributes:
    alone_s: t_c: without a coordinator for so long it halts.
    lanes: Data connections from each peer to each other.
    checked: Whether blocks that are exchanged have checksums.
    samples: How many samples a part draws, or a function that says it of the
      number of the part's round, the same on all; 0 for no leases.
    measured: Whether rings go by measured links; all peers alike. Measuring
      takes some tenths of a second, in each epoch.
    rounds: Of a whole run: who comes when these have been made, and nobody is
      waiting for it, ends. 0 for a run without an end.
    listen: Host and port at which it listens for other peers; port 0 for any
      that is free.
    advertise: Address at which peers reach it if that differs, as behind a NAT
      or with 0.0.0.0.
  """

  alone_s: float = 300.0
  lanes: int = 1
  checked: bool = False
  samples: int | Callable[[int], int] = 0
  measured: bool = False
  rounds: int = 0
  listen: tuple[str, int] = ("127.0.0.1", 0)
  advertise: tuple[str, int] | None = None

  def __post_init__(self) -> None:
    if not self.alone_s > 0:
      raise ValueError(f"alone_s={self.alone_s:g} must be positive")
    if not callable(self.samples) and self.samples < 0:
      raise ValueError(f"samples={self.samples} must not be negative")

  def num_samples(self, number: int) -> int:
    """Returns how many samples a part of a round draws."""
    return self.samples(number) if callable(self.samples) else self.samples


@dataclasses.dataclass(frozen=True)
class Options:
  """How links are made.

  Attributes:
    lanes: Data connections from each peer to each other.
    silence_s: Seconds without a sign of life after which a peer is lost.
    checked: Whether each block has a checksum.
    send_buffer: Bytes of the kernel's send buffer of a lane; 0 lets the kernel
      choose. A small one keeps what is under way in the cache, where peers are
      near; over a long link it limits the rate.
  """

  lanes: int = 1
  silence_s: float = 10.0
  checked: bool = False
  send_buffer: int = 0

  def __post_init__(self) -> None:
    if not 1 <= self.lanes <= 64:
      raise ValueError(f"lanes={self.lanes} must be an integer from 1 to 64")
    if not self.silence_s > 0:
      raise ValueError(f"silence_s={self.silence_s:g} must be positive")
