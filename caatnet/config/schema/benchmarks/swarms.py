"""Benchmarks of processes that communicate."""

from caatnet.config.schema.benchmarks.shared import RESULTS, ROUNDS
from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  POSITIVE_FRACTION,
  SEED,
  TWO_OR_MORE,
  field,
  section,
)


@section
class Churn:
  """Workers that join, leave and fail at random.

  With a model in the config they train; then only workers, seeds, gap_s,
  silence_s, limit_s and moments have an effect.
  """

  workers: int = field(8, "Number of workers.", TWO_OR_MORE)
  events: int = field(220, "Smallest number of events.", COUNT)
  minutes: float = field(0.0, "Smallest duration in minutes.", NOT_NEGATIVE)
  seeds: tuple[int, ...] = field((0, 1, 2), "Seed of each run.", SEED)
  gap_s: float = field(1.5, "Mean seconds between two events.", POSITIVE)
  silence_s: float = field(
    3.0, "Seconds without a heartbeat after which a peer is dropped.", POSITIVE
  )
  limit_s: float = field(
    60.0, "Seconds without a committed round after which the benchmark fails.",
    POSITIVE,
  )
  parameters: int = field(250_000, "Parameters of the model.", COUNT)
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


@section
class Membership:
  """Exhaustive search of the membership protocol of `parallel.elastic`."""

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
    'Worlds: numbers of "peers" and "rounds", "least" and "quorum" of the '
    "coordinator's rules, and numbers of faults by kind.", COUNT_OR_NONE,
  )
  most: int = field(
    500_000, "Number of states after which the search of a world stops.", COUNT
  )


@section
class ElasticBits:
  """Workers in a swarm compared bitwise with workers on a mesh axis."""

  workers: tuple[int, ...] = field(
    (2, 3, 5, 8), "Numbers of workers.", COUNT
  )
  steps: int = field(14, "Steps of each run.", COUNT)
  cases: tuple[tuple[str, str], ...] = field(
    (), "Label of each case, and its overrides of DiLoCo in float32."
  )


@section
class Moments:
  """Initial optimizer moments of workers that replace others."""

  seeds: tuple[int, ...] = field((0, 1, 2), "Seed of each run.", SEED)
  replaced: int = field(
    1, "Number of replaced workers after each round.", COUNT
  )


@section
class Ring:
  """All-reduces between processes on one machine and over throttled links."""

  megabytes: int = field(256, "Size of the all-reduce in MB.", COUNT)
  peers: tuple[int, ...] = field(
    (2, 4, 8), "Numbers of peers.", COUNT, empty=True
  )
  block_bytes: int = field(
    2**22, "Bytes per block of sending and adding.", COUNT
  )
  send_buffer: int = field(
    2**18, "Send buffer of sockets in bytes, also of raw streams; 0 for the "
    "kernel's default. On loopback, a small buffer keeps transfers in the CPU "
    "cache; over a long link it would limit the rate.", COUNT_OR_NONE,
  )
  rounds: int = field(5, ROUNDS, COUNT)
  gloo: bool = field(
    True, "Whether jax's all-reduce between processes is also timed."
  )
  python: str = field(
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
    "ms, and size of the all-reduce in MB.", COUNT_OR_NONE, empty=True,
  )
  num_connections: tuple[int, ...] = field(
    (1, 4, 8), "Data connections over these links.", COUNT
  )
  shaped_rounds: int = field(3, "Repetitions over these links.", COUNT)
  shaped_block_bytes: int = field(
    2**18, "Bytes per block of sending and adding over these links.", COUNT
  )


@section
class RingOrders:
  """Sums over unequal shaped links: chosen algorithm against all others."""

  peers: int = field(5, "Number of peers.", COUNT)
  megabytes: int = field(4, "Size of the all-reduce in MB.", COUNT)
  seeds: tuple[int, ...] = field((0, 1, 2), "Seed of each set of links.", SEED)
  mbit: tuple[float, float] = field(
    (10.0, 200.0), "Smallest and largest rate of a link in Mbit/s; rates are "
    "drawn on a logarithmic scale for each direction.", POSITIVE,
  )
  delays_ms: tuple[float, ...] = field(
    (1.0, 20.0, 100.0), "Delays in each direction in ms, of which one is drawn "
    "for each pair.", NOT_NEGATIVE,
  )
  rounds: int = field(5, ROUNDS, COUNT)


@section
class CalibratedLinks:
  """Sums between processes over shaped links, predicted from three of them."""

  peers: int = field(4, "Number of processes, of which some sum.", TWO_OR_MORE)
  links: int = field(6, "Sets of links in addition to that of the fit.", COUNT)
  mbit: tuple[float, float] = field(
    (50.0, 1000.0), "Smallest and largest rate of a link in Mbit/s; rates are "
    "drawn on a logarithmic scale for each direction.", POSITIVE,
  )
  delays_ms: tuple[float, ...] = field(
    (0.5, 2.0, 10.0), "Delays in each direction in ms, of which one is drawn "
    "for each pair.", NOT_NEGATIVE,
  )
  fitted: tuple[tuple[str, tuple[int, ...], int, int], ...] = field(
    (("direct", (1, 2), 4_000_000, 2**20),
     ("direct", (0, 1, 2, 3), 2_000_000, 2**18),
     ("ring", (0, 1, 2), 100_000, 2**16)),
    "Order, peers, bytes and bytes of a block of the sums of the fit.",
    COUNT_OR_NONE,
  )
  kilobytes: tuple[float, float] = field(
    (100.0, 4000.0), "Smallest and largest array of a random sum in KB, on a "
    "logarithmic scale.", POSITIVE,
  )
  block_bytes: tuple[int, ...] = field(
    (2**16, 2**18, 2**20), "Bytes per block of sending and adding.", COUNT
  )
  held_out: int = field(20, "Random sums that give the residuals.", COUNT)
  tested: int = field(100, "Further random sums.", COUNT)
  rounds: int = field(3, ROUNDS, COUNT)
  seed: int = field(0, "Seed of the sums.", SEED)


@section
class FederatedRounds:
  """Predicted and measured rounds of federated runs over emulated links."""

  results: str = field("runs/federated_rounds.json", RESULTS)
  models: tuple[str, ...] = field(
    ("configs/federated/tiny.py:convolutional",
     "configs/federated/tiny.py:squeezenet"), "Configs of the runs.",
  )
  fitted: tuple[str, ...] = field(
    ("configs/federated/tiny.py:convolutional,test",
     "configs/federated/tiny.py:text"), "Configs of further runs without "
    "emulated links, a smaller and a larger model. They and the other models "
    "give the time before a message's first byte as a linear function of its "
    "size.", empty=True,
  )
  interfaces: tuple[str, ...] = field(
    ("ethernet", "wifi", "5g-40mhz"), "Links of all clients; names or JSON "
    "files, as in config.federated.links.",
  )
  clients: tuple[int, ...] = field((4, 8), "Numbers of clients.", COUNT)
  rounds: int = field(5, ROUNDS, COUNT)
  local_steps: int = field(2, "Steps of a client in a round.", COUNT)
  cpu_quota: float = field(
    0.2, "CPUs of each client, for root; 0 for no limit.", FRACTION
  )
  least_share: float = field(
    0.05, "Share of a round from which the error of a phase counts.", FRACTION
  )


@section
class FederatedCell:
  """Time and bytes to an accuracy in a radio cell, on a simulated clock."""

  results: str = field("runs/federated_cell.json", RESULTS)
  variants: tuple[str, ...] = field(
    ("", "uplink=int4 downlink=int4",
     "uplink=sparse downlink=int4",
     "uplink=int4 downlink=int4 stragglers=late",
     "uplink=int4 downlink=int4 stragglers=late compensation=0.2",
     "downlinks_at_once=2 uplinks_at_once=2",
     "stragglers=drop deadline_s=22",
     "stragglers=drop deadline_s=22 downlinks_at_once=2 uplinks_at_once=2"),
    "Overrides of keys of config.federated, separated by spaces; with \"\" all "
    "is float32 and at once.",
  )
  seeds: tuple[int, ...] = field((0, 1, 2), "Seeds of the runs.", SEED)
  streamed: tuple[str, ...] = field(
    ("", "uplink=int4 downlink=int4"), "Overrides of variants whose fragments "
    "are sent under the compute.", empty=True,
  )
  fragments: int = field(
    4, "Fragments of these variants, a divisor of the local steps.", COUNT
  )
  target: float = field(
    0.7, "Validation accuracy at which time and bytes are compared.",
    POSITIVE_FRACTION,
  )
  compute_s: float = field(
    11.0, "Compute time of a client per round, assumed.", POSITIVE
  )
  compute_spread: float = field(
    0.05, "Relative standard deviation of compute times between clients.",
    FRACTION,
  )
  slow: float = field(
    1.5, "Compute time of the slowest client, relative to its usual one.",
    POSITIVE,
  )
  fixed_s: float = field(
    0.005, "Time of a message before its first byte is sent, assumed.",
    NOT_NEGATIVE,
  )
  plot: str = field(
    "", 'PNG of accuracy, time and bytes; "" for none.'
  )
