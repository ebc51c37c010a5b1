"""Ledger of a compiled program: the collectives that XLA made of it.

The entries are those of `parallel.xla.ledger`, so that what was asked for and
what will run stand side by side. XLA merges small reductions into one with
several operands, turns a reduce-scatter into an all-reduce and a slice (in one
operation of its own or in two), pads shapes, widens dtypes, and wraps a
collective to run beside compute, or spreads one over a chain of fusions with
compute in them: its first fusion sends.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import math
import re

import jax
import numpy as np

from parallel.xla import hlo, operations
from parallel.xla.ledger import Collective, place

_KINDS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "reduce-scatter": "reduce_scatter",
  "all-to-all": "all_to_all",
  "ragged-all-to-all": "all_to_all",
  "collective-permute": "permute",
  "collective-broadcast": "broadcast",
}
# Of the copies of a collective in a chain of XLA:TPU's fusions.
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_REDUCTIONS = {"add": "add", "maximum": "max", "minimum": "min"}


def collectives(
  module: hlo.Module, mesh: jax.sharding.Mesh
) -> list[Collective]:
  """Lists the collectives of a compiled program in the order of execution.

  Args:
    module: The compiled program.
    mesh: The mesh it was compiled for; names the axes.

  Returns:
    One entry per operand of each collective; counts as in the lowered ledger.
  """
  reader = Reader(module, mesh)
  return [
    dataclasses.replace(entry, count=count)
    for computation, count in module.runs()
    for instruction in computation.instructions
    for entry in reader.entries(computation, instruction)
  ]


class Reader:
  """Reads single instructions of a module as ledger entries of count one."""

  def __init__(self, module: hlo.Module, mesh: jax.sharding.Mesh) -> None:
    self.module = module
    self.sizes = dict(mesh.shape)
    self.axes_of_groups = dict(operations.groups_of_axes(self.sizes))
    self.differentiates = any(
      "jvp(" in instruction.op_name
      for computation in module.computations.values()
      for instruction in computation.instructions
    )

  def entries(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> list[Collective]:
    """What an instruction sends; for an asynchronous pair, its start does."""
    return [
      entry
      for owner, found in self._find(computation, instruction)
      for entry in self._entry(owner, found, instruction.op_name)
    ]

  def chain(self, instruction: hlo.Instruction) -> str:
    """Number of the chain of fusions whose link this is; "": of none."""
    if instruction.opcode != "fusion":
      return ""
    found = (
      _CHAIN.search(inner.attributes)
      for name in instruction.calls()
      for inner in self.module.computations[name].instructions
    )
    return next((match[1] for match in found if match), "")

  def _find(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    """The collective itself, inside what wraps it."""
    sends = instruction.opcode.removesuffix("-start") in _KINDS
    if instruction.opcode == "custom-call":
      sends = _kernel_sends(instruction) is not None
    if sends:
      yield computation, instruction
    elif instruction.opcode == "fusion" or (
      instruction.opcode.endswith("-start")
    ):
      for name in instruction.calls():
        inner = self.module.computations[name]
        if self.chain(instruction) and not any(
          "AsyncCollectiveStart" in i.attributes for i in inner.instructions
        ):
          continue
        for wrapped in inner.instructions:
          if not wrapped.opcode.endswith("-done"):
            yield from self._find(inner, wrapped)

  def _entry(
    self, computation: hlo.Computation, found: hlo.Instruction, outer: str
  ) -> Iterator[Collective]:
    phase, rematted, where = place(found.op_name or outer)
    if not self.differentiates:
      phase = "forward"
    if found.opcode == "custom-call":
      sent = _kernel_sends(found)
      yield Collective(
        "permute", (sent.axis,), self.sizes[sent.axis], sent.dtype, sent.shape,
        1, phase, rematted, None, where,
      )
      return
    kind = _KINDS[found.opcode.removesuffix("-start")]
    if computation.name.startswith("all-reduce-scatter"):
      kind = "reduce_scatter"  # XLA:TPU's own: its slice alone comes out
    if kind == "permute":
      axes, group_size = self._axes_of_pairs(found)
    else:
      axes, group_size = self._axes_of_groups(found)
    reduction = None
    if kind in ("all_reduce", "reduce_scatter"):
      combine = self.module.computations[found.calls("to_apply")[0]].root
      reduction = _REDUCTIONS.get(combine.opcode, combine.opcode)
    shapes = itertools.chain.from_iterable(
      operand.shapes for operand in computation.operands(found)
    )
    for shape in shapes:
      yield Collective(
        kind, axes, group_size, shape.dtype, shape.dims, 1, phase, rematted,
        reduction, where,
      )

  def _axes_of_groups(
    self, found: hlo.Instruction
  ) -> tuple[tuple[str, ...], int]:
    named = re.search(
      r"replica_groups=mesh\[[^\]]*\]\s*\{([^}]*)\}", found.attributes
    )
    if named:
      names = set(re.findall(r"'([^']+)'", named[1]))
      if ":" in named[1] or not names <= set(self.sizes):  # a part of an axis
        return (), 0
      axes = tuple(n for n, s in self.sizes.items() if n in names and s > 1)
      return axes, math.prod(self.sizes[n] for n in axes)
    groups = replica_groups(
      found.attribute("replica_groups"), math.prod(self.sizes.values())
    )
    key = frozenset(frozenset(row) for row in groups)
    return self.axes_of_groups.get(key, ()), max(map(len, groups), default=1)

  def _axes_of_pairs(
    self, found: hlo.Instruction
  ) -> tuple[tuple[str, ...], int]:
    numbers = re.findall(r"\d+", found.attribute("source_target_pairs"))
    pairs = np.array(numbers, int).reshape(-1, 2)
    places = np.stack(np.unravel_index(pairs, tuple(self.sizes.values())))
    moves = (places[..., 0] != places[..., 1]).any(axis=-1)
    axes = tuple(itertools.compress(self.sizes, moves))
    return axes, math.prod(self.sizes[name] for name in axes)


def _kernel_sends(call: hlo.Instruction) -> operations.KernelSends | None:
  results = sum(math.prod(shape.dims) for shape in call.shapes)
  return operations.kernel_sends(call.attributes, results)


def replica_groups(text: str, num_devices: int) -> list[list[int]]:
  """Device numbers of each group, from either form that HLO writes.

  Args:
    text: ``{{0,1},{2,3}}``, ``{}`` (all in one) or an iota such as
      ``[4,2]<=[2,4]T(1,0)``.
    num_devices: Of the program.

  Returns:
    The groups.
  """
  iota = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  if iota:
    shape, source, order = (
      [int(n) for n in part.split(",")] if part else None
      for part in iota.groups()
    )
    numbers = np.arange(math.prod(source)).reshape(source)
    return np.transpose(numbers, order).reshape(shape).tolist()
  rows = re.findall(r"\{([\d,]+)\}", text)
  if not rows:
    return [list(range(num_devices))]
  return [[int(n) for n in row.split(",")] for row in rows]


@dataclasses.dataclass(frozen=True)
class Difference:
  """What the lowered and the compiled program send on one axis in one phase.

  Attributes:
    axes: Mesh axes; empty: groups that no axes describe.
    phase: As in ``Collective``.
    lowered: (kind, dtype) -> (executions, operand bytes) per step.
    compiled: The same; executions count operands, not merged operations.
  """

  axes: tuple[str, ...]
  phase: str
  lowered: dict[tuple[str, str], tuple[int, int]]
  compiled: dict[tuple[str, str], tuple[int, int]]

  @property
  def differs(self) -> bool:
    """Whether kinds, dtypes or bytes are not the same."""
    return {k: b for k, (_, b) in self.lowered.items()} != {
      k: b for k, (_, b) in self.compiled.items()
    }


def compare(
  lowered: Iterable[Collective], compiled: Iterable[Collective]
) -> list[Difference]:
  """Puts two ledgers side by side; entries without bytes are left out."""
  sides = []
  for entries in (lowered, compiled):
    side: dict = {}
    for entry in entries:
      if not entry.bytes:
        continue
      place_of = side.setdefault((entry.axes, entry.phase), {})
      count, total = place_of.get((entry.kind, entry.dtype), (0, 0))
      known = entry.count is not None and count is not None
      place_of[entry.kind, entry.dtype] = (
        (count + entry.count, total + entry.count * entry.bytes)
        if known
        else (None, None)
      )
    sides.append(side)
  keys = list(dict.fromkeys([*sides[0], *sides[1]]))
  return [
    Difference(axes, phase, *(side.get((axes, phase), {}) for side in sides))
    for axes, phase in keys
  ]
