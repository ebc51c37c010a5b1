r"""Trains one run per override and seed; the same command resumes a sweep.

  python -m launch.sweep --config=configs/caatnet/sweep.py --cpu_devices=8 \
    --mesh=tensor:1
  python -m launch.sweep --config=configs/caatnet/tiny.py:test \
    --grid="sync.p=1.0,0.5 parallel.tensor=2,4" --seeds=0,1
  python -m launch.sweep --config=configs/experts/kinds.py  # router, experts
"""

import math

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("grid", "", "key=value,value ...; all combinations run.")
flags.DEFINE_list("seeds", None, "Seeds; config.sweep.seeds or 0 if unset.")


def main() -> None:
  import jax

  from caatnet.composition import training
  from caatnet.config import experiments
  from caatnet.config.override import override, take_sweep
  from caatnet.show import pictures, render, tables
  from caatnet.train import sweep, traffic
  from parallel.base import files

  config = FLAGS.config.copy_and_resolve_references()
  seeds = options.integers("seeds")
  workdir = FLAGS.workdir or f"runs/{config.name}"
  workdir = files.parse_folder(workdir, local=True)
  if "kinds" in config:
    if FLAGS.grid:
      raise ValueError(f"--grid={FLAGS.grid} has no effect with config.kinds")
    training.run(config, workdir, options.mesh(), seeds)
    return
  study = take_sweep(config)
  points = sweep.expand(FLAGS.grid) if FLAGS.grid else study.points
  seeds = seeds or study.seeds
  runs = [
    (point, override(config, f"{point} seed={seed}", study.sections))
    for seed in seeds for point in points
  ]
  # Bytes are counted with a device per rank: ranks of one device send nothing.
  everywhere = []
  for _, run_config in runs:  # built before the first run, to show errors now
    axes = experiments.build(run_config, options.mesh()).program.layout.axes
    everywhere.append({axis.name: axis.size for axis in axes})
  needed = max(math.prod(mesh.values()) for mesh in everywhere)
  if jax.device_count() < needed:
    raise ValueError("counting communication needs one device per worker and "
                     f"rank: --cpu_devices={needed}")
  rows = []
  for index, (point, run_config) in enumerate(runs):
    print(f"run {index + 1} of {len(runs)}: {point} seed={run_config.seed}")

    def count_bytes(run_config=run_config, mesh=everywhere[index]):
      made = experiments.build(run_config, mesh)
      return traffic.communication_per_step(made, traffic.lower_steps(made))

    experiment = experiments.build(run_config, options.mesh())
    row = sweep.run_point(experiment, point, workdir, count_bytes)
    rows.append(row)
    sweep.write_csv(rows, workdir / "sweep.csv")
  render.show(tables.sweep_table(rows))
  for path in pictures.plot_study(rows, workdir):
    print(f"figure: {path}, .svg and .pdf")
  print(f"table: {workdir}/sweep.csv")


if __name__ == "__main__":
  options.run(main, uses=(
    "config", "workdir", "mesh", "cpu_devices", "coordinator", "num_processes",
    "process_id",
  ))
