"""``config.experts``: experts of one base that a server switches between."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  NOT_NEGATIVE,
  field,
  section,
)

# Names of `parallel.plans.placement.evictions.EVICTIONS` for servers.
EVICTIONS = "lru", "lfu", "lookahead"
DEADLINE = (
  "Seconds without a step after which an expert with requests is loaded, "
  "regardless of the switching cost."
)
PATIENCE = (
  "Factor of the switching cost: a load that evicts an expert with requests "
  "starts when the accumulated waiting time exceeds patience x switch_s x its "
  "requests."
)


@section
class Experts:
  """Experts whose weights move between files, host memory and the device.

  ``config.serving.policy`` must be "experts".
  """

  path: str = field("", "Directory of the experts, with experts.json.")
  slots: int = field(4, "Experts whose weights are on the device.", COUNT)
  eviction: str = field(
    "lookahead", "Policy that selects the expert that a load replaces.",
    EVICTIONS,
  )
  prefetch: int = field(
    1, "Largest number of loads that run concurrently with steps of other "
    "experts; 0 to load only when no expert on the device has requests.",
    COUNT_OR_NONE,
  )
  pinned: tuple[str, ...] = field(
    (), "Experts that stay on the device after their first load."
  )
  host_experts: int = field(
    16, "Experts that are kept in host memory; others are read from their "
    "files.", COUNT_OR_NONE,
  )
  deadline_s: float = field(30.0, DEADLINE, NOT_NEGATIVE)
  switch_s: float = field(
    0.0, "Time of a switch in seconds; 0 for the median of recent loads.",
    NOT_NEGATIVE,
  )
  patience: float = field(1.0, PATIENCE, NOT_NEGATIVE)
  random: int = field(
    0, "Number of experts with random parameters that are created in the "
    "directory; 0 for an existing one.", COUNT_OR_NONE,
  )
