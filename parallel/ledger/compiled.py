"""Collectives of a compiled program, after XLA's transformations.

The entries have the type of `parallel.ledger.ledger`, so that the requested
collectives (lowered) can be compared with the executed ones (compiled).
Programs with automatic sharding (`jit` with shardings) have no collectives
before compilation. In other programs XLA changes them:

- It merges small reductions into one with several operands.
- It replaces a reduce-scatter by an all-reduce and a slice, in two operations
  or in a separate fusion.
- It pads shapes and widens dtypes.
- It wraps a collective to run concurrently with compute, or spreads it over a
  chain of fusions that contain compute. Each fusion of a chain holds a copy of
  the collective; only the first one sends.
- XLA:TPU compiles one program per slice, which sends to other slices by
  transfers to the host's runtime (megascale); they are entries over the axis
  `SLICE_AXIS`.
- XLA:GPU writes pipelined permutes as sends and receives.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import re
from typing import NamedTuple

import jax
import numpy as np

from parallel.ledger import hlo, operations, silent
from parallel.ledger.entries import (
  SLICE_AXIS,
  UnknownInstruction,
  branches_are_equal,
)
from parallel.ledger.groups import Group, MeshAxes, replica_groups
from parallel.ledger.ledger import Collective, parse_name_stack
from parallel.ledger.sources import SourceLines

# HLO opcode, without "-start" -> kind of a ledger entry.
_KINDS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "reduce-scatter": "reduce_scatter",
  "all-to-all": "all_to_all",
  "ragged-all-to-all": "ragged_all_to_all",
  "collective-permute": "permute",
  "collective-broadcast": "broadcast",
  "send": "permute",
}
# Transfer type of a send to other slices -> kind.
_SLICE_KINDS = {
  "ALL_REDUCE": "all_reduce", "ALL_GATHER": "all_gather",
  "REDUCE_SCATTER": "reduce_scatter", "ALL_TO_ALL": "all_to_all",
  "ONE_TO_ONE": "permute",
}
_MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
# Pairs of a permute, of a send or of a receive.
SOURCE_TARGET_PAIRS = re.compile(r'source_target_pairs="?(\{[\d,{}\s]*\})')
# Instructions whose computation is read where they are.
_WRAPPERS = ("fusion",) + tuple(
  f"{name}-start" for name in ("async", "call", "custom-call", "fusion")
)
# Suffix of the opcodes of an asynchronous pair.
_SUFFIX = re.compile(r"-(start|update|done)$")
# XLA:TPU assigns one chain_id to all copies of a collective in a chain of
# fusions.
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
# HLO opcode of a reducer's root -> name in the ledger of lowered programs.
_REDUCTIONS = {"add": "add", "maximum": "max", "minimum": "min"}


def collectives(
  module: hlo.Module, mesh: jax.sharding.Mesh
) -> list[Collective]:
  """Lists the collectives of a compiled program in the order of execution.

  Args:
    module: The compiled program.
    mesh: Mesh that the program was compiled for; names the axes.

  Returns:
    One entry per operand of each collective. Its count is the number of
    executions per execution of the program, None if unknown.

  Raises:
    ValueError: The program was compiled for another mesh.
    NotImplementedError: An instruction may communicate in a form that is not
      read (`Reader.unknown`).
  """
  return Reader(module, mesh).collectives()


def groups_list_replicas(found: hlo.Instruction) -> bool:
  """Returns whether the groups of a collective list replicas, not devices.

  Such a group contains all partitions of its replicas, whose number the
  instruction does not give. Source: ``GetCollectiveOpGroupMode`` of XLA.
  """
  return found.opcode.removesuffix("-start") in (
    "all-reduce", "all-gather", "reduce-scatter"
  ) and found.attribute("channel_id") != "" and (
    found.attribute("use_global_device_ids") != "true"
  )


class Reader:
  """Reads the instructions of a compiled program as ledger entries."""

  def __init__(
    self, module: hlo.Module, mesh: jax.sharding.Mesh, strict: bool = True,
    counted: bool = True,
  ) -> None:
    """Initializes a reader.

    Args:
      module: The compiled program.
      mesh: Mesh that the program was compiled for.
      strict: Whether `unknown` instructions are errors; otherwise they are left
        out.
      counted: Whether the number of devices is known.
    """
    self.module, self.strict = module, strict
    self.sizes = dict(mesh.shape)
    self.mesh_axes = MeshAxes(self.sizes, counted)
    # As in the ledger of lowered programs: without differentiation, the phase
    # of all entries is "forward".
    self.differentiates = any(
      "jvp(" in instruction.op_name
      for computation in module.computations.values()
      for instruction in computation.instructions
    )

  def collectives(self, start: str | None = None) -> list[Collective]:
    """Returns the ledger entries of one execution of a computation.

    Their counts are numbers of executions.

    Args:
      start: Name of the computation; None for the whole program.
    """
    return [
      dataclasses.replace(entry, count=count)
      for computation, count in self.runs(start)
      for instruction in computation.instructions
      for entry in self.entries(computation, instruction)
    ]

  def runs(
    self, start: str | None = None
  ) -> Iterator[tuple[hlo.Computation, int | None]]:
    """Yields (computation, number of executions), as `hlo.Module.runs` does.

    The executions are those in one execution of the computation ``start``, by
    default the whole program. If all branches of a conditional send the same,
    only the first branch is yielded, and its number is known.
    """
    return self.module.runs(
      start,
      lambda branches: branches_are_equal(map(self.collectives, branches))
    )

  def entries(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> list[Collective]:
    """Returns the entries of an instruction, with counts of one.

    The start of an asynchronous pair has entries, its done has none.
    """
    return [
      entry
      for owner, found in self.find(computation, instruction)
      for entry in self.entry(owner, found, instruction.op_name)
    ]

  def chain(self, instruction: hlo.Instruction) -> str:
    """Returns the chain_id of an instruction's chain of fusions, "" if none."""
    if instruction.opcode != "fusion":
      return ""
    found = (
      _CHAIN.search(inner.attributes)
      for name in instruction.calls()
      for inner in self.module.computations[name].instructions
    )
    return next((match[1] for match in found if match), "")

  def done(self, computation: hlo.Computation, start: int) -> int:
    """Returns the index of the `-done` that matches the `-start` at ``start``.

    The result is ``start`` itself for a synchronous instruction.
    """
    order = computation.instructions
    name = order[start].name
    # XLA:TPU may spread a collective over a chain of fusions that contain
    # compute. The first fusion sends, the last one returns the result.
    chain = self.chain(order[start])
    if chain:
      # Indices of the fusions of the chain.
      links = [i for i, x in enumerate(order) if self.chain(x) == chain]
      return links[-1]
    if not order[start].opcode.endswith(("-start", "send")):
      return start  # synchronous: done where it starts
    # start -> update -> ... -> done, each the operand of the next. An update
    # does not wait; the done is the first other user.
    for index in range(start + 1, len(order)):
      if name in order[index].operands:
        if not order[index].opcode.endswith("-update"):
          return index
        name = order[index].name
    return start

  def host_copy(
    self, computation: hlo.Computation, start: int
  ) -> tuple[bool, int] | None:
    """Describes the copy between device and host that begins at ``start``.

    Returns:
      Whether it copies to the host, and its bytes; None if it is no such copy.
    """
    inner, found = computation, computation.instructions[start]
    wraps = found.opcode.removesuffix("-start") in ("fusion", "async")
    if wraps:
      # XLA:GPU wraps the copy, whose operands are the wrapper's parameters.
      inner = self.module.computations[found.calls()[0]]
      found = inner.root
    opcode = found.opcode.removesuffix("-start")
    if opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
      return None
    result = found
    if not wraps:
      result = computation.instructions[self.done(computation, start)]
    source, *others = inner.operands(found)
    to_host, moved = result.shapes[0].on_host, result
    if opcode == "dynamic-update-slice":  # (buffer, update, indices)
      source = moved = others[0]
    if source.shapes[0].on_host == to_host:
      return None
    return to_host, moved.shapes[0].bytes

  def find(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Iterator[tuple[hlo.Computation, hlo.Instruction]]:
    """Finds the collectives in an instruction and in computations it wraps.

    Yields:
      Pairs (computation, collective or sending kernel in that computation).
    """
    if self.strict and self.unknown(computation, instruction):
      raise NotImplementedError(f"the ledger cannot read {instruction.opcode}")
    if self._sends(instruction):
      yield computation, instruction
    elif instruction.opcode in _WRAPPERS:
      # Fusions and generic async-start instructions wrap a computation, which
      # may contain the collective.
      for name in instruction.calls():
        inner = self.module.computations[name]
        # Only the first fusion of a chain contains AsyncCollectiveStart.
        if self.chain(instruction) and not any(
          "AsyncCollectiveStart" in i.attributes for i in inner.instructions
        ):
          continue
        for wrapped in inner.instructions:
          if not wrapped.opcode.endswith("-done"):  # its start is counted
            yield from self.find(inner, wrapped)

  def _sends(self, instruction: hlo.Instruction) -> bool:
    """Returns whether an instruction is a collective that `entry` reads."""
    opcode = instruction.opcode.removesuffix("-start")
    # Most custom calls send nothing; sending kernels declare it in metadata.
    if opcode == "custom-call":
      return operations.kernel_sends(instruction.attributes) is not None
    if opcode == "send":
      return _is_slice_transfer(instruction) or len(self.pairs(instruction)) > 0
    return opcode in _KINDS

  def unknown(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> str:
    """Describes how an instruction may communicate without being counted.

    The result is "" for an instruction that is counted, or sends nothing.
    """
    opcode = _SUFFIX.sub("", instruction.opcode)
    if instruction.opcode in ("send-done", "recv-done"):
      return ""  # the matching send is counted
    if self._sends(instruction):
      operands = self._operands(computation, instruction)
      if opcode == "custom-call" or all(o.shapes for o in operands):
        return ""
      return f"{opcode} of operands of an unknown type"
    # A wrapped call is read in the computation of its wrapper.
    if instruction.opcode == "custom-call" or (
      instruction.opcode == "custom-call-start" and not instruction.calls()
    ):
      target = instruction.attribute("custom_call_target")
      effect = instruction.attribute("custom_call_has_side_effect") == "true"
      if silent.is_silent_call(target, effect, instruction.attributes):
        return ""
      return f"custom call of {target!r}" + ", with a side effect" * effect
    if opcode in ("send", "recv"):
      handler = instruction.attribute("_xla_host_transfer_handler_name")
      received = _is_slice_transfer(instruction) or len(self.pairs(instruction))
      silently = received or handler in silent.HOST_HANDLERS
      return "" if silently else f"{opcode} to an unknown place"
    if (
      opcode in _KINDS
      or silent.is_silent_opcode(opcode)
      or opcode == "custom-call"
    ):
      return ""  # the start of an asynchronous pair is counted
    return f"unknown operation {opcode!r}"

  def all_unknown(self, lines: SourceLines | None = None) -> Iterator[
    UnknownInstruction
  ]:
    """Yields all instructions that may communicate without being counted.

    Args:
      lines: Source lines of the instructions; None if they are not known.
    """
    reached, chains = self._counted()
    called, left = set(), [self.module.entry]
    while left:
      if (name := left.pop()) in called:
        continue
      called.add(name)
      computation = self.module.computations[name]
      for instruction in computation.instructions:
        left += instruction.calls()
        what = self.unknown(computation, instruction)
        if not what and self._sends(instruction) and (
          instruction.name not in reached and computation.name not in chains
        ):
          what = f"{instruction.opcode} in a computation that is not followed"
        if what:
          yield UnknownInstruction(
            instruction.name, what, lines.of(instruction) if lines else "",
            instruction.attribute("custom_call_target"),
          )
    for line in self.module.unread:
      yield UnknownInstruction("", f"unknown syntax {line.strip()[:60]!r}")

  def _counted(self) -> tuple[set[str], set[str]]:
    """Finds the counted collectives, and computations with copies of them.

    Returns:
      Names of the counted collectives; and names of the computations of fusions
      that hold further copies of them.
    """
    reached, counted, links = set(), set(), {}
    for computation, _ in self.module.runs():
      for instruction in computation.instructions:
        found = [x.name for _, x in self.find(computation, instruction)]
        reached.update(found)
        if chain := self.chain(instruction):
          links.update(dict.fromkeys(instruction.calls(), chain))
          counted |= {chain} if found else set()
    return reached, {name for name, x in links.items() if x in counted}

  def entry(
    self, computation: hlo.Computation, found: hlo.Instruction, outer: str
  ) -> Iterator[Collective]:
    """Yields one ledger entry per operand of the collective ``found``.

    ``outer`` is jax's name stack of the instruction that wraps it, which is
    used if it has none.
    """
    # Some wrapped collectives have no name stack; their wrapper's is used.
    phase, rematted, where = parse_name_stack(found.op_name or outer)
    if not self.differentiates:
      phase = "forward"
    opcode = found.opcode.removesuffix("-start")
    if opcode == "custom-call":
      sent = operations.kernel_sends(found.attributes)
      yield Collective(
        "permute", (sent.axis,), self.sizes.get(sent.axis), sent.dtype,
        sent.shape, 1, phase, rematted, None, where,
      )
      return
    kind = _KINDS[opcode]
    if _is_slice_transfer(found):
      transfer = found.attribute("_xla_megascale_transfer_type")
      kind = _SLICE_KINDS.get(transfer, "permute")
    if computation.name.startswith("all-reduce-scatter"):
      # XLA:TPU's fusion of an all-reduce and a slice, a reduce-scatter in
      # effect: only the slice is written.
      kind = "reduce_scatter"
    axes, group_size, smallest = self._axes(found)
    reduction = None
    if _is_slice_transfer(found):
      name = found.attribute("_xla_megascale_reduce_operation").lower()
      reduction = name.replace("sum", "add") or None
    elif kind in ("all_reduce", "reduce_scatter"):
      combine = self.module.computations[found.calls("to_apply")[0]].root
      reduction = _REDUCTIONS.get(combine.opcode, combine.opcode)
    # Counts operands, not results, as the ledger of lowered programs does.
    operands = self._operands(computation, found)
    for shape in itertools.chain.from_iterable(o.shapes for o in operands):
      yield Collective(
        kind, axes, group_size, shape.dtype, shape.dims, 1, phase, rematted,
        reduction, where, smallest,
      )

  def _operands(
    self, computation: hlo.Computation, found: hlo.Instruction
  ) -> list[hlo.Instruction]:
    """Returns the instructions that compute what a collective sends."""
    operands = computation.operands(found)
    # The other operands of a ragged exchange are the buffer of the result, and
    # offsets and sizes of rows; the other operand of a send is a token.
    first = found.opcode.startswith(("ragged", "send"))
    return operands[:1] if first else operands

  def _axes(self, found: hlo.Instruction) -> Group:
    """Returns the axes of a collective and the sizes of its groups."""
    if _is_slice_transfer(found):
      # "{1,2}x{0:3}" (slices x devices), or groups, "{{100000,200000},...}".
      target = found.attribute("_xla_megascale_target")
      sizes = {n.count(",") + 1 for n in re.findall(r"\{([\d,]+)\}", target)}
      return Group((SLICE_AXIS,), sizes.pop() if len(sizes) == 1 else None)
    if SOURCE_TARGET_PAIRS.search(found.attributes):
      return self.mesh_axes.of_pairs(self.pairs(found))
    if groups_list_replicas(found):
      return Group((), None)
    if found.attribute("replica_groups") in ("", "{}"):
      return self.mesh_axes.of_groups([])
    return self.mesh_axes.of_groups(self.groups(found))

  def pairs(self, found: hlo.Instruction) -> np.ndarray:
    """Returns sources and targets, int ``[n, 2]``; n = 0 if not a permute."""
    text = SOURCE_TARGET_PAIRS.search(found.attributes)  # {{0,1},{1,0}}
    numbers = re.findall(r"\d+", text[1]) if text else []
    return np.array(numbers, int).reshape(-1, 2)

  def groups(self, found: hlo.Instruction) -> list[list[int]]:
    """Returns the device numbers of each group of a collective."""
    return replica_groups(
      found.attribute("replica_groups") or "{}", self.mesh_axes.num_devices
    )


def _is_slice_transfer(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction is a transfer between TPU slices."""
  return _MEGASCALE in instruction.attributes


def read(
  module: hlo.Module, mesh: jax.sharding.Mesh
) -> tuple[list[Collective], list[UnknownInstruction]]:
  """Returns the entries of `collectives`, and instructions it cannot read."""
  reader = Reader(module, mesh, strict=False)
  return reader.collectives(), [*reader.all_unknown()]


class SentTotals(NamedTuple):
  """Sums over a set of collectives of a program.

  Attributes:
    count: Executions of these collectives per execution of the program. Each
      operand counts as one, so that merging does not change the number.
    bytes: Operand bytes per execution of the program and device.
    unknown_bytes: Operand bytes of the collectives with an unknown number of
      executions, counted once each; not included in the other fields.
  """

  count: int = 0
  bytes: int = 0
  unknown_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Difference:
  """Communication over a set of axes in a phase, lowered and compiled.

  Attributes:
    axes: Mesh axes; empty for groups that no set of axes describes.
    phase: "forward", "backward" or "update", as ``Collective`` defines them.
    lowered: (`Collective.label`, dtype) -> sums of the lowered program.
    compiled: (`Collective.label`, dtype) -> sums of the compiled program.
  """

  axes: tuple[str, ...]
  phase: str
  lowered: dict[tuple[str, str], SentTotals]
  compiled: dict[tuple[str, str], SentTotals]

  @property
  def differs(self) -> bool:
    """Whether kinds, dtypes or bytes differ.

    The numbers of executions are not compared: XLA splits and merges
    collectives.
    """
    # Counts are set to 0 on both sides, so that only the bytes are compared.
    lowered, compiled = (
      {key: sent._replace(count=0) for key, sent in side.items()}
      for side in (self.lowered, self.compiled)
    )
    return lowered != compiled


def compare(
  lowered: Iterable[Collective], compiled: Iterable[Collective]
) -> list[Difference]:
  """Compares the collectives of a lowered and a compiled program.

  Args:
    lowered: Entries of the lowered program; those of zero bytes are ignored.
    compiled: Entries of the compiled program; those of zero bytes are ignored.

  Returns:
    One `Difference` per set of axes and phase, including those without a
    difference, in the order of first appearance.

  Example:
    >>> lowered = Collective(
    ...   "all_reduce", ("data",), 4, "bfloat16", (8,), 1, "update", False,
    ...   "add", "",
    ... )
    >>> compiled = dataclasses.replace(lowered, dtype="float32")  # widened
    >>> (difference,) = compare([lowered], [compiled])
    >>> difference.differs, difference.compiled["all_reduce", "float32"].bytes
    (True, 32)
  """
  sides = []
  for entries in (lowered, compiled):
    side: dict = {}
    for entry in entries:
      if not entry.bytes:
        continue
      # (axes, phase) -> (label, dtype) -> SentTotals
      sums = side.setdefault((entry.axes, entry.phase), {})
      count, known, unknown = sums.get((entry.label, entry.dtype), SentTotals())
      if entry.count is None:
        sent = SentTotals(count, known, unknown + entry.bytes)
      else:
        more = entry.count * entry.bytes
        sent = SentTotals(count + entry.count, known + more, unknown)
      sums[entry.label, entry.dtype] = sent
    sides.append(side)
  keys = list(dict.fromkeys([*sides[0], *sides[1]]))
  return [
    Difference(axes, phase, *(side.get((axes, phase), {}) for side in sides))
    for axes, phase in keys
  ]
