"""Lists every collective that a lowered program executes.

`collectives` walks the StableHLO module of a `jax.stages.Lowered` and returns
one `Collective` per operand of each collective operation: kind, mesh axes,
dtype, shape per device, executions per run of the program and its place in the
model. StableHLO is what the program asks for, before a backend widens dtypes,
or merges and splits collectives.

Rules of counting:

- Calls are followed, so that a function called twice counts twice.
- A loop multiplies the counts of its body by its trip count, which is known
  when an integer counter starts at a constant, moves by a constant and is
  compared with a constant (`lax.scan`, `lax.fori_loop` with Python bounds).
  Any other loop gives `count=None`: unknown, never guessed.
- A conditional whose branches communicate alike counts as one of them;
  otherwise the collectives of all branches are listed with `count=None`, but
  for those in a ``jax.named_scope`` of the name ``runs_2_of_5``: of five times
  that the conditional is reached they run two.
- A program that writes its own backward, without derivatives of its loops, says
  so by scopes of the names ``phase_forward`` and ``phase_backward``.
- Size-1 axes communicate nothing and are left out of `axes`; the operations
  that jax emits for them, and those on empty operands, stay listed with zero
  bytes.
- A Pallas kernel that sends to other devices says so in its metadata; its
  messages are listed as permutes.

Not seen here: communication that XLA itself adds for axes that are not manual
in `jax.shard_map` (within a region that is manual over a part of the mesh,
shapes are those before that partitioning), and remote copies of kernels whose
metadata do not name them.

Source: StableHLO specification, https://openxla.org/stablehlo/spec
"""

from collections.abc import Sequence
import dataclasses
import fractions
import itertools
import math
import re

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
import numpy as np

from parallel.xla import operations
from parallel.xla.entries import (
  Collective,
  Phase,
  alike,
  merge,
  select,
  shares,
  total,
)
from parallel.xla.groups import MeshAxes

# What users of the ledger need of its entries, too.
__all__ = ["Collective", "Phase", "collectives", "merge", "select", "total"]

_KINDS = {
  "stablehlo.all_reduce": "all_reduce",
  "stablehlo.all_gather": "all_gather",
  "stablehlo.reduce_scatter": "reduce_scatter",
  "stablehlo.all_to_all": "all_to_all",
  "stablehlo.collective_permute": "permute",
  "stablehlo.collective_broadcast": "broadcast",
}

# Operations that run another function, and the attribute that names it.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}

# Collectives that jax writes as custom calls. Explicit asynchronous ones have a
# start and a done, which the ledger reads. Any other custom call with the name
# of a collective is refused, since to miss one would make the totals wrong.
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


class _Reader:
  """Walks one module.

  Each method returns the collectives of one run of the region or operation
  that it reads; who runs a region several times multiplies the counts.
  """

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
    self.mesh_axes = MeshAxes(self.sizes)

  def read(self) -> list[Collective]:
    """Returns the collectives of one run of the module."""
    entries = self._region(self.functions["main"].regions[0], ())
    entries = [
      c if c.count is None else dataclasses.replace(c, count=_whole(c.count))
      for c in entries
    ]
    if self.differentiates:
      return entries
    # Only now is it known that nothing is differentiated, so that there is no
    # backward and no update to tell apart from the forward.
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
    """Returns the collectives of an operation and of what it runs."""
    # Name stacks start anew in a function and in a manual computation, so
    # those of the callers are handed down to be joined in front.
    stack = getattr(op.location, "name_str", "")
    # Every name stack counts, not only those of collectives: a loss may
    # communicate nothing and its gradients be reduced all the same.
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
      # The condition runs once more than the body: the last time it is false.
      checks = None if trips is None else trips + 1
      return _repeat(condition, checks) + _repeat(body, trips)
    if op.name in ("stablehlo.case", "stablehlo.if"):
      return _either([self._region(r, (*stacks, stack)) for r in op.regions])
    if op.name == "stablehlo.custom_call":
      target = op.attributes["call_target_name"].value
      half = _HALF.fullmatch(target)
      kind = "stablehlo." + half[1].replace("-", "_") if half else ""
      if kind in _KINDS:
        starts = half[2] == "start"  # the done sends nothing more
        return self._half(op, kind, (*stacks, stack)) if starts else []
      sent = operations.kernel_sends(operations.kernel_metadata(op))
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
      group = self.mesh_axes.of_pairs(pairs)
    else:
      group = self._axes_of_replica_groups(op)
    reduction = operations.reduction(op.regions[0]) if op.regions else None
    return self._entries(op, _KINDS[op.name], group, reduction, stacks)

  def _half(
    self, op: ir.Operation, kind: str, stacks: tuple[str, ...]
  ) -> list[Collective]:
    """Reads the start of an explicit asynchronous collective (jax 0.12)."""
    config = operations.asynchronous_config(op)
    if "permutation" in config:
      group = self.mesh_axes.of_pairs(np.array(config["permutation"]))
    else:
      group = self.mesh_axes.of_groups(config["replica_groups"])
    reducers = [
      operations.reduction(self.functions[name].regions[0])
      for name in operations.called(op)
    ]
    reduction = reducers[0] if reducers else None
    return self._entries(op, _KINDS[kind], group, reduction, stacks)

  def _kernel(
    self, sent: operations.KernelSends, stacks: tuple[str, ...]
  ) -> Collective:
    """Returns the messages of a Pallas kernel as one permute."""
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
    """Returns one entry per operand of a collective operation."""
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
      for operand in op.operands  # one operation may reduce several arrays
    ]

  def _axes_of_replica_groups(
    self, op: ir.Operation
  ) -> tuple[tuple[str, ...], int]:
    """Returns the axes and the group size of an operation's replica groups.

    jax 0.10 writes the device numbers of each group, jax 0.12 names mesh axes
    of the program's mesh, or parts of them.
    """
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseIntElementsAttr):
      return self.mesh_axes.of_groups(np.array(groups))
    groups = stablehlo.ReplicaGroupMeshAxesAttr(groups)
    sizes = self.meshes[ir.FlatSymbolRefAttr(groups.mesh).value]
    refs = [stablehlo.AxisRefAttr(axis) for axis in groups.axes]
    parts = [ref.sub_axis_info for ref in refs]
    group_size = math.prod(
      stablehlo.SubAxisInfoAttr(part).size if part else sizes[ref.name]
      for ref, part in zip(refs, parts, strict=True)
    )
    names = {ref.name for ref in refs}
    # A part of an axis, or an axis that our mesh does not have: no set of our
    # axes describes such groups.
    if any(parts) or any(self.sizes.get(n) != sizes[n] for n in names):
      return (), group_size
    return tuple(n for n, s in self.sizes.items() if n in names and s > 1), (
      group_size
    )


def place(path: str) -> tuple[Phase, bool, str]:
  """Reads the phase and the place of a collective from jax's name stack.

  Args:
    path: The stack, such as ``jit(step)/transpose(jvp(blocks))/while/...``.

  Returns:
    ``phase``, ``rematted`` and ``where`` of a ``Collective``. The phase holds
    for a program that differentiates; in others all is "forward".
  """
  # jax writes jvp(...) around what it differentiates, transpose(jvp(...))
  # around the backward made of it, and a name of its own around recomputation.
  rematted = "rematted_computation" in path
  phase: Phase = "forward" if "jvp(" in path else "update"
  if rematted or "transpose(" in path:
    phase = "backward"
  if "phase_backward" in path:
    rematted |= "jvp(" in path and phase == "forward"
    phase = "backward"
  elif "phase_forward" in path:
    phase = "forward"
  return phase, rematted, _readable(path)


def _repeat(
  entries: Sequence[Collective], trips: fractions.Fraction | int | None
) -> list[Collective]:
  """Returns the entries of a region that runs `trips` times."""
  return [
    dataclasses.replace(
      c, count=None if None in (c.count, trips) else c.count * trips
    )
    for c in entries
  ]


def _either(branches: Sequence[Sequence[Collective]]) -> list[Collective]:
  """Returns the entries of a conditional, of which one branch runs."""
  if alike(branches):
    return list(branches[0])
  return [
    entry
    for c in itertools.chain.from_iterable(branches)
    for entry in _repeat([c], _share(c.where))
  ]


def _share(where: str) -> fractions.Fraction | None:
  """Returns how often what is in a branch runs, if a scope tells."""
  return next(reversed(shares(where)), None)


def _whole(count: fractions.Fraction | int) -> int | None:
  """Returns a count of a whole program as an integer."""
  return int(count) if count == int(count) else None


def _readable(path: str) -> str:
  """Returns the named scopes in a name stack, joined by "/"."""
  names = []
  for name in path.split("/")[:-1]:  # the last one is the primitive
    while match := _TRANSFORM.fullmatch(name):
      name = match[2]
    if not _STRUCTURE.fullmatch(name):
      names.append(name)
  return "/".join(names)
