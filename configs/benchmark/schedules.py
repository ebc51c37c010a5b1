"""Time to build schedules, and how near the optimal ones come to the cut bound.

  python -m launch.benchmark --config=configs/benchmark/schedules.py \
    --output=results/schedules.json

Three parts: MultiTree on square tori and meshes of growing size; the optimal
trees on some graphs, one of them with failed links; and on 200 seeded random
graphs of up to 64 nodes, with links of several speeds, switches in some and
failed links in some. For each of those the output has the tight cut: its nodes
and the bandwidth that leaves it, which bound any all-gather from below. Aims:
MultiTree on 32x32 under 5 s and on a 64x64 torus under 60 s; optimal trees of
an 8x8 torus under 10 s; on 95% of the random graphs within 5% of the bound.
`schedules.py:test` is a few small ones.
"""

import ml_collections

from configs.caatnet import base


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """`all`, or `test` for seconds."""
  config = base.get_config()
  config.name = "schedules"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "schedules"
  # Sides of square grids.
  config.benchmark.tori = (4, 8, 16, 32, 64)
  config.benchmark.meshes = (4, 8, 16, 32)
  config.benchmark.optimal = ("torus 4x4", "torus 8x8", "mesh 8x8",
                              "torus 8x8, 2 links failed", "fat tree 4",
                              "leaf-spine 4x4x4", "dgx 2x8")
  config.benchmark.num_random = 200
  config.benchmark.max_nodes = 64
  # PNG of MultiTree's time against the number of ranks; "" for none.
  config.benchmark.plot = ""
  if size == "test":
    config.benchmark.tori = (4, 8)
    config.benchmark.meshes = (4,)
    config.benchmark.optimal = ("torus 4x4",)
    config.benchmark.num_random = 4
    config.benchmark.max_nodes = 12
  elif size != "all":
    raise ValueError(f"schedules.py:{size}: the sizes are all and test")
  return config
