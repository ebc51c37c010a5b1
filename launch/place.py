r"""Places the tensors of a training step on device memory, DRAM, CXL and files.

  python -m launch.place --config=configs/memory/12b_32k.py
  python -m launch.place --config=configs/memory/12b_32k.py \
    --tiers=one-cxl --config.data.seq_len=8192 --plot=tiers.png
  python -m launch.place --config=configs/memory/12b_32k.py \
    --tiers=tiers.json --output=placement.json --report=placement.html

Nothing is trained, and no device is needed; it takes a few seconds. Policies
are compared with a host whose DRAM holds everything. The result has for each
policy the seconds of each phase with the resource that determines them, and the
longest context and the largest model that fit; and for each tensor in the
optimal placement the time that another tier would cost.
"""

from absl import flags

from caatnet.studies import registry
from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet.show import render

  config = FLAGS.config.copy_and_resolve_references().to_dict()
  study = registry.find(
    config, only="placement", example="configs/memory/12b_32k.py"
  )
  if FLAGS.tiers:
    config["placement"]["tiers"] = FLAGS.tiers
  result = study.run(config)
  render.present(
    study.report(result), result, FLAGS.json, FLAGS.output, FLAGS.plot,
    FLAGS.report,
  )


if __name__ == "__main__":
  options.run(
    main, uses=("config", "json", "plot", "output", "report", "tiers"),
    devices=False,
  )
