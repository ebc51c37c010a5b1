"""How much communication of a compiled program runs under its compute.

In a scheduled module the order of instructions is the order of execution.
Nothing runs beside a synchronous collective. Beside an asynchronous one run the
instructions between its start and its done; it is hidden for as long as they
take by the roofline (`parallel.xla.roofline`). Where several collectives are
under way at once, an instruction's time counts for one of them only. Within a
computation this is the one that started first, as long as it is not hidden
entirely. Collectives inside a loop come before those that span the loop.

All times are bounds from peak rates of a device and its links.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
from types import MappingProxyType

import jax
import numpy as np

from parallel.hardware.clusters import Level
from parallel.hardware.devices import Device
from parallel.hardware.slices import SLICES
from parallel.xla import hlo, roofline
from parallel.xla.compiled import Reader
from parallel.xla.ledger import Collective
from parallel.xla.roofline import Cost
from parallel.xla.targets import Target

_ACTION = re.compile(r"\baction_(\w+)\b")


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
  """One communicating instruction, or a start and its done.

  Attributes:
    entries: What it sends, one entry per operand, each with a count of one.
    count: Executions per run of the program; None: unknown.
    asynchronous: Whether it has a start and a done.
    wire_seconds: Time of one execution on the links, in seconds.
    beside: Cost of all that runs between start and done.
    hidden_seconds: How much of ``wire_seconds`` is hidden under that compute.
    between: Names of up to three instructions between start and done, those
      that take longest.
  """

  entries: tuple[Collective, ...]
  count: int | None
  asynchronous: bool
  wire_seconds: float
  beside: Cost
  hidden_seconds: float
  between: tuple[str, ...]

  @property
  def bytes(self) -> int:
    """Operand bytes of one execution, per device."""
    return sum(entry.bytes for entry in self.entries)

  @property
  def hidden(self) -> float:
    """The part of its time, 0 to 1, that is hidden under compute."""
    if not self.wire_seconds:  # nothing to hide
      return 1.0
    return self.hidden_seconds / self.wire_seconds


class ScheduledProgram:
  """A compiled program's instructions, timed by the roofline of a device."""

  def __init__(
    self,
    module: hlo.Module,
    mesh: jax.sharding.Mesh,
    device: Device,
    wire_seconds: Callable[[Collective], float],
    reads: Mapping[tuple[int, ...], float] = MappingProxyType({}),
  ) -> None:
    """Takes a compiled program and the rates by which to time it.

    Args:
      module: The compiled program.
      mesh: The mesh it was compiled for.
      device: The device whose roofline gives the time of compute.
      wire_seconds: A function from a collective to its seconds on the links.
      reads: What kernels read of arrays, as `roofline.cost` takes it.

    Raises:
      ValueError: The module is not scheduled.
    """
    if not module.scheduled:
      raise ValueError("the program is not scheduled: its order says nothing")
    self.module, self.device = module, device
    self.reader = Reader(module, mesh)
    self.wire_seconds, self.reads = wire_seconds, reads
    self._schedules: dict[str, tuple[list[ScheduledCollective], float]] = {}

  def total(self) -> Cost:
    """Returns the cost of all compute in one run of the program.

    A loop of unknown length counts as one trip, and so does each branch of a
    conditional of which nobody knows how often it runs.
    """
    cost = Cost()
    for computation, count in self.module.runs():
      inside = sum(
        (self.cost(computation, i) for i in computation.instructions), Cost()
      )
      cost += inside * (1 if count is None else count)
    return cost

  def actions(self) -> dict[str, Cost]:
    """Returns the costs of branches in scopes ``action_NAME``, by name.

    Each is of one run of the branch. Its time has that of what it sends, as far
    as it is not hidden.
    """
    return {
      name[1]: self._run(branch)
      for computation in self.module.computations.values()
      for instruction in computation.instructions
      if instruction.opcode == "conditional"
      and not _ACTION.search(instruction.op_name)  # inside of another one
      for branch in instruction.calls()
      for inside in self.module.computations[branch].instructions
      if (name := _ACTION.search(inside.op_name))
    }

  def _run(self, start: str) -> Cost:
    """Returns the cost of one run of a computation, as scheduled."""
    total = Cost()
    for computation, count in self.module.runs(start):
      costs = [self.cost(computation, i) for i in computation.instructions]
      exposed = sum(
        t.wire_seconds - t.hidden_seconds * t.asynchronous
        for t in self._schedule(computation.name)[0]
      )
      once = sum(costs, Cost(seconds=exposed))
      total += once * (1 if count is None else count)
    return total

  def collectives(self) -> list[ScheduledCollective]:
    """Returns all communicating instructions in the order of execution.

    If the branches of a conditional send the same, those of the first one,
    unless it is known how often each of them runs.
    """
    return [
      dataclasses.replace(transfer, count=count)
      for computation, count in self.reader.runs()
      for transfer in self._schedule(computation.name)[0]
    ]

  def _schedule(self, name: str) -> tuple[list[ScheduledCollective], float]:
    """Times the communicating instructions of one run of a computation.

    Returns:
      The instructions, with counts of one, and the seconds of compute, loops
      and calls included, under which none of them was hidden.
    """
    if name in self._schedules:
      return self._schedules[name]
    computation = self.module.computations[name]
    order = computation.instructions
    found = []
    # Seconds of each instruction that no transfer has been hidden under yet.
    left = [self._left(computation, i) for i in order]
    for index, instruction in enumerate(order):
      entries = self.reader.entries(computation, instruction)
      if not entries:
        continue
      wire = sum(map(self.wire_seconds, entries))
      hidden = 0.0
      done = self._done(computation, index)
      beside = range(index + 1, done)
      # Transfers come in the order of their starts, so the oldest one takes
      # what it can of each instruction, and leaves the rest to later ones.
      for i in beside:
        share = min(left[i], wire - hidden)
        left[i] -= share
        hidden += share
      costs = {order[i].name: self._inclusive(computation, order[i])
               for i in beside}
      costly = sorted(costs, key=lambda n: -costs[n].seconds)
      found.append(
        ScheduledCollective(
          entries=tuple(entries),
          count=1,
          asynchronous=done > index,
          wire_seconds=wire,
          beside=sum(costs.values(), Cost()),
          hidden_seconds=hidden,
          between=tuple(n for n in costly[:3] if costs[n].seconds),
        )
      )
    self._schedules[name] = found, sum(left)
    return self._schedules[name]

  def _done(self, computation: hlo.Computation, start: int) -> int:
    """Returns the index of the instruction that waits for a start.

    Returns:
      The index of the done; ``start`` itself for a synchronous collective.
    """
    order = computation.instructions
    name = order[start].name
    # XLA:TPU may spread a collective over a chain of fusions with compute in
    # them. The first sends and the last has the result.
    chain = self.reader.chain(order[start])
    if chain:
      links = [i for i, x in enumerate(order) if self.reader.chain(x) == chain]
      return links[-1]
    if not order[start].opcode.endswith("-start"):
      return start  # synchronous: done where it starts
    # start -> update -> ... -> done, each the operand of the next. An update
    # lets an asynchronous call go on; what waits is the user of the last one.
    for index in range(start + 1, len(order)):
      if name in order[index].operands:
        if not order[index].opcode.endswith("-update"):
          return index
        name = order[index].name
    return start

  def _left(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> float:
    """Returns the seconds of an instruction that hide no transfer within it."""
    times, name = self._runs(computation, instruction)
    if name is None:
      return self.cost(computation, instruction).seconds
    return times * self._schedule(name)[1]

  def _inclusive(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Returns an instruction's cost with that of the loop or call it runs."""
    times, name = self._runs(computation, instruction)
    if name is None:
      return self.cost(computation, instruction)
    inner = self.module.computations[name]
    inside = (self._inclusive(inner, i) for i in inner.instructions)
    return sum(inside, Cost()) * times

  def _runs(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> tuple[int, str | None]:
    """Returns how often a loop or call runs what; (1, None) for all else.

    Branches of a conditional hide nothing: which of them runs when is not
    known.
    """
    if instruction.opcode == "while":
      # Of unknown length: one trip, so that nothing is hidden that may not be.
      trips = self.module.trip_count(computation, instruction)
      return 1 if trips is None else trips, instruction.calls("body")[0]
    if instruction.opcode == "call":
      return 1, instruction.calls("to_apply")[0]
    return 1, None

  def cost(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Returns the cost of one instruction, without the loop that it may run.

    Communication has no cost as compute; its time is ``wire_seconds``.
    """
    if self.reader.entries(computation, instruction):
      return Cost()
    return roofline.cost(
      self.module, computation, instruction, self.device, self.reads
    )


def wire_seconds(
  target: Target, mesh: jax.sharding.Mesh
) -> Callable[[Collective], float]:
  """Returns a function that gives the seconds of a collective on its links.

  The time is the bytes that a device sends under the ring algorithm, over the
  rate of the links that it can use at once:

  - On a torus these are links along every dimension that the group spans: two
    where the dimension closes to a ring, one where it does not.
  - Elsewhere it is the link of the innermost level that holds the whole group.

  Latency is left out.

  Source: Austin et al., "How to Scale Your Model", 2025, chapter "Sharded
  matrices": bandwidth multiplies with the axes of the torus.

  Args:
    target: What the program is compiled for. It must have hardware, so it
      cannot be a CPU.
    mesh: The mesh of the target's devices that the program was compiled for.

  Returns:
    A function from a collective to the seconds of one execution.
  """
  hardware = target.hardware

  def links_of_torus(entry: Collective) -> int:
    """Returns how many links of a device a collective can use at once."""
    everywhere = np.array([d.coords for d in target.devices])
    extent = everywhere.max(axis=0) + 1
    places = np.array([d.coords for d in group(mesh, entry)])
    spanned = np.ptp(places, axis=0) + 1
    closes = [SLICES[hardware.name].closes(int(size)) for size in extent]
    closed = (spanned == extent) & np.array(closes)
    # At least one link: two devices of a chip have the same coordinates.
    return max(1, int(np.sum((spanned > 1) * (1 + closed))))

  def seconds(entry: Collective) -> float:
    if not entry.bytes:
      return 0.0
    if hardware.num_links > 1:
      rate = links_of_torus(entry) * hardware.link.bandwidth
    else:
      level = level_of(target, group(mesh, entry))
      rate = level.link.bandwidth * level.links_per_device
    return entry.wire_bytes_ring / rate

  return functools.cache(seconds)


def group(mesh: jax.sharding.Mesh, entry: Collective) -> np.ndarray:
  """Returns the devices of a collective's first group; others are alike."""
  # Along the entry's axes all devices, along the others the first one. Groups
  # that no set of axes describes may lie anywhere: take all devices.
  index = tuple(
    slice(None) if name in entry.axes or not entry.axes else 0
    for name in mesh.axis_names
  )
  return mesh.devices[index].ravel()


def level_of(target: Target, devices: np.ndarray) -> Level:
  """Returns the innermost level of which one group holds all devices."""
  # Devices are numbered level by level, so they lie in one unit of ``size``
  # devices if the first and the last of them do.
  numbers = [target.devices.index(d) for d in devices]
  size = 1
  for level in target.levels:
    size *= level.size
    if numbers[0] // size == numbers[-1] // size:
      break
  return level


def by_axis(
  collectives: list[ScheduledCollective],
) -> Mapping[tuple[str, ...], dict[str, float]]:
  """Sums bytes and seconds of one run over transfers with the same axes.

  Args:
    collectives: What `ScheduledProgram.collectives` returned.

  Returns:
    Mesh axes -> a row of ``bytes`` (operand bytes per device),
    ``asynchronous`` (those of asynchronous transfers), ``hidden`` (those, each
    times the hidden part of its time), ``seconds`` (on the links),
    ``exposed_seconds`` (the part of it that is not hidden), and, of transfers
    whose count is not known and which are in none of the others, ``unknown``
    (how many there are) and ``unknown_bytes`` (operand bytes, each run once).
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
    # A transfer that takes no time is entirely hidden by definition, but a
    # synchronous one is not, whatever it takes.
    hidden = t.hidden if t.asynchronous else 0.0
    if t.asynchronous:
      row["asynchronous"] += t.bytes * t.count
      row["hidden"] += t.bytes * t.count * hidden
    row["exposed_seconds"] += t.wire_seconds * t.count * (1 - hidden)
  return table
