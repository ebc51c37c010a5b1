r"""Compares a training step on layouts of devices with the step on one device.

  python -m launch.equal docs/examples/mlp.py:layouts --devices=8 \
    --layouts="data:8 data:2,tensor:4"
  python -m launch.equal --config=configs/caatnet/tiny.py:test \
    --layouts="tensor:1 tensor:4 data:2,tensor:2"

The program is a function of a layout, {axis: devices}, that returns (jitted
step, arguments); {} is one device. A config has the same ranks on each layout.
Differences are rounding or a bug, whose line is looked for
(docs/equivalence.md). The exit code is 1 if a layout has a bug.
"""

import os
import sys

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string(
  "layouts", "", "Layouts to compare, AXIS:DEVICES,... separated by spaces."
)
flags.DEFINE_integer("steps", 3, "Steps after which to compare.", 1, 1000)


def main() -> int:
  import jax

  from caatnet.show import render
  from parallel.ledger.equal import check, programs, report
  from parallel.ledger.sends import foreign

  layouts = programs.parse_layouts(FLAGS.layouts)
  if bool(FLAGS.program) == bool(FLAGS.config):
    raise ValueError("give either a PROGRAM or --config=FILE")
  jax.config.update("jax_platforms", "cpu")  # local accelerators are not used
  jax.config.update("jax_num_cpu_devices", FLAGS.devices)
  if FLAGS.program:
    sys.path.insert(0, os.getcwd())
    builder = foreign.load_function(FLAGS.program, arguments=1)
  else:
    from caatnet.config import equality
    builder = equality.builder(FLAGS.config, layouts)
  name = FLAGS.program or FLAGS.config.name
  found = check.check(
    builder, layouts, FLAGS.steps, lambda line: print(line, file=sys.stderr)
  )
  render.present(
    report.report(name, found), report.data(name, found), FLAGS.json,
    FLAGS.output, document=FLAGS.report,
  )
  return int(report.failed(found))


if __name__ == "__main__":
  options.run(
    main, devices=False, required=("layouts",), positional="program",
    uses=("config", "devices", "json", "output", "program", "report"),
    defaults={"devices": "8"},
  )
