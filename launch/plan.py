r"""Searches for the fastest parallel configuration of a model on a cluster.

  python -m launch.plan --config=configs/planner/gpt_11b.py
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --cluster=cluster.json --plot=plan.png --output=plan.json \
    --report=plan.html
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --why_not="parallel.stage=8 parallel.data=2 parallel.tensor=8"

Nothing is trained, and no device is needed. The result has the flags of
`launch.train` and `launch.compile` for each configuration. A second pass over
the best ones (config.planner.second) reports variants that would be faster but
change training: fewer synchronised channels, outer loops, coded partitions.
"""


from absl import flags

from caatnet.studies import registry
from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_multi_string(
  "why_not", [], "A configuration to compare with the best one, as in "
  '"parallel.stage=8 parallel.tensor=8".'
)


def main() -> None:
  from caatnet.show import render

  config = FLAGS.config.copy_and_resolve_references().to_dict()
  study = registry.find(
    config, only="planner", example="configs/planner/gpt_11b.py"
  )
  for name in ("cluster", "tiers"):
    if FLAGS[name].value:
      config["planner"][name] = FLAGS[name].value
  config["planner"]["why_not"] = (
    *config["planner"]["why_not"], *FLAGS.why_not
  )
  result = study.run(config)
  render.present(
    study.report(result), result, FLAGS.json, FLAGS.output, FLAGS.plot,
    FLAGS.report,
  )


if __name__ == "__main__":
  options.run(
    main,
    uses=("cluster", "config", "json", "plot", "output", "report", "tiers"),
    devices=False,
  )
