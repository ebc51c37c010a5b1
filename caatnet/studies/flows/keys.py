"""Config of the study of flows."""

from caatnet.schema import register
from caatnet.schema.fields import BYTES, COUNT_OR_ZERO, SEED, field
from caatnet.studies.keys import BANDWIDTH_DOC, LATENCY_DOC, study_key


@register.study
class Flows:
  """Routes of flows in leaf-spine networks."""

  name: str = field("spraying_small", "Name of the config.")
  study: str = study_key("flows")
  topologies: tuple[str, ...] = field(
    ("leaf_spine:16x16x16", "leaf_spine:8x6x8", "leaf_spine:8x8x8"),
    "Leaf-spine networks. The first one is also used for failures, collectives "
    "and the program.",
  )
  patterns: tuple[str, ...] = field(
    ("shift", "permutation", "all_to_all"), "Traffic patterns to route."
  )
  routers: tuple[str, ...] = field(
    ("ecmp", "single_path", "spray", "ethereal", "coordinated",
     "coordinated_split"),
    "Routing algorithms.",
  )
  seed: int = field(0, "Seed of ECMP's hash and of the permutation.", SEED)
  failed_uplinks: tuple[tuple[int, int], ...] = field(
    ((0, 0), (1, 1)), "Links that fail, as (leaf, spine), counted from 0.",
    COUNT_OR_ZERO, empty=True,
  )
  algorithms: tuple[str, ...] = field(
    ("ring", "halving_doubling", "all_to_all"),
    "Collectives to time: builders of parallel/plans/schedules/builders.py, or "
    "all_to_all.",
  )
  size_bytes: tuple[int, ...] = field(
    tuple(m * 2**20 for m in (1, 16, 128)), "Sizes of messages in bytes.", BYTES
  )
  bandwidth: str = field("", BANDWIDTH_DOC)
  latency_s: str = field("", LATENCY_DOC)
  program: str = field(
    "", 'File that `launch.compile --json` printed; "" for none.'
  )
