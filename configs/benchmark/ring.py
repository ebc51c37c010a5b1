r"""Time of a sum of 256 MB among peers, beside raw streams and gloo.

  python -m launch.benchmark --config=configs/benchmark/ring.py \
    --output=results/ring.json

Peers are processes on this machine. Beside each sum over the links of
`parallel.elastic` the same bytes go over plain connections between the same
processes, all at once and without additions: what this machine's sockets give.
Other programs on the machine take from all of them, so only ratios within a run
say something, and the table says how high the load was. Bytes sent are compared
with the formula and with the kernel's count; a difference is an error. As root
two peers in network namespaces also sum over slow and over long links, with one
connection and with several: what is under way on one is limited by the kernel's
buffers (net.ipv4.tcp_wmem), and there is room for more on a long link. These
alone, two minutes: `ring.py:links`.

Aim: a sum takes at most 1 / 0.8 of the time of the raw streams. `ring.py:test`
takes seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, `links` alone, or `test`, some seconds."""
  if size not in ("all", "links", "test"):
    raise ValueError(f"ring.py:{size}: the sizes are all, links and test")
  config = ml_collections.ConfigDict()
  config.name = "ring"
  config.benchmark = defaults("benchmark", "ring")
  if size == "links":
    config.benchmark.peers = ()
  if size == "test":
    config.benchmark.megabytes, config.benchmark.peers = 4, (2, 3)
    config.benchmark.rounds, config.benchmark.links = 1, ()
    config.benchmark.gloo = False
  return config
