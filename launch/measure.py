r"""Measures links between processes, or this machine's memory, for plans.

  python -m launch.measure links --num_processes=8 --output=cluster.json
  python -m launch.measure links --num_processes=8 --output=cluster.json \
    --hosts=10.0.0.1,10.0.0.2 --prefix="ip netns exec n{i}"
  nvidia-smi topo -m > topo.txt
  python -m launch.measure links --topo=topo.txt --device=h100 --nodes=16 \
    --network=infiniband_ndr --output=cluster.json
  python -m launch.measure links --nccl=pair1.txt,pair2.txt --device=a100 \
    --output=cluster.json
  python -m launch.measure memory --output=tiers.json --file=/mnt/disk/tier \
    --sizes=64e6,256e6,1e9

Processes on this machine measure all pairs in rounds; latency and bandwidth are
fitted to messages of several sizes. --nccl takes outputs of `sendrecv_perf` (of
NCCL-tests), one per pair. `launch.plan --cluster=` reads the output.

`memory` measures every NUMA node and, with --file, a memory-mapped file: rates
of one core and of all cores, the latency of dependent loads, the speed of the
optimizer on the host, and of copies to and from JAX's default device. It needs
the extra `memory` (numba) and takes half a minute; with --file, longer. Other
work on the machine lowers the rates. `launch.place --tiers=` reads the output.
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_enum("what", None, ["links", "memory"], "What is measured.")
flags.DEFINE_list(
  "hosts", ["127.0.0.1"], "links: addresses, assigned to processes cyclically."
)
flags.DEFINE_string(
  "prefix", "", "links: prefix of commands; {i} is the process's number."
)
flags.DEFINE_string("topo", "", "links: file with nvidia-smi topo -m's output.")
flags.DEFINE_list("nccl", [], "links: files with the output of sendrecv_perf.")
flags.DEFINE_string("device", "a100", "links: kind of GPU of --topo, --nccl.")
flags.DEFINE_integer("nodes", 1, "links: number of nodes like --topo's.", 1)
flags.DEFINE_string("network", "", "links: kind of link between nodes.")
flags.DEFINE_string("pcie", "pcie_4", "links: kind of link without NVLink.")
flags.DEFINE_list(
  "sizes", [], "memory: bytes of the arrays, of which three are allocated at a "
  "time; 8e6, 64e6 and 256e6, or 4 times a larger cache, if unset."
)
flags.DEFINE_list("numa_nodes", [], "memory: numbers of nodes; all if unset.")
flags.DEFINE_string("file", "", "memory: new file, in whose folder to measure.")
FLAGS_BY_SUBJECT = {
  "links": ("num_processes", "hosts", "prefix", "topo", "nccl", "device",
            "nodes", "network", "pcie"),
  "memory": ("sizes", "file", "numa_nodes"),
}


def main() -> None:
  from parallel.base import files

  for what, names in FLAGS_BY_SUBJECT.items():
    for name in names:
      if what != FLAGS.what and FLAGS[name].present:
        raise ValueError(f"--{name} has no effect on measure {FLAGS.what}")
  if FLAGS.what == "links":
    from parallel.peers.ring.measured_links import build_cluster_file as measure
  else:
    from parallel.memory.measured_tiers import measure_to_json as measure
  values = (FLAGS[name].value for name in FLAGS_BY_SUBJECT[FLAGS.what])
  text, contents = measure(*values)
  files.replace(pathlib.Path(FLAGS.output), text)
  print(f"{contents}: {FLAGS.output}")


if __name__ == "__main__":
  options.run(
    main, uses=("num_processes", "output"), required=("what", "output"),
    positional="what", devices=False, helps={"output": "File to write."},
  )
