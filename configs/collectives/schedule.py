r"""Analyses one collective schedule on one topology.

  python -m launch.simulate --config=configs/collectives/schedule.py
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.topology=bigraph:4x8 --config.algorithm=hdrm --plot=round.png
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.xml     # for MSCCL's runtime
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.perfetto-trace    # for https://ui.perfetto.dev
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.msccl=multitree.xml

Nothing is trained; it takes a second. Expected result: 10 rounds, which take
18.1 us in the lockstep model, and 16.1 us in the event model, in which a
transfer starts as soon as its chunk has arrived.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.schedule.keys import Schedule


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns MultiTree on a 4 x 4 torus ("small") or a 2 x 2 torus ("test")."""
  # Topology, and the first round of its all-gather, which --plot draws.
  topologies = {"small": ("torus:4x4", 5), "test": ("torus:2x2", 2)}
  if size not in topologies:
    raise ValueError(
      f"configs/collectives/schedule.py:{size}: the sizes are "
      f"{', '.join(topologies)}"
    )
  config = defaults(Schedule)
  config.topology, config.picture_round = topologies[size]
  return config
