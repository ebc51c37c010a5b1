r"""Lists what a jax program sends between devices, by source line.

  python -m launch.sends docs/examples/mlp.py:step --devices=8
  python -m launch.sends docs/examples/mlp.py:step --target=tpu:v5p:2x2x2
  XLA_FLAGS="--xla_dump_to=DUMP --xla_dump_hlo_as_text" python program.py
  python -m launch.sends DUMP --compare=OTHER_DUMP
  python -m launch.sends DUMP --trace=step.perfetto-trace --chakra=traces \
    --rates=h100
  python -m launch.sends DUMP --profile=FOLDER_OF_JAX_PROFILER \
    --calibrate=cluster.json

The program is a function without arguments that returns (jitted function,
arguments), where arguments may be jax.ShapeDtypeStruct; a jitted function in a
module with a function example_args(); a folder of --xla_dump_to; or a file of
HLO or StableHLO (docs/ledger.md).
"""

import os
import pathlib
import sys

from absl import flags

from launch import options

FLAGS = flags.FLAGS
_FURTHER_COMMANDS = {
  "partial_sync": "launch.compile --config=configs/caatnet/tiny.py "
  "--target=cpu:8 --compare=config.sync.p=0.5",
  "outer": "launch.plan --config=configs/planner/gpt_11b.py",
}
flags.DEFINE_string("rates", "", "Device for times: --target's, or h100.")
flags.DEFINE_string("chakra", "", "Folder for execution traces of all devices.")
flags.DEFINE_string("calibrate", "", "File to write rates of --profile to.")


def main() -> None:
  import jax

  from caatnet.show import render
  from parallel.ledger import targets
  from parallel.ledger.sends import foreign, report, trace

  jax.config.update("jax_platforms", "cpu")  # local accelerators are not used
  jax.config.update("jax_num_cpu_devices", FLAGS.devices)
  sys.path.insert(0, os.getcwd())
  target = targets.resolve(FLAGS.target) if FLAGS.target else None
  rates = trace.rates_device(FLAGS.rates, target)
  devices = target.devices if target else ()
  readings = foreign.read(FLAGS.program, devices, FLAGS.compare)
  measured = foreign.measure_collectives(readings, FLAGS.profile)
  files = (trace.write, FLAGS.trace), (trace.write_chakra, FLAGS.chakra)
  lines = [
    write(readings, pathlib.Path(path), rates) for write, path in files if path
  ]
  if path := FLAGS.calibrate:
    lines.append(foreign.calibrate(readings, FLAGS.profile, pathlib.Path(path)))
  render.present(
    report.report(readings, measured, rates, _FURTHER_COMMANDS),
    report.readings_as_data(readings, measured, rates), FLAGS.json,
    FLAGS.output, document=FLAGS.report,
  )
  for line in lines:
    print(line, file=sys.stderr)


if __name__ == "__main__":
  options.run(
    main, devices=False, required=("program",), positional="program",
    uses=("compare", "devices", "json", "output", "profile", "program",
          "report", "target", "trace"),
    writes=("trace", "chakra/", "calibrate"),
    helps={
      "compare": "Second program, with which the first one is compared.",
      "profile": "Folder of a trace of jax.profiler.",
      "trace": "File for a timeline of the compiled program, for Perfetto.",
    },
  )
