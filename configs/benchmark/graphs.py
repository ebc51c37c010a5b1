r"""Graph networks: the sampler, caches, waiting for features, a large graph.

  python -m launch.benchmark --config=configs/benchmark/graphs.py
  python -m launch.benchmark --config=configs/benchmark/graphs.py \
    --config.benchmark.parts="('sampler',)" \
    --config.benchmark.python=/tmp/dgl_env/bin/python
  python -m launch.benchmark --config=configs/benchmark/graphs.py \
    --config.benchmark.parts="('large',)" --config.benchmark.folder=/tmp/large

Of the parts, "sampler" counts sampled edges per second, beside DGL's if
config.benchmark.python is a Python that has it (DGL 2.1.0 wants torch 2.2.1 and
numpy < 2: an environment of its own); "caches" counts hits of hot sets, LRU and
Belady's rule on the same batches, and bytes per epoch; "waits" trains and takes
the share of a step that waits for features; "large" builds and trains in a
process whose own memory is limited; "predicted" predicts steps of GPUs. Times
are of one machine and one run; the result is in LOG.md.
"""

import ml_collections

from configs.graphs import tiny

_LARGE = {
  # Nodes are 2^scale.
  "scale": 23, "num_edges": 100_000_000, "num_features": 128, "steps": 100,
  # Megabytes that the process may have beside pages of files (RLIMIT_DATA).
  "limit_mb": 2000,
}


def get_config(size: str = "full") -> ml_collections.ConfigDict:
  """Returns the benchmark: `full`, or `test` on small graphs."""
  # What is trained, on the graphs of the benchmark.
  config = tiny.get_config(
    "data_parallel,test" if size == "test" else "data_parallel"
  )
  config.name = "graphs"
  config.parallel.worker = config.parallel.data = 1
  config.data.validation_nodes = 64
  config.benchmark = benchmark = ml_collections.ConfigDict()
  benchmark.name = "graphs"
  benchmark.parts = ("sampler", "caches", "waits", "large", "predicted")
  # An R-MAT graph of 2^scale nodes.
  benchmark.scale = 20
  benchmark.num_edges = 16_000_000
  benchmark.num_features = 128
  benchmark.fanouts = (15, 10)
  benchmark.batch_size = 1024
  # Batches that are timed, after a tenth as many that are not.
  benchmark.samples = 60
  benchmark.threads = 2
  # A Python with DGL; "" for none.
  benchmark.python = ""
  # Shares of all rows that caches have room for.
  benchmark.shares = (0.01, 0.05, 0.2)
  # Steps that are trained for each way to wait.
  benchmark.steps = 60
  # Where the large graph lies; "" for a folder that goes. One that is there is
  # not built again.
  benchmark.folder = ""
  benchmark.large = ml_collections.ConfigDict(_LARGE)
  # What predictions assume: bytes per second that the cores of a host gather,
  # and that its memory has; the part of a link's rate and of a device's peak
  # that is reached; the share of all places that are distinct rows, which is
  # that of the part "sampler". None of the others was measured.
  benchmark.predicted = ml_collections.ConfigDict({
    "gather": 20e9, "memory": 150e9, "link_share": 0.85, "utilisation": 0.05,
    "hidden": 256, "distinct": 0.14,
  })
  if size == "test":
    benchmark.scale, benchmark.num_edges = 10, 8_000
    benchmark.num_features, benchmark.batch_size = 8, 64
    benchmark.fanouts, benchmark.samples, benchmark.steps = (3, 2), 10, 6
    benchmark.large = _LARGE | {
      "scale": 10, "num_edges": 5_000, "num_features": 8, "steps": 3,
    }
  return config
