"""Keys of benchmarks of kernels and compiled programs."""

from caatnet.benchmarks.keys import RESULTS_DOC, ROUNDS_DOC
from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  FRACTION,
  POSITIVE,
  SEED,
  TWO_OR_MORE,
  field,
)


@register.benchmark("calibration")
class Calibration:
  """Step times predicted by calibrated rates, compared with measured ones."""

  results: str = field(
    "runs/calibration.jsonl", "File with a line of JSON per configuration, "
    "which a later run continues."
  )
  cluster: str = field(
    "runs/calibration_cluster.json",
    "File for the rates and residuals, which `launch.compile --cluster` reads.",
  )
  profiled: tuple[tuple[str, str], ...] = field(
    (("parallel.tensor=4 sync.p=0.5", "tensor:4"),
     ("parallel.data=2 parallel.tensor=4 zero.scheme=zero3",
      "data:2,tensor:2"),
     ("parallel.data=2 parallel.stage=2 parallel.tensor=1 "
      "train.accumulation=4", "data:2,stage:2")),
    "Overrides and meshes of the configurations that rates are fitted to.",
  )
  held_out: int = field(
    20, "Random configurations that calibrate prediction intervals.", COUNT
  )
  tested: int = field(100, "Configurations that test the intervals.", COUNT)
  devices: int = field(4, "Devices of each configuration.", TWO_OR_MORE)
  p: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25, 0.0), "Random choices for sync.p, the fraction of "
    "synchronised channels.", FRACTION,
  )
  schemes: tuple[str, ...] = field(
    ("ddp", "zero1", "zero2", "zero3"), "Partitions of the training state."
  )
  schedules: tuple[str, ...] = field(
    ("gpipe", "1f1b", "eager_1f1b", "zb_h1"), "Pipeline schedules."
  )
  loops: tuple[str, ...] = field(
    ("local_sgd", "diloco", "streaming"),
    "Outer loops of configurations with workers.",
  )
  lanes: tuple[int, ...] = field(
    (1, 2), "Tensor ranks per device to choose from.", COUNT
  )
  batch_sizes: tuple[int, ...] = field(
    (4, 8, 16), "Examples per step to choose from.", COUNT
  )
  blocks: int = field(5, "Number of timed blocks of steps.", COUNT)
  block_s: float = field(0.5, "Minimum seconds per block.", POSITIVE)
  seed: int = field(0, "Seed of the configurations.", SEED)


@register.benchmark("kernels")
class Kernels:
  """Pallas kernels compared with XLA programs of their references."""

  ops: tuple[str, ...] = field(
    ("add_norm", "add_norm_backward", "reduce_add_norm", "encode", "mean",
     "nesterov", "gather_rows"),
    "Keys of SUBJECTS in caatnet/benchmarks/programs/kernel_subjects.py.",
  )
  target: str = field(
    "", 'Target, as in launch.compile; "" runs on the devices of this machine.'
  )
  rounds: int = field(20, ROUNDS_DOC, COUNT)
  buffers: int = field(
    4, "Sets of operands that calls alternate between, to avoid cache hits.",
    COUNT,
  )


@register.benchmark("programs")
class Programs:
  """Compiled steps with and without kernels."""

  results: str = field("results/programs.json", RESULTS_DOC)
  keep: bool = field(
    False, "Whether rows of the results file are reused if their lowered "
    "program and versions are unchanged, for example after an interrupted run.",
  )
  programs: tuple[tuple[str, str], ...] = field(
    (),
    "Target and overrides of each program, which is compiled with all values "
    "of the key kernels.",
  )
  kernels: tuple[str, ...] = field(
    ("pallas", "reference"), "Values of config.kernels."
  )
