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
from ml_collections import config_dict

from configs.planner import gpt_11b

# Those of `caatnet/studies/datacentre/knobs.py`, which has their values.
KNOBS = (
  "budget", "accelerators", "days_allowed", "compute_share", "rack_price",
  "per_rack", "rack_w", "overhead", "pue", "energy_price", "peak",
  "utilisation", "availability", "memory_bytes", "fill", "parameters",
  "active_share", "tokens_per_parameter", "state_bytes", "batch_tokens",
  "microbatch_tokens", "layers", "chunks", "step_share", "scale_up_bits",
  "scale_out_bits", "radix", "gradient_bits", "sync_every", "distance_km",
  "detour", "mtbf_h", "network_mtbf_h", "save_rate", "restart_s", "repair_h",
)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  """Returns the study; with "planner" a pod of its own planner is in it."""
  if variant not in ("", "planner", "test"):
    raise ValueError(
      f"configs/datacentre/hundred_billion.py:{variant}: the variants are "
      "planner and test"
    )
  config = ml_collections.ConfigDict()
  config.name = "hundred_billion"
  config.study = "datacentre"
  # What the size follows from: "budget", "accelerators" or "model", the last
  # one with days_allowed.
  config.given = "budget"
  # A key of RACKS in parallel/hardware/sites.py, and one of its formats.
  config.rack = "gb200"
  config.precision = "bf16"
  # A key of COOLING there: total power over IT power.
  config.cooling = "liquid"
  # NAME:WATTS, or a name of SITES there.
  config.sites = ("east", "west")
  config.knobs = ml_collections.ConfigDict()
  for knob in KNOBS:  # unset: the knob's own value, or the rack's
    config.knobs[knob] = config_dict.placeholder(float)
  # Between sites: steps of a round, and shares of the time that compute is to
  # reach.
  config.round_steps = 100
  config.targets = (0.5, 0.8, 0.9, 0.95, 0.99)
  # Plans of drawn knobs, and the result that the tornado is of; "" for
  # replica_days, or accelerators where these follow from a model.
  config.num_draws = 10_000
  config.seed = 0
  config.tornado = ""
  # A config of a planner's study, whose utilisation is taken; {} for none.
  config.pod = ml_collections.ConfigDict()
  if variant == "planner":
    config.pod = gpt_11b.get_config()
    config.pod.planner.cluster = "h100:8,uneven=0"
  if variant == "test":
    config.num_draws = 100
  return config
