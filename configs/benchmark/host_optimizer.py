r"""AdamW on the host: rates compared with triad and with other optimizers.

  python -m launch.benchmark --config=configs/benchmark/host_optimizer.py \
    --config.benchmark.rivals=/path/to/python \
    --output=results/host_optimizer.json
  python -m launch.measure_memory --file=/mnt/disk/tier --output=tiers.json
  python -m launch.benchmark --config=configs/benchmark/host_optimizer.py \
    --config.benchmark.tiers=tiers.json

It needs the extra `memory` (numba). Rivals are a Python with torch (its fused
AdamW) and, if it is installed and its extension can be built, DeepSpeed (its
CPUAdam). All subjects take steps in turns. A rate is 28 bytes per element (four
arrays are read, three written) over the time of a step. With 200 million
elements, all subjects together use 12 GB.

With tiers, the state is also placed in DRAM, in a file, half in each, and as
the optimum plans it if DRAM holds half of the state. After each step, files are
written to disk and dropped from memory, so that the next step reads the disk,
as with a state that is larger than the page cache; both count. Placements are
measured one after another, so that only one state is in memory at a time.
`host_optimizer.py:test` takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "full") -> ml_collections.ConfigDict:
  """Returns the benchmark: `full`, or `test` for small arrays."""
  if size not in ("full", "test"):
    raise ValueError(f"host_optimizer.py:{size}: the sizes are full and test")
  config = ml_collections.ConfigDict()
  config.name = "host_optimizer"
  config.benchmark = defaults("benchmark", "host_optimizer")
  if size == "test":
    config.benchmark.sizes = (100_000,)
    config.benchmark.rounds = 1
  return config
