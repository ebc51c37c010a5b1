"""Keys of the benchmark of graph networks."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  FRACTION,
  POSITIVE,
  POSITIVE_FRACTION,
  field,
  section,
)
from caatnet.schema.graph import SCALE

_PARTS = ("sampler", "caches", "waits", "large", "predicted")


@section
class LargeGraph:
  """Graph that is larger than the memory of its process."""

  scale: int = field(23, "Binary logarithm of the number of nodes.", SCALE)
  num_edges: int = field(100_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  steps: int = field(100, "Training steps.", COUNT)
  limit_mb: int = field(
    2000, "Limit of the process's private memory (RLIMIT_DATA), in MB; mapped "
    "files do not count.", COUNT,
  )


@section
class PredictedSteps:
  """Assumptions of predicted steps; only ``distinct`` was measured."""

  gather: float = field(
    20e9, "Bytes/s of features that a host's cores gather.", POSITIVE
  )
  memory_bandwidth: float = field(
    150e9, "Bandwidth of the host's memory, in bytes/s.", POSITIVE
  )
  link_share: float = field(
    0.85, "Achieved fraction of a link's bandwidth.", POSITIVE_FRACTION
  )
  utilisation: float = field(
    0.05, "Achieved fraction of a device's peak FLOP/s.", POSITIVE_FRACTION
  )
  hidden: int = field(256, "Channels of hidden states.", COUNT)
  distinct: float = field(
    0.14, "Distinct rows per tree position of a batch, as measured by the "
    'part "sampler".', POSITIVE_FRACTION,
  )


@register.benchmark("graphs")
class Graphs:
  """Graph networks: sampler, caches, feature access, a large graph."""

  parts: tuple[str, ...] = field(_PARTS, "Parts to run.", _PARTS)
  scale: int = field(
    20, "Binary logarithm of the number of nodes of an R-MAT graph.", SCALE
  )
  num_edges: int = field(16_000_000, "Edges.", COUNT)
  num_features: int = field(128, "Features of a node.", COUNT)
  fanouts: tuple[int, ...] = field(
    (15, 10), "Sampled neighbours per node of each level.", COUNT
  )
  batch_size: int = field(1024, "Nodes per batch.", COUNT)
  samples: int = field(
    60, "Timed batches, after a tenth as many for warm-up.", COUNT
  )
  threads: int = field(2, "Threads of the sampler.", COUNT)
  python_path: str = field("", 'A Python with DGL; "" for none.')
  shares: tuple[float, ...] = field(
    (0.01, 0.05, 0.2), "Sizes of caches as fractions of all rows.", FRACTION
  )
  steps: int = field(
    60, "Training steps for each setting of ahead and cache_rows.", COUNT
  )
  folder: str = field(
    "", 'Folder of the large graph; "" for a temporary one. An existing graph '
    "is reused.",
  )
  large: LargeGraph = field(LargeGraph, "The large graph.")
  predicted: PredictedSteps = field(
    PredictedSteps, "Assumptions of predicted steps."
  )
