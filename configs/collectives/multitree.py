r"""Times all-reduce algorithms on tori, meshes, fat trees and BiGraphs.

MultiTree (Huang et al., ISCA 2021) is compared with all builders that support a
network: the baselines of its paper (ring, 2D ring, double binary tree,
halving-doubling with rank mapping, HDRM) and others (bidirectional rings, the
bucket form of the 2D ring, halving-doubling without mapping, Swing, direct
exchange). Optimal trees, which may equal MultiTree's, are a separate baseline.
Each algorithm pipelines chunks in the number of pieces that is fastest for it.

  python -m launch.simulate --config=configs/collectives/multitree.py
  python -m launch.simulate --config=configs/collectives/multitree.py:large \
    --plot=multitree.png
  python -m launch.simulate --config=configs/collectives/multitree.py \
    --config.topologies='("torus:6x6",)' --config.latency_s=1e-6
  python -m launch.simulate --config=configs/collectives/multitree.py \
    --config.topologies='("torus:4x4",)' --config.size_bytes='(1048576,)' \
    --export=fastest.xml    # the recommended schedule, for MSCCL's runtime

Nothing is trained; it takes three minutes on one core. Link constants are those
of ASTRA-sim's example, not of the paper. The two-level fat tree is a leaf-spine
network with as many spines as hosts per leaf.

Expected result: MultiTree is at least as fast as the best of all other
algorithms except optimal trees in 22 of 40 cases in the event model (geometric
mean of its speed-up: 0.97), and in 7 of 40 in the lockstep model (0.56). Direct
exchange is faster on switches, Swing and the bucket form on square tori. The
speed-up over optimal trees is 0.94 in the event and 0.62 in the lockstep model.
At 64 MiB on the 4 x 4 torus, MultiTree reaches 83% of the bound in the event
model and 79% in lockstep, the bucket form 100% and 99%.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.collectives.keys import Collectives

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
  """Returns the study: "small" (16 and 64 ranks), "large" (256), or "test"."""
  if size not in TOPOLOGIES:
    raise ValueError(
      f"configs/collectives/multitree.py:{size}: the sizes are "
      f"{', '.join(TOPOLOGIES)}"
    )
  config = defaults(Collectives)
  config.name = f"multitree_{size}"
  config.topologies = TOPOLOGIES[size]
  if size == "large":  # optimal trees of 256 ranks take too long to find
    config.algorithms = config.algorithms[:-1]
  kib = {"test": (32, 1024), "large": (32, 2048, 65536)}
  if size in kib:
    config.size_bytes = tuple(k * 2**10 for k in kib[size])
  return config
