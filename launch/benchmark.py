r"""Runs the benchmark of a config.

  python -m launch.benchmark --config=configs/benchmark/train_step.py
  python -m launch.benchmark --config=configs/benchmark/schedules.py
  python -m launch.benchmark --config=configs/benchmark/kernels.py
  python -m launch.benchmark --config=configs/benchmark/programs.py
  python -m launch.benchmark --config=configs/benchmark/peers.py
  python -m launch.benchmark --config=configs/benchmark/decoding.py
  python -m launch.benchmark --config=configs/benchmark/serving.py
  python -m launch.benchmark --config=configs/benchmark/server.py
  python -m launch.benchmark --config=configs/benchmark/ring.py
  python -m launch.benchmark --config=configs/elastic/churn.py:short
  python -m launch.benchmark --config=configs/benchmark/membership.py
  python -m launch.benchmark --config=configs/benchmark/planner.py
  python -m launch.benchmark --config=configs/benchmark/graphs.py
  python -m launch.benchmark --config=benchmark/calibration --cpu_devices=4
"""

import importlib
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
# config.benchmark.name -> folder in caatnet/benchmarks/ of the file with `run`.
BODIES = {
  name: folder for folder, names in {
    "elastic": ("churn", "membership", "ring"), "graphs": ("graphs",),
    "peers": ("peers",), "planner": ("planner",),
    "programs": ("calibration", "kernels", "programs"),
    "serving": ("decoding", "server", "serving"),
    "training": ("schedules", "train_step"),
  }.items() for name in names
}


def main() -> None:
  from caatnet.show import results
  from parallel.base import atomic

  config = FLAGS.config
  name = config.benchmark.name if "benchmark" in config else None
  if name not in BODIES:
    raise ValueError(
      f"config.benchmark.name={name!r} must be one of "
      f"{', '.join(sorted(BODIES))}; the configs are in configs/benchmark/"
    )
  for key in ("results", "cluster", "plot"):
    if path := config.benchmark.get(key):
      atomic.check_writable(path, f"config.benchmark.{key}=")
  body = f"caatnet.benchmarks.{BODIES[name]}.{name}"
  result = importlib.import_module(body).run(config)
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), result)


if __name__ == "__main__":
  options.run(main, uses=("config", "cpu_devices", "output"))
