r"""Routing flows over leaf-spine networks: does it take packet spraying?

Ethereal (arXiv 2407.00550): if flows are equal and split as little as loads
need, every link carries what per-packet spraying gives it. Beside the paper's
splits: ECMP, one path per destination, and one colouring for all hosts, which
needs no splits where spines divide a leaf's flows (ours).

  python -m launch.simulate --config=configs/collectives/spraying.py
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.failed_uplinks='((0,0),(1,1),(2,2))' --plot=spraying.png
  python -m launch.compile --config=configs/caatnet/tiny.py --target=cpu:8 \
    --json > compiled.json
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.program=compiled.json

Nothing is trained; about half a minute. Expected result: on 16 leaves, 16
spines and 16 hosts per leaf, i -> i + 16 loads the fullest uplink with 1 flow
(ECMP: 4), for which Ethereal sends 4,096 pieces and the colouring 256 flows.
The paper's times (up to 30 % below spraying) come from packets; loads alone,
as here, make Ethereal and spraying equal.
"""

import ml_collections

TOPOLOGIES = {
  "test": ("leaf_spine:4x3x2",),
  "small": (
    "leaf_spine:16x16x16", "leaf_spine:8x6x8", "leaf_spine:8x8x8",
  ),
}


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """The paper's network of 256 hosts and two smaller; "test": 8 hosts."""
  if size not in TOPOLOGIES:
    raise ValueError(
      f"configs/collectives/spraying.py:{size}: the sizes are "
      f"{', '.join(TOPOLOGIES)}"
    )
  config = ml_collections.ConfigDict()
  config.name = f"spraying_{size}"
  config.study = "flows"
  # The first one also has the failures, the collectives and the program.
  config.topologies = TOPOLOGIES[size]
  config.patterns = ("shift", "permutation", "all_to_all")
  config.routers = (
    "ecmp", "single_path", "spray", "ethereal", "coordinated",
    "coordinated_split",
  )
  config.seed = 0  # of ECMP's hash and of the permutation
  # (leaf, spine), counted from 0.
  config.failed_uplinks = ((0, 0), (1, 1))
  # Builders of parallel/schedules/builders.py, and all_to_all.
  config.algorithms = ("ring", "halving_doubling", "all_to_all")
  mib = (1, 16, 128)
  config.size_bytes = tuple(m * 2**20 for m in mib)
  config.bandwidth = 50e9  # 400 Gb/s
  config.latency_s = 500e-9
  # What `launch.compile --json` printed; "" for none.
  config.program = ""
  return config
