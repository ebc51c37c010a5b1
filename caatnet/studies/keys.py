"""Keys shared by the configs of several studies."""

from typing import Any

from caatnet.schema.fields import COUNT_OR_ZERO, Range, field, section

BANDWIDTH_DOC = (
  "Bandwidth of links in bytes/s, or a kind of link of "
  'parallel/plans/hardware/links.py ("nvlink_4"); "" for the default of the '
  "topology."
)
LATENCY_DOC = (
  "Latency of links in seconds, or a kind of link of "
  'parallel/plans/hardware/links.py; "" for the topology\'s default.'
)
TIERS_DOC = (
  "File of a host's memory tiers, or a key of HOSTS in "
  "parallel/plans/hardware/tiers.py"
)
UTILISATION_DOC = (
  "Assumed fraction of peak FLOP/s that matrix products achieve."
)
ALGORITHMS = (
  "ring", "bidirectional_ring", "ring_2d", "bucket", "halving_doubling",
  "hdrm", "double_tree", "swing", "direct", "multitree", "optimal",
)
EXECUTION_MODELS = ("events", "lockstep")


@section
class Export:
  """Format of the MSCCL XML file of ``--export``."""

  runtime: str = field(
    "nccl", 'Runtime that reads the file: "nccl", "rccl" or "msccl".'
  )
  protocol: str = field("Simple", 'Protocol: "Simple", "LL" or "LL128".')
  min_bytes: int = field(
    0, "Smallest buffer in bytes for which the runtime uses the schedule.",
    Range(0, 2**63 - 1, whole=True)
  )
  max_bytes: int = field(
    2**63 - 1, "Largest buffer in bytes for which the schedule is used.",
    Range(0, 2**63 - 1, whole=True)
  )


def study_key(name: str) -> Any:
  """Declares ``config.study`` with one allowed value."""
  return field(name, "Study that runs.", (name,))


def random_numberings_key() -> Any:
  """Declares the key for the number of random numberings of ranks."""
  return field(
    0, "Number of random numberings of the ranks to try in addition to the "
    "topology's own and a grid's transpositions; the fastest one is used.",
    Range(0, 64, whole=True),
  )


def pieces_key() -> Any:
  """Declares the key for the number of pieces of a schedule's chunks."""
  return field(
    0, "Number of pieces into which each chunk is cut for pipelining; 0 for "
    "the fastest number, by size and time model.", COUNT_OR_ZERO,
  )
