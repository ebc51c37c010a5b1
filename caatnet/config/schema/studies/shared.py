"""Keys shared by the configs of several studies."""

from typing import Any

from caatnet.config.schema.fields import (
  field,
  section,
)


def study_key(name: str) -> Any:
  """Declares ``config.study`` with one allowed value."""
  return field(name, "Study that runs.", (name,))


@section
class Study:
  """Key common to all studies."""

  name: str = field("study", "Name of the config.")


BANDWIDTH = (
  "Bandwidth of links in bytes/s, or a kind of link of "
  'parallel/hardware/links.py ("nvlink_4"); "" for the topology\'s default.'
)


LATENCY = (
  "Latency of links in seconds, or a kind of link of "
  'parallel/hardware/links.py; "" for the topology\'s default.'
)


TIERS = (
  "File of a host's memory tiers, or a key of HOSTS in "
  "parallel/hardware/tiers.py"
)


UTILISATION = "Achieved share of peak FLOP/s of matrix products, an assumption."


EXECUTIONS = ("events", "lockstep")
