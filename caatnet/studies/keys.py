"""Keys shared by the configs of several studies."""

from typing import Any

from caatnet.schema.fields import Range, field

BANDWIDTH = (
  "Bandwidth of links in bytes/s, or a kind of link of "
  'parallel/plans/hardware/links.py ("nvlink_4"); "" for the default of the '
  "topology."
)
LATENCY = (
  "Latency of links in seconds, or a kind of link of "
  'parallel/plans/hardware/links.py; "" for the topology\'s default.'
)
TIERS = (
  "File of a host's memory tiers, or a key of HOSTS in "
  "parallel/plans/hardware/tiers.py"
)
UTILISATION = "Achieved share of peak FLOP/s of matrix products, an assumption."
EXECUTIONS = ("events", "lockstep")


def study_key(name: str) -> Any:
  """Declares ``config.study`` with one allowed value."""
  return field(name, "Study that runs.", (name,))


def random_numberings_key() -> Any:
  """Declares the number of random numberings of a topology's ranks."""
  return field(
    0, "Random numberings of the ranks that are tried in addition to those of "
    "the topology and, for a grid, of its transpositions; the fastest counts.",
    Range(0, 64, whole=True),
  )
