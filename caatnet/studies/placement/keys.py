"""Config of the study of placements."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  POSITIVE,
  POSITIVE_FRACTION,
  field,
  section,
)
from caatnet.studies.keys import TIERS_DOC, UTILISATION_DOC, study_key


@section
class PlacementOptions:
  """Memory tiers of a placement, and assumptions of its predictions."""

  tiers: str = field(
    "two-cxl", f"{TIERS_DOC}.",
  )
  baseline: str = field(
    "large-dram", f"{TIERS_DOC}, on which policy dram_only has speed 1.",
  )
  device: str = field(
    "h200", "Key of DEVICES in parallel/plans/hardware/devices.py."
  )
  policies: tuple[str, ...] = field(
    ("dram_only", "interleave", "largest_first", "latency_first", "optimum"),
    "Keys of POLICIES in parallel/plans/placement/policies.py.",
  )
  state: str = field(
    "mixed", 'State of the step: "mixed" for weights and gradients in the '
    "dtype of activations, which may be on the host, and for updates of a part "
    'of the parameters on each processor; "run" for the state of launch.train '
    "with config.parallel, config.zero, config.model.remat and "
    "config.memory.optimizer.", ("mixed", "run"),
  )
  utilisation: float = field(0.5, UTILISATION_DOC, POSITIVE_FRACTION)
  fill: float = field(
    0.9, "Assumed fraction of the device's memory that may be used.",
    POSITIVE_FRACTION,
  )
  longest: int = field(
    2**20, "Longest context that the search considers, in tokens.", COUNT
  )
  contexts: tuple[int, ...] = field(
    (), "Further context lengths (tokens) for which rates are varied.", COUNT
  )
  targets: tuple[float, ...] = field(
    (0.97, 0.99, 1.0), "Speeds relative to the baseline, for each of which the "
    "minimum rate of CXL cards is searched.", POSITIVE,
  )


@register.study
class Placement:
  """Placement of the training step that the config's other sections define."""

  study: str = study_key("placement")
  placement: PlacementOptions = field(
    PlacementOptions, "Memory tiers, and assumptions of predictions."
  )
