r"""The engine on this machine: its rate, and what its simulator says of it.

  python -m launch.benchmark --config=configs/benchmark/engine.py \
    --cpu_devices=1 --output=results/engine.json

Two tables, of a model with 25M parameters in float32. The first has the tokens
per second of the engine and of a bare loop around the same program, which has
all its arrays beforehand, in turns: by the clock, and by this process' time of
the processor. Aim: 0.9 of the loop's.

The second has times to first token and between tokens of requests that arrive
at random, on the engine and in the simulator, which is given how long steps of
each size take. These are measured before each run, in the same process. Aim:
mean, P50 and P90 within a tenth. It takes some minutes, in part XLA's; nothing
else should run.
"""

import ml_collections

from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for one that takes seconds."""
  config = decoding.get_config(size)
  config.name = "engine"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "engine"
  config.benchmark.rounds = 5
  # Sequences at a time, tokens of their prompts and of their answers.
  config.benchmark.batches = (16, 64)
  config.benchmark.prompt = 64
  config.benchmark.tokens = 64
  # Requests that arrive at random: how many, at a time, and at which share of
  # what the engine would do if they were all there.
  config.benchmark.requests = 60
  config.benchmark.slots = 16
  config.benchmark.load = 0.6
  # Steps of each size that are measured before a run.
  config.benchmark.steps = 8
  if size == "test":
    config.benchmark.rounds, config.benchmark.batches = 1, (2,)
    config.benchmark.prompt, config.benchmark.tokens = 8, 8
    config.benchmark.requests, config.benchmark.slots = 4, 2
    config.benchmark.steps = 2
  return config
