"""Time of one compiled instruction by the roofline of a device.

    seconds = max(FLOPs / peak, bytes read and written / memory bandwidth)

FLOPs are those of products (``dot``, ``convolution``), bytes those of operands
and results that lie in main memory; a slice counts what is sliced. A custom
kernel's FLOPs are not in the program's text: it counts by its bytes alone, so
that communication hidden beside it is rather under- than overstated.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

import dataclasses
import functools
import math
import re

from parallel.hardware.devices import Device
from parallel.xla import hlo

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


def cost(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  device: Device,
) -> Cost:
  """Of one instruction that does not communicate; nothing for loops."""
  if instruction.opcode in _FREE or instruction.opcode.endswith(
    ("-start", "-done", "-update")
  ):
    return Cost()
  flops, dtype = _flops(module, computation, instruction)
  moved = _bytes(module, computation, instruction)
  seconds = max(flops / device.peak(dtype), moved / device.memory_bandwidth)
  return Cost(flops, moved, seconds)


def _flops(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
) -> tuple[float, str]:
  if instruction.opcode in ("dot", "convolution"):
    return (
      _product_flops(computation, instruction),
      computation.operands(instruction)[0].shapes[0].dtype,
    )
  flops, dtype = 0.0, "bfloat16"
  if instruction.opcode in ("fusion", "custom-call"):
    for name in instruction.calls():
      inner = module.computations[name]
      for inside in inner.instructions:
        more, its_dtype = _flops(module, inner, inside)
        dtype = its_dtype if more else dtype
        flops += more
  return flops, dtype


def _bytes(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
) -> float:
  operands = computation.operands(instruction)
  if instruction.opcode != "fusion":
    return _moved(computation, instruction)
  inner = module.computations[instruction.calls()[0]]
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
