r"""Throughput of the engine on this machine, and accuracy of its simulator.

  python -m launch.benchmark --config=configs/benchmark/engine.py \
    --cpu_devices=1 --output=results/engine.json

The benchmark has two tables, for a model of 25M parameters in float32. The
first has the tokens per second of the engine and of a minimal loop around the
same program with precomputed arrays, measured in alternation: by wall-clock
time and by CPU time of this process. Aim: 0.9 of the loop's rate.

The second has times to first token and between tokens for random arrivals, on
the engine and in the simulator. The simulator gets the durations of steps of
each size, measured before and after each run in the same process. Aim: mean,
P50 and P90 within 10%. The table also has the spread between runs of the
engine, which limits the accuracy of the comparison. It takes about ten minutes,
half of them compilation; the machine should be otherwise idle.
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
