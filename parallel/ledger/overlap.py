"""Overlap of communication and compute in a compiled program.

In a scheduled module the order of instructions is the order of execution. No
compute overlaps a synchronous collective. An asynchronous collective overlaps
the instructions between its start and its done, and is hidden for the time of
these instructions by the roofline (`parallel.ledger.roofline`). If several
collectives are in flight, the time of an instruction hides only one of them:
within a computation, the one that started first, until it is hidden entirely.
Collectives inside a loop have priority over those that span the loop.

Copies between device and host memory are asynchronous in the same way. They use
another link, so a collective and a copy may be hidden under the same compute.

All times are lower bounds, computed from peak rates of a device and its links.
Instructions that may communicate (`Reader.all_unknown`) have no transfer.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import re
from types import MappingProxyType

import jax
import numpy as np

from parallel.ledger import hlo, link_times, roofline
from parallel.ledger.compiled import Reader
from parallel.ledger.ledger import Collective, parse_name_stack
from parallel.ledger.roofline import Cost
from parallel.ledger.targets import Target
from parallel.plans.hardware.clusters import Level
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.slices import SLICE_RULES

# Scope of a conditional's branch whose cost is reported by name.
_ACTION = re.compile(r"\baction_(\w+)\b")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
  """Communicating instruction, or a pair of start and done.

  Attributes:
    entries: Ledger entries, one per operand, each with a count of one.
    count: Executions per execution of the program; None if unknown.
    asynchronous: Whether it consists of a start and a done.
    wire_seconds: Time of one execution on the links, in seconds.
    overlapped: Cost of the instructions between start and done.
    hidden_seconds: Part of ``wire_seconds`` that is hidden under that compute.
    between: Names of the instructions between start and done that take time,
      longest first.
  """

  entries: tuple[Collective, ...]
  count: int | None
  asynchronous: bool
  wire_seconds: float
  overlapped: Cost
  hidden_seconds: float
  between: tuple[str, ...]

  @property
  def bytes(self) -> int:
    """Operand bytes of one execution, per device."""
    return sum(entry.bytes for entry in self.entries)

  @property
  def hidden(self) -> float:
    """Fraction of ``wire_seconds``, 0 to 1, that is hidden under compute."""
    if not self.wire_seconds:  # nothing to hide
      return 1.0
    return self.hidden_seconds / self.wire_seconds


@dataclasses.dataclass(frozen=True)
class HostCopy:
  """Copy between device and host memory, or a pair of start and done.

  Attributes:
    to_host: Whether it copies to the host, else to the device.
    bytes: Bytes of one execution, without the padding of layouts.
    count: Executions per execution of the program; None if unknown.
    asynchronous: Whether it consists of a start and a done.
    overlapped: Cost of the instructions between start and done.
    where: Name scopes of the copied array, as in the ledger.
  """

  to_host: bool
  bytes: int
  count: int | None
  asynchronous: bool
  overlapped: Cost
  where: str

  @property
  def hiding_rate(self) -> float:
    """Minimum bytes per second of a host link at which the copy is hidden."""
    if not self.overlapped.seconds:
      return math.inf
    return self.bytes / self.overlapped.seconds


class ScheduledProgram:
  """Instructions of a compiled program with roofline times on a device."""

  def __init__(
    self,
    module: hlo.Module,
    mesh: jax.sharding.Mesh,
    device: Device,
    wire_seconds: Callable[[Collective], float],
    reads: Mapping[tuple[int, ...], float] = MappingProxyType({}),
    hides: Callable[[Collective, hlo.Instruction], bool] = lambda *_: True,
  ) -> None:
    """Initializes the program and the rates of its time model.

    Args:
      module: The compiled program.
      mesh: Mesh that the program was compiled for.
      device: Device whose roofline gives the time of compute.
      wire_seconds: Function from a collective to its seconds on the links.
      reads: Dims of arrays -> bytes that kernels read of such an array.
      hides: Whether an instruction between start and done of a collective
        counts as compute that hides it.

    Raises:
      ValueError: The module is not scheduled.
    """
    if not module.scheduled:
      raise ValueError(
        "the program is not scheduled, so the order of its instructions is "
        "unknown; pass a compiled program"
      )
    self.module, self.device = module, device
    self.reader = Reader(module, mesh, strict=False)
    self.wire_seconds, self.reads, self.hides = wire_seconds, reads, hides
    # Results of `_time_collectives` by the name of the computation.
    self._schedules: dict[str, tuple[list[ScheduledCollective], float]] = {}

  def total(self) -> Cost:
    """Returns the cost of all compute in one execution of the program.

    A loop with an unknown trip count counts as one trip; each branch with an
    unknown number of executions counts as one execution.
    """
    cost = Cost()
    for computation, count in self.module.runs():
      inside = sum(
        (self.cost(computation, i) for i in computation.instructions), Cost()
      )
      cost += inside * (1 if count is None else count)
    return cost

  def actions(self) -> dict[str, Cost]:
    """Returns NAME -> cost of the branch with the scope ``action_NAME``.

    It is that of one execution, and its seconds include those of communication
    that is not hidden under compute.
    """
    return {
      name[1]: self._run(branch)
      for computation in self.module.computations.values()
      for instruction in computation.instructions
      if instruction.opcode == "conditional"
      and not _ACTION.search(instruction.op_name)  # nested in another action
      for branch in instruction.calls()
      for inside in self.module.computations[branch].instructions
      if (name := _ACTION.search(inside.op_name))
    }

  def _run(self, start: str) -> Cost:
    """Returns the cost of one execution of the computation ``start``.

    Its seconds include those of communication that is not hidden.
    """
    total = Cost()
    for computation, count in self.module.runs(start):
      costs = [self.cost(computation, i) for i in computation.instructions]
      # A synchronous transfer is exposed entirely.
      exposed = sum(
        t.wire_seconds - t.hidden_seconds * t.asynchronous
        for t in self._time_collectives(computation.name)[0]
      )
      once = sum(costs, Cost(seconds=exposed))
      total += once * (1 if count is None else count)
    return total

  def collectives(self) -> list[ScheduledCollective]:
    """Returns all communicating instructions in the order of execution.

    If all branches of a conditional send the same and their shares of the
    executions are not declared, only the first branch is included.
    """
    return [
      dataclasses.replace(transfer, count=count)
      for computation, count in self.reader.runs()
      for transfer in self._time_collectives(computation.name)[0]
    ]

  def host_copies(self) -> list[HostCopy]:
    """Returns the copies between device and host in the order of execution."""
    return [
      dataclasses.replace(copy, count=count)
      for computation, count in self.reader.runs()
      for index in range(len(computation.instructions))
      if (copy := self._host_copy(computation, index))
    ]

  def _host_copy(
    self, computation: hlo.Computation, index: int
  ) -> HostCopy | None:
    """Returns the copy that starts at instruction ``index``; None for none.

    Its count is one.
    """
    copied = self.reader.host_copy(computation, index)
    if copied is None:
      return None
    order, done = computation.instructions, self.reader.done(computation, index)
    return HostCopy(
      *copied, 1, done > index,
      sum(
        (self._inclusive_cost(computation, order[i])
         for i in range(index + 1, done)), Cost(),
      ),
      parse_name_stack(order[index].op_name)[2],
    )

  def _time_collectives(self, name: str) -> tuple[
    list[ScheduledCollective], float
  ]:
    """Times the communicating instructions of a computation, executed once.

    Returns:
      The communicating instructions, with counts of one; and the seconds of
      compute, including loops and calls, that hide none of them.
    """
    if name in self._schedules:
      return self._schedules[name]
    computation = self.module.computations[name]
    order = computation.instructions
    found = []
    # Seconds of each instruction that do not hide a transfer yet.
    left = [self._available_seconds(computation, i) for i in order]
    for index, instruction in enumerate(order):
      entries = self.reader.entries(computation, instruction)
      if not entries:
        continue
      wire = sum(map(self.wire_seconds, entries))
      hidden = 0.0
      done = self.reader.done(computation, index)
      between = [
        i for i in range(index + 1, done) if self.hides(entries[0], order[i])
      ]
      # Transfers are visited in the order of their starts: the oldest one uses
      # as much of each instruction's time as it can, later ones the rest.
      for i in between:
        share = min(left[i], wire - hidden)
        left[i] -= share
        hidden += share
      costs = {order[i].name: self._inclusive_cost(computation, order[i])
               for i in between}
      costly = sorted(costs, key=lambda n: -costs[n].seconds)
      found.append(
        ScheduledCollective(
          entries=tuple(entries),
          count=1,
          asynchronous=done > index,
          wire_seconds=wire,
          overlapped=sum(costs.values(), Cost()),
          hidden_seconds=hidden,
          between=tuple(n for n in costly if costs[n].seconds),
        )
      )
    self._schedules[name] = found, sum(left)
    return self._schedules[name]

  def _available_seconds(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> float:
    """Returns an instruction's seconds that can hide outer collectives.

    These are its seconds without those that hide collectives in its loop body
    or callee.
    """
    times, name = self.runs(computation, instruction)
    if name is None:
      return self.cost(computation, instruction).seconds
    return times * self._time_collectives(name)[1]

  def _inclusive_cost(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Returns an instruction's cost, including its loop body or callee."""
    times, name = self.runs(computation, instruction)
    if name is None:
      return self.cost(computation, instruction)
    inner = self.module.computations[name]
    inside = (self._inclusive_cost(inner, i) for i in inner.instructions)
    return sum(inside, Cost()) * times

  def runs(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> tuple[int, str | None]:
    """Returns (number of executions, name) of a loop's body or a callee.

    The result is (1, None) for other instructions.

    Branches of a conditional are not included and hide nothing: the branch that
    an execution takes is unknown.
    """
    if instruction.opcode == "while":
      # Unknown trip count: one trip, so that overlap is not overestimated.
      trips = self.module.trip_count(computation, instruction)
      return 1 if trips is None else trips, instruction.calls("body")[0]
    if instruction.opcode == "call":
      return 1, instruction.calls("to_apply")[0]
    return 1, None

  def cost(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Returns the cost of one instruction, without a loop body or callee.

    Communication has a cost of zero: its time is in `ScheduledCollective`.
    """
    if self.reader.entries(computation, instruction):
      return Cost()
    return roofline.cost(
      self.module, computation, instruction, self.device, self.reads
    )


def build_wire_time_model(
  target: Target, mesh: jax.sharding.Mesh
) -> Callable[[Collective], float]:
  """Returns a function from a collective to its seconds on the links.

  The time is the number of bytes that a device sends with the ring algorithm,
  divided by the rate of the links that it can use concurrently:

  - On a torus, links along every dimension that the group spans: two if the
    dimension closes to a ring, one otherwise.
  - Elsewhere, the link of the innermost network level with the whole group.

  Latency is not included. A target with measured links has the times of
  `parallel.ledger.link_times` instead.

  Source: Austin et al., "How to Scale Your Model", 2025, chapter "Sharded
  matrices": bandwidth multiplies with the axes of the torus.

  Args:
    target: Target of the compilation, with ``hardware`` (not a CPU).
    mesh: Mesh of the target's devices that the program was compiled for.

  Returns:
    A function from a collective to the seconds of one execution.
  """
  if target.links is not None:
    return link_times.build_time_model(target.links, mesh)
  hardware = target.hardware

  def links_of_torus(entry: Collective) -> int:
    """Returns the number of links of a device that a collective can use."""
    everywhere = np.array([d.coords for d in target.devices])
    # Dims of the torus, and of the box that the group spans.
    extent = everywhere.max(axis=0) + 1
    places = np.array([d.coords for d in first_group_devices(mesh, entry)])
    spanned = np.ptp(places, axis=0) + 1
    closes = [
      SLICE_RULES[hardware.name].wraps_around(int(size)) for size in extent
    ]
    closed = (spanned == extent) & np.array(closes)
    # At least one link: the two devices of a chip have equal coordinates.
    return max(1, int(np.sum((spanned > 1) * (1 + closed))))

  def seconds(entry: Collective) -> float:
    if not entry.bytes:
      return 0.0
    if hardware.num_links > 1:
      rate = links_of_torus(entry) * hardware.link.bandwidth
    else:
      level = level_of(target, first_group_devices(mesh, entry))
      rate = level.link.bandwidth * level.links_per_device
    return entry.wire_bytes_ring / rate

  return functools.cache(seconds)


def first_group_devices(
  mesh: jax.sharding.Mesh, entry: Collective
) -> np.ndarray:
  """Returns the devices of a collective's first group, as an example of all."""
  # Selects all devices along the entry's axes, and the first along others, or
  # all devices of the mesh if no set of axes describes the groups.
  index = tuple(
    slice(None) if name in entry.axes or not entry.axes else 0
    for name in mesh.axis_names
  )
  return mesh.devices[index].ravel()


def level_of(target: Target, devices: np.ndarray) -> Level:
  """Returns the innermost network level that connects all of the devices."""
  # Devices are numbered level by level: all are in one unit of ``size`` devices
  # if the first and the last one are.
  numbers = [target.devices.index(d) for d in devices]
  size = 1
  for level in target.levels:
    size *= level.size
    if numbers[0] // size == numbers[-1] // size:
      break
  return level


def sum_by_axes(
  collectives: list[ScheduledCollective],
) -> Mapping[tuple[str, ...], dict[str, float]]:
  """Sums bytes and seconds of the transfers over each set of mesh axes.

  They are those of one execution of the program.

  Args:
    collectives: Result of `ScheduledProgram.collectives`.

  Returns:
    Mesh axes -> row with the keys

    - ``bytes``: operand bytes per device,
    - ``asynchronous``: operand bytes of asynchronous transfers,
    - ``hidden``: asynchronous bytes, weighted by the hidden fraction,
    - ``seconds``: time on the links,
    - ``exposed_seconds``: part of ``seconds`` that is not hidden,
    - ``unknown``: number of transfers with an unknown count, which are not
      included in the keys above,
    - ``unknown_bytes``: operand bytes of these transfers, counted once each.
  """
  table: dict[tuple[str, ...], dict[str, float]] = {}
  for t in collectives:
    if not t.bytes:
      continue
    row = table.setdefault(
      t.entries[0].axes,
      dict(bytes=0, asynchronous=0, hidden=0.0, seconds=0.0,
           exposed_seconds=0.0, unknown=0, unknown_bytes=0),
    )
    if t.count is None:
      row["unknown"] += 1
      row["unknown_bytes"] += t.bytes
      continue
    row["bytes"] += t.bytes * t.count
    row["seconds"] += t.wire_seconds * t.count
    # `hidden` is 1 for a transfer that takes no time; a synchronous transfer is
    # never hidden.
    hidden = t.hidden if t.asynchronous else 0.0
    if t.asynchronous:
      row["asynchronous"] += t.bytes * t.count
      row["hidden"] += t.bytes * t.count * hidden
    row["exposed_seconds"] += t.wire_seconds * t.count * (1 - hidden)
  return table
