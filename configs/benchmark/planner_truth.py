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


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test`."""
  if size not in ("all", "test"):
    raise ValueError(f"planner_truth.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "planner_truth"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "planner_truth"
  # JSON file of the rows; "" keeps none.
  config.benchmark.results = "runs/planner_truth.json"
  config.benchmark.processes = 8
  # A matrix of links for each seed, and the configurations drawn of each.
  config.benchmark.seeds = (0, 1, 2)
  config.benchmark.drawn = 12
  config.benchmark.within = 3.0
  # How often a configuration is run; the median counts.
  config.benchmark.rounds = 3
  # Seconds after which no other one is begun.
  config.benchmark.limit_s = 3600.0
  # Bytes per second between two processes, drawn on a logarithmic scale; () for
  # links that nobody shapes.
  config.benchmark.rates = (2e6, 20e6)
  # The device: FLOP/s, and the share of that time that a core works.
  config.benchmark.flops = 3e8
  config.benchmark.quota = 0.05
  # The model, float32, and the examples of a step.
  config.benchmark.layers = 8
  config.benchmark.width = 128
  config.benchmark.positions = 16
  config.benchmark.batch_size = 32
  config.benchmark.timetables = ("1f1b", "gpipe", "eager_1f1b", "zb_h1")
  if size == "test":
    config.benchmark.results, config.benchmark.rates = "", ()
    config.benchmark.processes, config.benchmark.seeds = 4, (0,)
    config.benchmark.drawn, config.benchmark.rounds = 3, 1
    config.benchmark.flops, config.benchmark.batch_size = 2e9, 8
  return config
