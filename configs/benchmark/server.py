r"""500 streams at once from a 25M-parameter model, with HTTP and without.

  python -m launch.benchmark --config=configs/benchmark/server.py \
    --cpu_devices=1 --output=results/serving_http.json

Both engines get the same requests, all at once, and take turns. Without HTTP a
thread makes steps and takes tokens; with it the server does, and a process of
its own asks it and reads 500 streams. That client works on the same cores, so
its part of the time is counted as the server's. `server.py:test` takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
  config = decoding.get_config(size)
  config.name = "server"
  config.inference.context = 256
  config.benchmark = defaults("benchmark", "server")
  if size == "test":
    config.benchmark.rounds = 1
    config.benchmark.batches = (4,)
    config.benchmark.streams = 8
    config.benchmark.prompt, config.benchmark.tokens = 9, 5
  return config
