r"""Time of an all-reduce of 256 MB among peers, compared with TCP and gloo.

  python -m launch.benchmark --config=configs/benchmark/ring.py \
    --output=results/ring.json

Peers are processes on this machine. For each all-reduce by `parallel.peers`,
the same bytes are also sent over raw TCP streams between the same processes,
concurrently and without additions, which gives the rate of this machine's
sockets. With a Python that has torch in config.benchmark.python_path, torch's
all-reduce over gloo is timed in addition to jax's. Other programs on the
machine slow all variants, so only ratios within a run are meaningful, and the
table has the machine's load. Bytes sent are compared with the formula and with
the kernel's counters; a difference is an error. As root, two peers in network
namespaces also run the all-reduce over slow and long links, with one and with
several connections: the kernel's buffers (net.ipv4.tcp_wmem) limit the bytes in
flight of one connection, and are smaller than the bandwidth-delay product of a
long link. `ring.py:links` measures only these links, in two minutes.

Aim: an all-reduce takes at most 1 / 0.8 of the time of the raw streams.
`ring.py:test` takes seconds.
"""

import ml_collections

from caatnet.benchmarks.elastic.keys import Ring
from caatnet.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, `links` only, or `test` (seconds)."""
  if size not in ("all", "links", "test"):
    raise ValueError(f"ring.py:{size}: the sizes are all, links and test")
  config = ml_collections.ConfigDict()
  config.name = "ring"
  config.benchmark = defaults(Ring)
  if size == "links":
    config.benchmark.peers = ()
  if size == "test":
    config.benchmark.megabytes, config.benchmark.peers = 4, (2, 3)
    config.benchmark.rounds, config.benchmark.links = 1, ()
    config.benchmark.gloo = False
  return config
