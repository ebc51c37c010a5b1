r"""Analyses one collective schedule on one topology.

  python -m launch.simulate --config=configs/collectives/schedule.py
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.topology=bigraph:4x8 --config.algorithm=hdrm --plot=round.png
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.algorithm=optimal --config.pieces=4
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.xml     # for MSCCL's runtime, within its limits
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.perfetto-trace    # for https://ui.perfetto.dev
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.msccl=multitree.xml

Nothing is trained; it takes some seconds. Expected result: MultiTree with 16
pieces per chunk takes 12.7 us in the event model, in which a transfer starts as
soon as its chunk has arrived. That is 1.29 times a lower bound, and a warning
names a faster algorithm, "swing" with 10.7 us. With --config.pieces=1, 10
rounds of whole chunks take 16.1 us.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.schedule.keys import Schedule


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns the study: "small" (4 x 4 torus) or "test" (2 x 2 torus)."""
  # Topology, and the round that --plot draws.
  topologies = {"small": ("torus:4x4", 5), "test": ("torus:2x2", 2)}
  if size not in topologies:
    raise ValueError(
      f"configs/collectives/schedule.py:{size}: the sizes are "
      f"{', '.join(topologies)}"
    )
  config = defaults(Schedule)
  config.topology, config.picture_round = topologies[size]
  return config
