r"""Plans a datacentre for training: 100 billion dollars, or one accelerator.

  python -m launch.simulate --config=configs/datacentre/hundred_billion.py \
    --html=page.html --plot=datacentre.png
  python -m launch.simulate --config=configs/datacentre/hundred_billion.py \
    --config.given=accelerators --config.knobs.accelerators=64 \
    --config.knobs.parameters=7e9
  python -m launch.simulate --config=configs/datacentre/hundred_billion.py \
    --config.given=model --config.knobs.parameters=405e9 \
    --config.knobs.days_allowed=60 --config.rack=h100
  python -m launch.simulate \
    --config=configs/datacentre/hundred_billion.py:planner

All is arithmetic on assumptions, printed with their sources and marks;
nothing is measured. The defaults are those of arXiv 2407.12819 where it states
them, and backed out of its outputs where it does not. With --html a page with
sliders is written that needs nothing else. It takes ten seconds.

With ":planner" the share of the peak is not a constant, but what
`parallel/planner` predicts for a model of 11B parameters on a pod of 64 GPUs;
it is taken for the whole machine, whose accelerators may be others.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.planner import gpt_11b


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the study; with "planner" a pod of its own planner is in it."""
  if variant not in ("", "planner", "test"):
    raise ValueError(
      f"configs/datacentre/hundred_billion.py:{variant}: the variants are "
      "planner and test"
    )
  config = defaults("study", "datacentre")
  if variant == "planner":
    config.pod = gpt_11b.get_config()
    config.pod.planner.cluster = "h100:8,uneven=0"
  if variant == "test":
    config.num_draws = 100
  return config
