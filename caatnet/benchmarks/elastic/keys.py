"""Keys of benchmarks of processes that communicate."""

from caatnet.benchmarks.keys import ROUNDS_DOC
from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  NOT_NEGATIVE,
  POSITIVE,
  SEED,
  TWO_OR_MORE,
  field,
)


@register.benchmark("churn")
class Churn:
  """Workers that join, leave and fail at random.

  With a model in the config they train; then only workers, seeds, gap_s,
  silence_s, limit_s and moments have an effect.
  """

  workers: int = field(8, "Number of workers.", TWO_OR_MORE)
  events: int = field(220, "Smallest number of events.", COUNT)
  minutes: float = field(
    0.0, "Duration in minutes, instead of events; 0 for none.", NOT_NEGATIVE
  )
  seeds: tuple[int, ...] = field((0, 1, 2), "Seed of each run.", SEED)
  gap_s: float = field(1.5, "Mean seconds between two events.", POSITIVE)
  silence_s: float = field(
    3.0, "Seconds without a heartbeat after which a peer is dropped.", POSITIVE
  )
  limit_s: float = field(
    60.0, "Seconds without a committed round after which the benchmark fails.",
    POSITIVE,
  )
  parameters: int = field(250_000, "Number of parameters.", COUNT)
  samples: int = field(16, "Samples per contribution to a round.", COUNT)
  pause_s: float = field(
    0.05, "Sleep per contribution in addition to its arithmetic, in seconds.",
    NOT_NEGATIVE,
  )
  network: bool = field(
    False, "Whether workers are in network namespaces and reachability is "
    "disturbed, too; needs root."
  )
  rtt_ms: tuple[float, float] = field(
    (1.0, 200.0), "Shortest and longest round trip between two namespaces.",
    NOT_NEGATIVE,
  )
  lasts_s: tuple[float, float] = field(
    (3.0, 20.0), "Shortest and longest disturbance of reachability, in "
    "seconds.", POSITIVE,
  )
  moments: str = field(
    "own", "Moments of the inner optimizer of a worker that joins a training "
    'run: "own" for the checkpoint of the killed worker that it replaces, '
    '"zero", or "donor" for another worker\'s.', ("own", "zero", "donor"),
  )


@register.benchmark("membership")
class Membership:
  """Exhaustive search of the membership protocol of `parallel.peers`."""

  worlds: tuple[dict[str, int], ...] = field(
    (
      {"peers": 2, "rounds": 2, "least": 2, "crashes": 1, "restarts": 1},
      {"peers": 2, "rounds": 1, "least": 1, "cuts": 1, "restarts": 1},
      {"peers": 2, "rounds": 1, "least": 2, "crashes": 1, "restarts": 1,
       "losses": 1},
      {"peers": 2, "rounds": 1, "least": 2, "suspicions": 1, "failures": 1},
      {"peers": 2, "rounds": 1, "least": 2, "cuts": 1, "failures": 1,
       "crashes": 1},
      {"peers": 2, "rounds": 2, "least": 2, "quorum": 1, "cuts": 1},
      {"peers": 3, "rounds": 1, "least": 3, "crashes": 1},
      {"peers": 3, "rounds": 1, "least": 3, "cuts": 1, "copies": 1},
      {"peers": 3, "rounds": 2, "least": 3, "leaves": 1},
      {"peers": 4, "rounds": 1, "least": 4, "cuts": 1},
    ),
    'Systems to search: numbers of "peers", "rounds", members to start '
    '("least"), contributions to a round ("quorum"), and faults by kind.',
    COUNT_OR_ZERO,
  )
  most: int = field(
    500_000, "Number of states after which the search of a system stops.", COUNT
  )


@register.benchmark("ring")
class Ring:
  """All-reduces between processes on one machine and over throttled links."""

  megabytes: int = field(256, "Size of the all-reduce in MB.", COUNT)
  peers: tuple[int, ...] = field(
    (2, 4, 8), "Numbers of peers.", COUNT, empty=True
  )
  block_bytes: int = field(
    2**22, "Bytes that are sent and added at a time.", COUNT
  )
  send_buffer: int = field(
    2**18, "Send buffer of sockets in bytes, also of raw streams; 0 for the "
    "kernel's default. On loopback, a small buffer keeps transfers in the CPU "
    "cache; over a long link it would limit the rate.", COUNT_OR_ZERO,
  )
  rounds: int = field(5, ROUNDS_DOC, COUNT)
  gloo: bool = field(
    True, "Whether jax's all-reduce between processes is also timed."
  )
  python_path: str = field(
    "", 'A Python with torch, whose all-reduce over gloo is also timed; "" '
    "for none.",
  )
  links: tuple[dict[str, int], ...] = field(
    (
      {"mbit": 50, "rtt_ms": 0, "megabytes": 16},
      {"mbit": 50, "rtt_ms": 100, "megabytes": 16},
      {"mbit": 1000, "rtt_ms": 0, "megabytes": 128},
      {"mbit": 1000, "rtt_ms": 100, "megabytes": 128},
    ),
    "Links between two peers: bandwidth in Mbit/s, added round-trip time in "
    "ms, and size of the all-reduce in MB.", COUNT_OR_ZERO, empty=True,
  )
  num_connections: tuple[int, ...] = field(
    (1, 4, 8), "Numbers of data connections for each link in `links`.", COUNT
  )
  shaped_rounds: int = field(3, "Repetitions for each link in `links`.", COUNT)
  shaped_block_bytes: int = field(
    2**18, "Bytes sent and added at a time on each link in `links`.", COUNT
  )
