r"""500 concurrent streams of a 25M-parameter model, with and without HTTP.

  python -m launch.benchmark --config=configs/benchmark/server.py \
    --cpu_devices=1 --output=results/serving_http.json

Both variants get the same concurrent requests, in alternating rounds. Lengths
of responses are random, from 0.5 to 1.5 times the mean. Without HTTP, a thread
executes steps and reads tokens. With HTTP, the server does so, and a separate
client process sends the requests and reads 500 streams. The client runs on the
same cores, so its time is included in the server's time.
`server.py:test` takes seconds.
"""

import ml_collections

from caatnet.benchmarks.serving.keys import Server
from caatnet.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
  config = decoding.get_config(size)
  config.name = "server"
  config.inference.context = 256
  config.benchmark = defaults(Server)
  if size == "test":
    config.benchmark.rounds = 1
    config.benchmark.batches = (4,)
    config.benchmark.streams = 8
    config.benchmark.prompt, config.benchmark.tokens = 9, 5
  return config
