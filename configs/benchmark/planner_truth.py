r"""Measured step times of processes, compared with the planner's predictions.

  python -m launch.benchmark --config=configs/benchmark/planner_truth.py
  python -m launch.benchmark --config=configs/benchmark/planner_truth.py:test

Eight processes run in network namespaces, with a random rate limit for each
pair and direction; this needs root. Links are measured, and all configurations
are predicted with the measured links. The best one and random ones among those
within three times its predicted time are run, with devices in default order, in
the planner's order, or in random order. Processes exchange messages over
sockets in the order of the pipeline schedule; compute is emulated by a wait
during part of which a core is busy. The output is the rank correlation of
predicted and measured times, and the regret of the predicted best against the
measured best. A row is added to `config.benchmark.results` after its
measurement, and existing rows are not repeated. It takes a quarter of an hour.

`:test` has four processes without rate limits and takes seconds; its links are
those of this machine, so its results are not meaningful.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test`."""
  if size not in ("all", "test"):
    raise ValueError(f"planner_truth.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "planner_truth"
  config.benchmark = defaults("benchmark", "planner_truth")
  if size == "test":
    config.benchmark.results, config.benchmark.rates = "", ()
    config.benchmark.processes, config.benchmark.seeds = 4, (0,)
    config.benchmark.drawn, config.benchmark.rounds = 3, 1
    config.benchmark.flops, config.benchmark.batch_size = 2e9, 8
  return config
