r"""Verifies all pipeline schedules within a range of sizes.

  python -m launch.benchmark --config=configs/benchmark/pipeline_schedules.py
  python -m launch.benchmark \
    --config=configs/benchmark/pipeline_schedules.py:test

Every builder gets every number of stages, microbatches and chunks up to the
limits below. Supported schedules are built and verified
(`parallel.pipeline.check`), and their counts (stored activations, ticks, sends)
are compared with the closed forms. Then the times of large verifications are
printed, in seconds of CPU time; the aim is under 2 s. The benchmark takes a
minute of one core.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(
      f"pipeline_schedules.py:{size}: the sizes are all and test"
    )
  config = ml_collections.ConfigDict()
  config.name = "schedules_proven"
  config.benchmark = defaults("benchmark", "pipeline_schedules")
  if size == "test":
    config.benchmark.stages, config.benchmark.microbatches = 4, 8
    config.benchmark.chunks = 2
    config.benchmark.timed = (8, 16)
    config.benchmark.processes = 1
  return config
