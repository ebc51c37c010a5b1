r"""Exhaustive search of the membership protocol of `parallel.peers`.

  python -m launch.benchmark --config=configs/benchmark/membership.py
  python -m launch.benchmark --config=configs/benchmark/membership.py:test

A world is a system with given numbers of peers, rounds and faults of each kind,
which may occur at any time (`parallel.peers.membership.world`). For each world
the output has the number of different states, whether the search was complete,
and violated invariants with a shortest trace. It takes some minutes and
gigabytes; the search of a world stops after benchmark.most states.
"""

import ml_collections

from caatnet.benchmarks.elastic.keys import Membership
from caatnet.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"membership.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "membership"
  config.benchmark = defaults(Membership)
  if size == "test":
    config.benchmark.worlds = (
      {"peers": 2, "rounds": 1, "least": 2, "crashes": 1},
      {"peers": 2, "rounds": 1, "least": 2, "failures": 1},
    )
  return config
