"""Evaluates a run's checkpoint, on any number of devices.

  python -m launch.evaluate --workdir=runs/tiny
  python -m launch.evaluate --workdir=runs/tiny --step=200 --cpu_devices=4
"""

import json
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet.build import experiments
  from caatnet.show import pictures, tables
  from caatnet.train import evaluate, evaluated

  experiment = experiments.from_folder(FLAGS.workdir, options.mesh())
  program = experiment.program
  params, step = evaluated.read_stored(experiment, FLAGS.workdir, FLAGS.step)
  data = experiment.data
  dataset = data.load(experiment.seed)
  result = evaluate.make_evaluate(program, experiment.data.batch_size)(
    params, dataset.validation
  )
  if FLAGS.json:
    facts = tables.evaluation_dict(result, data, dataset, step)
    print(json.dumps(facts))
  else:
    tables.print_evaluation(result, data, dataset, step)
  if FLAGS.plot:
    losses = result.per_place["loss"]
    if not losses.ndim:
      raise ValueError(
        f"--plot={FLAGS.plot}: the loss of {data.unit} has no positions"
      )
    pictures.plot_positions(
      losses, pathlib.Path(FLAGS.plot), data.labels["loss"]
    )


if __name__ == "__main__":
  options.run(
    main,
    uses=(
      "workdir", "mesh", "cpu_devices", "json", "plot", "step", "coordinator",
      "num_processes", "process_id",
    ),
    required=("workdir",),
  )
