r"""The engine on this machine: its rate, and what its simulator says of it.

  python -m launch.benchmark --config=configs/benchmark/engine.py \
    --cpu_devices=1 --output=results/engine.json

Two tables, of a model with 25M parameters in float32. The first has the tokens
per second of the engine and of a bare loop around the same program, which has
all its arrays beforehand, in turns: by the clock, and by this process' time of
the processor. Aim: 0.9 of the loop's.

The second has times to first token and between tokens of requests that arrive
at random, on the engine and in the simulator, which is given how long steps of
each size take in an engine. These are measured before each run and after it, in
the same process. Aim: mean, P50 and P90 within a tenth. How far runs of the
engine differ from one another stands beside it: nothing is to be said more
exactly than that. It takes about ten minutes, half of them XLA's; nothing else
should run.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for one that takes seconds."""
  config = decoding.get_config(size)
  config.name = "engine"
  config.benchmark = defaults("benchmark", "engine")
  if size == "test":
    config.benchmark.rounds, config.benchmark.batches = 1, (2,)
    config.benchmark.prompt, config.benchmark.tokens = 8, 8
    config.benchmark.requests, config.benchmark.slots = 4, 2
    config.benchmark.steps = 2
  return config
