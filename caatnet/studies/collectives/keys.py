"""Config of the study of collective schedules."""

from caatnet.schema import register
from caatnet.schema.fields import BYTES, field
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
class Collectives:
  """Collective schedules on several topologies."""

  name: str = field("multitree_small", "Name of the config.")
  study: str = study_key("collectives")
  topologies: tuple[str, ...] = field(
    ("torus:4x4", "mesh:4x4", "leaf_spine:4x4x4", "bigraph:2x8", "torus:8x8",
     "mesh:8x8", "leaf_spine:8x8x8", "bigraph:4x16"),
    "Topologies, as in configs/collectives/schedule.py.",
  )
  algorithms: tuple[str, ...] = field(
    ALGORITHMS, "Builders of parallel/plans/schedules/builders.py. Optimal "
    "trees of 256 ranks take too long to find.",
  )
  pieces: int = pieces_key()
  random_numberings: int = random_numberings_key()
  size_bytes: tuple[int, ...] = field(
    tuple(k * 2**10 for k in (32, 256, 2048, 16384, 65536)),
    "Sizes of messages in bytes.", BYTES,
  )
  export: Export = field(
    Export, "Format of --export, which needs one topology and one size."
  )
  bandwidth: str = field("", BANDWIDTH_DOC)
  latency_s: str = field("", LATENCY_DOC)
  barrier: bool = field(
    False, "Whether all ranks wait for each other after each round."
  )
