"""Configs of studies of serving."""

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
from caatnet.config.schema.studies.shared import RATE, Study, study_key


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
  """Machine of the FastSwitch paper: an A10 of 24 GB on PCIe 4."""

  device: str = field("a10", "Device of parallel/plans/hardware/devices.py.")
  utilisation: float = field(
    0.5, "Achieved share of peak FLOP/s of a step, an assumption.",
    POSITIVE_FRACTION,
  )
  memory_fraction: float = field(
    0.8, "Achieved share of memory bandwidth of a step, an assumption.",
    POSITIVE_FRACTION,
  )
  memory_share: float = field(
    0.9, "Share of memory for weights and cache, by vLLM's default.",
    POSITIVE_FRACTION,
  )
  page_size: int = field(16, "Positions of a page of the cache.", COUNT)
  pages: int = field(
    2588, "Pages of the cache; 0 for the number that fits. The default is the "
    "number of vLLM 0.19.0 for this model on another GPU of 24 GB "
    "(configs/serving/vllm_log.py).", COUNT_OR_NONE,
  )
  copy_rate: float = field(
    25e9, "Bandwidth of copies in each direction in bytes/s: 80% of the 31.5 "
    "GB/s of PCIe 4.0 x16.", POSITIVE,
  )
  copy_call_s: float = field(
    6e-6,
    "Fixed time per contiguous range in seconds: 5 to 7 us for each "
    "cudaMemcpyAsync (Wu et al., DualPath, arXiv 2602.21548, section 5.2).",
    NOT_NEGATIVE,
  )
  host_bytes: float = field(
    60e9, "Host memory for swapping, in bytes, as in the paper.", NOT_NEGATIVE
  )


@section
class Arm:
  """Preemption method."""

  preempt: str = field(
    "recompute", 'Handling of preempted pages: "recompute", "swap", or "cost", '
    "the cheaper one.", ("recompute", "swap", "cost"),
  )
  single: bool = field(True, "Whether each page is copied separately.")
  growth: int = field(1, "Pages per allocation of a request.", COUNT)
  wait_s: float = field(
    1e6, "Longest copy, in seconds, for which a step waits.", NOT_NEGATIVE
  )
  keep: bool = field(
    False, "Whether the host cache keeps copies after their use, and copies of "
    "conversation turns.",
  )


@section
class FoundArm(Arm):
  """Preemption method with prefix reuse."""

  found: bool = field(True, "Whether requests share pages of common prefixes.")


@section
class Limits:
  """Limits of a step."""

  slots: int = field(256, "Largest number of running requests.", COUNT)
  tokens: int = field(2048, "Tokens of a step.", COUNT)
  steps_ahead: int = field(2, "Largest number of steps in flight.", COUNT)


def _arms() -> dict[str, Arm]:
  """Returns the arms; each adds one feature to the previous one."""
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
    """Changing priorities."""

    frequency: float = field(
      0.04,
      "Probability that a step changes priorities, as in the paper for an 8B "
      "model.",
      FRACTION,
    )
    levels: int = field(8, "Number of priorities, an assumption.", COUNT)

  @section
  class Sessions:
    """Conversations in several turns."""

    num_sessions: int = field(100, "Number of sessions.", COUNT)
    rate: float = field(1.0, "Turns per second.", RATE)
    turns: float = field(5.5, "Mean number of turns of a session.", Range(1))
    think_s: float = field(
      30.0, "Mean time between a response and the next turn in seconds, an "
      "assumption.", NOT_NEGATIVE,
    )
    seed: int = field(0, "Seed of the sessions.", SEED)
    longest_answer: int = field(
      1000, "Largest number of tokens of a response: the 99th percentile of "
      "ShareGPT.", COUNT,
    )

  @section
  class Trace:
    """Public trace of requests."""

    path: str = field(
      "",
      'File of the trace; "" for the sample in the package.',
    )

  name: str = field("fastswitch", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fastswitch", "Subject of the study.", ("fastswitch",))
  keep: str = field(
    "runs/fastswitch/cells.jsonl", "File that stores finished simulations, "
    'which are not repeated; "" for none.',
  )
  model: Workload = field(Workload, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves.")
  limits: Limits = field(Limits, "Limits of a step.")
  arms: dict[str, Arm] = field(
    _arms, "Preemption methods by name."
  )
  order: tuple[str, ...] = field(
    ("recompute", "blocks", "groups", "asynchronous", "reuse", "cost"),
    "Arms to simulate, in this order.",
  )
  priorities: Priorities = field(Priorities, "Changes of priorities.")
  kinds: tuple[str, ...] = field(
    ("random", "markov"), "Kinds of priority changes in the first setting; the "
    "second setting has the first kind.",
  )
  sessions: Sessions = field(Sessions, "Sessions of the first setting.")
  traces: dict[str, Trace] = field(
    lambda: {
      name: FastSwitch.Trace()
      for name in ("azure_code", "azure_conv", "mooncake")
    }, "Traces of the second setting by name.",
  )
  num_requests: int = field(
    200, "Number of requests of each trace; 0 for all.",
    COUNT_OR_NONE,
  )
  loads: tuple[float, ...] = field(
    (0.5, 0.7, 0.9), "Arrival rates as shares of the first arm's capacity.",
    RATE,
  )
  seeds: tuple[int, ...] = field(
    (0, 1, 2, 3, 4), "Seeds of Poisson arrivals, for the comparison of costs.",
    SEED,
  )
  seeds_trace: str = field("azure_conv", "Trace of the comparison of costs.")
  ranks: int = field(8, "Tensor ranks of the CAAT-Net experiment.", TWO_OR_MORE)
  ranks_device: str = field("h100", "Device of the tensor ranks.")
  shares: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25, 0.0),
    "Values of p of the CAAT-Net experiment; () to skip it.",
    FRACTION, empty=True,
  )
  shares_rate: float = field(
    40.0, "Requests per second of the CAAT-Net experiment's trace.", RATE
  )


@section
class Client:
  """Client with its own requests."""

  requests: int = field(400, "Number of requests.", COUNT)
  rate: float = field(
    0.0, "Requests per second; 0 for simultaneous arrival.", NOT_NEGATIVE
  )
  prompt: int = field(
    128, "Mean tokens of a prompt, without the common prefix.", COUNT
  )
  output: int = field(64, "Mean tokens of a response.", COUNT)
  shared: int = field(
    256, "Tokens of the common prefix of the client's prompts.", COUNT
  )
  priority: int = field(
    1, "Strict priority; lower is served earlier.", COUNT_OR_NONE
  )
  backlogged: bool = field(
    True, "Whether the client is included in the comparison."
  )


@section
class Fairness(Study):
  """Cost of fairness between clients that exceed a server's capacity."""

  name: str = field("fairness", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fairness", "Subject of the study.", ("fairness",))
  policies: tuple[str, ...] = field(
    ("first_come", "shortest_first", "strict_priority", "vtc", "dlpm"),
    "Scheduling policies, each of which serves the same requests.",
  )
  seed: int = field(0, "Seed of the requests.", SEED)
  model: Workload = field(Workload, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves.")
  arm: FoundArm = field(FoundArm, "Handling of preemption.")
  limits: Limits = field(
    lambda: Limits(slots=16), "Limits of a step. The number of slots is small, "
    "since the fairness bound grows with it.",
  )
  clients: dict[str, Client] = field(
    lambda: {
      "short": Client(),
      "long": Client(requests=120, prompt=512, output=256),
      "aggressor": Client(
        requests=1200, rate=20.0, prompt=256, output=128, priority=0
      ),
      "light": Client(requests=60, rate=0.5, backlogged=False),
    }, "Clients by name.",
  )


@section
class VLLMLog(Study):
  """Simulation of a vLLM run of 300 requests, compared with its log."""

  @section
  class Server:
    """Options of vLLM in that run."""

    policy: str = field("first_come", "Scheduling policy.")
    slots: int = field(
      0, "Largest number of running requests; 0 for that of the log.",
      COUNT_OR_NONE,
    )
    tokens: int = field(
      0, "Tokens of a step; 0 for that of the log.", COUNT_OR_NONE
    )
    page_size: int = field(
      0, "Positions of a page of the cache; 0 for those of the log.",
      COUNT_OR_NONE,
    )
    pages: int = field(
      0, "Pages of the cache; 0 for the number in the log or, without one, for "
      "those that fit in memory next to the weights.", COUNT_OR_NONE,
    )
    reuse: bool = field(
      True, "Whether requests share pages of prefixes; never if the log's do "
      "not."
    )
    whole_prompt: bool = field(
      True, "Whether admission of a request requires free pages for its whole "
      "prompt.",
    )
    steps_ahead: int = field(2, "Largest number of steps in flight.", COUNT)

  @section
  class Sizes:
    """Sizes of the model; 0 for those of the model that the log names."""

    path: str = field(
      "", "The model's published config.json, or its folder; unset for a known "
      "model, or the file in configs/model of LLMServingSim.",
    )
    vocab_size: int = field(0, "Size of the vocabulary.", COUNT_OR_NONE)
    width: int = field(0, "Channels of the residual stream.", COUNT_OR_NONE)
    num_layers: int = field(0, "Layers.", COUNT_OR_NONE)
    num_heads: int = field(0, "Query heads.", COUNT_OR_NONE)
    num_kv_heads: int = field(0, "Key and value heads.", COUNT_OR_NONE)
    ffn_width: int = field(0, "Hidden channels of the MLP.", COUNT_OR_NONE)
    head_width: int = field(0, "Channels of a head.", COUNT_OR_NONE)

  @section
  class Collectives:
    """All-reduces over tensor ranks, which a profile does not contain."""

    per_layer: int = field(2, "All-reduces of a layer.", COUNT_OR_NONE)
    bandwidth: float = field(
      0.0, "Bytes per second between two ranks; 0 for that of the log.",
      NOT_NEGATIVE,
    )
    latency_s: float | None = field(
      None, "Seconds of a message without its bytes; None for that of the log.",
      NOT_NEGATIVE,
    )

  name: str = field("vllm_log", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("vllm_log", "Subject of the study.", ("vllm_log",))
  log: str = field(
    "rtx4090_llama31_8b", "Log of one vLLM engine: a folder in the format of "
    "LLMServingSim, or a name in caatnet/studies/serving/logs.",
  )
  profile: str = field(
    "", "Folder with the measured times of operations; unset for the folder "
    '"profile" of the log, or that of LLMServingSim\'s repository.',
  )
  model: Sizes = field(Sizes, "Sizes of the model.")
  ranks: int = field(
    0, "Tensor ranks; 0 for the number of the log.", COUNT_OR_NONE
  )
  collectives: Collectives = field(
    Collectives, "All-reduces over tensor ranks."
  )
  skew: float | None = field(
    None, "Attention of sequences of unequal length: position of its time "
    "between those of the mean (0) and of the largest context (1); None for "
    "the fit in the profile.", FRACTION,
  )
  num_requests: int = field(
    0, "Number of requests of the log; 0 for all.", COUNT_OR_NONE
  )
  prefixes: str = field(
    "auto", 'Common prefixes of prompts: "published" for those in the log\'s '
    'prefixes.csv, "none", or the path of the workload\'s file; "auto" uses '
    "prefixes.csv or else the workload's file, if it is found.",
  )
  server: Server = field(Server, "Options of vLLM in that run.")
  percentiles: tuple[int, ...] = field(
    (50, 90, 95, 99), "Percentiles to compare.",
    Range(0, 100, whole=True),
  )
  tolerance: float = field(
    0.02, "Relative error above which a rule is reported.", FRACTION
  )
  change: float = field(
    0.01,
    "Relative change of pages and times whose effect is shown; 0 for none.",
    DECAY,
  )
