"""Training step of the 7B model, compiled for TPUs with and without kernels.

  python -m launch.benchmark --config=configs/benchmark/programs.py

Nothing is executed: times are lower bounds from peak rates without latency,
with transfers overlapped as XLA schedules them. A program takes a minute or
two; its row is then added to `config.benchmark.results`. These rows determine
for which norms `config.kernels="auto"` uses a kernel: `make tables` writes them
to parallel/kernels/evidence.py. Needs the optional dependencies `tpu`.
"""

import importlib

import ml_collections

from caatnet.benchmarks.programs.keys import Programs
from caatnet.schema.tree import defaults


def get_config(size: str = "7b") -> ml_collections.ConfigDict:
  """Returns the benchmark: `7b`, or `test` for programs that take seconds."""
  if size not in ("7b", "test"):
    raise ValueError(f"programs.py:{size}: the sizes are 7b and test")
  # `import` does not support names that begin with a digit.
  config = importlib.import_module("configs.caatnet.7b").get_config()
  config.name = "programs"
  config.benchmark = defaults(Programs)
  v5p, v6e, v5e = "tpu:v5p:4x4x4", "tpu:v6e:8x8", "tpu:v5e:8x8"
  config.benchmark.programs = (
    *((target, f"sync.p={p}") for target in (v5p, v6e) for p in (1.0, 0.5)),
    # 32 layers do not fit into the memory of the target.
    *((v5e, f"model.num_layers=4 sync.p={p}") for p in (1.0, 0.5)),
    (v5p, "sync.p=0.25"),
    (v5p, "sync.p=0.5 sync.route=one_shot"),
    (v5p, "sync.p=0.5 sync.route=ring_kernel"),
  )
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 2
    config.model.num_heads = config.model.num_kv_heads = 8
    config.model.ffn_width = 48
    config.model.vocab_size = 256
    config.data.seq_len = 16
    config.data.batch_size = 8
    config.train.accumulation = 1
    config.parallel.data = 1
    config.benchmark.results = ""
    config.benchmark.programs = (("cpu:4", "sync.p=0.5"),)
  return config
