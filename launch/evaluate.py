r"""Evaluates a run's checkpoint, on any number of devices.

  python -m launch.evaluate --workdir=runs/tiny
  python -m launch.evaluate --workdir=runs/tiny --step=200 --cpu_devices=4
  python -m launch.evaluate --workdir=runs/tiny --tasks=arc_easy,my.yaml \
    --limit=100 --config.inference.batch=32

The last command needs the extra `eval`.
"""

import pathlib

from absl import flags

from launch import options
from parallel.base import files

FLAGS = flags.FLAGS
flags.DEFINE_list("tasks", [], "Tasks of lm-eval, names or .yaml files.")
flags.DEFINE_float(
  "limit", None, "Documents per task; below 1, a fraction of them."
)


def main() -> None:
  if FLAGS.tasks:
    return evaluate_on_tasks()
  for name, value in (("limit", FLAGS.limit), ("config", options.overrides())):
    if value not in (None, ""):
      raise ValueError(f"--{name} has no effect on evaluate without --tasks")
  from caatnet.config import experiments
  from caatnet.show import pictures, tables
  from caatnet.train import evaluate
  from caatnet.train.checkpoint import export
  experiment = experiments.from_folder(FLAGS.workdir, options.mesh())
  run = experiment, FLAGS.workdir, FLAGS.step
  params, step = export.read_stored_params(*run)
  options.resume_gc()
  data = experiment.data
  dataset = data.load(experiment.seed)
  result = evaluate.make_evaluate(experiment.program, data.batch_size)(
    params, dataset.validation
  )
  if FLAGS.json:
    found = tables.evaluation_dict(result, data, dataset, step)
    print(files.to_json(found))
  else:
    tables.print_evaluation(result, data, dataset, step)
  if FLAGS.plot:
    losses = result.per_place["loss"]
    if not losses.ndim:
      raise ValueError(f"--plot: the loss of {data.unit} has no positions")
    path = pathlib.Path(FLAGS.plot)
    pictures.plot_positions(losses, path, data.labels["loss"])


def evaluate_on_tasks() -> None:
  from caatnet.config import responses
  from caatnet.interop import harness
  from caatnet.show import tables

  if FLAGS.plot:
    raise ValueError(f"--plot={FLAGS.plot} has no effect with --tasks")
  harness.check(FLAGS.tasks, FLAGS.limit)
  made, step = responses.from_folder(
    FLAGS.workdir, options.mesh(), options.overrides(), FLAGS.step
  )
  options.resume_gc()
  found = {"step": step} | harness.evaluate(made, FLAGS.tasks, FLAGS.limit)
  print(files.to_json(found)) if FLAGS.json else tables.print_tasks(found)


if __name__ == "__main__":
  options.run(
    main, required=("workdir",), helps={"workdir": "Folder of the run."},
    uses=("workdir", "mesh", "cpu_devices", "json", "plot", "step",
          "coordinator", "num_processes", "process_id", "programs"),
    changeable=("inference", "parallel.data", "model.max_positions"),
  )
