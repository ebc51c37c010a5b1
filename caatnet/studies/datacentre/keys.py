"""Config of the study of datacentres."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  INNER_FRACTION,
  NOT_NEGATIVE,
  SEED,
  NestedConfig,
  Range,
  field,
)
from caatnet.studies.keys import study_key

_KNOBS = (
  "budget", "accelerators", "days_allowed", "compute_share", "rack_price",
  "per_rack", "per_domain", "rack_w", "overhead", "pue", "energy_price",
  "peak", "utilisation", "availability", "memory_bytes", "fill", "parameters",
  "active_share", "tokens_per_parameter", "state_bytes", "batch_tokens",
  "microbatch_tokens", "layers", "chunks", "step_share", "scale_up_bits",
  "scale_out_bits", "radix", "gradient_bits", "sync_every", "distance_km",
  "detour", "mtbf_h", "network_mtbf_h", "save_rate", "restart_s", "repair_h",
)


@register.study
class Datacentre:
  """Plan of a datacentre for training."""

  name: str = field("hundred_billion", "Name of the config.")
  study: str = study_key("datacentre")
  given: str = field(
    "budget",
    'Quantity that determines the number of accelerators: "budget", '
    '"accelerators", or "model", which is trained within days_allowed.',
  )
  rack: str = field(
    "gb200", "Key of RACKS in parallel/plans/hardware/sites.py."
  )
  precision: str = field("bf16", "One of the rack's number formats.")
  cooling: str = field(
    "liquid",
    "Key of COOLING in parallel/plans/hardware/sites.py, which sets the ratio "
    "of total power to IT power.",
  )
  sites: tuple[str, ...] = field(
    ("east", "west"), "NAME:WATTS, or names of SITES in "
    "parallel/plans/hardware/sites.py.",
  )
  knobs: dict[str, float | None] = field(
    lambda: dict.fromkeys(_KNOBS), "Values of knobs; units and meanings are in "
    "caatnet/studies/datacentre/knobs.py. None for the default value of the "
    "knob or the rack.", NOT_NEGATIVE,
  )
  round_steps: int = field(
    100, "Steps between synchronisations of sites.",
    Range(1, 100_000, whole=True)
  )
  targets: tuple[float, ...] = field(
    (0.5, 0.8, 0.9, 0.95, 0.99), "Fractions of the time spent on compute, for "
    "each of which the bandwidth between sites is computed.",
    INNER_FRACTION,
  )
  num_draws: int = field(10_000, "Number of plans with random knobs.", COUNT)
  seed: int = field(0, "Seed of the random knobs.", SEED)
  tornado: str = field(
    "",
    "Result for which the effect of each knob is computed (tornado diagram); "
    '"" for replica_days or, with given="model", accelerators.',
  )
  pod: NestedConfig = field(
    dict,
    "Config of a planner study whose predicted utilisation replaces the knob "
    "utilisation; {} for none.",
  )
