"""Keys that the configs of several studies share."""

from typing import Any

from caatnet.config.schema.fields import (
  field,
  section,
)


def study_key(name: str) -> Any:
  """Declares ``config.study``."""
  return field(name, "Study that runs.", (name,))


@section
class Study:
  """The key that all studies have."""

  name: str = field("study", "Name of the config.")


BANDWIDTH = (
  "Bytes per second of links, or a kind of link of parallel/hardware/links.py "
  '("nvlink_4"); "" for the topology\'s own.'
)


LATENCY = (
  "Latency of links in seconds, or a kind of link of "
  'parallel/hardware/links.py; "" for the topology\'s own.'
)


UTILISATION = "Share of the peak that matrix products reach, an assumption."


EXECUTIONS = ("events", "lockstep")
