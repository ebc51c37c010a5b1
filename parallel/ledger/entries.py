"""Ledger entries, one per collective operand: selection, sums, merging.

An instruction that a ledger cannot count is listed as an `UnknownInstruction`.
"""

import collections
from collections.abc import Iterable
import dataclasses
import fractions
import math
import re
from typing import Any, Literal

import numpy as np

Phase = Literal["forward", "backward", "update"]
# Axis of the traffic between TPU slices, which run one program each.
SLICE_AXIS = "slices"


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operand of a collective operation.

  Attributes:
    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
      "ragged_all_to_all", "permute" or "broadcast".
    axes: Mesh axes over which it communicates, in mesh order, without axes of
      size 1. If it is empty and `group_size` > 1, no set of mesh axes describes
      the groups of devices. `SLICE_AXIS` is the network between TPU slices.
    group_size: Number of devices in one replica group, in the largest one if
      groups differ in size; None if unknown.
    dtype: NumPy name of the element type, such as "bfloat16".
    shape: Shape of the operand on one device.
    count: Executions per execution of the program; None if unknown.
    phase: "backward" for the backward pass including recomputation; "forward"
      for the rest of the differentiated function; "update" for the rest of a
      program that differentiates (gradient reduction, clipping). In a program
      without differentiation all entries are "forward".
    rematted: Whether it repeats a forward collective in the backward pass.
    reduction: "add", "max", ...; None if nothing is reduced.
    where: `jax.named_scope` names from the outermost in, joined by "/".
    smallest_group: Number of devices in the smallest replica group; None if all
      groups have `group_size` devices.

  Example:
    >>> gradients = Collective(
    ...   "all_reduce", ("data",), 4, "float32", (1024,), 12, "update", False,
    ...   "add", "blocks",
    ... )
    >>> gradients.bytes, gradients.wire_bytes_ring
    (4096, 6144.0)
    >>> total([gradients], axis="data")  # 12 executions
    49152
  """

  kind: str
  axes: tuple[str, ...]
  group_size: int | None
  dtype: str
  shape: tuple[int, ...]
  count: int | None
  phase: Phase
  rematted: bool
  reduction: str | None
  where: str
  smallest_group: int | None = None

  @property
  def over(self) -> str:
    """Axes joined by ","; the number of devices if no axes describe them."""
    if self.axes:
      return ",".join(self.axes)
    if self.group_size is None:
      return "all devices, number unknown"
    least = "" if self.smallest_group is None else f"{self.smallest_group} to "
    return f"{least}{self.group_size} devices"

  @property
  def at_most(self) -> bool:
    """Whether its bytes are an upper bound.

    The number of rows that a ragged all-to-all sends depends on data, and a
    device in a smaller group sends less than one in the largest group.
    """
    return self.kind == "ragged_all_to_all" or self.smallest_group is not None

  @property
  def label(self) -> str:
    """Kind, followed by ", at most" if its bytes are an upper bound."""
    return f"{self.kind}, at most" if self.at_most else self.kind

  @property
  def elements(self) -> int:
    """Number of elements of the operand on one device."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Operand bytes per device and execution; 0 in a group of one device.

    An element of a type narrower than a byte counts as one byte.
    """
    if self.group_size == 1:  # an axis of size 1: no communication
      return 0
    return self.elements * np.dtype(self.dtype).itemsize

  @property
  def wire_bytes_ring(self) -> float | None:
    """Bytes that a device sends per execution with the ring algorithm.

    For n devices in a group and b operand bytes: all-reduce 2(n-1)/n b,
    all-gather (n-1) b, reduce-scatter and all-to-all (n-1)/n b, permute and
    broadcast (a pipeline along the ring) b. A ragged all-to-all sends at most
    b, since all rows may be those of other devices. None if n is unknown.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, section 4.
    """
    # The operand of an all-gather is one slice of the result; the operands of
    # the other kinds have the size of the whole array.
    n = self.group_size
    if self.kind in ("permute", "broadcast", "ragged_all_to_all"):
      return float(self.bytes)
    if n is None:
      return None
    if self.kind == "all_reduce":
      return 2 * (n - 1) * self.bytes / n
    if self.kind == "all_gather":
      return float((n - 1) * self.bytes)
    return (n - 1) * self.bytes / n

  @property
  def ring_hops(self) -> int:
    """Number of messages that a device sends one after another in a ring.

    2(n-1) for an all-reduce of n devices, 1 for a permute, n-1 otherwise.
    """
    n = self.group_size
    if self.kind == "permute":
      return 1
    return (2 if self.kind == "all_reduce" else 1) * (n - 1)


@dataclasses.dataclass(frozen=True)
class UnknownInstruction:
  """Instruction that may communicate, and whose bytes are not counted.

  Attributes:
    name: Name of the instruction, or name stack of a StableHLO operation; "" if
      it has none.
    what: Operation, such as "custom call of 'pfft3d'".
    source: FILE:LINE that made it; "" if it is not known.
    target: Target of a custom call; "" for other instructions.
  """

  name: str
  what: str
  source: str = ""
  target: str = ""

  def __str__(self) -> str:
    return f"{self.name}: {self.what}" if self.name else self.what


def select(
  entries: Iterable[Collective],
  *,
  kind: str | None = None,
  axis: str | tuple[str, ...] | None = None,
  phase: Phase | None = None,
  dtype: str | None = None,
  rematted: bool | None = None,
) -> list[Collective]:
  """Returns the entries that match every given argument.

  Args:
    entries: Result of `collectives`.
    kind: Kind to keep.
    axis: A name keeps entries over that axis, alone or with others, so that a
      reduction over two axes matches both names; a tuple of names keeps entries
      over exactly these axes.
    phase: Phase to keep.
    dtype: NumPy name of the dtype to keep.
    rematted: True keeps the recomputed entries, False the others.

  Returns:
    The matching entries, in their order.
  """

  def keep(entry: Collective) -> bool:
    if isinstance(axis, str) and axis not in entry.axes:
      return False
    # Compared as sets, since the order of a tuple does not matter.
    if isinstance(axis, tuple) and set(axis) != set(entry.axes):
      return False
    return (
      kind in (None, entry.kind)
      and phase in (None, entry.phase)
      and dtype in (None, entry.dtype)
      and rematted in (None, entry.rematted)
    )

  return [entry for entry in entries if keep(entry)]


def total(entries: Iterable[Collective], **wanted: Any) -> int:
  """Sums operand bytes per device over one execution of the program.

  Args:
    entries: Result of `collectives`.
    **wanted: Arguments of `select`; only matching entries are counted.

  Returns:
    The sum of `bytes * count` over the selected entries.

  Raises:
    ValueError: A selected entry of more than zero bytes has an unknown count.
  """
  selected = select(entries, **wanted)
  # Unknown counts of entries without bytes do not affect the sum.
  unknown = [c for c in selected if c.count is None and c.bytes]
  if unknown:
    raise ValueError(
      f"{len(unknown)} collectives run an unknown number of times, in a loop "
      "without a constant trip count or in one branch of a conditional, so the "
      f"total is unknown; the first is {unknown[0]}"
    )
  return sum(c.bytes * c.count for c in selected if c.count is not None)


# Scope name that declares the share of a conditional's runs that take a branch.
_RUNS = re.compile(r"\bruns_(\d+)_of_(\d+)\b")


def branch_run_shares(path: str) -> list[fractions.Fraction]:
  """Returns the fractions of executions that take a scope path's branches.

  Args:
    path: Scopes from the outermost in, joined by "/". The name ``runs_2_of_5``
      declares that two of five executions of a conditional take this branch.

  Returns:
    One fraction per scope ``runs_N_of_M``, outermost first.

  Example:
    >>> branch_run_shares("step/runs_2_of_5/blocks")
    [Fraction(2, 5)]
  """
  return [fractions.Fraction(*map(int, n)) for n in _RUNS.findall(path)]


def branches_are_equal(branches: Iterable[Iterable[Collective]]) -> bool:
  """Returns whether all branches of a conditional have equal collectives.

  Order and named scopes may differ.
  """
  # Multisets: branches may order their collectives differently.
  first, *others = (
    collections.Counter(dataclasses.replace(c, where="") for c in branch)
    for branch in branches
  )
  return all(other == first for other in others)


def merge(entries: Iterable[Collective]) -> list[Collective]:
  """Merges entries that differ in their counts only.

  Args:
    entries: Result of `collectives`.

  Returns:
    Distinct entries in the order of first appearance, with summed counts.
    Entries with an unknown count are merged separately; the count remains
    unknown.
  """
  # (entry with count 0, whether its count is unknown) -> summed count. The flag
  # separates unknown from known counts of the same entry.
  counts: dict[tuple[Collective, bool], int] = {}
  for entry in entries:
    key = dataclasses.replace(entry, count=0), entry.count is None
    counts[key] = counts.get(key, 0) + (entry.count or 0)
  return [
    dataclasses.replace(entry, count=None if unknown else count)
    for (entry, unknown), count in counts.items()
  ]
