r"""Plans a datacentre for training, from a budget, a size or a model.

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

All results are arithmetic on assumptions, which are printed with their sources
and confidence marks; nothing is measured. Defaults are those of arXiv
2407.12819 if stated there, else derived from its outputs. --html writes a
self-contained page with sliders. It takes ten seconds.

With ":planner" the achieved fraction of peak FLOP/s is not a constant, but the
prediction of `parallel/plans/planner` for a model of 11B parameters on a pod of
64 GPUs. It is used for the whole datacentre, even with other accelerators.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.datacentre.keys import Datacentre
from configs.planner import gpt_11b


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the study; with "planner", it contains a planner's config."""
  if variant not in ("", "planner", "test"):
    raise ValueError(
      f"configs/datacentre/hundred_billion.py:{variant}: the variants are "
      "planner and test"
    )
  config = defaults(Datacentre)
  if variant == "planner":
    config.pod = gpt_11b.get_config()
    config.pod.planner.cluster = "h100:8,uneven=0"
  if variant == "test":
    config.num_draws, config.targets = 100, (0.5, 0.95)
  return config
