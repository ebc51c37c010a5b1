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

import pathlib

from absl import flags

from caatnet.benchmarks import registry
from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet.show import results
  from parallel.base import atomic

  config = FLAGS.config
  run = registry.find(config)
  for key in ("results", "cluster", "plot"):
    if path := config.benchmark.get(key):
      atomic.check_writable(path, f"config.benchmark.{key}=")
  result = run(config)
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), result)


if __name__ == "__main__":
  options.run(main, uses=("config", "cpu_devices", "output"))
