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
  from caatnet.train import evaluate, files, records
  from caatnet.train.checkpoint import Checkpointer

  workdir = files.folder(FLAGS.workdir)
  config = records.read_config(workdir)
  try:
    experiment = experiments.from_dict(config, options.mesh())
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise ValueError(f"{workdir / 'config.json'}: {error}") from error
  program = experiment.program
  checkpointer = Checkpointer(workdir, program)
  abstract = experiment.abstract_state()
  params, outer, step = checkpointer.restore_params(
    abstract.params, abstract.outer, FLAGS.step
  )
  checkpointer.close()
  params = experiment.make_evaluated()(params, outer)
  data = experiment.data
  dataset = data.load(experiment.seed)
  result = evaluate.make_evaluate(program, experiment.data.batch_size)(
    params, dataset.validation
  )
  if FLAGS.json:
    facts = tables.evaluation_dict(result, data, step, dataset.sha256)
    print(json.dumps(facts))
  else:
    tables.print_evaluation(result, data, step, dataset.baselines())
  if FLAGS.plot:
    losses = result.per_place["loss"]
    if not losses.ndim:
      raise ValueError(
        f"--plot={FLAGS.plot}: the loss of {data.unit} has no positions"
      )
    pictures.plot_positions(losses, pathlib.Path(FLAGS.plot))


if __name__ == "__main__":
  options.run(main, required=("workdir",))
