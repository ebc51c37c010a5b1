r"""Time to build schedules, and their time over the tightest cut's bound.

  python -m launch.benchmark --config=configs/benchmark/schedules.py \
    --config.benchmark.plot=schedules.png --output=results/schedules.json

The benchmark has four parts: MultiTree on square tori and meshes of increasing
size; the event loop on all-gathers of 1,024 ranks; optimal trees on some
graphs, one of them with failed links; and optimal trees on 400 random graphs,
some with switches and some with failed links. Link bandwidths are 25, 50, 100
or 200 GB/s in the first 200 random graphs, and uniform from 25 to 200 GB/s in
the others. For each graph of the last two parts the output has the tightest cut
(its nodes, and the outgoing bandwidth, which gives a lower bound of the
all-gather time); the time of the busiest link of the optimal (packed) trees,
divided by this bound; and for each message size the time of the schedule that
`caatnet.studies.collectives.chosen` selects, divided by a bound that includes
latency, event by event ("events") and round by round ("lockstep").

Aims: MultiTree on 32x32 under 5 s and on a 64x64 torus under 60 s; 300,000 link
traversals per second; packed trees of an 8x8 torus under 10 s. Seconds in the
result are CPU time. The benchmark takes minutes; `schedules.py:test`, with a
few small graphs, takes seconds.
"""

import ml_collections

from caatnet.benchmarks.training.keys import Schedules
from caatnet.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  config = ml_collections.ConfigDict()
  config.name = "schedules"
  config.benchmark = defaults(Schedules)
  if size == "test":
    config.benchmark.tori = (4, 8)
    config.benchmark.meshes = (4,)
    config.benchmark.optimal = ("torus 4x4",)
    config.benchmark.simulated = ("ring, ring 64",)
    config.benchmark.num_random = 4
    config.benchmark.max_nodes = 12
  elif size != "all":
    raise ValueError(f"schedules.py:{size}: the sizes are all and test")
  return config
