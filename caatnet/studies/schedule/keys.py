"""Config of the study of one collective schedule."""

from caatnet.schema import register
from caatnet.schema.fields import BYTES, COUNT_OR_ZERO, field
from caatnet.studies.keys import (
  ALGORITHMS,
  BANDWIDTH_DOC,
  LATENCY_DOC,
  Export,
  pieces_key,
  random_numberings_key,
  study_key,
)


@register.study
class Schedule:
  """One collective schedule on one topology."""

  name: str = field("schedule", "Name of the config.")
  study: str = study_key("schedule")
  topology: str = field(
    "torus:4x4",
    "file:PATH, or NAME:SIZExSIZE with the name of a builder in "
    "parallel/plans/topology/builders.py. Options of the builder may follow, "
    'as in "dgx:2x8,network_bandwidth=infiniband_hdr", and links that have '
    'failed, as in "torus:4x4,failed=0-1".',
  )
  picture_round: int = field(
    5, "Number of the round that --plot draws, counted from 0.", COUNT_OR_ZERO,
  )
  algorithm: str = field(
    "multitree", "Name of a builder in parallel/plans/schedules/builders.py; "
    'options may follow, as in "multitree,farthest_first=True" or '
    '"optimal,weight=2".',
  )
  collective: str = field("all_reduce", "Collective to build.")
  pieces: int = pieces_key()
  alternatives: tuple[str, ...] = field(
    ALGORITHMS, "Further algorithms to time, on at most 64 ranks; the report "
    "warns if one is faster. () for none.", empty=True,
  )
  random_numberings: int = random_numberings_key()
  msccl: str = field(
    "", "MSCCL XML file to read instead of running an algorithm; "
    '"" for none.',
  )
  export: Export = field(Export, "Format of --export.")
  size_bytes: int = field(2**20, "Size of the message in bytes.", BYTES)
  bandwidth: str = field("", BANDWIDTH_DOC)
  latency_s: str = field("", LATENCY_DOC)
