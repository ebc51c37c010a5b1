"""Keys of benchmarks of training steps and collective schedules."""

from caatnet.benchmarks.keys import ROUNDS_DOC
from caatnet.schema import register
from caatnet.schema.fields import COUNT, Range, field


@register.benchmark("train_step")
class TrainStep:
  """Training step compared with plain JAX."""

  rounds: int = field(7, ROUNDS_DOC, COUNT)
  dtypes: tuple[str, ...] = field(
    ("float32", "bfloat16"), "Values of config.model.dtype."
  )
  variants: tuple[tuple[str, str], ...] = field(
    (
      ("plain JAX step", ""),
      ("r=1", "parallel.tensor=1"),
      ("r=1, unrolled", "parallel.tensor=1 model.unroll=8"),
      ("r=8 lanes, p=1", "parallel.tensor=8"),
      ("r=8 lanes, p=.5", "parallel.tensor=8 sync.p=0.5"),
    ),
    'Label and overrides of each step; a label that begins with "plain" stands '
    "for the plain JAX step.",
  )


@register.benchmark("schedules")
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
    ("events", "lockstep"), "Time models for each of which a schedule is "
    'selected: event by event ("events"), round by round ("lockstep").',
  )
  num_random: int = field(200, "Number of random graphs.", COUNT)
  max_nodes: int = field(
    24, "Largest number of nodes of a random graph.", COUNT
  )
  processes: int = field(2, "Processes that share the graphs.", COUNT)
  plot: str = field(
    "", 'PNG of the times against the number of nodes; "" for none.'
  )
