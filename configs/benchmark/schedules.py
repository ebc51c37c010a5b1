r"""Time to build schedules, and how near optimal ones come to the cut bound.

  python -m launch.benchmark --config=configs/benchmark/schedules.py \
    --config.benchmark.plot=schedules.png --output=results/schedules.json

It has four parts: MultiTree on square tori and meshes of growing size; the
event loop on all-gathers of 1,024 ranks; optimal trees on some graphs, one of
them with failed links; and optimal trees on twice 200 seeded random graphs,
with switches in some and failed links in some. Links are of 25, 50, 100 and 200
GB/s in the first 200, and anything from 25 to 200 GB/s in the others. For each
graph of the last two parts the output has the tight cut: its nodes, and the
bandwidth that leaves it, which bounds any all-gather from below; the busiest
link of packed trees over this bound; and the time, over the bound, of the
schedule that `caatnet.studies.collectives.chosen` chooses for a size, by two
models.

Aims: MultiTree on 32x32 under 5 s and on a 64x64 torus under 60 s; 300,000 link
traversals per second; packed trees of an 8x8 torus under 10 s. Seconds in the
result are processor time. The whole takes minutes; `schedules.py:test`, with a
few small graphs, seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  config = ml_collections.ConfigDict()
  config.name = "schedules"
  config.benchmark = defaults("benchmark", "schedules")
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
