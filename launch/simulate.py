r"""Predicts times and utilisations; trains nothing, needs no device.

  python -m launch.simulate --config=configs/diloco/utilisation.py
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.recommend.link=ethernet_1g --config.recommend.target=0.9
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.fitted_factor=True --plot=utilisation.png --json

What is simulated: config.study.
"""

import json
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import simulation

  config = FLAGS.config.copy_and_resolve_references().to_dict()
  study = simulation.find(config)
  result = study.run(config)
  if FLAGS.json:
    print(json.dumps(result))
  else:
    study.show(result)
  if FLAGS.plot:
    study.plot(result, pathlib.Path(FLAGS.plot))


if __name__ == "__main__":
  options.run(main)
