"""Benchmarks of kernels and compiled programs."""

from caatnet.config.schema.benchmarks.shared import RESULTS, ROUNDS
from caatnet.config.schema.fields import (
  COUNT,
  field,
  section,
)


@section
class ForeignPrograms:
  """Programs of other projects, compiled in environments of their own."""

  projects: tuple[str, ...] = field(
    (), "Keys of `caatnet.benchmarks.foreign.closed_forms.PROGRAMS`; () for "
    "all."
  )
  folder: str = field(
    ".cache/foreign", "Folder of the environments, which are made once."
  )
  python: str = field(
    "", 'Python that makes the environments; "" for the one that runs this.'
  )


@section
class Kernels:
  """Pallas kernels compared with XLA programs of their references."""

  ops: tuple[str, ...] = field(
    ("add_norm", "add_norm_backward", "reduce_add_norm", "encode", "mean",
     "nesterov", "gather_rows"),
    "Names of `caatnet.benchmarks.kernel_subjects.SUBJECTS`.",
  )
  target: str = field(
    "", 'Target, as in launch.compile; "" runs on the devices of this machine.'
  )
  rounds: int = field(20, ROUNDS, COUNT)
  buffers: int = field(
    4, "Sets of operands that calls alternate between, to avoid cache hits.",
    COUNT,
  )


@section
class PagedAttention:
  """Paged attention kernels that compile for a target."""

  targets: tuple[str, ...] = field(
    ("tpu:v5p:2x2x1", "gpu:h200:1x1"), "Targets, as in launch.compile."
  )
  head_widths: tuple[int, ...] = field((64, 128), "Channels of a head.", COUNT)
  kv_heads: tuple[int, ...] = field(
    (1, 5, 8), "Key and value heads of one rank.", COUNT
  )


@section
class Programs:
  """Compiled steps with and without kernels."""

  results: str = field("results/programs.json", RESULTS)
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
