"""Benchmarks of plans, placements, collective and pipeline schedules."""

from caatnet.config.schema.fields import (
  COUNT,
  POSITIVE,
  Range,
  field,
  section,
)

_ALL_SCHEDULES = ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1")


@section
class Planner:
  """Device orders of the planner, compared with bounds and other searches."""

  exact: int = field(
    200, "Clusters for the comparison with exhaustive search.", COUNT
  )
  solved: int = field(8, "Clusters for the comparison with CP-SAT.", COUNT)
  certified: int = field(
    10, "Clusters of 64 devices for each grid.", COUNT
  )
  premise: int = field(200, "Clusters for the test of the premise.", COUNT)
  regret: int = field(32, "Clusters for the measurement of regret.", COUNT)
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
    (4, 6, 8, 5), "Numbers of devices for the regret, used cyclically.",
    Range(2, 8, whole=True),
  )
  positions: tuple[int, ...] = field(
    (2048, 16_384), "Positions of an example for the regret, used cyclically.",
    COUNT,
  )
  executions: tuple[str, ...] = field(
    ("events", "lockstep"), "Execution models of stages for the regret, used "
    "cyclically.",
  )
  layers: int = field(8, "Layers of the regret's model.", COUNT)
  batch_size: int = field(16, "Examples of a step of the regret.", COUNT)
  schedules: tuple[str, ...] = field(
    _ALL_SCHEDULES, "Pipeline schedules that the regret tries."
  )
  microbatches: int = field(32, "Microbatches of a step.", COUNT)
  examples: int = field(1, "Examples of a microbatch.", COUNT)
  python: str = field("", 'A Python with ortools; "" to skip CP-SAT.')
  limit_s: float = field(
    60.0, "Time limit of CP-SAT per problem, in seconds.", POSITIVE
  )
  steps: int = field(3000, "Steps of Pipette's simulated annealing.", COUNT)


@section
class Schedules:
  """Collective schedules: proofs, optimal trees and times."""

  tori: tuple[int, ...] = field(
    (4, 8, 16, 32, 64), "Sides of square tori.", COUNT, empty=True,
  )
  meshes: tuple[int, ...] = field(
    (4, 8, 16, 32), "Sides of square meshes.", COUNT, empty=True,
  )
  optimal: tuple[str, ...] = field(
    ("torus 4x4", "torus 8x8", "mesh 8x8", "torus 8x8, 2 links failed",
     "fat tree 4", "leaf-spine 4x4x4", "dgx 2x8"),
    "Topologies of optimal trees.", empty=True,
  )
  simulated: tuple[str, ...] = field(
    ("ring, ring 1024", "bucket, torus 32x32", "multitree, torus 32x32"),
    "All-gathers, by algorithm and topology.", empty=True,
  )
  size_bytes: tuple[int, ...] = field(
    (2**15, 2**20, 2**26), "Sizes of all-gathers in bytes; the last one is "
    "used for random graphs.", Range(1, 2**53, whole=True),
  )
  models: tuple[str, ...] = field(
    ("events", "lockstep"),
    "Time models; a schedule is selected for each one.",
  )
  num_random: int = field(200, "Number of random graphs.", COUNT)
  max_nodes: int = field(
    24, "Largest number of nodes of a random graph.", COUNT
  )
  processes: int = field(2, "Processes that share the graphs.", COUNT)
  plot: str = field(
    "", 'PNG of the times against the number of nodes; "" for none.'
  )
