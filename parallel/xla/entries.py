"""Entries of a ledger: one collective each, chosen, added up, merged."""

import collections
from collections.abc import Iterable
import dataclasses
import fractions
import math
import re
from typing import Any, Literal

import numpy as np

Phase = Literal["forward", "backward", "update"]


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operand of a collective operation.

  Attributes:
    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"
      or "broadcast".
    axes: the mesh axes over which it communicates, in mesh order, without
      those of size 1. If it is empty and `group_size` > 1, no set of mesh axes
      describes the groups of devices.
    group_size: number of devices in one replica group.
    dtype: numpy name of the element type, such as "bfloat16".
    shape: shape of the operand on one device.
    count: executions per run of the program; None where it is not known.
    phase: "backward" for what runs in the backward pass, recomputation
      included; "forward" for the rest of the differentiated function; "update"
      for the rest of a program that differentiates (gradient reduction,
      clipping). All of a program that does not differentiate is "forward".
    rematted: whether it repeats a forward collective in the backward pass.
    reduction: "add", "max", ...; None if nothing is reduced.
    where: `jax.named_scope` names from the outermost in, joined by "/".
  """

  kind: str
  axes: tuple[str, ...]
  group_size: int
  dtype: str
  shape: tuple[int, ...]
  count: int | None
  phase: Phase
  rematted: bool
  reduction: str | None
  where: str

  @property
  def elements(self) -> int:
    """Number of elements of the operand on one device."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Operand bytes per device and execution; 0 in a group of one device.

    An element of a type narrower than a byte counts as one byte.
    """
    if self.group_size == 1:
      return 0
    return self.elements * np.dtype(self.dtype).itemsize

  @property
  def wire_bytes_ring(self) -> float:
    """Bytes that a device sends per execution under the ring algorithm.

    With n devices in a group and b operand bytes: all-reduce 2(n-1)/n b,
    all-gather (n-1) b, reduce-scatter and all-to-all (n-1)/n b, permute and
    broadcast (a pipeline along the ring) b.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, section 4.
    """
    n = self.group_size
    if self.kind == "all_reduce":
      return 2 * (n - 1) * self.bytes / n
    if self.kind == "all_gather":
      return float((n - 1) * self.bytes)
    if self.kind in ("reduce_scatter", "all_to_all"):
      return (n - 1) * self.bytes / n
    return float(self.bytes)


def select(
  entries: Iterable[Collective],
  *,
  kind: str | None = None,
  axis: str | tuple[str, ...] | None = None,
  phase: Phase | None = None,
  dtype: str | None = None,
  rematted: bool | None = None,
) -> list[Collective]:
  """Keeps the entries that agree with every argument given.

  Args:
    entries: what `collectives` returned.
    kind: the kind to keep.
    axis: a name keeps what communicates over that axis, alone or with others,
      so a reduction over two axes is kept by both names; a tuple of names
      keeps what communicates over exactly these axes.
    phase: the phase to keep.
    dtype: numpy name of the dtype to keep.
    rematted: True keeps the recomputed entries, False the others.

  Returns:
    The entries that are kept, in their order.
  """

  def keep(entry: Collective) -> bool:
    if isinstance(axis, str) and axis not in entry.axes:
      return False
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
  """Sums operand bytes per device over one run of the program.

  Args:
    entries: what `collectives` returned.
    **wanted: what `select` takes; only these entries are counted.

  Returns:
    The sum of `bytes * count` over the selected entries.

  Raises:
    ValueError: if a selected entry that carries bytes has an unknown count.
  """
  selected = select(entries, **wanted)
  unknown = [c for c in selected if c.count is None and c.bytes]
  if unknown:
    raise ValueError(
      f"{len(unknown)} collectives run an unknown number of times (in a loop "
      "without constant trip count, or in one branch of a conditional), so "
      f"that there is no total; the first: {unknown[0]}"
    )
  return sum(c.bytes * c.count for c in selected if c.count is not None)


# A scope that tells how often a branch runs, as `shares` reads it.
_RUNS = re.compile(r"\bruns_(\d+)_of_(\d+)\b")


def shares(path: str) -> list[fractions.Fraction]:
  """Reads of how many runs of its conditionals a place in a program is part.

  Args:
    path: Scopes from the outermost in, joined by "/". One of the name
      ``runs_2_of_5`` says that of five times that a conditional is reached two
      take this branch.

  Returns:
    A number for each such scope in turn.
  """
  return [fractions.Fraction(*map(int, n)) for n in _RUNS.findall(path)]


def alike(branches: Iterable[Iterable[Collective]]) -> bool:
  """Tells whether the branches of a conditional send the same.

  The named scopes may differ.
  """
  first, *others = (
    collections.Counter(dataclasses.replace(c, where="") for c in branch)
    for branch in branches
  )
  return all(other == first for other in others)


def merge(entries: Iterable[Collective]) -> list[Collective]:
  """Joins entries that differ in nothing but their count.

  Args:
    entries: what `collectives` returned.

  Returns:
    Distinct entries in the order of their first appearance, with counts added
    up. Those of unknown count are joined among themselves and stay unknown.
  """
  counts: dict[tuple[Collective, bool], int] = {}
  for entry in entries:
    key = dataclasses.replace(entry, count=0), entry.count is None
    counts[key] = counts.get(key, 0) + (entry.count or 0)
  return [
    dataclasses.replace(entry, count=None if unknown else count)
    for (entry, unknown), count in counts.items()
  ]
