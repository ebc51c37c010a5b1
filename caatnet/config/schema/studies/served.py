"""Configs of the studies of servers."""

from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  DECAY,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  POSITIVE_FRACTION,
  SEED,
  TWO_OR_MORE,
  Range,
  field,
  section,
)
from caatnet.config.schema.studies.shared import Study, study_key


@section
class Workload:
  """Sizes of a served transformer: Llama-3.1-8B in bfloat16."""

  vocab_size: int = field(128256, "Size of the vocabulary.", COUNT)
  width: int = field(4096, "Channels of the residual stream.", COUNT)
  num_layers: int = field(32, "Layers.", COUNT)
  num_heads: int = field(32, "Query heads.", COUNT)
  num_kv_heads: int = field(8, "Key and value heads.", COUNT)
  ffn_width: int = field(14336, "Hidden channels of the MLP.", COUNT)


@section
class Hardware:
  """The paper's machine: an A10 of 24 GB on PCIe 4."""

  device: str = field("a10", "Device of parallel/hardware/devices.py.")
  utilisation: float = field(
    0.5, "Share of peak FLOP/s that a step reaches; of no source.",
    POSITIVE_FRACTION,
  )
  memory_fraction: float = field(
    0.8, "Share of memory bandwidth that a step reaches; of no source.",
    POSITIVE_FRACTION,
  )
  memory_share: float = field(
    0.9, "Share of the memory that weights and cache may take: vLLM's default.",
    POSITIVE_FRACTION,
  )
  page_size: int = field(16, "Positions of a page of the cache.", COUNT)
  pages: int = field(
    2588, "Pages of the cache; 0 for as many as fit. The default is what vLLM "
    "0.19.0 had for this model on another GPU of 24 GB "
    "(configs/serving/vllm_log.py).", COUNT_OR_NONE,
  )
  copy_rate: float = field(
    25e9, "Bytes per second of copies in each direction: 80% of the 31.5 GB/s "
    "of PCIe 4.0 x16.", POSITIVE,
  )
  copy_call_s: float = field(
    6e-6,
    "Seconds of a contiguous range in addition to its bytes: 5 to 7 us for "
    "each cudaMemcpyAsync (Wu et al., DualPath, arXiv 2602.21548, section "
    "5.2).",
    NOT_NEGATIVE,
  )
  host_bytes: float = field(
    60e9, "Host memory for swapping, in bytes, as in the paper.", NOT_NEGATIVE
  )


@section
class Arm:
  """A way to preempt requests."""

  preempt: str = field(
    "recompute", 'Handling of preempted pages: "recompute", "swap", or "cost", '
    "the cheaper one.", ("recompute", "swap", "cost"),
  )
  single: bool = field(True, "Whether each page is copied by itself.")
  growth: int = field(1, "Pages that a request takes at a time.", COUNT)
  wait_s: float = field(
    1e6, "Longest copy, in seconds, for which a step waits.", NOT_NEGATIVE
  )
  keep: bool = field(
    False, "Whether copies on the host outlive their use, and turns are copied "
    "there.",
  )


@section
class FoundArm(Arm):
  """A way to preempt requests, with prefix reuse."""

  found: bool = field(True, "Whether pages are found by their tokens.")


@section
class Limits:
  """Limits of a step."""

  slots: int = field(256, "Requests that run at a time.", COUNT)
  tokens: int = field(2048, "Tokens of a step.", COUNT)
  steps_ahead: int = field(2, "Steps that are under way at a time.", COUNT)


def _arms() -> dict[str, Arm]:
  """Returns the arms, each of which adds one thing to the one before."""
  copies = {"preempt": "swap", "single": False, "growth": 4}
  return {
    "recompute": Arm(),
    "blocks": Arm(preempt="swap"),
    "groups": Arm(**copies),
    "asynchronous": Arm(**copies, wait_s=0.002),
    "reuse": Arm(**copies, wait_s=0.002, keep=True),
    "cost": Arm(**copies | {"preempt": "cost"}, wait_s=0.002, keep=True),
  }


@section
class FastSwitch(Study):
  """Costs of switching between requests."""

  @section
  class Priorities:
    """Priorities that change."""

    frequency: float = field(
      0.04,
      "Probability that a step gives new priorities: the paper's for an 8B "
      "model.",
      FRACTION,
    )
    levels: int = field(8, "Number of priorities; of no source.", COUNT)

  @section
  class Sessions:
    """Conversations in several turns."""

    num_sessions: int = field(100, "Number of sessions.", COUNT)
    rate: float = field(1.0, "Turns per second.", POSITIVE)
    turns: float = field(5.5, "Mean number of turns of a session.", Range(1))
    think_s: float = field(
      30.0, "Mean seconds between an answer and the next turn; of no source.",
      NOT_NEGATIVE,
    )
    seed: int = field(0, "Seed of the sessions.", SEED)
    longest_answer: int = field(
      1000, "Largest number of tokens of an answer: the 99th percentile of "
      "ShareGPT's.", COUNT,
    )

  @section
  class Trace:
    """A public trace of requests."""

    path: str = field(
      "",
      'File of the trace; "" for the sample in the package.',
    )

  name: str = field("fastswitch", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fastswitch", "Subject of the study.", ("fastswitch",))
  keep: str = field(
    "runs/fastswitch/cells.jsonl", "File that keeps finished simulations; "
    '"" keeps nothing.',
  )
  model: Workload = field(Workload, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves.")
  limits: Limits = field(Limits, "Limits of a step.")
  arms: dict[str, Arm] = field(
    _arms, "Ways to preempt requests, by their names."
  )
  order: tuple[str, ...] = field(
    ("recompute", "blocks", "groups", "asynchronous", "reuse", "cost"),
    "Arms that are simulated, in this order.",
  )
  priorities: Priorities = field(Priorities, "Priorities that change.")
  kinds: tuple[str, ...] = field(
    ("random", "markov"), "Changes of priorities in the first setting; the "
    "second has the first kind.",
  )
  sessions: Sessions = field(Sessions, "Sessions of the first setting.")
  traces: dict[str, Trace] = field(
    lambda: {
      name: FastSwitch.Trace()
      for name in ("azure_code", "azure_conv", "mooncake")
    }, "Traces of the second setting, by their names.",
  )
  num_requests: int = field(
    200, "Number of requests that are read of each trace; 0 for all.",
    COUNT_OR_NONE,
  )
  loads: tuple[float, ...] = field(
    (0.5, 0.7, 0.9), "Arrival rates as shares of the first arm's capacity.",
    POSITIVE,
  )
  seeds: tuple[int, ...] = field(
    (0, 1, 2, 3, 4), "Seeds of Poisson arrivals, for the comparison of costs.",
    SEED,
  )
  seeds_trace: str = field("azure_conv", "Trace of that comparison.")
  ranks: int = field(8, "Tensor ranks, for CAAT-Net's part.", TWO_OR_MORE)
  ranks_device: str = field("h100", "Device of these ranks.")
  shares: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25, 0.0),
    "Values of p, for CAAT-Net's part; () leaves it out.",
    FRACTION,
  )
  shares_rate: float = field(
    40.0, "Requests per second of the trace, for CAAT-Net's part.", POSITIVE
  )


@section
class Client:
  """A client with requests of its own."""

  requests: int = field(400, "Number of requests.", COUNT)
  rate: float = field(
    0.0, "Requests per second; 0 for all at once.", NOT_NEGATIVE
  )
  prompt: int = field(
    128, "Mean tokens of a prompt, in addition to the shared ones.", COUNT
  )
  output: int = field(64, "Mean tokens of an answer.", COUNT)
  shared: int = field(
    256, "Tokens with which all of the client's prompts begin.", COUNT
  )
  priority: int = field(
    1, "Strict priority; lower is served earlier.", COUNT_OR_NONE
  )
  backlogged: bool = field(
    True, "Whether the client is among those that are compared."
  )


@section
class Fairness(Study):
  """The cost of fairness between clients that exceed a server's capacity."""

  name: str = field("fairness", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fairness", "Subject of the study.", ("fairness",))
  policies: tuple[str, ...] = field(
    ("first_come", "shortest_first", "strict_priority", "vtc", "dlpm"),
    "Scheduling policies that serve the same requests.",
  )
  seed: int = field(0, "Seed of the requests.", SEED)
  model: Workload = field(Workload, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves.")
  arm: FoundArm = field(FoundArm, "Handling of preemption.")
  limits: Limits = field(
    lambda: Limits(slots=16), "Limits of a step. Slots are few, so that the "
    "bound, which grows with them, is of use.",
  )
  clients: dict[str, Client] = field(
    lambda: {
      "short": Client(),
      "long": Client(requests=120, prompt=512, output=256),
      "aggressor": Client(
        requests=1200, rate=20.0, prompt=256, output=128, priority=0
      ),
      "light": Client(requests=60, rate=0.5, backlogged=False),
    }, "Clients by their names.",
  )


@section
class VLLMLog(Study):
  """A simulation of vLLM's run of 300 requests, compared with its log."""

  @section
  class Server:
    """Options of vLLM in that run."""

    policy: str = field("first_come", "Scheduling policy.")
    slots: int = field(256, "Requests that run at a time.", COUNT)
    tokens: int = field(2048, "Tokens of a step.", COUNT)
    page_size: int = field(16, "Positions of a page of the cache.", COUNT)
    pages: int = field(2588, "Pages of the cache.", TWO_OR_MORE)
    reuse: bool = field(True, "Whether pages are found by their tokens.")
    whole_prompt: bool = field(
      True, "Whether a request is admitted only if pages for its whole prompt "
      "are left.",
    )
    steps_ahead: int = field(2, "Steps that are under way at a time.", COUNT)

  name: str = field("vllm_log", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("vllm_log", "Subject of the study.", ("vllm_log",))
  num_requests: int = field(
    0, "Number of requests that are read of the log; 0 for all.", COUNT_OR_NONE
  )
  prefixes: str = field(
    "published", 'Prompts with the same beginning: "published", as in the '
    'published workload, or "none", or that workload\'s file.',
  )
  server: Server = field(Server, "Options of vLLM in that run.")
  percentiles: tuple[int, ...] = field(
    (50, 90, 95, 99), "Percentiles that are compared.",
    Range(0, 100, whole=True),
  )
  tolerance: float = field(
    0.02, "Relative error beyond which a rule is suspected.", FRACTION
  )
  change: float = field(
    0.01,
    "Relative change of pages and times whose effect is shown; 0 for none.",
    DECAY,
  )
