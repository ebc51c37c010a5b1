r"""Algorithm of a sum over unequal links: the chosen one against all others.

  python -m launch.benchmark --config=configs/benchmark/ring_orders.py \
    --output=results/ring_orders.json

Peers are processes in network namespaces with one link for each pair, whose
rates (by direction) and delays (by pair) are random. Peers measure the links
and choose a ring or a direct exchange by their modelled times, as workers do
with `config.elastic.measured=True`. Then all rings and the direct exchange are
timed in turns. Needs root; a process per link delays the packets, so a loaded
machine slows fast links down.

Aim: the chosen algorithm takes at most 1.1 times as long as the fastest one.
`ring_orders.py:test` takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all` (minutes) or `test` (seconds)."""
  if size not in ("all", "test"):
    raise ValueError(f"ring_orders.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "ring_orders"
  config.benchmark = defaults("benchmark", "ring_orders")
  if size == "test":
    config.benchmark.peers, config.benchmark.seeds = 3, (0,)
    config.benchmark.megabytes, config.benchmark.rounds = 1, 1
  return config
