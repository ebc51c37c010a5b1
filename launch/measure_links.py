r"""Measures the links between processes, or imports what tools have printed.

  python -m launch.measure_links --num_processes=8 --output=cluster.json
  python -m launch.measure_links --num_processes=8 --output=cluster.json \
    --hosts=10.0.0.1,10.0.0.2 --prefix="ip netns exec n{i}"
  nvidia-smi topo -m > topo.txt
  python -m launch.measure_links --topo=topo.txt --device=h100 --nodes=16 \
    --network=infiniband_ndr --output=cluster.json
  python -m launch.measure_links --nccl=pair1.txt,pair2.txt --device=a100 \
    --output=cluster.json

Processes run here, in pairs that change in rounds; each message's latency and
rate are fitted to several sizes. Tables of NCCL-tests are those of
`sendrecv_perf`, one of each pair. `launch.plan --cluster=` reads the file.
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_list("hosts", ["127.0.0.1"], "Addresses, taken in turn.")
flags.DEFINE_string("prefix", "", "Before each command; {i} is its number.")
flags.DEFINE_string("topo", "", "A file that nvidia-smi topo -m has written.")
flags.DEFINE_list("nccl", [], "Files that sendrecv_perf has written.")
flags.DEFINE_string("device", "a100", "What the GPUs of such files are.")
flags.DEFINE_integer("nodes", 1, "Nodes like that of --topo.", lower_bound=1)
flags.DEFINE_string("network", "", "The kind of link between them.")
flags.DEFINE_string("pcie", "pcie_4", "The kind of link without NVLink.")


def main() -> None:
  from caatnet.train import files
  from parallel.checks import known
  from parallel.hardware import cluster_files, cluster_imports
  from parallel.hardware.devices import DEVICES
  from parallel.hardware.links import KINDS

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
    from caatnet.benchmarks.planner import measured_links

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
