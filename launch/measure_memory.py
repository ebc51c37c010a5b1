r"""Measures this machine's memory tiers, and writes the file that plans read.

  python -m launch.measure_memory --output=tiers.json
  python -m launch.measure_memory --output=tiers.json --file=/mnt/disk/tier \
    --sizes=64e6,256e6,1e9
  python -m launch.place --config=configs/memory/12b_32k.py --tiers=tiers.json

Every NUMA node is measured with one core and with all: read, write, copy, triad
and the latency of dependent loads. Steps of the optimizer on the host, with
four arrays of each size, are measured on every node and, with --file, on a
mapped file; copies are those to and from JAX's default device. It needs the
extra `memory` (numba) and takes half a minute, with a file longer. Other work
on the machine makes rates smaller.
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_list(
  "sizes", ["8e6", "64e6", "256e6"], "Bytes of the arrays, of which three are "
  "allocated at a time."
)
flags.DEFINE_list("numa_nodes", [], "Numbers of NUMA nodes; all if unset.")
flags.DEFINE_string(
  "file", "", "File to create, measure as a tier, and remove."
)


def main() -> None:
  # jax is imported when all arguments are valid.
  from parallel.base import atomic
  from parallel.memory import measured_tiers
  from parallel.plans.hardware import tiers

  host = measured_tiers.measure(
    [_size(text) for text in FLAGS.sizes],
    pathlib.Path(FLAGS.file) if FLAGS.file else None,
    [_node(text) for text in FLAGS.numa_nodes],
  )
  with atomic.whole(FLAGS.output) as temporary:
    temporary.write_text(tiers.to_json(host))
  print(f"{len(host.tiers)} tiers: {FLAGS.output}")


def _size(text: str) -> int:
  """Parses a number of bytes such as 64e6."""
  try:
    size = float(text)
  except ValueError as error:
    raise ValueError(f"--sizes={text} must be numbers of bytes") from error
  if not 1e6 <= size < 1e13:
    raise ValueError(f"--sizes={text} must lie in [1e6, 1e13)")
  return int(size)


def _node(text: str) -> int:
  """Parses the number of a node."""
  if not text.isdecimal():
    raise ValueError(f"--numa_nodes={text} must be numbers of nodes, as in 0,1")
  return int(text)


if __name__ == "__main__":
  options.run(main, uses=("output",), required=("output",), devices=False)
