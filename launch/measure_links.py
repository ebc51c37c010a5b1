r"""Measures the links between processes, or imports output of other tools.

  python -m launch.measure_links --num_processes=8 --output=cluster.json
  python -m launch.measure_links --num_processes=8 --output=cluster.json \
    --hosts=10.0.0.1,10.0.0.2 --prefix="ip netns exec n{i}"
  nvidia-smi topo -m > topo.txt
  python -m launch.measure_links --topo=topo.txt --device=h100 --nodes=16 \
    --network=infiniband_ndr --output=cluster.json
  python -m launch.measure_links --nccl=pair1.txt,pair2.txt --device=a100 \
    --output=cluster.json

Processes run on this machine and measure all pairs in rounds; latency and
bandwidth are fitted to messages of several sizes. Tables of NCCL-tests are
those of `sendrecv_perf`, one per pair. `launch.plan --cluster=` reads the file.
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_list(
  "hosts", ["127.0.0.1"], "Addresses, assigned to processes cyclically."
)
flags.DEFINE_string(
  "prefix", "", "Prefix of commands; {i} is the process's number."
)
flags.DEFINE_string("topo", "", "File with the output of nvidia-smi topo -m.")
flags.DEFINE_list("nccl", [], "Files with the output of sendrecv_perf.")
flags.DEFINE_string("device", "a100", "Kind of GPU of --topo and --nccl.")
flags.DEFINE_integer(
  "nodes", 1, "Number of nodes, each as in --topo.", lower_bound=1
)
flags.DEFINE_string("network", "", "Kind of link between nodes.")
flags.DEFINE_string("pcie", "pcie_4", "Kind of link without NVLink.")


def main() -> None:
  from parallel.base import files
  from parallel.base.checks import known
  from parallel.plans.hardware import cluster_files, cluster_imports
  from parallel.plans.hardware.devices import DEVICES
  from parallel.plans.hardware.links import KINDS

  ways = bool(FLAGS.topo) + bool(FLAGS.nccl) + (FLAGS.num_processes is not None)
  if ways != 1:
    raise ValueError("give one of --num_processes, --topo and --nccl")
  known("--device=", FLAGS.device, DEVICES)
  device = DEVICES[FLAGS.device]
  if FLAGS.topo:
    known("--pcie=", FLAGS.pcie, KINDS)
    if FLAGS.network:
      known("--network=", FLAGS.network, KINDS)
    links = cluster_imports.from_topo(
      pathlib.Path(FLAGS.topo).read_text(), device, KINDS[FLAGS.pcie],
      KINDS.get(FLAGS.network), FLAGS.nodes,
    )
  elif FLAGS.nccl:
    texts = {name: pathlib.Path(name).read_text() for name in FLAGS.nccl}
    links = cluster_imports.from_nccl(texts, device)
  else:
    from parallel.peers.ring import measured_links

    count, hosts = FLAGS.num_processes, FLAGS.hosts
    links = measured_links.measure(
      [hosts[i % len(hosts)] for i in range(count)], FLAGS.prefix
    )
  files.replace(pathlib.Path(FLAGS.output), cluster_files.to_json(links))
  print(f"{links.num_devices} devices, {links.source}: {FLAGS.output}")


if __name__ == "__main__":
  options.run(
    main, uses=("num_processes", "output"), required=("output",), devices=False
  )
