r"""Routes flows over leaf-spine networks: is packet spraying needed?

Ethereal (arXiv 2407.00550) splits equal flows as little as loads need, so that
every link carries what it would carry with per-packet spraying. It is compared
with ECMP, with one path per destination, and with one colouring for all hosts.
The last one is ours, and needs no splits where the number of spines divides a
leaf's flows.

  python -m launch.simulate --config=configs/collectives/spraying.py
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.failed_uplinks='((0,0),(1,1),(2,2))' --plot=spraying.png
  python -m launch.compile --config=configs/caatnet/tiny.py --target=cpu:8 \
    --json > compiled.json
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.program=compiled.json

Nothing is trained; it takes about half a minute. Expected result: on 16 leaves,
16 spines and 16 hosts per leaf, host i sending to i + 16 loads the fullest
uplink with 1 flow (ECMP: 4). For that Ethereal sends 4,096 pieces, the
colouring 256 flows. The paper's times (up to 30 % below spraying) come from a
simulator of packets. By loads alone, as here, Ethereal and spraying are equal.
"""

import ml_collections

TOPOLOGIES = {
  "test": ("leaf_spine:4x3x2",),
  "small": (
    "leaf_spine:16x16x16", "leaf_spine:8x6x8", "leaf_spine:8x8x8",
  ),
}


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns the paper's 256 hosts and two smaller networks, or "test"."""
  if size not in TOPOLOGIES:
    raise ValueError(
      f"configs/collectives/spraying.py:{size}: the sizes are "
      f"{', '.join(TOPOLOGIES)}"
    )
  config = ml_collections.ConfigDict()
  config.name = f"spraying_{size}"
  config.study = "flows"
  # The first one is also used for failures, collectives and the program.
  config.topologies = TOPOLOGIES[size]
  config.patterns = ("shift", "permutation", "all_to_all")
  config.routers = (
    "ecmp", "single_path", "spray", "ethereal", "coordinated",
    "coordinated_split",
  )
  config.seed = 0  # decides ECMP's hash and the permutation
  # Links that fail, as (leaf, spine), counted from 0.
  config.failed_uplinks = ((0, 0), (1, 1))
  # Builders of parallel/schedules/builders.py, and all_to_all.
  config.algorithms = ("ring", "halving_doubling", "all_to_all")
  mib = (1, 16, 128)
  config.size_bytes = tuple(m * 2**20 for m in mib)
  # Bytes per second of links and their latency, or a kind of link of
  # parallel/hardware/links.py ("nvlink_4"); "" for the topology's own.
  config.bandwidth = ""
  config.latency_s = ""
  # A file with what `launch.compile --json` printed; "" for none.
  config.program = ""
  return config
