r"""Graph networks: sampling, caches, waits for features, and a large graph.

  python -m launch.benchmark --config=configs/benchmark/graphs.py
  python -m launch.benchmark --config=configs/benchmark/graphs.py \
    --config.benchmark.parts="('sampler',)" \
    --config.benchmark.python_path=/tmp/dgl_env/bin/python
  python -m launch.benchmark --config=configs/benchmark/graphs.py \
    --config.benchmark.parts="('large',)" --config.benchmark.folder=/tmp/large

The part "sampler" measures sampled edges per second, compared with DGL if
config.benchmark.python_path is a Python with DGL (DGL 2.1.0 needs torch 2.2.1
and numpy < 2, hence a separate environment). "caches" counts hits of fixed, LRU
and optimal (Belady) caches on the same batches, and bytes per epoch. "waits"
trains and measures the fraction of a step that waits for features. "large"
builds a graph and trains in a process with limited memory. "predicted" predicts
step times on GPUs. Times are of one machine and one run. Results:
log/README.md, 2026-11-23.
"""

import ml_collections

from caatnet.benchmarks.graphs.keys import Graphs
from caatnet.schema.tree import defaults
from configs.graphs import tiny


def get_config(size: str = "full") -> ml_collections.ConfigDict:
  """Returns the benchmark: `full`, or `test` on small graphs."""
  if size not in ("full", "test"):
    raise ValueError(f"graphs.py:{size}: the sizes are full and test")
  # Config of the runs that the benchmark trains.
  config = tiny.get_config(
    "data_parallel,test" if size == "test" else "data_parallel"
  )
  config.name = "graphs"
  config.parallel.worker = config.parallel.data = 1
  config.data.validation_nodes = 64
  config.benchmark = benchmark = defaults(Graphs)
  if size == "test":
    benchmark.scale, benchmark.num_edges = 10, 8_000
    benchmark.num_features, benchmark.batch_size = 8, 64
    benchmark.fanouts, benchmark.samples, benchmark.steps = (3, 2), 10, 6
    benchmark.large.scale, benchmark.large.num_edges = 10, 5_000
    benchmark.large.num_features, benchmark.large.steps = 8, 3
  return config
