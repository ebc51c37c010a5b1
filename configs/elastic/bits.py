r"""Bitwise comparison of workers in a swarm with workers on a mesh axis.

  python -m launch.benchmark --config=configs/elastic/bits.py --cpu_devices=8
  python -m launch.benchmark --config=configs/elastic/bits.py:test \
    --cpu_devices=2

Each case is trained twice from the same samples: by workers that are peers of
`parallel.elastic`, as threads of this process with sockets between them, and
by one program on a mesh with one device per worker. The comparison includes all
workers' parameters and optimizer states, and the outer loop's state.

XLA:CPU contracts products and sums to fused multiply-adds, and the choice may
differ between two programs. Without these instructions no bit differs:

  XLA_FLAGS=--xla_cpu_max_isa=AVX python -m launch.benchmark \
    --config=configs/elastic/bits.py --cpu_devices=8

Expected result: log/2026-11-23-elastic-bit-equality.md.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.diloco import base


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns 2, 3, 5 and 8 workers (`all`), or two in one case (`test`)."""
  if size not in ("all", "test"):
    raise ValueError(f"bits.py:{size}: the sizes are all and test")
  config = base.get_config("diloco", "test")
  config.name = "elastic_bits"
  config.parallel.worker = 1
  config.parallel.tensor = 2
  config.data.batch_size = 2  # per worker
  config.outer.sync_every = 4
  config.elastic = defaults("elastic")
  config.benchmark = defaults("benchmark", "elastic_bits")
  # Overrides of the base case, DiLoCo in float32.
  streaming = (
    "outer.algorithm=streaming outer.sync_every=6 outer.overlap=(2,) "
    "outer.keep=0.5 "
    "outer.codec=e3m0 outer.block=64 outer.error_feedback=True"
  )
  cases = {
    "DiLoCo, float32": "",
    "Streaming, tau=2, E3M0": streaming,
    "DC-S3GD, float32": "outer.algorithm=dc_s3gd",
    "Eager, E3M0": "outer.algorithm=eager outer.sync_every=4 outer.codec=e3m0 "
                   "outer.block=64 outer.error_feedback=True",
    "data parallelism": "outer.algorithm=data_parallel",
  }
  if size == "test":
    config.benchmark.workers, config.benchmark.steps = (2,), 9
    cases = {"Streaming, tau=2, E3M0": streaming}
  config.benchmark.cases = tuple(cases.items())
  return config
