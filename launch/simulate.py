r"""Predicts times and utilisations, without training and without devices.

  python -m launch.simulate --config=configs/diloco/utilisation.py
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.recommend.link=ethernet_1g --config.recommend.target=0.9
  python -m launch.simulate --config=configs/diloco/utilisation.py \
    --config.fitted_factor=True --plot=utilisation.png --json
  python -m launch.simulate --config=configs/collectives/multitree.py
  python -m launch.simulate --config=configs/collectives/spraying.py
  python -m launch.simulate --config=configs/collectives/schedule.py \
    --export=multitree.xml
  python -m launch.simulate --config=configs/serving/vllm_log.py
  python -m launch.simulate --config=configs/pipeline/schedules.py
  python -m launch.simulate --config=configs/graphs/alignment.py
  python -m launch.simulate --config=configs/datacentre/hundred_billion.py \
    --html=page.html

config.study is the name of the study. --report=FILE.md or FILE.html writes the
tables with their picture.
"""

import pathlib

from absl import flags

from caatnet.studies import registry
from launch import options

FLAGS = flags.FLAGS

flags.DEFINE_string(
  "html", "", "HTML page with sliders to write, for configs/datacentre."
)


def main() -> None:
  from caatnet.show import render

  config = FLAGS.config.copy_and_resolve_references().to_dict()
  study = registry.find(config)
  if FLAGS.export and study.export is None:
    raise ValueError(
      f"--export={FLAGS.export}: config.study={config['study']!r} has nothing "
      "to export; use configs/collectives/schedule.py or multitree.py"
    )
  if FLAGS.html and study.write_page is None:
    raise ValueError(
      f"--html={FLAGS.html}: config.study={config['study']!r} has no page; "
      "use configs/datacentre/hundred_billion.py"
    )
  if FLAGS.export:
    study.export(config, pathlib.Path(FLAGS.export))
  result = study.run(config)
  render.present(
    study.report(result), result, FLAGS.json, FLAGS.output, FLAGS.plot,
    FLAGS.report,
  )
  if FLAGS.html:
    study.write_page(result, pathlib.Path(FLAGS.html))


if __name__ == "__main__":
  options.run(
    main, uses=("config", "json", "plot", "export", "output", "report"),
    writes=("html",), devices=False,
  )
