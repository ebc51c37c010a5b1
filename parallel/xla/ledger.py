"""Ledger of communication: every collective that a lowered program executes.

`collectives` walks the StableHLO module of a `jax.stages.Lowered` and returns
one `Collective` per operand of each collective operation: kind, mesh axes,
dtype, shape per device, executions per run of the program and where in the
model it stands. StableHLO is what the program asks for, before a backend
widens dtypes, merges or splits collectives.

Rules of counting:

- Calls are followed, so that a function called twice counts twice.
- A loop multiplies the counts of its body by its trip count, which is known
  when an integer counter starts at a constant, moves by a constant and is
  compared with a constant (`lax.scan`, `lax.fori_loop` with Python bounds).
  Any other loop gives `count=None`: unknown, never guessed.
- A conditional whose branches communicate alike counts as one of them;
  otherwise the collectives of all branches are listed with `count=None`.
- Size-1 axes communicate nothing and are left out of `axes`; the operations
  that jax emits for them, and those on empty operands, stay listed with zero
  bytes.

Not seen here: communication that XLA itself adds for axes that are not manual
in `jax.shard_map` (within a region that is manual over a part of the mesh,
shapes are those before that partitioning), and remote copies inside kernels.

Source: StableHLO specification, https://openxla.org/stablehlo/spec
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import itertools
import math
import re
from typing import Literal

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
import numpy as np

from parallel.xla import operations

Phase = Literal["forward", "backward", "update"]

_KINDS = {
  "stablehlo.all_reduce": "all_reduce",
  "stablehlo.all_gather": "all_gather",
  "stablehlo.reduce_scatter": "reduce_scatter",
  "stablehlo.all_to_all": "all_to_all",
  "stablehlo.collective_permute": "permute",
  "stablehlo.collective_broadcast": "broadcast",
}

# Operations that continue in another function, and the attribute naming it.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}

# Collectives that jax writes as custom calls: the explicit asynchronous ones,
# in two halves, and what it gives a layout of its own.
_HALF = re.compile(r"([a-z-]+)-(start|done)")
_OPAQUE = re.compile(
  r"all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|"
  r"collective[-_](permute|broadcast)"
)

# Parts of a name stack that come from jax and not from the model.
_STRUCTURE = re.compile(
  r"|jit(\(.*\))?|pjit|shard_map|while|body|cond|scan|branch_\d+_fun|"
  r"(closed|core)_call:?|eval_jaxpr|checkpoint|rematted_computation|remat2?|"
  r"custom_(jvp|vjp)_call"
)
_TRANSFORM = re.compile(r"(jvp|transpose|vmap)\((.*)\)")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operand of a collective operation.

  Attributes:
    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"
      or "broadcast".
    axes: the mesh axes over which it communicates, in mesh order, without
      those of size 1. Empty with `group_size` > 1: the devices talk in groups
      that no set of mesh axes describes.
    group_size: number of devices in one replica group.
    dtype: numpy name of the element type, such as "bfloat16".
    shape: shape of the operand on one device.
    count: executions per run of the program; None where it is not known.
    phase: "backward" for what runs in the backward pass, recomputation
      included; "forward" for the differentiated function otherwise; "update"
      for the rest of a program that differentiates (gradient reduction,
      clipping). All of a program that does not differentiate is "forward".
    rematted: whether it repeats a forward collective in the backward pass.
    reduction: "add", "max", ...; None where nothing is reduced.
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
    """Operand bytes per device and execution; 0 where nobody else listens.

    Types narrower than a byte count one byte each, unless packed by hand.
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


def collectives(
  lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh
) -> list[Collective]:
  """Lists the collectives of a lowered program in program order.

  Args:
    lowered: what `jax.jit(f).lower(...)` returns.
    mesh: the mesh that the program was written for; names the axes.

  Returns:
    One entry per operand of each collective and per call path that leads to
    it. `merge` joins equal ones.

  Raises:
    ValueError: if the program was lowered for meshes other than `mesh`.
    NotImplementedError: if the program holds a collective in a form that the
      ledger cannot read (explicit asynchronous or ragged ones).
  """
  return _Reader(lowered.compiler_ir("stablehlo"), mesh).read()


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
    kind: kind to keep.
    axis: a name keeps what communicates over that axis, alone or with others
      (so that a reduction over two axes answers to both names); a tuple of
      names keeps what communicates over exactly these.
    phase: phase to keep.
    dtype: numpy name of the dtype to keep.
    rematted: whether to keep the recomputed ones or the others.

  Returns:
    The entries kept, in their order.
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


def total(
  entries: Iterable[Collective],
  *,
  kind: str | None = None,
  axis: str | tuple[str, ...] | None = None,
  phase: Phase | None = None,
  dtype: str | None = None,
  rematted: bool | None = None,
) -> int:
  """Sums operand bytes per device over one run of the program.

  Args:
    entries: what `collectives` returned.
    kind: as in `select`; so are `axis`, `phase`, `dtype` and `rematted`.
    axis: see `select`.
    phase: see `select`.
    dtype: see `select`.
    rematted: see `select`.

  Returns:
    The sum of `bytes * count` over the selected entries.

  Raises:
    ValueError: if a selected entry that carries bytes has an unknown count.
  """
  selected = select(
    entries, kind=kind, axis=axis, phase=phase, dtype=dtype, rematted=rematted
  )
  unknown = [c for c in selected if c.count is None and c.bytes]
  if unknown:
    raise ValueError(
      f"{len(unknown)} collectives run an unknown number of times (in a loop "
      "without constant trip count, or in one branch of a conditional), so "
      f"that there is no total; the first: {unknown[0]}"
    )
  return sum(c.bytes * c.count for c in selected if c.count is not None)


def merge(entries: Iterable[Collective]) -> list[Collective]:
  """Joins entries that differ in nothing but their count.

  Args:
    entries: what `collectives` returned.

  Returns:
    Distinct entries in order of first appearance, counts added; the sum with
    an unknown count is unknown.
  """
  counts: dict[Collective, int | None] = {}
  for entry in entries:
    key = dataclasses.replace(entry, count=None)
    before = counts.get(key, 0)
    known = before is not None and entry.count is not None
    counts[key] = before + entry.count if known else None
  return [dataclasses.replace(key, count=n) for key, n in counts.items()]


class _Reader:
  """Walks one module; counts are relative to one run of what is walked."""

  def __init__(self, module: ir.Module, mesh: jax.sharding.Mesh):
    self.sizes = dict(mesh.shape)
    self.functions: dict[str, ir.Operation] = {}
    self.meshes: dict[str, dict[str, int]] = {}
    self.differentiates = False
    for op in module.body.operations:
      op = op.operation
      if op.name == "func.func":
        self.functions[op.attributes["sym_name"].value] = op
      elif op.name == "sdy.mesh":
        name = op.attributes["sym_name"].value
        sizes = operations.mesh_sizes(op.attributes["stablehlo.mesh"])
        self.meshes[name] = sizes
    # The order of axes counts too: it numbers the devices.
    ours = list(self.sizes.items())
    theirs = [list(m.items()) for m in self.meshes.values()]
    if theirs and ours not in theirs:
      raise ValueError(
        f"the program was lowered for the meshes {list(self.meshes.values())}, "
        f"not for {self.sizes}"
      )
    self.axes_of_groups = dict(operations.groups_of_axes(self.sizes))

  def read(self) -> list[Collective]:
    entries = self._region(self.functions["main"].regions[0], ())
    if self.differentiates:
      return entries
    return [dataclasses.replace(c, phase="forward") for c in entries]

  def _region(
    self, region: ir.Region, stacks: tuple[str, ...]
  ) -> list[Collective]:
    return [
      entry
      for block in region.blocks
      for op in block.operations
      for entry in self._operation(op.operation, stacks)
    ]

  def _operation(
    self, op: ir.Operation, stacks: tuple[str, ...]
  ) -> list[Collective]:
    # Name stacks start anew in a function and in a manual computation.
    stack = getattr(op.location, "name_str", "")
    self.differentiates |= "jvp(" in stack
    if op.name in _KINDS:
      return self._collective(op, (*stacks, stack))
    if op.name in _CALLS:
      callee = self.functions[op.attributes[_CALLS[op.name]].value]
      return self._region(callee.regions[0], (*stacks, stack))
    if op.name == "sdy.manual_computation":
      return self._region(op.regions[0], (*stacks, stack))
    if op.name == "stablehlo.while":
      condition, body = (self._region(r, stacks) for r in op.regions)
      trips = operations.trip_count(op)
      checks = None if trips is None else trips + 1
      return _repeat(condition, checks) + _repeat(body, trips)
    if op.name in ("stablehlo.case", "stablehlo.if"):
      return _either([self._region(r, stacks) for r in op.regions])
    if op.name == "stablehlo.custom_call":
      target = op.attributes["call_target_name"].value
      half = _HALF.fullmatch(target)
      kind = "stablehlo." + half[1].replace("-", "_") if half else ""
      if kind in _KINDS:
        starts = half[2] == "start"
        return self._half(op, kind, (*stacks, stack)) if starts else []
      sent = None
      metadata = operations.kernel_metadata(op)
      if metadata:
        shapes = [ir.ShapedType(result.type).shape for result in op.results]
        sent = operations.kernel_sends(metadata, sum(map(math.prod, shapes)))
      if sent:
        return [self._kernel(sent, (*stacks, stack))]
      if _OPAQUE.search(target):
        raise NotImplementedError(
          f"the ledger cannot read the collective {target!r} at {stack!r}"
        )
    return [c for region in op.regions for c in self._region(region, stacks)]

  def _collective(
    self, op: ir.Operation, stacks: tuple[str, ...]
  ) -> list[Collective]:
    if "source_target_pairs" in op.attributes:
      pairs = np.array(op.attributes["source_target_pairs"])
      group = self._axes_of_pairs(pairs)
    else:
      group = self._axes_of_replica_groups(op)
    reduction = operations.reduction(op.regions[0]) if op.regions else None
    return self._entries(op, _KINDS[op.name], group, reduction, stacks)

  def _half(
    self, op: ir.Operation, kind: str, stacks: tuple[str, ...]
  ) -> list[Collective]:
    """The start of an explicit asynchronous collective (jax 0.12)."""
    config = operations.asynchronous_config(op)
    if "permutation" in config:
      group = self._axes_of_pairs(np.array(config["permutation"]))
    else:
      group = self._axes_of_sets(config["replica_groups"])
    reducers = [
      operations.reduction(self.functions[name].regions[0])
      for name in operations.called(op)
    ]
    reduction = reducers[0] if reducers else None
    return self._entries(op, _KINDS[kind], group, reduction, stacks)

  def _kernel(
    self, sent: operations.KernelSends, stacks: tuple[str, ...]
  ) -> Collective:
    phase, rematted, where = place("/".join(stacks))
    return Collective(
      "permute", (sent.axis,), self.sizes[sent.axis], sent.dtype, sent.shape,
      1, phase, rematted, None, where,
    )

  def _entries(
    self,
    op: ir.Operation,
    kind: str,
    group: tuple[tuple[str, ...], int],
    reduction: str | None,
    stacks: tuple[str, ...],
  ) -> list[Collective]:
    axes, group_size = group
    phase, rematted, where = place("/".join(stacks))
    return [
      Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        dtype=operations.dtype_name(operand.type.element_type),
        shape=tuple(operand.type.shape),
        count=1,
        phase=phase,
        rematted=rematted,
        reduction=reduction,
        where=where,
      )
      for operand in op.operands
    ]

  def _axes_of_replica_groups(
    self, op: ir.Operation
  ) -> tuple[tuple[str, ...], int]:
    """jax 0.10 numbers the devices of each group, jax 0.12 names mesh axes."""
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseIntElementsAttr):
      return self._axes_of_sets(np.array(groups))
    groups = stablehlo.ReplicaGroupMeshAxesAttr(groups)
    sizes = self.meshes[ir.FlatSymbolRefAttr(groups.mesh).value]
    refs = [stablehlo.AxisRefAttr(axis) for axis in groups.axes]
    parts = [ref.sub_axis_info for ref in refs]
    group_size = math.prod(
      stablehlo.SubAxisInfoAttr(part).size if part else sizes[ref.name]
      for ref, part in zip(refs, parts, strict=True)
    )
    names = {ref.name for ref in refs}
    if any(parts) or any(self.sizes.get(n) != sizes[n] for n in names):
      return (), group_size
    return tuple(n for n, s in self.sizes.items() if n in names and s > 1), (
      group_size
    )

  def _axes_of_sets(
    self, groups: Iterable[Iterable[int]]
  ) -> tuple[tuple[str, ...], int]:
    sets = frozenset(frozenset(int(i) for i in g if i >= 0) for g in groups)
    return self.axes_of_groups.get(sets, ()), max(map(len, sets), default=1)

  def _axes_of_pairs(self, pairs: np.ndarray) -> tuple[tuple[str, ...], int]:
    """The axes along which a source and its target have different places."""
    pairs = pairs.reshape(-1, 2)
    if pairs.size and pairs.max() >= math.prod(self.sizes.values()):
      return (), len(np.unique(pairs))
    places = np.stack(np.unravel_index(pairs, tuple(self.sizes.values())))
    moves = (places[..., 0] != places[..., 1]).any(axis=-1)
    axes = tuple(itertools.compress(self.sizes, moves))
    return axes, math.prod(self.sizes[name] for name in axes)


def place(path: str) -> tuple[Phase, bool, str]:
  """What jax's name stack of a collective says about it.

  Args:
    path: The stack, such as ``jit(step)/transpose(jvp(blocks))/while/...``.

  Returns:
    ``phase``, ``rematted`` and ``where`` of a ``Collective``; the phase as for
    a program that differentiates.
  """
  rematted = "rematted_computation" in path
  phase: Phase = "forward" if "jvp(" in path else "update"
  if rematted or "transpose(" in path:
    phase = "backward"
  return phase, rematted, _readable(path)


def _repeat(entries: Sequence[Collective], trips: int | None):
  """Entries of a region that runs `trips` times."""
  return [
    dataclasses.replace(
      c, count=None if None in (c.count, trips) else c.count * trips
    )
    for c in entries
  ]


def _either(branches: Sequence[Sequence[Collective]]) -> list[Collective]:
  """Entries of a conditional, of which one branch runs."""
  contents = [
    collections.Counter(dataclasses.replace(c, where="") for c in branch)
    for branch in branches
  ]
  if all(content == contents[0] for content in contents):
    return list(branches[0])
  return _repeat(list(itertools.chain.from_iterable(branches)), None)


def _readable(path: str) -> str:
  """The named scopes in a name stack that ends with its primitive."""
  names = []
  for name in path.split("/")[:-1]:
    while match := _TRANSFORM.fullmatch(name):
      name = match[2]
    if not _STRUCTURE.fullmatch(name):
      names.append(name)
  return "/".join(names)
