r"""Trains a model; the same command resumes a stopped run.

  python -m launch.train --config=configs/caatnet/tiny.py --cpu_devices=8
  python -m launch.train --config=configs/caatnet/tiny.py \
    --config.sync.p=0.5 --workdir=runs/half --mesh=tensor:2 --cpu_devices=2
  python -m launch.train --config=configs/elastic/diloco.py \
    --elastic=localhost:7000  # a worker of a swarm; configs/elastic/diloco.py
"""

import functools
import sys

from absl import flags

from launch import options, swarms
from parallel.base import heap

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import commands
  from caatnet.config import experiments
  from caatnet.train import loop
  from parallel.base import files

  config = FLAGS.config
  experiment = experiments.build(config, options.mesh())
  options.resume_gc()
  workdir = files.parse_folder(FLAGS.workdir or f"runs/{config.name}")
  train = loop.train
  if FLAGS.elastic:
    from caatnet.train.elastic import swarm_loop

    endpoint = swarms.endpoint()
    if not FLAGS.workdir:  # a separate folder for each worker of this machine
      workdir, _mine = files.reserve_folder(workdir, "worker")
    train = functools.partial(
      swarm_loop.train, endpoint=endpoint,
      options=experiments.swarm_options(config),
    )
  elif "elastic" in config:
    raise ValueError("config.elastic has no effect without --elastic=HOST:PORT")
  result = train(
    experiment, workdir, label=config.name, profile=options.profiled_steps()
  )
  if result.profiled:
    from caatnet.show import render
    from parallel.ledger.sends import foreign

    render.show(foreign.report_of_trace(
      result.profiled, experiment.program.layout.mesh, workdir / "profile"
    ))
  if not result.finished:
    sys.exit(result.exit_code)  # all processes of the run leave together
  data = experiment.data
  measures = ", ".join(
    f"{data.labels[key]} {value:.4f}" for key, value in result.measures.items()
  )
  speed = result.units_per_second  # None after fewer than three steps
  measured = "" if speed is None else f"{speed:,.0f} {data.unit}/s; "
  print(f"step {result.step}: validation {measures}; {measured}in {workdir}")
  print(commands.rewrite_commands(
    f"evaluate: python -m launch.evaluate --workdir={workdir}"
  ))


if __name__ == "__main__":
  heap.keep_freed_memory()
  options.run(
    main,
    uses=(
      "config", "workdir", "mesh", "cpu_devices", "profile", "coordinator",
      "num_processes", "process_id", "elastic", "listen", "advertise",
      "token_file", "certificate", "key", "authority", "programs",
    ),
  )
