"""Benchmarks of training, decoding and serving."""

from caatnet.config.schema.benchmarks.shared import (
  PROMPT,
  RESULTS,
  ROUNDS,
  TOKENS,
)
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
class Decoding:
  """Decoding compared with Hugging Face's generate."""

  rounds: int = field(7, ROUNDS, COUNT)
  batches: tuple[int, ...] = field(
    (1, 16), "Batch sizes; each is a program and a row.", COUNT
  )
  prompt: int = field(128, PROMPT, COUNT)
  tokens: int = field(128, TOKENS, COUNT)
  rival: str = field("", 'A Python with torch and transformers; "" for none.')
  threads: int = field(2, "Threads of that Python.", COUNT)


@section
class Server:
  """Server over HTTP, compared with its engine."""

  rounds: int = field(3, ROUNDS, COUNT)
  batches: tuple[int, ...] = field(
    (16, 64), "Concurrent sequences; each value is a row.", COUNT
  )
  streams: int = field(500, "Concurrent streams.", COUNT)
  prompt: int = field(16, PROMPT, COUNT)
  tokens: int = field(32, TOKENS, COUNT)


@section
class Serving:
  """Scheduling time per step."""

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
    }, "Pages of 16 tokens for each policy; few enough for preemption in one "
    "of twenty steps.", COUNT,
  )
  warm_up: int = field(600, "Steps before the timed ones.", COUNT_OR_NONE)
  steps: int = field(2000, "Number of timed steps.", COUNT)
  rounds: int = field(5, ROUNDS, COUNT)
  frequency: float = field(
    0.04, "Probability that a step changes priorities of requests.", FRACTION
  )
  stay: float = field(
    0.99, "Probability that a request keeps its priority in such a step.",
    FRACTION,
  )
  clients: int = field(27, "Clients.", COUNT)


@section
class LargeGraph:
  """Graph that is larger than the memory of its process."""

  scale: int = field(23, "Binary logarithm of the number of nodes.", SCALE)
  num_edges: int = field(100_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  steps: int = field(100, "Training steps.", COUNT)
  limit_mb: int = field(
    2000, "Memory limit of the process without mapped files (RLIMIT_DATA), in "
    "MB.", COUNT,
  )


@section
class PredictedSteps:
  """Assumptions of predicted steps; only the key distinct was measured."""

  gather: float = field(
    20e9, "Gather rate of the cores of a host, in bytes/s.", POSITIVE
  )
  memory: float = field(
    150e9, "Bandwidth of the host's memory, in bytes/s.", POSITIVE
  )
  link_share: float = field(
    0.85, "Achieved share of a link's bandwidth.", POSITIVE_FRACTION
  )
  utilisation: float = field(
    0.05, "Achieved share of a device's peak FLOP/s.", POSITIVE_FRACTION
  )
  hidden: int = field(256, "Channels of hidden states.", COUNT)
  distinct: float = field(
    0.14, "Share of distinct rows among all tree positions, as measured by the "
    'part "sampler".', POSITIVE_FRACTION,
  )


@section
class Graphs:
  """Graph networks: sampler, caches, feature access, a large graph."""

  parts: tuple[str, ...] = field(
    ("sampler", "caches", "waits", "large", "predicted"), "Parts to run."
  )
  scale: int = field(
    20, "Binary logarithm of the number of nodes of an R-MAT graph.", SCALE
  )
  num_edges: int = field(16_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  fanouts: tuple[int, ...] = field(
    (15, 10), "Sampled neighbours per node of each level.", COUNT
  )
  batch_size: int = field(1024, "Nodes per batch.", COUNT)
  samples: int = field(
    60, "Timed batches, after a tenth as many for warm-up.", COUNT
  )
  threads: int = field(2, "Threads of the sampler.", COUNT)
  python: str = field("", 'A Python with DGL; "" for none.')
  shares: tuple[float, ...] = field(
    (0.01, 0.05, 0.2), "Sizes of caches as shares of all rows.", FRACTION
  )
  steps: int = field(
    60, "Training steps for each setting of ahead and cache_rows.", COUNT
  )
  folder: str = field(
    "", 'Folder of the large graph; "" for a temporary one. An existing graph '
    "is reused.",
  )
  large: LargeGraph = field(LargeGraph, "The large graph.")
  predicted: PredictedSteps = field(
    PredictedSteps, "Assumptions of predicted steps."
  )


@section
class TrainStep:
  """Training step compared with plain JAX."""

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
    'Label and overrides of each step; a label that begins with "plain" stands '
    "for the plain JAX step.",
  )


@section
class Peers:
  """Training steps and decoding compared with other projects' ones."""

  results: str = field("runs/peers.json", RESULTS)
  rounds: int = field(3, ROUNDS, COUNT)
  steps: int = field(2, "Training steps of a round.", COUNT)
  variants: tuple[tuple[str, str], ...] = field(
    (
      ("r=1", "parallel.tensor=1"),
      ("r=1, unrolled", "parallel.tensor=1 model.unroll=8"),
      ("r=8 lanes, p=1", "parallel.tensor=8"),
      ("r=8 lanes, p=.5", "parallel.tensor=8 sync.p=0.5"),
    ),
    "Label and overrides of each of our training steps.", empty=True,
  )
  batches: tuple[int, ...] = field(
    (1, 16, 64), "Sequences that are decoded together.", COUNT, empty=True,
  )
  prompt: int = field(64, PROMPT, COUNT)
  tokens: int = field(64, TOKENS, COUNT)
  threads: int = field(2, "Threads of torch.", COUNT)
  python: str = field(
    "", 'Python with the packages of peers; "" makes an environment with '
    "`packages`.",
  )
  packages: tuple[str, ...] = field(
    ("torch", "transformers", "llama-cpp-python", "gguf"),
    "Requirements of that environment.", empty=True,
  )
  compiled: bool = field(
    True, "Whether Hugging Face's model is also timed with torch.compile, "
    "which needs a C++ compiler.",
  )
  llama: tuple[str, ...] = field(
    ("F32", "Q8_0"), "Types of llama.cpp's matrices; () for no llama.cpp.",
    ("F32", "Q8_0"), empty=True,
  )
  folder: str = field(
    ".cache/peers", "Folder of the environment, which is made once."
  )
  nanodo: str = field(
    "", "Checkout of https://github.com/google-deepmind/nanodo, which is in no "
    'package registry; "" for none.',
  )
  vllm: str = field(
    "", 'Python with vllm for CPUs, whose server is compared with ours; "" for '
    "none.",
  )
  llama_server: str = field(
    "", "Program llama-server of llama.cpp, which is compared with our server; "
    '"" for none.',
  )
