"""Partitions: on which level each part of a training state is sharded.

Data-parallel ranks lie on nested *levels*, e.g. 2 nodes of 4 GPUs of 2 dies.
A partition shards weights, gradients and optimizer state over the innermost w,
g and o levels each, w <= g <= o, and every rank of the other levels has a
replica. So three levels have 20 partitions, and the named schemes are points
among them, times a secondary copy of the weights and the bits on the wire.

What is stored from step to step is one shard per rank at the optimizer's
depth: float32 weights and the optimizer's moments. Weights at depth w and
gradients at depth g exist during a step only.

Sources: ZeRO 1 to 3, Rajbhandari et al., arXiv 1910.02054; ZeRO++ (zeropp: hpZ,
qwZ, qgZ), Wang et al., arXiv 2306.10209; MiCS, Zhang et al., arXiv 2205.00119;
FSDP and hsdp, Zhao et al., arXiv 2304.11277; frontier3, Xu et al., arXiv
2501.04266, of which the placement and bits of the secondary copy are recalled.
The space of all triples: AMSP, arXiv 2311.00257; PaRO, arXiv 2310.06003.

No jax here: simulators read the same truth as the trainer.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math

# Codecs of `parallel.kernels.codec` that weights and gradients can have.
CODECS = ("none", "int8", "int4")
_STATES = ("weights", "gradients", "optimizer")


@dataclasses.dataclass(frozen=True)
class Level:
  """A level of data-parallel ranks.

  Attributes:
    name: Of the axis.
    size: Logical ranks along it.
  """

  name: str
  size: int


@dataclasses.dataclass(frozen=True)
class Partition:
  """Where each part of the training state lives; depths count from inside.

  Attributes:
    levels: Outermost first.
    weights: Innermost levels that weights are sharded over, during a step.
    gradients: The same for accumulated gradients.
    optimizer: The same for float32 weights and moments.
    secondary: Depth of a second copy of the weights, taken in the forward,
      from which the backward gathers; None: none.
    weight_codec: Of weights on the wire; "none" is the dtype of activations.
    gradient_codec: Of gradients on the wire, by all-to-all with float32 sums;
      "none" is float32. All-reduces over the levels beyond ``optimizer`` are
      float32 always.
    secondary_codec: Of the second copy.
    block: Elements that share a scale.
  """

  levels: tuple[Level, ...]
  weights: int = 0
  gradients: int = 0
  optimizer: int = 0
  secondary: int | None = None
  weight_codec: str = "none"
  gradient_codec: str = "none"
  secondary_codec: str = "none"
  block: int = 256

  def __post_init__(self) -> None:
    depths = [getattr(self, state) for state in _STATES]
    if not 0 <= depths[0] <= depths[1] <= depths[2] <= len(self.levels):
      raise ValueError(
        f"weights={depths[0]}, gradients={depths[1]} and optimizer="
        f"{depths[2]} of {len(self.levels)} levels must not decrease: a rank "
        "updates what it has gradients of"
      )
    for key in ("weight_codec", "gradient_codec", "secondary_codec"):
      if getattr(self, key) not in CODECS:
        raise ValueError(
          f"{key}={getattr(self, key)!r} must be one of "
          f"{', '.join(map(repr, CODECS))}"
        )
    if self.secondary is None:
      if self.secondary_codec != "none":
        raise ValueError(
          f"secondary_codec={self.secondary_codec!r} has no effect without a "
          "second copy"
        )
    elif not 1 <= self.secondary <= self.optimizer:
      raise ValueError(
        f"secondary={self.secondary} must be 1 to {self.optimizer}: the second "
        "copy is sharded over levels of the optimizer"
      )
    elif not self.weights:
      raise ValueError(
        f"secondary={self.secondary} has no effect: weights that are not "
        "sharded need no copy"
      )
    if self.weight_codec != "none" and not self.optimizer:
      raise ValueError(
        f"weight_codec={self.weight_codec!r} has no effect: nothing is "
        "gathered"
      )
    if self.gradient_codec != "none" and not self.optimizer:
      raise ValueError(
        f"gradient_codec={self.gradient_codec!r} has no effect: nothing is "
        "scattered, and all-reduces are float32"
      )
    if self.block < 2 or self.block % 2:
      raise ValueError(f"block={self.block} must be even")

  @property
  def inner(self) -> tuple[Level, ...]:
    """The levels innermost first: ``inner[:depth]`` shard at that depth."""
    return self.levels[::-1]

  @property
  def num_ranks(self) -> int:
    return self.degree(len(self.levels))

  def degree(self, depth: int) -> int:
    """Shards that ``depth`` innermost levels make."""
    return math.prod(level.size for level in self.inner[:depth])

  def shard(self, num_elements: int) -> int:
    """Elements of one stored shard of a tensor, padding included."""
    return math.ceil(num_elements / self.degree(self.optimizer))

  def padded(self, num_elements: int) -> int:
    """Elements of a tensor whose shards are equal at every depth."""
    return self.shard(num_elements) * self.degree(self.optimizer)

  def __str__(self) -> str:
    text = ", ".join(
      f"{state} / {self.degree(getattr(self, state))}" for state in _STATES
    )
    if self.secondary is not None:
      text += f", second copy / {self.degree(self.secondary)}"
      if self.secondary_codec != "none":
        text += f" in {self.secondary_codec}"
    for wire in ("weight", "gradient"):
      codec = getattr(self, f"{wire}_codec")
      if codec != "none":
        text += f", {wire}s sent as {codec}"
    return text


def _named() -> dict[str, tuple[str, str, str, dict[str, str]]]:
  """Scheme -> weights, gradients, optimizer, and what else is special.

  "inner": all levels but the outermost; "first": the innermost.
  """
  quantised = {"weight_codec": "int8", "gradient_codec": "int4"}
  return {
    "ddp": ("none", "none", "none", {}),
    "zero1": ("none", "none", "all", {}),
    "zero2": ("none", "all", "all", {}),
    "zero3": ("all", "all", "all", {}),
    "hsdp": ("inner", "inner", "inner", {}),
    "mics": ("inner", "inner", "inner", {}),
    "hpz": ("all", "all", "all", {"secondary": "inner"}),
    "zeropp": ("all", "all", "all", {"secondary": "inner"} | quantised),
    "frontier3": ("first", "inner", "all", {}),
    "frontier3_quantised": (
      "first", "inner", "all",
      {"secondary": "inner", "secondary_codec": "int8"} | quantised,
    ),
  }


SCHEMES = tuple(_named())


def named(scheme: str, levels: Sequence[Level]) -> Partition:
  """The partition that a paper's name stands for.

  Args:
    scheme: One of ``SCHEMES``.
    levels: Outermost first.

  Raises:
    ValueError: An unknown scheme, or too few levels for it.
  """
  if scheme not in SCHEMES:
    raise ValueError(
      f"scheme={scheme!r} must be one of "
      f"{', '.join(map(repr, SCHEMES))}"
    )
  *states, special = _named()[scheme]
  groups = {*states, special.get("secondary")}
  if len(levels) < 2 and groups & {"inner", "first"}:
    raise ValueError(
      f"scheme={scheme!r} needs two levels or more, and there are "
      f"{len(levels)}: e.g. levels=node:2,gpu:4"
    )
  depths = {
    "none": 0, "first": 1, "inner": len(levels) - 1, "all": len(levels)
  }
  special = {k: depths.get(v, v) for k, v in special.items() if v != "none"}
  return Partition(tuple(levels), *(depths[s] for s in states), **special)


def triples(levels: Sequence[Level]) -> Iterator[Partition]:
  """All partitions of weights, gradients and optimizer state, unquantised."""
  depths = range(len(levels) + 1)
  for w, g, o in itertools.combinations_with_replacement(depths, 3):
    yield Partition(tuple(levels), w, g, o)


def parse_levels(text: str, num_ranks: int) -> tuple[Level, ...]:
  """Reads nested levels from text.

  Args:
    text: ``"node:2,gpu:4"``, outermost first; "" is one level named data.
    num_ranks: Data-parallel ranks, the product of the sizes.

  Raises:
    ValueError: Not of this form, a name twice, or another product.
  """
  if not text:
    return (Level("data", num_ranks),)
  levels = []
  for part in text.split(","):
    name, _, size = (piece.strip() for piece in part.partition(":"))
    if not name.isidentifier() or not size.isdigit() or int(size) < 1:
      raise ValueError(
        f"levels={text!r}: {part!r} is not name:size, as in node:2,gpu:4"
      )
    levels.append(Level(name, int(size)))
  names = [level.name for level in levels]
  if len(set(names)) < len(names):
    raise ValueError(f"levels={text!r}: names must differ")
  product = math.prod(level.size for level in levels)
  if product != num_ranks:
    raise ValueError(
      f"levels={text!r} have {product} ranks, not the {num_ranks} "
      "data-parallel ones"
    )
  return tuple(levels)
