r"""Proves every timetable of a pipeline within its domain.

  python -m launch.benchmark --config=configs/benchmark/timetables.py
  python -m launch.benchmark --config=configs/benchmark/timetables.py:test

Every builder is given every number of stages, microbatches and chunks up to
those below. What it takes is built and proven (`parallel.pipeline.check`), and
what is counted in it (stored activations, ticks, sends) is compared with the
closed forms. Then the times of large proofs are printed, in seconds of
processor time; the aim is under 2 s. The whole takes a minute of one core.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"timetables.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "timetables_proven"
  config.benchmark = defaults("benchmark", "timetables")
  if size == "test":
    config.benchmark.stages, config.benchmark.microbatches = 4, 8
    config.benchmark.chunks = 2
    config.benchmark.timed = (8, 16)
    config.benchmark.processes = 1
  return config
