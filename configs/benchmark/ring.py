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


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, `links` alone, or `test`, some seconds."""
  if size not in ("all", "links", "test"):
    raise ValueError(f"ring.py:{size}: the sizes are all, links and test")
  config = ml_collections.ConfigDict()
  config.name = "ring"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "ring"
  config.benchmark.megabytes = 256
  config.benchmark.peers = (2, 4, 8)
  # Bytes that are sent and added at once, and of the kernels' send buffers, of
  # raw streams, too; 0 lets the kernel choose. On loopback a small one keeps
  # what is under way in the cache; over a long link it would limit the rate.
  config.benchmark.block_bytes = 2**22
  config.benchmark.send_buffer = 2**18
  # How often everything is measured; the median counts.
  config.benchmark.rounds = 5
  # Whether jax's all-reduce between processes is timed, too.
  config.benchmark.gloo = True
  # Links between two peers: their rate in Mbit/s, milliseconds there and back
  # that are added, megabytes that are summed; and data connections over them.
  config.benchmark.links = (
    {"mbit": 50, "rtt_ms": 0, "megabytes": 16},
    {"mbit": 50, "rtt_ms": 100, "megabytes": 16},
    {"mbit": 1000, "rtt_ms": 0, "megabytes": 128},
    {"mbit": 1000, "rtt_ms": 100, "megabytes": 128},
  )
  config.benchmark.lanes = (1, 4, 8)
  config.benchmark.shaped_rounds = 3
  config.benchmark.shaped_block_bytes = 2**18
  if size == "links":
    config.benchmark.peers = ()
  if size == "test":
    config.benchmark.megabytes, config.benchmark.peers = 4, (2, 3)
    config.benchmark.rounds, config.benchmark.links = 1, ()
    config.benchmark.gloo = False
  return config
