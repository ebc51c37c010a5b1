r"""Trains a model; run it again to resume.

  python -m launch.train --config=configs/caatnet/tiny.py --cpu_devices=8
  python -m launch.train --config=configs/caatnet/tiny.py \
    --config.model.p=0.5 --workdir=runs/half --mesh=tensor:2 --cpu_devices=2
"""

import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import build
  from caatnet.train import loop

  config = FLAGS.config
  experiment = build.build(config, options.mesh())
  workdir = pathlib.Path(FLAGS.workdir or f"runs/{config.name}")
  result = loop.train(
    experiment, workdir, label=config.name, profile=options.profile()
  )
  if not result.finished:
    return
  evaluation = result.evaluation
  print(
    f"step {result.step}: validation loss {evaluation.loss:.4f} nats, "
    f"{evaluation.bits_per_byte:.4f} bits per byte, "
    f"{result.tokens_per_second:,.0f} tokens/s; in {workdir}"
  )
  print(f"evaluate: python -m launch.evaluate --workdir={workdir}")


if __name__ == "__main__":
  options.run(main)
