"""Runs the benchmark that its config names.

  python -m launch.benchmark --config=configs/benchmark/train_step.py
  python -m launch.benchmark --config=configs/benchmark/schedules.py
  python -m launch.benchmark --config=configs/benchmark/kernels.py
  python -m launch.benchmark --config=configs/benchmark/paged_attention.py
  python -m launch.benchmark --config=configs/benchmark/zero.py --cpu_devices=8
  python -m launch.benchmark --config=configs/benchmark/programs.py
  python -m launch.benchmark --config=configs/benchmark/coded.py
  python -m launch.benchmark --config=configs/benchmark/decoding.py
  python -m launch.benchmark --config=configs/benchmark/serving.py
  python -m launch.benchmark --config=configs/benchmark/engine.py
  python -m launch.benchmark --config=configs/benchmark/server.py
  python -m launch.benchmark --config=configs/benchmark/ring.py
  python -m launch.benchmark --config=configs/elastic/churn.py:short
  python -m launch.benchmark --config=configs/benchmark/membership.py
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS

def main() -> None:
  from caatnet import ranges
  from caatnet.show import results
  from launch.benchmarks import (
    churn,
    coded,
    decoding,
    elastic_bits,
    engine,
    kernels,
    membership,
    paged_attention,
    programs,
    ring,
    schedules,
    server,
    serving,
    train_step,
    zero,
  )

  bodies = {
    "churn": churn.run,
    "coded": coded.run,
    "decoding": decoding.run,
    "elastic_bits": elastic_bits.run,
    "engine": engine.run,
    "kernels": kernels.run,
    "membership": membership.run,
    "paged_attention": paged_attention.run,
    "programs": programs.run,
    "ring": ring.run,
    "schedules": schedules.run,
    "server": server.run,
    "serving": serving.run,
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
    results.write(pathlib.Path(FLAGS.output), result)


if __name__ == "__main__":
  options.run(main, uses=("config", "cpu_devices", "output"))
