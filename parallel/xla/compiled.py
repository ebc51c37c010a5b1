"""Lists the collectives of a compiled program: what XLA made of a lowered one.

The entries have the type of `parallel.xla.ledger`, so that what was asked for
and what will run can be compared. XLA changes collectives:

- It merges small reductions into one with several operands.
- It turns a reduce-scatter into an all-reduce and a slice, in two operations
  or in a fusion of its own.
- It pads shapes and widens dtypes.
- It wraps a collective so that it runs beside compute, or spreads it over a
  chain of fusions with compute in them. Each fusion of a chain holds a copy of
  the collective; only the first one sends.
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
# XLA:TPU gives the copies of a collective in a chain of fusions one number.
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
    One entry per operand of each collective, with its executions per run of
    the program as the count; None where that is not known.
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
    # As in the lowered ledger: in a program that differentiates nothing, all is
    # forward.
    self.differentiates = any(
      "jvp(" in instruction.op_name
      for computation in module.computations.values()
      for instruction in computation.instructions
    )

  def entries(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> list[Collective]:
    """Returns what an instruction sends, with counts of one.

    In an asynchronous pair the start sends and the done does not.
    """
    return [
      entry
      for owner, found in self._find(computation, instruction)
      for entry in self._entry(owner, found, instruction.op_name)
    ]

  def chain(self, instruction: hlo.Instruction) -> str:
    """Returns the number of an instruction's chain of fusions, "" if none."""
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
    """Finds the collectives in an instruction and in what it wraps.

    Yields:
      A collective (or a kernel that sends), after the computation it is in.
    """
    sends = instruction.opcode.removesuffix("-start") in _KINDS
    # Most custom calls send nothing; kernels that do say so in their metadata.
    if instruction.opcode == "custom-call":
      sends = _kernel_sends(instruction) is not None
    if sends:
      yield computation, instruction
    elif instruction.opcode == "fusion" or (
      instruction.opcode.endswith("-start")
    ):
      for name in instruction.calls():
        inner = self.module.computations[name]
        # Only the first fusion of a chain has this mark.
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
    """Yields one ledger entry per operand of a collective.

    Args:
      computation: Where the collective is.
      found: The collective.
      outer: jax's name stack of the instruction that wraps it.
    """
    # XLA leaves some wrapped collectives without a name stack.
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
      # A fusion in which XLA:TPU reduces and slices: only the slice leaves it.
      kind = "reduce_scatter"
    if kind == "permute":
      axes, group_size = self._axes_of_pairs(found)
    else:
      axes, group_size = self._axes_of_groups(found)
    reduction = None
    if kind in ("all_reduce", "reduce_scatter"):
      combine = self.module.computations[found.calls("to_apply")[0]].root
      reduction = _REDUCTIONS.get(combine.opcode, combine.opcode)
    # Operands, not results: that is what the lowered ledger counts.
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
    """Returns the mesh axes of an instruction's groups, and the group size.

    HLO writes groups as names of mesh axes or as device numbers.
    """
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
    """Returns the axes of a permute, and the number of devices along them.

    They are those along which some source and its target have different
    coordinates.
    """
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
  """Reads the device numbers of each group from either form that HLO writes.

  Args:
    text: ``{{0,1},{2,3}}``, ``{}`` (all devices in one group) or an iota such
      as ``[4,2]<=[2,4]T(1,0)``: the numbers 0 to 7 as 2 x 4, transposed, and
      read off as 4 groups of 2.
    num_devices: Number of devices that the program runs on.

  Returns:
    The device numbers of each group.
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
  """What the lowered and the compiled program send over some axes in a phase.

  Attributes:
    axes: Mesh axes; empty for groups that no set of axes describes.
    phase: "forward", "backward" or "update", as ``Collective`` defines them.
    lowered: (kind, dtype) -> (executions, operand bytes) per run of the
      lowered program; (None, None) where a count is not known.
    compiled: (kind, dtype) -> (executions, operand bytes) per run of the
      compiled program. Each operand counts as an execution, so that merging
      collectives does not change the number.
  """

  axes: tuple[str, ...]
  phase: str
  lowered: dict[tuple[str, str], tuple[int, int]]
  compiled: dict[tuple[str, str], tuple[int, int]]

  @property
  def differs(self) -> bool:
    """Whether kinds, dtypes or bytes are not the same.

    Numbers of executions may differ: XLA splits and merges collectives.
    """
    return {k: b for k, (_, b) in self.lowered.items()} != {
      k: b for k, (_, b) in self.compiled.items()
    }


def compare(
  lowered: Iterable[Collective], compiled: Iterable[Collective]
) -> list[Difference]:
  """Compares what a lowered and a compiled program send.

  Args:
    lowered: Entries of the lowered program; those without bytes are left out.
    compiled: Entries of the compiled program, likewise.

  Returns:
    One `Difference` per set of axes and phase, equal ones included, in the
    order in which they first appear.
  """
  sides = []
  for entries in (lowered, compiled):
    side: dict = {}
    for entry in entries:
      if not entry.bytes:
        continue
      place_of = side.setdefault((entry.axes, entry.phase), {})
      count, total = place_of.get((entry.kind, entry.dtype), (0, 0))
      # One unknown count makes the sum unknown.
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
