r"""150 experts of 33.7M parameters on one server, with memory for 40 of them.

  python -m launch.benchmark --config=configs/benchmark/experts.py \
    --cpu_devices=1 --output=results/experts.json

For each eviction policy a server answers streams of requests (zipf, uniform,
bursty, cyclic over slots + 1) over HTTP; its router selects the experts. Every
stream's first requests are also sent to one server process per expert, stopped
and started as llama-swap does.
The experts have random parameters and take 20.2 GB on disk in runs/. The run
has an hour of requests and took 69 minutes;
`experts.py:test` takes minutes.

`experts.py:simulated` compares the engine with its simulator, for 12 experts
of 29 MB on 4 slots: hits, loads, and exposed switching, in four minutes;
`experts.py:simulated_test` takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, `simulated`, or `test` for seconds."""
  if size in ("simulated", "simulated_test"):
    return _simulated(size)
  config = decoding.get_config(size)
  config.name = "experts_benchmark"
  config.inference.batch = 8
  config.inference.context = 64
  config.inference.page_size = 16
  config.inference.chunk = 32
  config.serving = defaults("serving")
  config.serving.policy = "experts"
  config.experts = defaults("experts")
  config.experts.path = f"runs/experts_{size}"
  config.experts.slots = 8
  config.benchmark = defaults("benchmark", "experts")
  if size == "test":
    config.experts.slots = config.experts.host_experts = 2
    config.benchmark.number = 5
    config.benchmark.streams = ("cyclic",)
    config.benchmark.evictions = ("lookahead",)
    config.benchmark.seconds, config.benchmark.rate = 2.0, 8.0
    config.benchmark.prompt, config.benchmark.tokens = 9, 5
    config.benchmark.memory = 0
    config.benchmark.processes = 2
  return config


def _simulated(size: str) -> ml_collections.ConfigDict:
  """Returns the comparison of engine and simulator."""
  config = get_config("25m" if size == "simulated" else "test")
  config.name = f"experts_{size}"
  config.experts.path = f"runs/experts_{size}"
  config.experts.random, config.experts.slots = 12, 4
  config.experts.host_experts = 12
  config.inference.batch, config.inference.chunk = 4, 16  # few programs
  config.benchmark = defaults("benchmark", "experts_simulated")
  if size == "simulated":
    config.model.width, config.model.ffn_width = 256, 688
    config.model.num_layers = 4
  else:
    config.experts.random, config.experts.slots = 4, 2
    config.benchmark.rounds, config.benchmark.requests = 1, 10
    config.benchmark.evictions = ("lru",)
    config.benchmark.prompt, config.benchmark.tokens = 9, 3
  return config
