r"""Measures how good device orders are: exact, certified, and against others.

  python -m launch.benchmark --config=configs/benchmark/planner.py
  python -m launch.benchmark --config=configs/benchmark/planner.py:test
  python -m launch.benchmark --config=configs/benchmark/planner.py \
    --config.benchmark.python=/tmp/ortools/bin/python

Six parts. Against all orders, up to eight devices in clusters whose links are
drawn one by one. Against CP-SAT up to sixteen, if benchmark.python names a
Python that has ortools (`python -m venv /tmp/ortools && /tmp/ortools/bin/pip
install ortools`); where it does not finish, its bound counts. Certified gaps at
64 devices. Time and gap at 1,024. And what an order is worth on uneven links:
the devices' own, Pipette's annealing of nodes, and ours. And what a whole plan
loses against all configurations in all orders, up to eight devices. The model
is that of configs/planner/gpt_11b.py. It takes half an hour of one core without
CP-SAT.
"""

import ml_collections

from configs.planner import gpt_11b


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"planner.py:{size}: the sizes are all and test")
  config = gpt_11b.get_config("train")
  config.name = "device_orders"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "planner"
  # How many clusters of each part: against all orders, against CP-SAT, at 64
  # devices for each grid, of the premise, and of the regret.
  config.benchmark.exact = 200
  config.benchmark.solved = 8
  config.benchmark.certified = 10
  config.benchmark.premise = 200
  config.benchmark.regret = 32
  # Stages, data and tensor ranks of 64 and of 1,024 devices.
  config.benchmark.grids = (
    (4, 2, 8), (2, 4, 8), (8, 1, 8), (1, 8, 8), (2, 8, 4), (4, 4, 4),
    (8, 8, 1),
  )
  config.benchmark.large = ((8, 16, 8), (16, 8, 8), (16, 64, 1))
  # Of the regret: devices, positions of an example and ways that stages run,
  # which take turns; layers, examples of a step, and timetables that are tried.
  config.benchmark.sizes = (4, 6, 8, 5)
  config.benchmark.positions = (2048, 16_384)
  config.benchmark.executions = ("events", "lockstep")
  config.benchmark.layers = 8
  config.benchmark.batch_size = 16
  config.benchmark.timetables = (
    "1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1"
  )
  # Microbatches of a step, and the examples of each.
  config.benchmark.microbatches = 32
  config.benchmark.examples = 1
  # A Python that has ortools; "" leaves CP-SAT out. Seconds for each problem.
  config.benchmark.python = ""
  config.benchmark.limit_s = 60.0
  # Orders that Pipette's annealing tries.
  config.benchmark.steps = 3000
  if size == "test":
    config.benchmark.exact = config.benchmark.certified = 1
    config.benchmark.solved = config.benchmark.premise = 1
    config.benchmark.grids = ((2, 2, 4),)
    config.benchmark.large = ((4, 2, 8),)
    config.benchmark.steps = 50
    config.benchmark.regret = 2
    config.benchmark.sizes, config.benchmark.batch_size = (4, 4), 8
  return config
