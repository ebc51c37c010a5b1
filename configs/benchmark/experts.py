r"""150 experts of 33.7M parameters on one server, with memory for 40 of them.

  python -m launch.benchmark --config=configs/benchmark/experts.py \
    --cpu_devices=1 --output=results/experts.json

For each eviction policy a server answers streams of requests (zipf, uniform,
bursty, cyclic over slots + 1) over HTTP. Every stream's first requests are also
sent to one server process per expert, stopped and started as llama-swap does.
The experts have random parameters and take 20.2 GB on disk in runs/. The run
takes an estimated hour; `experts.py:test` takes minutes.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
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
