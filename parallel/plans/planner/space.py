"""Search space of the planner, and constraints that exclude configurations.

A configuration has the parallelism settings of a training run. All
combinations are enumerated; each one that cannot run violates a named
constraint, which explains its exclusion. Fields that change the trained model
keep their defaults: only `parallel.plans.planner.lossy_options` tries other
values of them.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools

import numpy as np

from parallel.base import checks
from parallel.plans.axis_kinds import AXES
from parallel.plans.outer.cost import OuterLoopConfig
from parallel.plans.pipeline import builders
from parallel.plans.planner.message_costs import Grid
from parallel.plans.workload import TrainingStep

SCHEMES = ("ddp", "zero1", "zero2", "zero3")
ROUTES = ("psum", "one_shot")
REMATS = ("none", "reduced", "full")
KEEPS = ("residuals", "inputs")
# Keys of a training run's config -> field of a configuration.
CONFIG_KEYS = {
  f"parallel.{kind.name}": kind.planned
  # Optional axes (stages) first, as in the text of a configuration.
  for kind in sorted(AXES, key=lambda kind: not kind.optional) if kind.planned
} | {
  "train.accumulation": "microbatches",
  "zero.scheme": "scheme", "memory.moments": "offload", "sync.route": "route",
  "model.remat": "remat", "pipeline.schedule": "schedule",
  "pipeline.chunks": "chunks", "pipeline.keep": "keep",
}
# Whether the optimizer state is offloaded -> value of memory.moments.
MOMENTS_MEMORY = {False: "device", True: "pinned_host"}
# Keys that change the trained model -> field of a configuration.
LOSSY_KEYS = {
  "sync.p": "p", "zero.weight_codec": "weight_codec",
  "zero.gradient_codec": "gradient_codec",
}


@dataclasses.dataclass(frozen=True)
class Configuration:
  """Parallel configuration of a training step.

  Attributes:
    stages: p, the stages of the pipeline.
    data: d, the data-parallel ranks.
    tensor: t, the tensor ranks.
    microbatches: m, the microbatches per step in each pipeline.
    schedule: Pipeline schedule, a key of `builders.BUILDERS`.
    chunks: Parts of the model per stage.
    scheme: ZeRO partition over data-parallel ranks, one of ``SCHEMES``.
    route: All-reduce algorithm over tensor ranks, one of ``ROUTES``.
    remat: Rematerialization of a layer, one of ``REMATS``.
    offload: Whether the optimizer's moments are in host memory between steps.
    keep: Values that a stage's forward saves for its backward, one of
      ``KEEPS``: residuals, or only inputs of parts, whose forward the backward
      then repeats.
    p: Fraction of the residual stream's channels that tensor ranks synchronise.
    weight_codec: Codec of weight gathers, one of
      `parallel.plans.zero.partition.CODECS`.
    gradient_codec: Codec of gradient scatters.
    outer: Outer loop between workers, which are groups of data-parallel ranks;
      None if all ranks form one worker.

  Example:
    >>> c = Configuration(stages=2, data=4, tensor=1, microbatches=8)
    >>> print(c)
    stage 2 x data 4 x tensor 1, 8 microbatches, 1f1b, ddp, psum, remat none,
    inputs kept
    >>> c.examples(batch_size=64)
    2
  """

  stages: int
  data: int
  tensor: int
  microbatches: int
  schedule: str = "1f1b"
  chunks: int = 1
  scheme: str = "ddp"
  route: str = "psum"
  remat: str = "none"
  offload: bool = False
  keep: str = "inputs"
  p: float = 1.0
  weight_codec: str = "none"
  gradient_codec: str = "none"
  outer: OuterLoopConfig | None = None

  @property
  def ranks(self) -> int:
    """Data-parallel ranks per worker."""
    return self.data // (self.outer.workers if self.outer else 1)

  @property
  def grid(self) -> Grid:
    """Numbers of stages, data-parallel ranks and tensor ranks."""
    return Grid(self.stages, self.data, self.tensor)

  def examples(self, batch_size: int) -> int:
    """Returns the number of examples per microbatch."""
    return batch_size // (self.data * self.microbatches)

  def overrides(self) -> str:
    """Returns the `keys` as command-line text, ``SECTION.KEY=VALUE ...``."""
    return " ".join(f"{key}={value}" for key, value in self.keys().items())

  def device_order(self, order: np.ndarray) -> tuple[int, ...]:
    """Converts a device order to the form of a training run's config.

    Args:
      order: Device by stage, data and tensor rank, int ``[p, d, t]``.

    Returns:
      The value of ``parallel.device_order``, in which the data axis is outside
      of the stage axis; () for the default order.
    """
    found = np.moveaxis(order, 0, 1).ravel().tolist()  # [d, p, t]
    return () if found == sorted(found) else tuple(found)

  def keys(self) -> dict[str, object]:
    """Returns a training run's config keys for this configuration -> values."""
    # Pipeline keys only with several stages, `LOSSY_KEYS` only if changed.
    usual = {x.name: x.default for x in dataclasses.fields(self)}
    found = {
      key: getattr(self, name) for key, name in CONFIG_KEYS.items()
      if self.stages > 1 or not key.startswith("pipeline.")
    } | {
      key: getattr(self, name) for key, name in LOSSY_KEYS.items()
      if getattr(self, name) != usual[name]
    }
    found["memory.moments"] = MOMENTS_MEMORY[self.offload]
    if self.stages > 1 and self.route != "psum":
      # With carry on, a fused kernel would leave a layer's all-reduce to the
      # next layer, which may be on another stage.
      found["sync.carry"] = "off"
    if self.outer is None:
      return found
    return found | self.outer.keys() | {"parallel.data": self.ranks}

  def __str__(self) -> str:
    stages = f", {self.schedule}" if self.stages > 1 else ""
    keep = f", {self.keep} kept" if self.stages > 1 else ""
    chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
    return (
      f"{self.grid}, {self.microbatches} microbatches{stages}{chunks}, "
      f"{self.scheme}, {self.route}, remat {self.remat}{keep}"
      + (", offload" if self.offload else "")
      + (f"; {self.learned()}" if self.learned() else "")
    )

  def learned(self) -> str:
    """Describes the fields that change the trained model; "" for none."""
    found = [f"p = {self.p:g}"] if self.p < 1 else []
    for what in ("weight", "gradient"):
      codec = getattr(self, f"{what}_codec")
      found += [f"{codec} {what}s"] if codec != "none" else []
    found += [str(self.outer)] if self.outer else []
    return ", ".join(found)


@dataclasses.dataclass(frozen=True)
class Choices:
  """Values that a plan tries, in combination with all grids of the devices.

  Attributes:
    schedules: Keys of `builders.BUILDERS`.
    chunks: Parts per stage, for schedules that support several.
    schemes: ZeRO partitions, from ``SCHEMES``.
    routes: All-reduce algorithms over tensor ranks, from ``ROUTES``.
    remats: Rematerializations, from ``REMATS``.
    offload: Whether to also try offloading the optimizer's moments.
    keeps: Values that stages save, from ``KEEPS``.
    max_microbatches: Maximum number of microbatches per step in a pipeline.

  Raises:
    ValueError: A name is unknown.
  """

  schedules: tuple[str, ...] = (
    "1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1"
  )
  chunks: tuple[int, ...] = (1, 2)
  schemes: tuple[str, ...] = SCHEMES
  routes: tuple[str, ...] = ROUTES
  remats: tuple[str, ...] = REMATS
  offload: bool = True
  max_microbatches: int = 256
  keeps: tuple[str, ...] = KEEPS

  def __post_init__(self) -> None:
    for key, names in (
      ("schedules", builders.BUILDERS), ("schemes", SCHEMES),
      ("routes", ROUTES), ("remats", REMATS), ("keeps", KEEPS),
    ):
      for name in getattr(self, key):
        checks.known(f"{key}=", name, names)


def all_configurations(
  batch_size: int, num_devices: int, choices: Choices
) -> Iterator[Configuration]:
  """Yields all configurations of these choices, valid or not."""
  for grid in grids(num_devices):
    # Microbatches must divide the examples of a data-parallel rank.
    for m in checks.divisors(max(1, batch_size // grid.data)):
      schedules: Sequence[tuple[str, int]] = [("1f1b", 1)]
      if grid.stages > 1:
        schedules = [
          (name, chunks)
          for name in choices.schedules for chunks in choices.chunks
          # With one chunk, chunked schedules equal schedules without chunks.
          if builders.BUILDERS[name].chunked == (chunks > 1)
          and builders.num_chunks_for(name, chunks) == chunks
        ]
      # Along an axis of one rank, all choices are equivalent: one is kept.
      schemes = choices.schemes if grid.data > 1 else ("ddp",)
      routes = choices.routes if grid.tensor > 1 else ("psum",)
      for (name, chunks), *rest in itertools.product(
        schedules, schemes, routes, choices.remats,
        (False, True) if choices.offload else (False,),
        choices.keeps if grid.stages > 1 else ("inputs",),
      ):
        yield Configuration(*grid, m, name, chunks, *rest)


def grids(num_devices: int) -> Iterator[Grid]:
  """Yields all grids of stages, data and tensor ranks for a device count.

  Example:
    >>> [tuple(grid) for grid in grids(2)]
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
  """
  for stages in checks.divisors(num_devices):
    for data in checks.divisors(num_devices // stages):
      yield Grid(stages, data, num_devices // stages // data)


def violated_constraint(
  configuration: Configuration, step: TrainingStep, choices: Choices
) -> tuple[str, str] | None:
  """Returns (violated constraint, reason) if a configuration cannot run.

  Args:
    configuration: The configuration.
    step: The training step.
    choices: Choices of the search, of which ``max_microbatches`` is used.

  Returns:
    None if the configuration satisfies all constraints.
  """
  c, model = configuration, step.model
  if step.batch_size % (c.data * c.microbatches):
    return "batch", (
      f"a batch of {step.batch_size} is not a multiple of data={c.data} x "
      f"microbatches={c.microbatches}"
    )
  if c.microbatches > choices.max_microbatches:
    return "microbatches", (
      f"microbatches={c.microbatches} are more than the limit, "
      f"{choices.max_microbatches}"
    )
  # Tensor ranks split heads and channels evenly.
  for name, size in (
    ("heads", model.num_heads), ("key/value heads", model.num_kv_heads),
    ("channels of the MLP", model.ffn_width),
  ):
    if size % c.tensor:
      return "tensor", f"tensor={c.tensor} does not divide {size} {name}"
  # Each part has at least one layer.
  if c.stages * c.chunks > model.num_layers:
    return "layers", (
      f"stages={c.stages} x chunks={c.chunks} are more than "
      f"{model.num_layers} layers"
    )
  try:
    builders.check_supported(c.schedule, c.stages, c.microbatches, c.chunks)
  except ValueError as error:
    return "schedule", str(error)
  # With saved residuals, a split backward transposes the linearization of a
  # part of the model in two halves (`parallel.pipeline.residuals`). This needs
  # layers without `jax.checkpoint` and without gathers of weights.
  if c.keep == "residuals" and _splits_backward(c.schedule) and (
    c.remat != "none" or c.scheme != "ddp"
  ):
    return "keep", (
      "residuals kept for both halves of backwards need remat='none' and "
      f"scheme='ddp', not {c.remat!r} and {c.scheme!r}"
    )
  if c.ranks == 1 and c.scheme != "ddp":
    return "scheme", f"scheme={c.scheme!r} shards nothing over data=1 ranks"
  return None


@functools.cache
def _splits_backward(name: str) -> bool:
  """Returns whether a schedule splits each backward into two actions."""
  return builders.build(name, 2, 2, builders.num_chunks_for(name, 2)).splits
