"""Configs of studies of collective schedules, flows and pipeline schedules."""

from caatnet.config.schema.fields import (
  BYTES,
  COUNT,
  COUNT_OR_NONE,
  POSITIVE,
  SEED,
  Range,
  field,
  section,
)
from caatnet.config.schema.studies.shared import (
  BANDWIDTH,
  LATENCY,
  Study,
  random_numberings_key,
  study_key,
)


@section
class Collectives(Study):
  """Collective schedules on several topologies."""

  name: str = field("multitree_small", "Name of the config.")
  study: str = study_key("collectives")
  topologies: tuple[str, ...] = field(
    ("torus:4x4", "mesh:4x4", "leaf_spine:4x4x4", "bigraph:2x8", "torus:8x8",
     "mesh:8x8", "leaf_spine:8x8x8", "bigraph:4x16"),
    "Topologies, as in configs/collectives/schedule.py.",
  )
  algorithms: tuple[str, ...] = field(
    ("ring", "bidirectional_ring", "ring_2d", "bucket", "halving_doubling",
     "hdrm", "double_tree", "swing", "direct", "multitree", "optimal"),
    "Builders of parallel/plans/schedules/builders.py. Optimal trees of 256 "
    "ranks take too long to find.",
  )
  pieces: int = field(
    0, "Pieces of each chunk, which are pipelined; 0 for the fastest number of "
    "each size and time model.", COUNT_OR_NONE,
  )
  random_numberings: int = random_numberings_key()
  size_bytes: tuple[int, ...] = field(
    tuple(k * 2**10 for k in (32, 256, 2048, 16384, 65536)),
    "Sizes of messages in bytes.", BYTES,
  )
  bandwidth: str = field("", BANDWIDTH)
  latency_s: str = field("", LATENCY)
  barrier: bool = field(
    False, "Whether there is a barrier between rounds."
  )


@section
class Schedule(Study):
  """One collective schedule on one topology."""

  @section
  class Export:
    """Format of the MSCCL XML file of ``--export``."""

    runtime: str = field(
      "nccl", 'Runtime that reads it: "nccl", "rccl" or "msccl".'
    )
    protocol: str = field("Simple", 'Protocol: "Simple", "LL" or "LL128".')
    min_bytes: int = field(
      0, "Smallest buffer in bytes.", Range(0, 2**63 - 1, whole=True)
    )
    max_bytes: int = field(
      2**63 - 1, "Largest buffer in bytes.", Range(0, 2**63 - 1, whole=True)
    )

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
    5, "Round that --plot draws, from 0; the default is the first round of the "
    "all-gather.", COUNT_OR_NONE,
  )
  algorithm: str = field(
    "multitree", "Name of a builder in parallel/plans/schedules/builders.py; "
    'options may follow, as in "multitree,farthest_first=True" or '
    '"optimal,weight=2".',
  )
  collective: str = field("all_reduce", "Collective to build.")
  random_numberings: int = random_numberings_key()
  msccl: str = field(
    "", "MSCCL XML file to read instead of running an algorithm; "
    '"" for none.',
  )
  export: Export = field(Export, "Format of --export.")
  size_bytes: int = field(2**20, "Size of the message in bytes.", BYTES)
  bandwidth: str = field("", BANDWIDTH)
  latency_s: str = field("", LATENCY)


@section
class Flows(Study):
  """Routes of flows in leaf-spine networks."""

  name: str = field("spraying_small", "Name of the config.")
  study: str = study_key("flows")
  topologies: tuple[str, ...] = field(
    ("leaf_spine:16x16x16", "leaf_spine:8x6x8", "leaf_spine:8x8x8"),
    "Topologies. The first one is also used for failures, collectives and the "
    "program.",
  )
  patterns: tuple[str, ...] = field(
    ("shift", "permutation", "all_to_all"), "Patterns of traffic."
  )
  routers: tuple[str, ...] = field(
    ("ecmp", "single_path", "spray", "ethereal", "coordinated",
     "coordinated_split"),
    "Routing algorithms.",
  )
  seed: int = field(0, "Seed of ECMP's hash and of the permutation.", SEED)
  failed_uplinks: tuple[tuple[int, int], ...] = field(
    ((0, 0), (1, 1)), "Links that fail, as (leaf, spine), counted from 0.",
    COUNT_OR_NONE, empty=True,
  )
  algorithms: tuple[str, ...] = field(
    ("ring", "halving_doubling", "all_to_all"),
    "Builders of parallel/plans/schedules/builders.py, and all_to_all.",
  )
  size_bytes: tuple[int, ...] = field(
    tuple(m * 2**20 for m in (1, 16, 128)), "Sizes of messages in bytes.", BYTES
  )
  bandwidth: str = field("", BANDWIDTH)
  latency_s: str = field("", LATENCY)
  program: str = field(
    "", 'File that `launch.compile --json` printed; "" for none.'
  )


@section
class Pipeline(Study):
  """Pipeline schedules: bubble, memory, bytes and time."""

  @section
  class Stages:
    """Sizes of the pipeline."""

    stages: int = field(4, "Stages.", COUNT)
    microbatches: int = field(8, "Microbatches of a step.", COUNT)
    chunks: int = field(
      2, "Model chunks per stage, for schedules with several.", COUNT
    )
    schedule: str = field(
      "1f1b", "Pipeline schedule whose timeline --export writes."
    )

  @section
  class Work:
    """Seconds per microbatch and stage, over all chunks."""

    forward_s: float = field(0.01, "Seconds of the forward.", POSITIVE)
    input_s: float = field(
      0.01, "Seconds of the cotangents of inputs.", POSITIVE
    )
    weight_s: float = field(
      0.01, "Seconds of the cotangents of weights.", POSITIVE
    )
    factors: tuple[float, ...] = field(
      (), "Factor of each stage's times; () for equal stages.", POSITIVE
    )
    recompute: bool = field(
      False, "Whether a backward, or each half of a split backward, recomputes "
      "the forward first.",
    )

  @section
  class Link:
    """Links between stages."""

    bandwidth: str = field(
      "infiniband_ndr", "Bytes per second, or a kind of link of "
      "parallel/plans/hardware/links.py.",
    )
    latency_s: str = field(
      "5e-6", "Seconds, or a kind of link of parallel/plans/hardware/links.py."
    )
    overlap: bool = field(
      True, "Whether sends overlap with the stage's compute."
    )

  name: str = field("schedules", "Name of the config.")
  study: str = study_key("pipeline")
  schedules: tuple[str, ...] = field(
    ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped", "zb_h1",
     "zb_h2", "zb_v", "dualpipe_v"),
    "Names of builders in parallel/plans/pipeline/builders.py.",
  )
  pipeline: Stages = field(Stages, "Sizes of the pipeline.")
  work: Work = field(Work, "Times of a microbatch.")
  link: Link = field(Link, "Links between stages.")
  boundary_bytes: int = field(
    64 * 2**20,
    "Bytes of a microbatch's activations at the boundary of two chunks.",
    BYTES,
  )
  activation_bytes: int = field(
    2 * 2**30, "Bytes of a microbatch's stored activations per stage, over all "
    "chunks.", BYTES,
  )
