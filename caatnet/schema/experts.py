"""``config.experts``: experts, trained from one base, that a server loads."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  NOT_NEGATIVE,
  field,
  section,
)

# Names of `parallel.plans.placement.evictions.EVICTIONS` for servers.
EVICTIONS = "lru", "lfu", "lookahead"
DEADLINE_DOC = (
  "Seconds without a step after which an expert that has requests is loaded, "
  "regardless of the switching cost."
)
PATIENCE_DOC = (
  "Factor of the switching cost. Expert A replaces an expert B with requests "
  "when (requests of A) x (seconds since the last step of A) is at least "
  "patience x switch_s x (requests of B)."
)


@section
class Experts:
  """Experts whose weights move between files, host memory and the device.

  ``config.serving.policy`` must be "experts".
  """

  path: str = field("", "Directory of the experts, which has experts.json.")
  slots: int = field(4, "Largest number of experts in device memory.", COUNT)
  eviction: str = field(
    "lookahead", "Policy that selects the expert that a load replaces.",
    EVICTIONS,
  )
  prefetch: int = field(
    1, "Largest number of loads that run concurrently with steps of other "
    "experts; 0 to load only when no expert on the device has requests, or "
    "after deadline_s.", COUNT_OR_ZERO,
  )
  pinned: tuple[str, ...] = field(
    (), "Experts that stay on the device after their first load."
  )
  host_experts: int = field(
    16, "Largest number of experts that are kept in host memory; others are "
    "read from their files.", COUNT_OR_ZERO,
  )
  deadline_s: float = field(30.0, DEADLINE_DOC, NOT_NEGATIVE)
  switch_s: float = field(
    0.0, "Assumed time to load an expert, in seconds; 0 for the median of "
    "recent loads.", NOT_NEGATIVE,
  )
  patience: float = field(1.0, PATIENCE_DOC, NOT_NEGATIVE)
  random: int = field(
    0, "Number of experts with random parameters that are created in path; 0 "
    "to serve the existing experts.", COUNT_OR_ZERO,
  )
