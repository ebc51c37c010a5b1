"""Partitions: sharding depth of each part of the training state.

Data-parallel ranks form nested *levels*, for example 2 nodes of 4 GPUs of 2
dies. A partition shards weights over the w innermost levels, gradients over the
g innermost ones and optimizer state over the o innermost ones, w <= g <= o.
Ranks that differ only in the other levels hold replicas. Three levels thus have
20 partitions. Each named scheme (`SCHEMES`) is one of them, some with a second
copy of the weights and with codecs on the wire.

Between steps a rank stores one shard at depth o: float32 weights and the
optimizer's moments. Weights at depth w and gradients at depth g exist during a
step only.

Sources:

- zero1 to zero3: ZeRO, Rajbhandari et al., arXiv 1910.02054.
- hpz, zeropp: ZeRO++ (hpZ, qwZ, qgZ), Wang et al., arXiv 2306.10209; compared
  with the official code in DeepSpeed. As in that code, zeropp reduces gradients
  (qgZ) in two hops, one over all levels inside the outermost and one over the
  outermost, and rounds them twice. zeropp_by_level has one hop per level: three
  levels round three times, but fewer bytes cross the middle one. With encoded
  weights, DeepSpeed also encodes the gathers from the second copy and keeps the
  copy itself in 16 bits.
- mics: Zhang et al., arXiv 2205.00119; compared with DeepSpeed's code. Its
  partition group is arbitrary; here it is all levels but the outermost, which
  makes it equal to hsdp.
- hsdp, and zero3 as FSDP: Zhao et al., arXiv 2304.11277.
- frontier3: Xu et al., arXiv 2501.04266. Its abstract has three levels (dies,
  GPUs, nodes) on top of ZeRO++, and block-based quantisation. The depth of each
  state and of the second copy, and the codecs, are recalled, not read.
- All triples (w, g, o): AMSP, arXiv 2311.00257; PaRO, arXiv 2310.06003.

This module does not import jax, so that simulators and the trainer can both use
it.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import itertools
import math

from parallel.base.checks import known, not_negative

# Codecs of `parallel.kernels.codec` that are allowed for weights and gradients.
CODECS = ("none", "int8", "int4")
# Hops that reduce encoded gradients: one per level, or one over all levels
# inside the outermost and one over the outermost.
HOPS = ("by_level", "two")
# Forms of the shards of a tensor: slices of the flattened elements, whole rows
# (slices along the first dim), or the whole tensor on every rank.
FORMS = ("flat", "rows", "whole")
_STATES = ("weights", "gradients", "optimizer")


@dataclasses.dataclass(frozen=True)
class Level:
  """One level of data-parallel ranks.

  Attributes:
    name: Name of the level's axis.
    size: Number of logical ranks along it.
  """

  name: str
  size: int


@dataclasses.dataclass(frozen=True)
class Partition:
  """Sharding depth of weights, gradients and optimizer state.

  A depth is a number of levels, counted from the innermost: a state of depth d
  is sharded over the d innermost levels.

  Attributes:
    levels: Levels of data-parallel ranks, outermost first.
    weights: w, the depth of the weights during a step.
    gradients: g, the depth of accumulated gradients.
    optimizer: o, the depth of float32 weights and the optimizer's moments,
      which are stored between steps.
    secondary: Depth of a second copy of the weights, which the forward creates
      and the backward gathers from; None for no copy.
    weight_codec: Codec of weights on the wire; "none" sends the dtype of
      activations.
    gradient_codec: Codec of gradients on the wire, which are sent by all-to-all
      and summed in float32; "none" sends float32. All-reduces over the levels
      beyond ``optimizer`` are always float32.
    secondary_codec: Codec of the second copy and of its gathers; "none" keeps
      the dtype of activations.
    block: Number of elements that share a scale.
    coded_blocks: Minimum number of whole blocks in a rank's shard of a tensor
      for the tensor to be encoded; smaller tensors are sent as without codecs.
      0 encodes all tensors; a shard with few elements then takes one block.
    gradient_hops: "by_level" or "two": whether encoded gradients are reduced in
      one hop per level, or in one over all levels inside the outermost and one
      over the outermost. Each hop rounds once. No hop has levels on both sides
      of the depth ``gradients``.

  Raises:
    ValueError: The depths decrease from weights to optimizer, a value is
      unknown or out of range, or a codec or copy has no effect.

  Example:
    ZeRO-3 within a node and plain data parallelism between nodes, for a tensor
    of 1000 elements.

    >>> levels = (Level("node", 2), Level("gpu", 4))
    >>> partition = Partition(levels, weights=1, gradients=1, optimizer=1)
    >>> print(partition)
    weights / 4, gradients / 4, optimizer / 4
    >>> partition.num_ranks, partition.shard_size(1000)
    (8, 250)
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
  coded_blocks: int = 1
  gradient_hops: str = "by_level"

  def __post_init__(self) -> None:
    depths = [getattr(self, state) for state in _STATES]
    if not 0 <= depths[0] <= depths[1] <= depths[2] <= len(self.levels):
      raise ValueError(
        f"weights={depths[0]}, gradients={depths[1]} and optimizer={depths[2]} "
        f"must lie in [0, {len(self.levels)}] and must not decrease, since a "
        "rank updates only weights whose gradients it has"
      )
    for key in ("weight_codec", "gradient_codec", "secondary_codec"):
      known(f"{key}=", getattr(self, key), CODECS)
    known("gradient_hops=", self.gradient_hops, HOPS)
    not_negative("coded_blocks", self.coded_blocks)
    if self.secondary is None:
      if self.secondary_codec != "none":
        raise ValueError(
          f"secondary_codec={self.secondary_codec!r} has no effect without a "
          "second copy"
        )
    elif not 1 <= self.secondary <= self.optimizer:
      raise ValueError(
        f"secondary={self.secondary} must lie in [1, {self.optimizer}], since "
        "the second copy is sharded over levels of the optimizer"
      )
    elif not self.weights:
      raise ValueError(
        f"secondary={self.secondary} has no effect, since weights that are not "
        "sharded need no copy; leave it out"
      )
    if self.weight_codec != "none" and not self.optimizer:
      raise ValueError(
        f"weight_codec={self.weight_codec!r} has no effect, since no weights "
        "are gathered; use 'none'"
      )
    if self.gradient_codec != "none" and not self.optimizer:
      raise ValueError(
        f"gradient_codec={self.gradient_codec!r} has no effect, since no "
        "gradients are scattered and all-reduces are float32; use 'none'"
      )
    if self.block < 2 or self.block % 2:
      raise ValueError(f"block={self.block} must be even and at least 2")

  @property
  def inner(self) -> tuple[Level, ...]:
    """Levels of data-parallel ranks, innermost first.

    A depth d shards a state over the first d.
    """
    return self.levels[::-1]

  @property
  def num_ranks(self) -> int:
    """Number of data-parallel ranks."""
    return self.degree(len(self.levels))

  def degree(self, depth: int) -> int:
    """Returns the number of shards of a state with this depth."""
    return math.prod(level.size for level in self.inner[:depth])

  def shard_size(self, num_elements: int, unit: int = 1) -> int:
    """Returns the elements of one stored shard of a tensor, with padding.

    Args:
      num_elements: Elements of the tensor.
      unit: Number of consecutive elements, such as those of a row, that no
        shard divides.
    """
    return -(-num_elements // (unit * self.degree(self.optimizer))) * unit

  def padded(self, num_elements: int, unit: int = 1) -> int:
    """Returns the elements of a tensor after padding to equal shards.

    A tensor that is padded for the optimizer's depth is divisible at all
    smaller depths, too. The arguments are those of `shard_size`.
    """
    return self.shard_size(num_elements, unit) * self.degree(self.optimizer)

  def of_tensor(
    self, form: str = "flat", apart: Collection[str] = ()
  ) -> "Partition":
    """Returns the partition of one tensor.

    Args:
      form: One of ``FORMS``; every rank has a tensor that is "whole".
      apart: Names of the levels whose ranks have separate tensors, for example
        different experts: the tensor is neither cut nor summed over them.

    Example:
      >>> partition = named("zero3", [Level("data", 2), Level("expert", 4)])
      >>> print(partition.of_tensor(apart=["expert"]))
      weights / 2, gradients / 2, optimizer / 2
      >>> print(partition.of_tensor("whole"))
      weights / 1, gradients / 1, optimizer / 1
    """
    if form != "whole" and not apart:
      return self
    kept = [level.name not in apart for level in self.inner]
    depths = {
      key: 0 if form == "whole" else sum(kept[: getattr(self, key) or 0])
      for key in (*_STATES, "secondary")
    }
    cut, copied = depths["optimizer"], None
    if self.secondary is not None and depths["weights"]:
      # The copy is cut like the weights if it would not be cut at all.
      copied = depths["secondary"] or depths["weights"]
    return dataclasses.replace(
      self, **depths | {"secondary": copied},
      levels=tuple(x for x in self.levels if x.name not in apart),
      weight_codec=self.weight_codec if cut else "none",
      gradient_codec=self.gradient_codec if cut else "none",
      secondary_codec=self.secondary_codec if copied else "none",
    )

  def is_coded(self, shard: int) -> bool:
    """Returns whether a tensor with ``shard`` elements per shard is encoded."""
    return shard >= self.coded_blocks * self.block

  def hops(
    self, lower: int, upper: int, coded: bool = True
  ) -> list[range]:
    """Returns the levels of data-parallel ranks that each reduction covers.

    A reduction (hop) of gradients is over one or several levels.

    Args:
      lower: Number of innermost levels reduced before the first hop.
      upper: Number of innermost levels reduced after the last hop.
      coded: Whether any gradient is encoded; otherwise each hop is one level.

    Returns:
      Indices of the levels of each hop, 0 for the innermost level.
    """
    if not coded or self.gradient_hops == "by_level":
      return [range(j, j + 1) for j in range(lower, upper)]
    outermost = len(self.levels) - 1
    # Two hops at most: the levels inside the outermost one, then that one.
    cuts = (
      range(lower, min(upper, outermost)), range(max(lower, outermost), upper)
    )
    return [cut for cut in cuts if cut]

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
    if self.gradient_hops == "two" and len(self.levels) > 2:
      text += " in two hops"
    return text


def _scheme_table() -> dict[str, tuple[str, str, str, dict[str, str]]]:
  """Returns the named schemes.

  Returns:
    For each name the levels of data-parallel ranks over which weights,
    gradients and optimizer state are sharded ("none", "first" for the
    innermost, "inner" for all but the outermost, "all"), and further fields of
    `Partition`.
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
    "zeropp": (
      "all", "all", "all",
      {"secondary": "inner", "gradient_hops": "two"} | quantised,
    ),
    "zeropp_by_level": (
      "all", "all", "all", {"secondary": "inner"} | quantised
    ),
    "frontier3": ("first", "inner", "all", {}),
    "frontier3_quantised": (
      "first", "inner", "all",
      {"secondary": "inner", "secondary_codec": "int8"} | quantised,
    ),
  }


SCHEMES = tuple(_scheme_table())


def named(scheme: str, levels: Sequence[Level]) -> Partition:
  """Returns the partition of a named scheme.

  Args:
    scheme: One of ``SCHEMES``.
    levels: Levels of data-parallel ranks, outermost first.

  Raises:
    ValueError: The scheme is unknown, or there are too few levels for it.

  Example:
    >>> print(named("hpz", [Level("node", 2), Level("gpu", 4)]))
    weights / 8, gradients / 8, optimizer / 8, second copy / 4
  """
  known("scheme=", scheme, SCHEMES)
  *states, special = _scheme_table()[scheme]
  groups = {*states, special.get("secondary")}
  if len(levels) < 2 and groups & {"inner", "first"}:
    raise ValueError(
      f"scheme={scheme!r} needs two levels or more, as in levels=node:2,gpu:4, "
      f"but there are {len(levels)}"
    )
  depths = {
    "none": 0, "first": 1, "inner": len(levels) - 1, "all": len(levels)
  }
  # Values that are not keys of `depths`, such as codecs, are kept unchanged.
  special = {k: depths.get(v, v) for k, v in special.items() if v != "none"}
  return Partition(tuple(levels), *(depths[s] for s in states), **special)


def enumerate_partitions(levels: Sequence[Level]) -> Iterator[Partition]:
  """Yields all partitions over levels of data-parallel ranks.

  Those with a second copy of the weights or with codecs are left out.
  """
  depths = range(len(levels) + 1)
  for w, g, o in itertools.combinations_with_replacement(depths, 3):
    yield Partition(tuple(levels), w, g, o)


def parse_levels(text: str, num_ranks: int) -> tuple[Level, ...]:
  """Parses nested levels from text.

  Args:
    text: Levels, outermost first, as in ``"node:2,gpu:4"``; "" is one level
      named data.
    num_ranks: Number of data-parallel ranks, the product of the sizes.

  Raises:
    ValueError: The text does not have this form, a name occurs twice, or the
      product differs from ``num_ranks``.

  Example:
    >>> parse_levels("node:2,gpu:4", num_ranks=8)
    (Level(name='node', size=2), Level(name='gpu', size=4))
  """
  if not text:
    return (Level("data", num_ranks),)
  levels = []
  for part in text.split(","):
    name, _, size = (piece.strip() for piece in part.partition(":"))
    if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
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
