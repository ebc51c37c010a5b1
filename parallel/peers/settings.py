"""Settings of a peer in a swarm, and options of its links to other peers."""

from collections.abc import Callable
import dataclasses

# Maximum data connections to one peer; each has a thread at either end.
MAX_CONNECTIONS = 64


@dataclasses.dataclass(frozen=True)
class PeerSettings:
  """Settings of a peer.

  Attributes:
    alone_s: Seconds without a connection to the coordinator after which the
      peer halts.
    num_connections: Number of data connections to each other peer; may differ
      between peers.
    checked: Whether exchanged blocks carry checksums.
    samples: Training samples per contribution, or a function from a round's
      number to it; equal on all peers. 0 disables sample leases
      (`parallel.peers.membership.leases`).
    measured: Whether peers measure their links, and sums with order="ring" use
      the fastest of three algorithms: a ring, a direct exchange, or a sum that
      first adds inside each site. Equal on all peers. A measurement takes
      tenths of a second, but seconds per peer with round trips of 100 ms.
    rounds: Number of rounds of the run; 0 for a run without an end. A peer that
      connects after the last round raises `timeouts.RunFinished`.
    listen: (host, port) at which the peer listens; port 0 selects a free port.
    advertise: Address at which other peers reach it, if it differs from
      `listen`: behind a NAT, or when listening at 0.0.0.0.

  Raises:
    ValueError: `alone_s` is not positive, `samples` is negative, or
      `advertise` has port 0.
  """

  alone_s: float = 300.0
  num_connections: int = 1
  checked: bool = False
  samples: int | Callable[[int], int] = 0
  measured: bool = False
  rounds: int = 0
  listen: tuple[str, int] = ("127.0.0.1", 0)
  advertise: tuple[str, int] | None = None

  def __post_init__(self) -> None:
    if not self.alone_s > 0:
      raise ValueError(f"alone_s={self.alone_s:g} must be positive")
    # The results of a function cannot be checked here.
    if not callable(self.samples) and self.samples < 0:
      raise ValueError(f"samples={self.samples} must not be negative")
    if self.advertise is not None and not 0 < self.advertise[1] < 1 << 16:
      raise ValueError(
        f"advertise={self.advertise} must have a port from 1 to 65535; only "
        "listen may have port 0, which selects a free port"
      )

  def num_samples(self, number: int) -> int:
    """Returns the number of samples per contribution of a round."""
    return self.samples(number) if callable(self.samples) else self.samples


@dataclasses.dataclass(frozen=True)
class LinkOptions:
  """Options of an epoch's links.

  Attributes:
    num_connections: Number of data connections to each other peer.
    silence_s: Seconds without received data after which a peer is lost.
    checked: Whether each block carries a checksum.
    send_buffer: Bytes of the kernel's send buffer per connection; 0 selects the
      kernel's default. A small buffer keeps data in flight in the CPU cache
      when peers are close; on links with a high latency it limits the rate.

  Raises:
    ValueError: `num_connections` or `silence_s` is out of range.
  """

  num_connections: int = 1
  silence_s: float = 10.0
  checked: bool = False
  send_buffer: int = 0

  def __post_init__(self) -> None:
    if not 1 <= self.num_connections <= MAX_CONNECTIONS:
      raise ValueError(
        f"num_connections={self.num_connections} must be an integer from 1 to "
        f"{MAX_CONNECTIONS}"
      )
    if not self.silence_s > 0:
      raise ValueError(f"silence_s={self.silence_s:g} must be positive")
