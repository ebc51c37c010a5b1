"""Runs the benchmark that its config names.

  python -m launch.benchmark --config=configs/benchmark/train_step.py
  python -m launch.benchmark --config=configs/benchmark/train_step.py:test
  python -m launch.benchmark --config=configs/benchmark/schedules.py
  python -m launch.benchmark --config=configs/benchmark/kernels.py
  python -m launch.benchmark --config=configs/benchmark/zero.py --cpu_devices=8
"""

import json
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("output", "", "JSON file for the result.")


def main() -> None:
  from caatnet import ranges
  from launch.benchmarks import kernels, schedules, train_step, zero

  bodies = {
    "kernels": kernels.run,
    "schedules": schedules.run,
    "train_step": train_step.run,
    "zero": zero.run,
  }
  config = FLAGS.config
  name = config.benchmark.name if "benchmark" in config else None
  if name not in bodies:
    raise ValueError(
      f"config.benchmark.name={name!r} must be one of {', '.join(bodies)}; "
      "the configs are in configs/benchmark/"
    )
  ranges.check(config)
  result = bodies[name](config)
  if FLAGS.output:
    path = pathlib.Path(FLAGS.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  options.run(main, uses=("config", "cpu_devices"))
