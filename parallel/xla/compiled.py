"""Collectives of a compiled program, after XLA's transformations.

The entries have the type of `parallel.xla.ledger`, so that the requested
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
"""

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import re
from typing import NamedTuple

import jax
import numpy as np

from parallel.xla import hlo, operations
from parallel.xla.entries import alike
from parallel.xla.groups import MeshAxes, replica_groups
from parallel.xla.ledger import Collective, place

# HLO opcode, without "-start" -> kind of a ledger entry.
_KINDS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "reduce-scatter": "reduce_scatter",
  "all-to-all": "all_to_all",
  "ragged-all-to-all": "all_to_all",
  "collective-permute": "permute",
  "collective-broadcast": "broadcast",
}
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
    executions per run of the program, None if unknown.

  Raises:
    ValueError: The program was compiled for another mesh.
    NotImplementedError: A collective has an unsupported form.
  """
  return Reader(module, mesh).collectives()


class Reader:
  """Reader of the instructions of a module as ledger entries of count one."""

  def __init__(
    self, module: hlo.Module, mesh: jax.sharding.Mesh, strict: bool = True
  ) -> None:
    """Initializes a reader.

    Args:
      module: The compiled program.
      mesh: Mesh that the program was compiled for.
      strict: Whether `unreadable` instructions are errors; otherwise they are
        left out.
    """
    self.module, self.strict = module, strict
    self.sizes = dict(mesh.shape)
    self.mesh_axes = MeshAxes(self.sizes)
    # As in the ledger of lowered programs: without differentiation, the phase
    # of all entries is "forward".
    self.differentiates = any(
      "jvp(" in instruction.op_name
      for computation in module.computations.values()
      for instruction in computation.instructions
    )

  def collectives(self, start: str | None = None) -> list[Collective]:
    """Returns the entries of one run of a computation, with their counts.

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
    """Yields computations with their run counts, as `hlo.Module.runs` does.

    If all branches of a conditional send the same, only the first branch is
    yielded, and its count is known.
    """
    return self.module.runs(
      start, lambda branches: alike(map(self.collectives, branches))
    )

  def entries(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> list[Collective]:
    """Returns the entries of an instruction, with counts of one.

    Of an asynchronous pair, the start has entries and the done has none.
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
    """Returns the index of a start's done; ``start`` if it is synchronous."""
    order = computation.instructions
    name = order[start].name
    # XLA:TPU may spread a collective over a chain of fusions that contain
    # compute. The first fusion sends, the last one returns the result.
    chain = self.chain(order[start])
    if chain:
      # Indices of the fusions of the chain.
      links = [i for i, x in enumerate(order) if self.chain(x) == chain]
      return links[-1]
    if not order[start].opcode.endswith("-start"):
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
    """Reads a copy between device and host memory, by its first instruction.

    Returns:
      Whether it copies to the host, and its bytes; None for other instructions.
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
    """Finds the collectives in an instruction and in the ones it wraps.

    Yields:
      Pairs (computation, collective or sending kernel in that computation).
    """
    if self.strict and unreadable(instruction):
      raise NotImplementedError(f"the ledger cannot read {instruction.opcode}")
    sends = instruction.opcode.removesuffix("-start") in _KINDS
    # Most custom calls send nothing; sending kernels declare it in metadata.
    if instruction.opcode == "custom-call":
      sends = operations.kernel_sends(instruction.attributes) is not None
    if sends:
      yield computation, instruction
    elif instruction.opcode == "fusion" or (
      instruction.opcode.endswith("-start")
    ):
      # Fusions and generic async-start instructions wrap a computation, which
      # may contain the collective.
      for name in instruction.calls():
        inner = self.module.computations[name]
        # Only the first fusion of a chain has this mark.
        if self.chain(instruction) and not any(
          "AsyncCollectiveStart" in i.attributes for i in inner.instructions
        ):
          continue
        for wrapped in inner.instructions:
          if not wrapped.opcode.endswith("-done"):  # its start is counted
            yield from self.find(inner, wrapped)

  def entry(
    self, computation: hlo.Computation, found: hlo.Instruction, outer: str
  ) -> Iterator[Collective]:
    """Yields one ledger entry per operand of a collective."""
    # Some wrapped collectives have no name stack; their wrapper's is used.
    phase, rematted, where = place(found.op_name or outer)
    if not self.differentiates:
      phase = "forward"
    if found.opcode == "custom-call":
      sent = operations.kernel_sends(found.attributes)
      yield Collective(
        "permute", (sent.axis,), self.sizes[sent.axis], sent.dtype, sent.shape,
        1, phase, rematted, None, where,
      )
      return
    kind = _KINDS[found.opcode.removesuffix("-start")]
    if computation.name.startswith("all-reduce-scatter"):
      # XLA:TPU's fusion of an all-reduce and a slice, a reduce-scatter in
      # effect: only the slice is written.
      kind = "reduce_scatter"
    axes, group_size = self._axes(found)
    reduction = None
    if kind in ("all_reduce", "reduce_scatter"):
      combine = self.module.computations[found.calls("to_apply")[0]].root
      reduction = _REDUCTIONS.get(combine.opcode, combine.opcode)
    # Operands, not results, as in the ledger of lowered programs.
    operands = computation.operands(found)
    if found.opcode.startswith("ragged"):
      # The others are the buffer of the result, and offsets and sizes of rows.
      operands = operands[:1]
    for shape in itertools.chain.from_iterable(o.shapes for o in operands):
      yield Collective(
        kind, axes, group_size, shape.dtype, shape.dims, 1, phase, rematted,
        reduction, where,
      )

  def _axes(self, found: hlo.Instruction) -> tuple[tuple[str, ...], int]:
    """Returns the axes of a collective and the number of devices of a group."""
    pairs = self.pairs(found)
    if len(pairs):
      return self.mesh_axes.of_pairs(pairs)
    return self.mesh_axes.of_groups(self.groups(found))

  def pairs(self, found: hlo.Instruction) -> np.ndarray:
    """Returns sources and targets of a permute, int ``[n, 2]``, else n = 0."""
    text = found.attribute("source_target_pairs")  # {{0,1},{1,0}}
    return np.array(re.findall(r"\d+", text), int).reshape(-1, 2)

  def groups(self, found: hlo.Instruction) -> list[list[int]]:
    """Returns the device numbers of each group of a collective."""
    return replica_groups(
      found.attribute("replica_groups"), self.mesh_axes.num_devices
    )


def unreadable(instruction: hlo.Instruction) -> bool:
  """Returns whether an instruction communicates in a form that is not read."""
  # Transfers between device and host are not collectives.
  return (instruction.opcode in ("send", "recv") and (
    "is_host_transfer=true" not in instruction.attributes
  )) or (instruction.opcode == "custom-call" and (
    operations.OPAQUE.search(instruction.attribute("custom_call_target"))
    is not None
  ))


class Sent(NamedTuple):
  """Sums over a set of collectives of a program.

  Attributes:
    count: Executions per run. Each operand counts as an execution, so that
      merging collectives does not change the number.
    bytes: Operand bytes per run and device.
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
    lowered: (kind, dtype) -> sums of the lowered program.
    compiled: (kind, dtype) -> sums of the compiled program.
  """

  axes: tuple[str, ...]
  phase: str
  lowered: dict[tuple[str, str], Sent]
  compiled: dict[tuple[str, str], Sent]

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
    lowered: Entries of the lowered program; entries of zero bytes are ignored.
    compiled: Entries of the compiled program, likewise.

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
      # (axes, phase) -> (kind, dtype) -> Sent
      sums = side.setdefault((entry.axes, entry.phase), {})
      count, known, unknown = sums.get((entry.kind, entry.dtype), Sent())
      if entry.count is None:
        sent = Sent(count, known, unknown + entry.bytes)
      else:
        more = entry.count * entry.bytes
        sent = Sent(count + entry.count, known + more, unknown)
      sums[entry.kind, entry.dtype] = sent
    sides.append(side)
  keys = list(dict.fromkeys([*sides[0], *sides[1]]))
  return [
    Difference(axes, phase, *(side.get((axes, phase), {}) for side in sides))
    for axes, phase in keys
  ]
