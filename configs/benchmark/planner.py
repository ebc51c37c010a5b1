r"""Quality of the planner's device orders, against bounds and other searches.

  python -m launch.benchmark --config=configs/benchmark/planner.py
  python -m launch.benchmark --config=configs/benchmark/planner.py:test
  python -m launch.benchmark --config=configs/benchmark/planner.py \
    --config.benchmark.python_path=/tmp/ortools/bin/python

The benchmark has six parts: (1) comparison with exhaustive search of device
orders, up to eight devices in clusters with independent random links; (2)
comparison with CP-SAT up to sixteen devices, if python_path is a Python
with ortools (`python -m venv /tmp/ortools && /tmp/ortools/bin/pip install
ortools`), or with its bound if it does not finish; (3) gaps to the lower bound
at 64 devices; (4) time and gap at 1,024 devices; (5) step times on uneven links
in the default order, in that of Pipette's annealing of nodes, and in ours; (6)
the excess of a plan's step time over the best of all configurations in all
orders (regret), up to eight devices. The model is that of
configs/planner/gpt_11b.py. It takes half an hour on one core without CP-SAT.
"""

import ml_collections

from caatnet.benchmarks.planner.keys import Planner
from caatnet.schema.tree import defaults
from configs.planner import gpt_11b


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"planner.py:{size}: the sizes are all and test")
  config = gpt_11b.get_config("train")
  config.name = "device_orders"
  config.benchmark = defaults(Planner)
  if size == "test":
    config.benchmark.exact_clusters = config.benchmark.certified_clusters = 1
    config.benchmark.solved_clusters = config.benchmark.premise_clusters = 1
    config.benchmark.grids = ((2, 2, 4),)
    config.benchmark.large = ((4, 2, 8),)
    config.benchmark.steps = 50
    config.benchmark.regret_clusters = 2
    config.benchmark.sizes, config.benchmark.batch_size = (4, 4), 8
  return config
