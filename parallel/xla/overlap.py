"""What runs beside communication: the schedule of a compiled program.

In a scheduled module the order of instructions is the order of execution. A
synchronous collective has nothing beside it. An asynchronous one has what
stands between its start and its done, and hides as much of its time as that
compute takes by the roofline (`parallel.xla.roofline`). Compute beside several
transfers at once counts for one of them, the oldest that is not covered yet.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools

import jax
import numpy as np

from parallel.hardware.devices import Device
from parallel.xla import hlo, roofline
from parallel.xla.compiled import Reader
from parallel.xla.ledger import Collective
from parallel.xla.roofline import Cost
from parallel.xla.targets import Target


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One communicating instruction.

  Attributes:
    entries: What it sends, of count one each.
    count: Executions per run; None: unknown.
    asynchronous: Whether it has a start and a done.
    wire_seconds: Of one execution, by the rate of its links.
    beside: Cost of what runs between start and done.
    hidden_seconds: The part of ``beside`` that counts for this transfer.
    between: Names of the costliest instructions there.
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
    """Operand bytes of one execution."""
    return sum(entry.bytes for entry in self.entries)

  @property
  def hidden(self) -> float:
    """The part of its time, 0 to 1, that compute beside it takes."""
    if not self.wire_seconds:
      return 1.0
    return self.hidden_seconds / self.wire_seconds


class Schedule:
  """A compiled program's instructions, timed by the roofline of a device."""

  def __init__(
    self,
    module: hlo.Module,
    mesh: jax.sharding.Mesh,
    device: Device,
    wire_seconds: Callable[[Collective], float],
  ) -> None:
    """Reads the schedule.

    Args:
      module: The compiled program.
      mesh: The mesh it was compiled for.
      device: Whose roofline it is.
      wire_seconds: Collective -> seconds on its links.

    Raises:
      ValueError: The module is not scheduled.
    """
    if not module.scheduled:
      raise ValueError("the program is not scheduled: its order says nothing")
    self.module, self.device = module, device
    self.reader = Reader(module, mesh)
    self.wire_seconds = wire_seconds

  def total(self) -> Cost:
    """Of all compute in one run; a loop of unknown length counts once."""
    cost = Cost()
    for computation, count in self.module.runs():
      inside = sum(
        (self.cost(computation, i) for i in computation.instructions), Cost()
      )
      cost += inside * (1 if count is None else count)
    return cost

  def transfers(self) -> list[Transfer]:
    """All communicating instructions in the order of execution."""
    return [
      transfer
      for computation, count in self.module.runs()
      for transfer in self._transfers(computation, count)
    ]

  def _transfers(
    self, computation: hlo.Computation, count: int | None
  ) -> list[Transfer]:
    order = computation.instructions
    found = []
    left = [self._inclusive(computation, i).seconds for i in order]
    for index, instruction in enumerate(order):
      entries = self.reader.entries(computation, instruction)
      if not entries:
        continue
      wire = sum(map(self.wire_seconds, entries))
      hidden = 0.0
      done = self._done(computation, index)
      beside = range(index + 1, done)
      for i in beside:
        share = min(left[i], wire - hidden)
        left[i] -= share
        hidden += share
      costs = {order[i].name: self._inclusive(computation, order[i])
               for i in beside}
      costly = sorted(costs, key=lambda n: -costs[n].seconds)
      found.append(
        Transfer(
          entries=tuple(entries),
          count=count,
          asynchronous=done > index,
          wire_seconds=wire,
          beside=sum(costs.values(), Cost()),
          hidden_seconds=hidden,
          between=tuple(n for n in costly[:3] if costs[n].seconds),
        )
      )
    return found

  def _done(self, computation: hlo.Computation, start: int) -> int:
    """Where the instruction that waits for a start stands."""
    order = computation.instructions
    name = order[start].name
    chain = self.reader.chain(order[start])
    if chain:
      links = [i for i, x in enumerate(order) if self.reader.chain(x) == chain]
      return links[-1]
    if not order[start].opcode.endswith("-start"):
      return start
    for index in range(start + 1, len(order)):
      if name in order[index].operands:
        if not order[index].opcode.endswith("-update"):
          return index
        name = order[index].name
    return start

  def _inclusive(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Of an instruction with the loop or call that it runs."""
    times = 1
    if instruction.opcode == "while":
      times = self.module.trip_count(computation, instruction) or 1
      names = instruction.calls("body")
    elif instruction.opcode == "call":
      names = instruction.calls("to_apply")
    else:
      return self.cost(computation, instruction)
    inside = [
      self._inclusive(self.module.computations[name], i)
      for name in names
      for i in self.module.computations[name].instructions
    ]
    return sum(inside, Cost()) * times

  def cost(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Cost:
    """Of one instruction; nothing for communication and for loops."""
    if self.reader.entries(computation, instruction):
      return Cost()
    return roofline.cost(self.module, computation, instruction, self.device)


def wire_seconds(
  target: Target, mesh: jax.sharding.Mesh
) -> Callable[[Collective], float]:
  """Seconds of a collective: ring bytes over the links that it can use.

  On a torus a collective uses, in each dimension that its group spans, both
  links of a device where that dimension closes to a ring, one where it does
  not; all dimensions at once. Elsewhere a device sends through the link of the
  innermost level that holds the whole group. Latency is left out.

  Source: Austin et al., "How to Scale Your Model", 2025, chapter "Sharded
  matrices": bandwidth multiplies with the axes of the torus; a v4, v5p or 7x
  slice closes in dimensions that are multiples of 4, a v5e or v6e slice in
  those of size 16.

  Args:
    target: What is compiled for; has hardware.
    mesh: Of its devices.

  Returns:
    The function.
  """
  hardware = target.hardware
  devices = mesh.devices

  def group(entry: Collective) -> np.ndarray:
    """The devices of the first group."""
    index = tuple(
      slice(None) if name in entry.axes or not entry.axes else 0
      for name in mesh.axis_names
    )
    return devices[index].ravel()

  def links_of_torus(entry: Collective) -> int:
    everywhere = np.array([d.coords for d in target.devices])
    extent = everywhere.max(axis=0) + 1
    places = np.array([d.coords for d in group(entry)])
    spanned = np.ptp(places, axis=0) + 1
    unit = 4 if hardware.num_links == 6 else 16
    closed = (spanned == extent) & (extent % unit == 0)
    return max(1, int(np.sum((spanned > 1) * (1 + closed))))

  def seconds(entry: Collective) -> float:
    if not entry.bytes:
      return 0.0
    if hardware.num_links > 1:
      rate = links_of_torus(entry) * hardware.link.bandwidth
    else:
      numbers = [target.devices.index(d) for d in group(entry)]
      size = 1
      for level in target.levels:
        size *= level.size
        if numbers[0] // size == numbers[-1] // size:
          break
      rate = level.link.bandwidth * level.links_per_device
    return entry.wire_bytes_ring / rate

  return functools.cache(seconds)


def by_axis(
  transfers: list[Transfer],
) -> Mapping[tuple[str, ...], dict[str, float]]:
  """Sums per set of axes: operand bytes in all, asynchronous, hidden; seconds.

  A transfer of unknown count is left out; bytes hidden are those of an
  asynchronous transfer times the part of its time that is hidden.
  """
  table: dict[tuple[str, ...], dict[str, float]] = {}
  for t in transfers:
    if t.count is None or not t.bytes:
      continue
    row = table.setdefault(
      t.entries[0].axes,
      dict(bytes=0, asynchronous=0, hidden=0.0, seconds=0.0,
           exposed_seconds=0.0),
    )
    row["bytes"] += t.bytes * t.count
    row["seconds"] += t.wire_seconds * t.count
    hidden = t.hidden if t.asynchronous else 0.0
    if t.asynchronous:
      row["asynchronous"] += t.bytes * t.count
      row["hidden"] += t.bytes * t.count * hidden
    row["exposed_seconds"] += t.wire_seconds * t.count * (1 - hidden)
  return table
