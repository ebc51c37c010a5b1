r"""Loss of a run's model with weights and cache stored as int8 codes.

  python -m launch.benchmark --config=configs/benchmark/coded.py \
    --config.benchmark.workdir=runs/demo/p0.5

Validation windows are read in chunks through a paged cache, so that attention
reads quantised keys and values. Weights have one scale per 128 elements of a
row, keys and values one per token and head; embedding tables are not quantised.
Result: log/2026-11-22-int8-inference.md.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "full") -> ml_collections.ConfigDict:
  """Returns the benchmark: `full`, or `test` for a few windows."""
  if size not in ("full", "test"):
    raise ValueError(f"coded.py:{size}: the sizes are full and test")
  config = ml_collections.ConfigDict()
  config.name = "coded"
  config.benchmark = defaults("benchmark", "coded")
  if size != "full":
    config.benchmark.windows = 2
  return config
