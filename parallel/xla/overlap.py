"""What runs beside communication: the schedule of a compiled program.

In a scheduled module the order of instructions is the order of execution. A
synchronous collective has nothing beside it. An asynchronous one has what
stands between its start and its done, and hides as much of its time as that
compute takes by the roofline

    seconds = max(FLOPs / peak, bytes read and written / memory bandwidth).

Compute beside several transfers at once counts for one of them, the oldest that
is not covered yet. FLOPs are those of products (``dot``, ``convolution``),
bytes those of operands and results that lie in main memory; a slice counts what
is sliced. A custom kernel's FLOPs are not in the program's text: it counts by
its bytes alone, so that hidden communication is rather under- than overstated.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import re

import jax
import numpy as np

from parallel.hardware.devices import Device
from parallel.xla import hlo
from parallel.xla.compiled import Reader
from parallel.xla.ledger import Collective
from parallel.xla.targets import Target

# They move no data, or (the last ones) only wait for what has been counted.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while",
  "conditional", "call", "after-all", "partition-id", "replica-id", "iota",
  "opt-barrier", "domain", "add-dependency",
}


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one instruction or more: FLOPs, main-memory bytes, roofline seconds."""

  flops: float = 0.0
  bytes: float = 0.0
  seconds: float = 0.0

  def __add__(self, other: "Cost") -> "Cost":
    return Cost(
      self.flops + other.flops,
      self.bytes + other.bytes,
      self.seconds + other.seconds,
    )

  def __mul__(self, times: int) -> "Cost":
    return Cost(self.flops * times, self.bytes * times, self.seconds * times)


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
      beside = range(index + 1, self._done(computation, index))
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
          asynchronous=instruction.opcode.endswith("-start"),
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
    if instruction.opcode in _FREE or instruction.opcode.endswith(
      ("-start", "-done", "-update")
    ):
      return Cost()
    if self.reader.entries(computation, instruction):
      return Cost()
    flops, dtype = self._flops(computation, instruction)
    moved = self._bytes(computation, instruction)
    seconds = max(
      flops / self.device.peak(dtype), moved / self.device.memory_bandwidth
    )
    return Cost(flops, moved, seconds)

  def _flops(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> tuple[float, str]:
    if instruction.opcode in ("dot", "convolution"):
      return (
        _product_flops(computation, instruction),
        computation.operands(instruction)[0].shapes[0].dtype,
      )
    flops, dtype = 0.0, "bfloat16"
    if instruction.opcode in ("fusion", "custom-call"):
      for name in instruction.calls():
        inner = self.module.computations[name]
        for inside in inner.instructions:
          more, its_dtype = self._flops(inner, inside)
          dtype = its_dtype if more else dtype
          flops += more
    return flops, dtype

  def _bytes(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> float:
    operands = computation.operands(instruction)
    if instruction.opcode != "fusion":
      return _moved(computation, instruction)
    inner = self.module.computations[instruction.calls()[0]]
    total = 0.0
    for parameter in inner.instructions:
      if parameter.opcode != "parameter":
        continue
      operand = operands[int(parameter.literal)]
      if not _on_chip(operand):
        total += min(_read(inner, parameter), _size(operand))
    if not _on_chip(instruction):
      total += _written(inner, inner.root)
    return total


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


def _size(instruction: hlo.Instruction) -> int:
  return sum(s.bytes for s in instruction.shapes if not s.on_chip)


def _on_chip(instruction: hlo.Instruction) -> bool:
  return bool(instruction.shapes) and all(
    s.on_chip for s in instruction.shapes
  )


def _moved(
  computation: hlo.Computation, instruction: hlo.Instruction
) -> float:
  operands = computation.operands(instruction)
  if instruction.opcode in ("dynamic-slice", "slice", "gather"):
    return 2 * _size(instruction)
  if instruction.opcode == "dynamic-update-slice":
    return 2 * _size(operands[1])
  return sum(map(_size, operands)) + _size(instruction)


@functools.cache
def _users(
  computation: hlo.Computation, name: str
) -> tuple[hlo.Instruction, ...]:
  return tuple(i for i in computation.instructions if name in i.operands)


def _read(computation: hlo.Computation, value: hlo.Instruction) -> float:
  """Bytes of a fusion's parameter that it reads."""
  total = 0.0
  for user in _users(computation, value.name):
    if user.opcode in ("dynamic-slice", "slice", "gather"):
      total += sum(s.bytes for s in user.shapes)
    elif user.opcode == "bitcast":
      total += _read(computation, user)
    elif user.opcode == "dynamic-update-slice" and (
      user.operands[0] == value.name
    ):
      continue  # updated in place
    else:
      return float(sum(s.bytes for s in value.shapes))
  return total


def _written(computation: hlo.Computation, root: hlo.Instruction) -> float:
  """Bytes of a fusion's result that it writes."""
  if root.opcode == "tuple":
    return sum(_written(computation, o) for o in computation.operands(root))
  if root.opcode == "bitcast":
    return _written(computation, computation.operands(root)[0])
  if root.opcode == "dynamic-update-slice":
    update = computation.operands(root)[1]
    return float(sum(s.bytes for s in update.shapes))
  return float(sum(s.bytes for s in root.shapes))


def _product_flops(
  computation: hlo.Computation, product: hlo.Instruction
) -> float:
  """2 per multiplication and addition; padding is not counted."""
  left, right = (o.shapes[0] for o in computation.operands(product)[:2])
  output = product.shapes[0]
  if product.opcode == "dot":
    dims = re.findall(r"\d+", product.attribute("lhs_contracting_dims"))
    contracted = math.prod(left.dims[int(d)] for d in dims)
    return 2.0 * output.elements * contracted
  lhs, rhs, out = re.fullmatch(
    r"(\w+)_(\w+)->(\w+)", product.attribute("dim_labels")
  ).groups()
  window = product.attribute("window")
  spatial = sorted(label for label in rhs if label.isdigit())
  settings = {
    name: value.split("x")
    for name, value in re.findall(r"(\w+)=([\dx_\-]+)", window)
  }
  pairs = 1.0
  for number, label in enumerate(spatial):

    def setting(name, number=number):
      return settings[name][number] if name in settings else None

    pairs *= _valid_pairs(
      left.dims[lhs.index(label)],
      output.dims[out.index(label)],
      right.dims[rhs.index(label)],
      stride=int(setting("stride") or 1),
      padding=int((setting("pad") or "0_0").split("_")[0]),
      base_dilation=int(setting("lhs_dilate") or 1),
      window_dilation=int(setting("rhs_dilate") or 1),
    )
  groups = int(product.attribute("batch_group_count") or 1)
  batch_and_features = (
    output.dims[out.index("b")] * output.dims[out.index("f")]
  )
  return (
    2.0 * batch_and_features * right.dims[rhs.index("i")] * pairs / groups
  )


def _valid_pairs(
  size: int,
  outputs: int,
  window: int,
  *,
  stride: int,
  padding: int,
  base_dilation: int,
  window_dilation: int,
) -> int:
  """(output, window) positions of one dim that meet an element."""
  count = 0
  for w in range(window):
    for o in range(outputs):
      position = o * stride + w * window_dilation - padding
      inside = 0 <= position < (size - 1) * base_dilation + 1
      count += inside and position % base_dilation == 0
  return count
