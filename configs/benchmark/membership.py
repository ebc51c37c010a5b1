r"""Searches all states of the membership protocol of `parallel.elastic`.

  python -m launch.benchmark --config=configs/benchmark/membership.py
  python -m launch.benchmark --config=configs/benchmark/membership.py:test

A world is a number of peers, of rounds, and of accidents of each kind, which
may happen at any moment (`parallel.elastic.membership.world`). Of each the
number of different states is printed, whether these are all that there are, and
what is wrong, with a shortest way to it. It takes some minutes and gigabytes; a
world with more states than benchmark.most is given up.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"membership.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "membership"
  config.benchmark = defaults("benchmark", "membership")
  if size == "test":
    config.benchmark.worlds = (
      {"peers": 2, "rounds": 1, "least": 2, "crashes": 1},
      {"peers": 2, "rounds": 1, "least": 2, "failures": 1},
    )
  return config
