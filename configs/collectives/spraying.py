r"""Compares routing of flows over leaf-spine networks with packet spraying.

Ethereal (arXiv 2407.00550) splits equal flows into as few pieces as possible
such that every link has the load of per-packet spraying. It is compared with
ECMP, with one path per destination, and with one edge colouring for all hosts.
The colouring is this project's; it splits no flows if the number of spines
divides the number of flows of a leaf.

  python -m launch.simulate --config=configs/collectives/spraying.py
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.failed_uplinks='((0,0),(1,1),(2,2))' --plot=spraying.png
  python -m launch.compile --config=configs/caatnet/tiny.py --target=cpu:8 \
    --json > compiled.json
  python -m launch.simulate --config=configs/collectives/spraying.py \
    --config.program=compiled.json

Nothing is trained; it takes about half a minute. Expected result: with 16
leaves, 16 spines, 16 hosts per leaf, and host i sending to i + 16, the most
loaded uplink has 1 flow (ECMP: 4). Ethereal reaches this with 4,096 pieces, the
colouring with 256 whole flows. The paper's times (up to 30% below spraying) are
from a packet simulator; the loads compared here are equal for both.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.flows.keys import Flows

SIZES = ("test", "small")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns the paper's 256 hosts and two smaller networks, or `test`."""
  if size not in SIZES:
    raise ValueError(
      f"configs/collectives/spraying.py:{size}: the sizes are "
      f"{', '.join(SIZES)}"
    )
  config = defaults(Flows)
  if size == "test":
    config.name = "spraying_test"
    config.topologies = ("leaf_spine:4x3x2",)
  return config
