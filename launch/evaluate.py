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
  from caatnet import build, evaluate, plots, report
  from caatnet.checkpoint import Checkpointer
  from caatnet.data.baselines import text_baselines

  workdir = pathlib.Path(FLAGS.workdir)
  path = workdir / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"--workdir={workdir} holds no run (config.json)")
  experiment = build.from_dict(json.loads(path.read_text()), options.mesh())
  program = experiment.program
  checkpointer = Checkpointer(workdir, program)
  abstract = experiment.abstract_state()
  params, outer, step = checkpointer.restore_params(
    abstract.params, abstract.outer, FLAGS.step
  )
  checkpointer.close()
  params = experiment.make_evaluated()(params, outer)
  corpus = experiment.corpus()
  windows = experiment.validation(corpus)
  result = evaluate.make_evaluate(program, experiment.data.batch_size)(
    params, windows
  )
  if FLAGS.json:
    print(json.dumps(report.evaluation_dict(result, step, corpus.sha256)))
  else:
    report.print_evaluation(
      result, step, text_baselines(corpus.train, windows)
    )
  if FLAGS.plot:
    plots.plot_positions(result.loss_per_position, pathlib.Path(FLAGS.plot))


if __name__ == "__main__":
  options.run(main, required=("workdir",))
