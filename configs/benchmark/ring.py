r"""Time of an all-reduce of 256 MB among peers, compared with TCP and gloo.

  python -m launch.benchmark --config=configs/benchmark/ring.py \
    --output=results/ring.json

Peers are processes on this machine. For each all-reduce by `parallel.peers`,
the same bytes are also sent over raw streams between the same processes,
concurrently and without additions, which gives the rate of this machine's
sockets. With a Python in config.benchmark.python_path, which has torch, its
all-reduce over gloo is timed in addition to jax's. Other programs on the
machine slow all of them, so only ratios within a run are meaningful, and the
table has the load. Bytes sent are compared with the formula and with the
kernel's counters; a difference is an error. As root, two peers in network
namespaces also run the all-reduce over slow and long links, with one and with
several connections: the bytes in flight of one connection are limited by the
kernel's buffers (net.ipv4.tcp_wmem), which are less than the bandwidth-delay
product of a long link. `ring.py:links` measures only these, in two minutes.

`ring.py:sites` measures the links of peers in two sites that share a link, and
compares all algorithms of a sum with their modelled times, in eight minutes.

Aim: an all-reduce takes at most 1 / 0.8 of the time of the raw streams.
`ring.py:test` takes seconds.
"""

import ml_collections

from caatnet.benchmarks.elastic.keys import Ring
from caatnet.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, `links`, `sites`, or `test` (seconds)."""
  if size not in ("all", "links", "sites", "test"):
    raise ValueError(f"ring.py:{size}: the sizes are all, links, sites, test")
  config = ml_collections.ConfigDict()
  config.name = "ring"
  config.benchmark = defaults(Ring)
  if size in ("links", "sites"):
    config.benchmark.peers = ()
  if size == "sites":
    config.benchmark.links, config.benchmark.shaped_rounds = (), 5
    config.benchmark.shaped_block_bytes = 2**20  # as in training
    config.benchmark.sites = tuple(
      {"mbit": 100, "rtt_ms": rtt_ms, "megabytes": 8, "peers": peers}
      for rtt_ms, peers in ((120, 2), (120, 3), (20, 3))
    )
  if size == "test":
    config.benchmark.megabytes, config.benchmark.peers = 4, (2, 3)
    config.benchmark.rounds, config.benchmark.links = 1, ()
    config.benchmark.gloo = False
  return config
