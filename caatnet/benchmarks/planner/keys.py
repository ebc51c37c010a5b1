"""Keys of the planner's benchmark."""

from caatnet.schema import register
from caatnet.schema.fields import COUNT, POSITIVE, Range, field

_ALL_SCHEDULES = ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1")


@register.benchmark("planner")
class Planner:
  """Device orders of the planner, compared with bounds and other searches."""

  exact_clusters: int = field(
    200, "Number of clusters for the comparison with exhaustive search.", COUNT
  )
  solved_clusters: int = field(
    8, "Number of clusters for the comparison with CP-SAT.", COUNT
  )
  certified_clusters: int = field(
    10, "Number of clusters of 64 devices for each grid.", COUNT
  )
  premise_clusters: int = field(
    200, "Number of clusters with uneven links.", COUNT
  )
  regret_clusters: int = field(
    32, "Number of clusters on which a plan's step time is compared with that "
    "of the best plan (regret: their ratio - 1).", COUNT
  )
  grids: tuple[tuple[int, int, int], ...] = field(
    ((4, 2, 8), (2, 4, 8), (8, 1, 8), (1, 8, 8), (2, 8, 4), (4, 4, 4),
     (8, 8, 1)),
    "Stages, data and tensor ranks of 64 devices.", COUNT,
  )
  large: tuple[tuple[int, int, int], ...] = field(
    ((8, 16, 8), (16, 8, 8), (16, 64, 1)),
    "Stages, data and tensor ranks of 1,024 devices.", COUNT, empty=True,
  )
  sizes: tuple[int, ...] = field(
    (4, 6, 8, 5), "Devices of the regret test's clusters; cluster i has "
    "sizes[i % len(sizes)].",
    Range(2, 8, whole=True),
  )
  positions: tuple[int, ...] = field(
    (2048, 16_384), "Sequence lengths of the regret test; each is combined "
    "with all executions, and these with all sizes.", COUNT,
  )
  executions: tuple[str, ...] = field(
    ("events", "lockstep"), "Execution models of pipeline stages in the regret "
    "test; each is combined with all sizes.",
  )
  layers: int = field(8, "Layers of the regret test's model.", COUNT)
  batch_size: int = field(16, "Sequences per step in the regret test.", COUNT)
  schedules: tuple[str, ...] = field(
    _ALL_SCHEDULES,
    "Pipeline schedules that plans of the regret test may use.",
  )
  microbatches: int = field(32, "Microbatches of a step.", COUNT)
  examples: int = field(1, "Examples of a microbatch.", COUNT)
  python_path: str = field("", 'A Python with ortools; "" to skip CP-SAT.')
  limit_s: float = field(
    60.0, "Time limit of CP-SAT per problem, in seconds.", POSITIVE
  )
  steps: int = field(3000, "Steps of Pipette's simulated annealing.", COUNT)
