"""Benchmarks of models that train, decode and serve."""

from caatnet.config.schema.benchmarks.shared import PROMPT, ROUNDS, TOKENS
from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  FRACTION,
  POSITIVE,
  POSITIVE_FRACTION,
  field,
  section,
)
from caatnet.config.schema.graph import SCALE


@section
class Coded:
  """The loss of a model with weights and cache kept as int8 codes."""

  workdir: str = field("runs/demo/p0.5", "Folder of a run with one worker.")
  windows: int = field(
    256, "Largest number of validation windows that are read.", COUNT
  )
  chunk: int = field(64, "Tokens that a step reads.", COUNT)


@section
class Decoding:
  """Decoding compared with Hugging Face's generate."""

  rounds: int = field(7, ROUNDS, COUNT)
  batches: tuple[int, ...] = field(
    (1, 16), "Sequences at a time; each is a program and a row.", COUNT
  )
  prompt: int = field(128, PROMPT, COUNT)
  tokens: int = field(128, TOKENS, COUNT)
  rival: str = field("", 'A Python with torch and transformers; "" for none.')
  threads: int = field(2, "Threads of that Python.", COUNT)


@section
class Engine:
  """The rate of the engine, and its simulator compared with it."""

  rounds: int = field(5, ROUNDS, COUNT)
  batches: tuple[int, ...] = field((16, 64), "Sequences at a time.", COUNT)
  prompt: int = field(64, PROMPT, COUNT)
  tokens: int = field(64, "Tokens of an answer.", COUNT)
  requests: int = field(60, "Requests that arrive at random.", COUNT)
  slots: int = field(16, "Requests that run at a time.", COUNT)
  load: float = field(
    0.6, "Arrival rate as a share of the engine's rate with all requests "
    "present.", POSITIVE,
  )
  steps: int = field(
    8, "Smallest number of steps of each size that are measured between two "
    "runs.", COUNT,
  )


@section
class Server:
  """The server over HTTP compared with its engine."""

  rounds: int = field(3, ROUNDS, COUNT)
  batches: tuple[int, ...] = field(
    (16, 64), "Sequences that run at a time; each is a row.", COUNT
  )
  streams: int = field(500, "Streams at a time.", COUNT)
  prompt: int = field(16, PROMPT, COUNT)
  tokens: int = field(32, TOKENS, COUNT)


@section
class Serving:
  """Time of the scheduler per step."""

  policies: tuple[str, ...] = field(
    ("first_come", "strict_priority", "shortest_first", "vtc", "dlpm"),
    "Scheduling policies.",
  )
  running: int = field(256, "Running requests.", COUNT)
  waiting: int = field(1000, "Waiting requests.", COUNT)
  pages: dict[str, int] = field(
    lambda: {
      "first_come": 10700, "strict_priority": 11400, "shortest_first": 8500,
      "vtc": 10700, "dlpm": 10500,
    }, "Pages of 16 tokens, for each policy; so few that one step of twenty "
    "preempts.", COUNT,
  )
  warm_up: int = field(600, "Steps before those that are timed.", COUNT_OR_NONE)
  steps: int = field(2000, "Steps that are timed.", COUNT)
  rounds: int = field(5, ROUNDS, COUNT)
  frequency: float = field(
    0.04, "Probability that a step gives requests new priorities.", FRACTION
  )
  stay: float = field(
    0.99, "Probability that a request keeps its priority then.", FRACTION
  )
  clients: int = field(27, "Clients.", COUNT)


@section
class LargeGraph:
  """A graph that is larger than the memory of its process."""

  scale: int = field(23, "Binary logarithm of the number of nodes.", SCALE)
  num_edges: int = field(100_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  steps: int = field(100, "Steps that are trained.", COUNT)
  limit_mb: int = field(
    2000, "Megabytes that the process may have in addition to pages of files "
    "(RLIMIT_DATA).", COUNT,
  )


@section
class PredictedSteps:
  """Assumptions of predicted steps; only distinct was measured."""

  gather: float = field(
    20e9, "Bytes per second that the cores of a host gather.", POSITIVE
  )
  memory: float = field(
    150e9, "Bytes per second of the host's memory.", POSITIVE
  )
  link_share: float = field(
    0.85, "Share of a link's rate that is reached.", POSITIVE_FRACTION
  )
  utilisation: float = field(
    0.05, "Share of a device's peak that is reached.", POSITIVE_FRACTION
  )
  hidden: int = field(256, "Channels of states between layers.", COUNT)
  distinct: float = field(
    0.14, 'Share of all places that are distinct rows, as the part "sampler" '
    "measures it.", POSITIVE_FRACTION,
  )


@section
class Graphs:
  """Graph networks: sampler, caches, waiting for features, a large graph."""

  parts: tuple[str, ...] = field(
    ("sampler", "caches", "waits", "large", "predicted"), "Parts that run."
  )
  scale: int = field(
    20, "Binary logarithm of the number of nodes of an R-MAT graph.", SCALE
  )
  num_edges: int = field(16_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  fanouts: tuple[int, ...] = field(
    (15, 10), "Sampled neighbours, level by level.", COUNT
  )
  batch_size: int = field(1024, "Nodes per batch.", COUNT)
  samples: int = field(
    60, "Batches that are timed, after a tenth as many that are not.", COUNT
  )
  threads: int = field(2, "Threads of the sampler.", COUNT)
  python: str = field("", 'A Python with DGL; "" for none.')
  shares: tuple[float, ...] = field(
    (0.01, 0.05, 0.2), "Sizes of caches as shares of all rows.", FRACTION
  )
  steps: int = field(
    60, "Steps that are trained for each way to wait.", COUNT
  )
  folder: str = field(
    "", 'Folder of the large graph; "" for a temporary one. A graph that is '
    "there is not built again.",
  )
  large: LargeGraph = field(LargeGraph, "The large graph.")
  predicted: PredictedSteps = field(
    PredictedSteps, "Assumptions of predicted steps."
  )


@section
class TrainStep:
  """A training step compared with plain JAX."""

  rounds: int = field(7, ROUNDS, COUNT)
  dtypes: tuple[str, ...] = field(
    ("float32", "bfloat16"), "Values of config.model.dtype."
  )
  variants: tuple[tuple[str, str], ...] = field(
    (
      ("plain JAX step", ""),
      ("r=1", "parallel.tensor=1"),
      ("r=1, unrolled", "parallel.tensor=1 model.unroll=8"),
      ("r=8 lanes, p=1", "parallel.tensor=8"),
      ("r=8 lanes, p=.5", "parallel.tensor=8 sync.p=0.5"),
    ),
    'Label and overrides of each step; one whose label begins with "plain" is '
    "not ours.",
  )


@section
class ZeroStep:
  """A partitioned step compared with XLA's automatic partitions."""

  rounds: int = field(9, ROUNDS, COUNT)
  variants: tuple[tuple[str, str], ...] = field(
    (
      ("automatic", ""),
      ("zero3", "zero.scheme=zero3"),
      ("automatic, unrolled", "model.unroll=8"),
      ("zero3, unrolled", "zero.scheme=zero3 model.unroll=8"),
      ("ddp", "zero.scheme=ddp"),
    ),
    "Label and overrides of each step; others are compared with the first. One "
    'whose label begins with "automatic" is partitioned by XLA.',
  )


@section
class Lockstep:
  """Steps in stages: timetables compared with forms without branches."""

  forms: tuple[str, ...] = field(
    ("autodiff", "masked", "gpipe", "1f1b", "zb_h1", "gpipe +", "1f1b +",
     "zb_h1 +", "zb_h2 +"),
    'Timetables, with " +" where residuals are kept; "autodiff" or "masked".',
  )
  stages: int = field(4, "Stages.", COUNT)
  microbatches: int = field(16, "Microbatches of a step.", COUNT)
  layers: int = field(
    2, "Layers of a stage, each of two products of tokens by width squared.",
    COUNT,
  )
  width: int = field(256, "Channels.", COUNT)
  tokens: int = field(128, "Tokens of a microbatch.", COUNT)
  rounds: int = field(5, ROUNDS, COUNT)
