r"""What switching between requests costs: recompute, swap, and FastSwitch.

  python -m launch.simulate --config=configs/serving/fastswitch.py \
    --plot=fastswitch.png
  python -m launch.simulate --config=configs/serving/fastswitch.py:paper
  python -m launch.simulate --config=configs/serving/fastswitch.py \
    --config.traces.azure_conv.path=AzureLLMInferenceTrace_conv.csv \
    --config.num_requests=0

A server with priorities that change is simulated with several ways to take a
request's pages: arms, each of which adds one thing. First with sessions as in
FastSwitch's evaluation (arXiv 2411.18424), then with public traces whose
arrivals are scaled to shares of the capacity that the first arm has.

Sizes: `all` has 100 sessions and takes some minutes on one core, `paper`
has the 1,000 of the paper and takes more than an hour, `test` seconds. What has
been simulated is kept in config.keep, so that a study that was stopped goes on.
"""

import ml_collections

_SIZES = ("all", "paper", "test")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, `paper` for 1,000 sessions, or `test`."""
  if size not in _SIZES:
    raise ValueError(
      f"fastswitch.py:{size}: the sizes are {', '.join(_SIZES)}"
    )
  config = ml_collections.ConfigDict()
  config.name = "fastswitch"
  config.study = "serving"
  config.subject = "fastswitch"
  # A file that keeps what has been simulated; "" keeps nothing.
  config.keep = "" if size == "test" else "runs/fastswitch/cells.jsonl"
  # Llama-3.1-8B in bfloat16.
  config.model = ml_collections.ConfigDict({
    "vocab_size": 128256, "width": 4096, "num_layers": 32, "num_heads": 32,
    "num_kv_heads": 8, "ffn_width": 14336,
  })
  config.hardware = hardware()
  config.limits = ml_collections.ConfigDict()
  config.limits.slots = 256
  config.limits.tokens = 2048
  # Steps that are under way at a time.
  config.limits.steps_ahead = 2
  config.arms = arms()
  # Which of them are simulated, in this order.
  config.order = (
    "recompute", "blocks", "groups", "asynchronous", "reuse", "cost"
  )
  # The paper's frequency for an 8B model; eight levels are of no source.
  config.priorities = ml_collections.ConfigDict()
  config.priorities.frequency = 0.04
  config.priorities.levels = 8
  # How priorities change in the first setting; the second has the first kind.
  config.kinds = ("random", "markov")
  config.sessions = ml_collections.ConfigDict()
  config.sessions.num_sessions = {"all": 100, "paper": 1000, "test": 10}[size]
  # Turns per second.
  config.sessions.rate = 1.0
  config.sessions.turns = 5.5
  # Mean seconds between an answer and the next turn; of no source.
  config.sessions.think_s = 30.0
  config.sessions.seed = 0
  # Tokens of an answer at most: the 99th percentile of ShareGPT's.
  config.sessions.longest_answer = 1000
  config.traces = traces()
  # The first so many requests of each trace; 0 for all.
  config.num_requests = {"all": 200, "paper": 1500, "test": 16}[size]
  # Shares of the first arm's capacity.
  config.loads = (0.5, 0.7, 0.9)
  # Of Poisson arrivals, for the comparison of costs.
  config.seeds = (0, 1, 2, 3, 4)
  config.seeds_trace = "azure_conv"
  # Tensor ranks of these GPUs, and p, for CAAT-Net's part; () leaves it out.
  config.ranks = 8
  config.ranks_device = "h100"
  config.shares = (1.0, 0.75, 0.5, 0.25, 0.0)
  # Requests per second of the trace above, for that part.
  config.shares_rate = 40.0
  if size == "test":
    config.kinds, config.loads, config.seeds = ("random",), (0.9,), (0,)
    config.shares, config.hardware.pages = (1.0, 0.0), 160
    config.sessions.rate, config.sessions.longest_answer = 20.0, 40
    config.sessions.think_s = 1.0
    del config.traces.azure_code, config.traces.mooncake
  return config


def hardware() -> ml_collections.ConfigDict:
  """Returns the paper's machine: an A10 of 24 GB on PCIe 4."""
  hardware = ml_collections.ConfigDict()
  hardware.device = "a10"
  # The shares of peak FLOP/s and of memory bandwidth that a step reaches; of no
  # source.
  hardware.utilisation = 0.5
  hardware.memory_fraction = 0.8
  # The share of memory that weights and cache may take: vLLM's default.
  hardware.memory_share = 0.9
  hardware.page_size = 16
  # Pages of the cache; 0 for what fits. Here those that vLLM 0.19.0 had for
  # this model on another GPU of 24 GB (configs/serving/vllm_log.py).
  hardware.pages = 2588
  # Bytes per second in each direction: 80% of the 31.5 GB/s of PCIe 4.0 x16.
  hardware.copy_rate = 25e9
  # Seconds that a contiguous range takes beside its bytes: 5 to 7 us for each
  # cudaMemcpyAsync (Wu et al., DualPath, arXiv 2602.21548, section 5.2).
  hardware.copy_call_s = 6e-6
  # The paper's host memory for swapping.
  hardware.host_bytes = 60e9
  return hardware


def arms() -> ml_collections.ConfigDict:
  """Returns the arms, in the order in which one thing is added to another."""
  recompute = {
    # How pages are taken: "recompute", "swap", or "cost", the cheaper one.
    "preempt": "recompute",
    # Whether each page is copied by itself.
    "single": True,
    # Pages that a request takes at a time.
    "growth": 1,
    # A step waits for copies that take no longer; so long, for all.
    "wait_s": 1e6,
    # Whether copies on the host outlive their use, and turns are copied there.
    "keep": False,
  }
  blocks = recompute | {"preempt": "swap"}
  groups = blocks | {"single": False, "growth": 4}
  asynchronous = groups | {"wait_s": 0.002}
  reuse = asynchronous | {"keep": True}
  return ml_collections.ConfigDict({
    "recompute": recompute,
    "blocks": blocks,
    "groups": groups,
    "asynchronous": asynchronous,
    "reuse": reuse,
    "cost": reuse | {"preempt": "cost"},
  })


def traces() -> ml_collections.ConfigDict:
  """Returns the traces: a file, "" for the sample in the package, and pages."""
  names = "azure_code", "azure_conv", "mooncake"
  return ml_collections.ConfigDict({name: {"path": ""} for name in names})
