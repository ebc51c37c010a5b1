r"""Times all-reduce algorithms on tori, meshes, fat trees and BiGraphs.

MultiTree (Huang et al., ISCA 2021) is compared with all builders that run on a
network: those of its paper (ring, 2D ring, double binary tree,
halving-doubling with rank mapping, HDRM) and those that the paper does not have
(rings both ways, the bucket form of the 2D ring, halving-doubling without
mapping, Swing, direct exchange). Optimal trees, which may be MultiTree's own,
are a rival apart. Chunks are cut into as many pieces as suit an algorithm best.

  python -m launch.simulate --config=configs/collectives/multitree.py
  python -m launch.simulate --config=configs/collectives/multitree.py:large \
    --plot=multitree.png
  python -m launch.simulate --config=configs/collectives/multitree.py \
    --config.topologies='("torus:6x6",)' --config.latency_s=1e-6

Nothing is trained; it takes three minutes of a processor. Link constants are
those of ASTRA-sim's example, not the paper's. The two-level fat tree is a
leaf-spine network with as many spines as a leaf has hosts.

Expected result: by events MultiTree is not slower than the best of all others
but optimal trees in 22 of 40 cases (geometric mean of its speed-up over it
0.97), in lockstep in 7 of 40 (0.56): direct exchange is faster on switches,
Swing and the bucket form on square tori. Over optimal trees it has 0.94 and
0.62. At 64 MiB on the 4 x 4 torus MultiTree reaches 79 % of the bound in
lockstep and 83 % by events, the bucket form 99 and 100 %.
"""

import ml_collections

TOPOLOGIES = {
  "test": ("torus:2x2", "bigraph:2x4"),
  "small": (
    "torus:4x4", "mesh:4x4", "leaf_spine:4x4x4", "bigraph:2x8",
    "torus:8x8", "mesh:8x8", "leaf_spine:8x8x8", "bigraph:4x16",
  ),
  "large": (
    "torus:16x16", "mesh:16x16", "leaf_spine:16x16x16", "bigraph:8x32",
  ),
}


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns 16 and 64 ranks, 256 for "large", or "test", which takes a second.
  """
  if size not in TOPOLOGIES:
    raise ValueError(
      f"configs/collectives/multitree.py:{size}: the sizes are "
      f"{', '.join(TOPOLOGIES)}"
    )
  config = ml_collections.ConfigDict()
  config.name = f"multitree_{size}"
  config.study = "collectives"
  config.topologies = TOPOLOGIES[size]
  # All builders: an algorithm looks good beside few rivals. Optimal trees of
  # 256 ranks take too long to find.
  config.algorithms = (
    "ring", "bidirectional_ring", "ring_2d", "bucket", "halving_doubling",
    "hdrm", "double_tree", "swing", "direct", "multitree",
    *(() if size == "large" else ("optimal",)),
  )
  # Pieces of each chunk, which follow one another; 0: for each size and model
  # of time as many as are fastest.
  config.pieces = 0
  kib = {"test": (32, 1024), "large": (32, 2048, 65536)}
  config.size_bytes = tuple(
    k * 2**10 for k in kib.get(size, (32, 256, 2048, 16384, 65536))
  )
  # Bytes per second of links and their latency, or a kind of link of
  # parallel/hardware/links.py ("nvlink_4"); "" for the topology's own.
  config.bandwidth = ""
  config.latency_s = ""
  # Whether a round waits until all of the round before has arrived.
  config.barrier = False
  return config
