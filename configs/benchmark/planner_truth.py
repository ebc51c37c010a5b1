r"""Steps that processes really take beside what the planner predicts.

  python -m launch.benchmark --config=configs/benchmark/planner_truth.py
  python -m launch.benchmark --config=configs/benchmark/planner_truth.py:test

Eight processes in network namespaces, whose links the kernel holds to rates
that are drawn for each pair and direction: root only. Links are measured, and
every configuration is predicted on what was measured. From those that are
predicted within three times of the best some are drawn, with the best itself;
devices are in their own order, in the planner's, or in a random one. Their
messages then go over sockets in the order of the timetable, while computing is
a wait of which a core works a share. What is printed is the rank correlation of
predicted and measured seconds, and what the predicted best loses against the
measured best. A row is in `config.benchmark.results` as soon as it is measured,
and those that are there are not measured again. It takes a quarter of an hour.

`:test` has four processes without shaped links, and takes seconds; its links
are those of this machine, so its figures mean nothing.
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
