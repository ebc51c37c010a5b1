"""Config of the study of outer loops between sites."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  INNER_FRACTION,
  POSITIVE,
  field,
  section,
)
from caatnet.studies.keys import study_key


@register.study
class Utilisation:
  """Compute utilisation between sites, and a recommended outer loop."""

  @section
  class Recommend:
    """Model that is trained across sites, and candidate outer loops."""

    link: str = field(
      "wide_area_10g", "Name of a link in parallel/plans/hardware/links.py, in "
      "lower case.",
    )
    parameters: float = field(10e9, "Parameters of the model.", POSITIVE)
    num_layers: int = field(48, "Layers of the model.", COUNT)
    step_seconds: float = field(
      0.8, "Time of a step without communication, in seconds.", POSITIVE
    )
    target: float = field(
      0.95, "Target compute utilisation.", INNER_FRACTION
    )
    volume_factor: float = field(
      1.0,
      "Bits that a replica sends for each bit of its parameters: 2 (M - 1) / M "
      "in a ring of M replicas; M - 1 in an all-gather, which 4-bit codes use.",
      POSITIVE,
    )
    sync_every: tuple[int, ...] = field(
      (1, 10, 30, 50, 100, 200, 500),
      "Candidates for the steps between reductions. Fewer steps are preferred, "
      "then smaller overlap, then more bits.",
      COUNT,
    )
    overlap_steps: tuple[int, ...] = field(
      (0, 1, 2, 5), "Candidates for the overlap, in steps.", COUNT_OR_ZERO
    )
    bits: tuple[float, ...] = field(
      (16, 8, 4), "Candidates for the bits of a parameter on the link, which "
      "may be fractions, since codes may have scales.", POSITIVE,
    )

  name: str = field("utilisation", "Name of the config.")
  study: str = study_key("utilisation")
  fitted_factor: bool = field(
    False, "Whether table 4 of arXiv 2501.18512 is predicted with a volume "
    "factor (bits sent per bit of parameters) fitted to it, instead of 1.",
  )
  recommend: Recommend = field(
    Recommend, "Model for which an outer loop is recommended."
  )
