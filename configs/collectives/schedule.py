r"""Looks closely at one collective on one topology.

  python -m launch.simulate --config=configs/collectives/schedule.py
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.topology=bigraph:4x8 --config.algorithm=hdrm --plot=round.png
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.xml     # for MSCCL's runtime
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.json    # for https://ui.perfetto.dev
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --config.msccl=multitree.xml

Nothing is trained; it takes a second. Expected result: 10 rounds, which take
18.1 us in lockstep, and 16.1 us if a transfer starts as soon as its chunk is
there.
"""

import ml_collections


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns MultiTree on a 4 x 4 torus, or for "test" on a 2 x 2 one."""
  # The round to draw is the first of the all-gather.
  topologies = {"small": ("torus:4x4", 5), "test": ("torus:2x2", 2)}
  if size not in topologies:
    raise ValueError(
      f"configs/collectives/schedule.py:{size}: the sizes are "
      f"{', '.join(topologies)}"
    )
  config = ml_collections.ConfigDict()
  config.name = "schedule"
  config.study = "schedule"
  # The topology is file:PATH, or NAME:SIZExSIZE with the name of a builder in
  # parallel/topology/builders.py. Options of the builder may follow, as in
  # "dgx:2x8,network_bandwidth=infiniband_hdr", and links that have failed, as
  # in "torus:4x4,failed=0-1". --plot draws round picture_round, from 0.
  config.topology, config.picture_round = topologies[size]
  # The name of a builder in parallel/schedules/builders.py; options may follow,
  # as in "multitree,farthest_first=True" or "optimal,weight=2".
  config.algorithm = "multitree"
  config.collective = "all_reduce"
  # An MSCCL XML file to read in place of running an algorithm; "" for none.
  config.msccl = ""
  # What --export writes as MSCCL XML: for which runtime ("nccl", "rccl" or
  # "msccl"), which protocol ("Simple", "LL" or "LL128"), and which buffers.
  config.export = ml_collections.ConfigDict()
  config.export.runtime = "nccl"
  config.export.protocol = "Simple"
  config.export.min_bytes = 0
  config.export.max_bytes = 2**63 - 1
  config.size_bytes = 2**20
  # Bytes per second of links and their latency, or a kind of link of
  # parallel/hardware/links.py ("nvlink_4"); "" for the topology's own.
  config.bandwidth = ""
  config.latency_s = ""
  return config
