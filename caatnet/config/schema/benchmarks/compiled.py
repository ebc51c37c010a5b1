"""Benchmarks of kernels and compiled programs."""

from caatnet.config.schema.benchmarks.shared import RESULTS, ROUNDS
from caatnet.config.schema.fields import (
  COUNT,
  SEED,
  TWO_OR_MORE,
  Range,
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
class Flower:
  """Federated rounds compared with Flower, in an environment of its own."""

  clients: tuple[int, ...] = field(
    (4, 8, 16, 64), "Numbers of clients on loopback.", TWO_OR_MORE
  )
  idle: tuple[int, ...] = field(
    (4,), "Numbers of clients of runs without training and evaluation.",
    TWO_OR_MORE,
  )
  links: tuple[str, ...] = field(
    ("ethernet", "wifi", "5g-40mhz"), "Links with the first number of clients, "
    "names of caatnet/federated/links.py; emulated in namespaces, for root.",
  )
  with_model: tuple[int, ...] = field(
    (4,), "Numbers of clients that train the model of the config, on loopback.",
    TWO_OR_MORE,
  )
  seeds: tuple[int, ...] = field((0, 1, 2), "Seed of each run.", SEED)
  rounds: int = field(
    12, "Rounds of a run; the first two are not measured.",
    Range(5, 10_000, whole=True),
  )
  steps: int = field(5, "Steps of a client in a round.", COUNT)
  width: int = field(
    9873, "Hidden channels of the network; it has 75 x width + 10 parameters.",
    COUNT,
  )
  folder: str = field(
    ".cache/foreign", "Folder of the environment, which is made once."
  )
  python: str = field(
    "", 'Python that makes it; "" for the one that runs this.'
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
