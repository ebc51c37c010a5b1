"""Time of one compiled instruction by the roofline of a device.

    seconds = max(FLOPs / peak, bytes read and written / memory bandwidth)

plus the overhead of an instruction, if it was measured
(`parallel.ledger.calibration`).
FLOPs include matrix products and convolutions (``dot``, ``convolution``) only.
Bytes include operands and results in main memory; a slice counts only the
elements that it takes. The program's text contains neither the products of a
custom kernel nor the parts of arrays that it reads. A kernel therefore has
bytes and no FLOPs, so that its time, and the communication that it hides, are
underestimated; the caller passes the bytes that it reads of large arrays
(``reads``).

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import re
from types import MappingProxyType

from parallel.ledger import hlo
from parallel.plans.hardware.devices import Device

# Opcodes that update their first operand in place -> index of the operand with
# the update.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}

# Opcodes that move no data. `overlap.ScheduledProgram` counts the computations
# that loops, branches and calls run.
_FREE_OPCODES = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while",
  "conditional", "call", "after-all", "partition-id", "replica-id", "iota",
  "opt-barrier", "domain", "add-dependency",
}


@dataclasses.dataclass(frozen=True)
class Cost:
  """Cost of one or more instructions.

  Attributes:
    flops: FLOPs of matrix products and convolutions.
    bytes: Bytes read from and written to main memory.
    seconds: Time by the roofline; the sum over instructions.

  Example:
    >>> Cost(flops=2e9, bytes=1e6, seconds=0.5) * 2 + Cost(seconds=1.0)
    Cost(flops=4000000000.0, bytes=2000000.0, seconds=2.0)
  """

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
  reads: Mapping[tuple[int, ...], float] = MappingProxyType({}),
) -> Cost:
  """Returns the cost of one instruction that does not communicate.

  Args:
    module: The compiled program.
    computation: Computation that contains the instruction.
    instruction: The instruction; a loop body or callee is not included.
    device: Device whose peak rates give the time.
    reads: Dims of arrays -> bytes that a custom kernel reads of such an array,
      if it does not read all of it. Results with these dims are updated in
      place and not counted.

  Returns:
    FLOPs, main-memory bytes and seconds of one execution.
  """
  # Starts and dones are collectives, which are timed on their links, or copies,
  # which overlap with compute.
  if instruction.opcode in _FREE_OPCODES or instruction.opcode.endswith(
    ("-start", "-done", "-update")
  ):
    return Cost()
  flops, dtype = product_flops_and_dtype(module, computation, instruction)
  if instruction.opcode == "custom-call" and reads:
    moved = _bytes_of_kernel(computation, instruction, reads)
  else:
    moved = _bytes(module, computation, instruction)
  seconds = max(flops / device.peak(dtype), moved / device.memory_bandwidth)
  if flops or moved:
    seconds += device.overhead_s
  return Cost(flops, moved, seconds)


def product_flops_and_dtype(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
) -> tuple[float, str]:
  """Returns the FLOPs of the products in an instruction, and their dtype.

  The dtype is the dtype of the left operand of the last product; "bfloat16" if
  there is no product.
  """
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
        more, its_dtype = product_flops_and_dtype(module, inner, inside)
        dtype = its_dtype if more else dtype
        flops += more
  return flops, dtype


def _bytes(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
) -> float:
  """Returns the main-memory bytes that an instruction reads and writes."""
  operands = computation.operands(instruction)
  if instruction.opcode != "fusion":
    return _operation_bytes(computation, instruction)
  # Intermediates of a fusion stay in registers or on-chip memory; only its
  # parameters and results are in main memory.
  inner = module.computations[instruction.calls()[0]]
  total = 0.0
  for parameter in inner.instructions:
    if parameter.opcode != "parameter":
      continue
    operand = operands[int(parameter.literal)]
    if not _on_chip(operand):
      # Slices may overlap, so their sum is limited to the whole operand.
      total += min(_bytes_read(module, inner, parameter), _size(operand))
  if not _on_chip(instruction):
    total += _bytes_written(inner, inner.root)
  return total


def _bytes_of_kernel(
  computation: hlo.Computation,
  kernel: hlo.Instruction,
  reads: Mapping[tuple[int, ...], float],
) -> float:
  """Returns the main-memory bytes of a kernel that reads parts of arrays.

  ``reads``: dims of an array -> bytes that the kernel reads of it.
  """
  # An array that is passed as several operands is counted once.
  operands = [computation.by_name[n] for n in dict.fromkeys(kernel.operands)]
  return sum(
    reads.get(s.dims, s.bytes)
    for operand in operands for s in operand.shapes if not s.on_chip
  ) + sum(
    s.bytes for s in kernel.shapes if not s.on_chip and s.dims not in reads
  )


def _size(instruction: hlo.Instruction) -> int:
  """Returns the main-memory bytes of a result."""
  return sum(s.bytes for s in instruction.shapes if not s.on_chip)


def _on_chip(instruction: hlo.Instruction) -> bool:
  """Returns whether all arrays of a result are in a TPU's vector memory."""
  return bool(instruction.shapes) and all(
    s.on_chip for s in instruction.shapes
  )


def _operation_bytes(
  computation: hlo.Computation, instruction: hlo.Instruction
) -> float:
  """Returns the main-memory bytes that one operation reads and writes."""
  operands = computation.operands(instruction)
  # A slice is read and written. An update in place reads and writes only the
  # update.
  if instruction.opcode in ("dynamic-slice", "slice", "gather"):
    return 2 * _size(instruction)
  if instruction.opcode in _UPDATES:
    return 2 * _size(operands[_UPDATES[instruction.opcode]])
  return sum(map(_size, operands)) + _size(instruction)


@functools.cache
def _users(
  computation: hlo.Computation, name: str
) -> tuple[hlo.Instruction, ...]:
  """Returns the instructions of a computation that read ``name``."""
  return tuple(i for i in computation.instructions if name in i.operands)


def _bytes_read(
  module: hlo.Module, computation: hlo.Computation, value: hlo.Instruction
) -> float:
  """Returns the bytes that a fusion reads of its parameter ``value``."""
  whole = float(sum(s.bytes for s in value.shapes))
  if value.root:  # a nested fusion that returns its parameter
    return whole
  total = 0.0
  for user in _users(computation, value.name):
    if user.opcode in ("dynamic-slice", "slice", "gather"):
      total += sum(s.bytes for s in user.shapes)
    elif user.opcode == "bitcast":
      total += _bytes_read(module, computation, user)
    elif user.opcode in _UPDATES and user.operands[0] == value.name:
      continue  # updated in place: not read
    elif user.opcode == "fusion":  # XLA:TPU nests fusions
      inner = module.computations[user.calls()[0]]
      for parameter in inner.instructions:
        if parameter.opcode == "parameter" and (
          user.operands[int(parameter.literal)] == value.name
        ):
          total += _bytes_read(module, inner, parameter)
    else:
      return whole
  return total


def _bytes_written(
  computation: hlo.Computation, root: hlo.Instruction
) -> float:
  """Returns the bytes that a fusion writes of its result ``root``."""
  if root.opcode == "tuple":
    return sum(
      _bytes_written(computation, o) for o in computation.operands(root)
    )
  if root.opcode == "bitcast":
    return _bytes_written(computation, computation.operands(root)[0])
  if root.opcode in _UPDATES:
    update = computation.operands(root)[_UPDATES[root.opcode]]
    return float(sum(s.bytes for s in update.shapes))
  return float(sum(s.bytes for s in root.shapes))


def _product_flops(
  computation: hlo.Computation, product: hlo.Instruction
) -> float:
  """Returns the FLOPs of a product: 2 per multiply-add.

  XLA:TPU writes matrix products as convolutions, often with a window over a
  batch dim and much padding. Only window positions on an element of the input
  count.
  """
  left, right = (o.shapes[0] for o in computation.operands(product)[:2])
  output = product.shapes[0]
  if product.opcode == "dot":
    dims = re.findall(r"\d+", product.attribute("lhs_contracting_dims"))
    contracted = math.prod(left.dims[int(d)] for d in dims)
    return 2.0 * output.elements * contracted
  # dim_labels such as b01f_01io->b01f: batch, spatial dims and features of the
  # input; spatial dims, input and output features of the kernel; dims of the
  # result.
  lhs, rhs, out = re.fullmatch(
    r"(\w+)_(\w+)->(\w+)", product.attribute("dim_labels")
  ).groups()
  window = product.attribute("window")
  spatial = sorted(label for label in rhs if label.isdigit())
  settings = {
    name: value.split("x")
    for name, value in re.findall(r"(\w+)=([\dx_\-]+)", window)
  }
  # Spatial dims are independent, so the pairs of all dims multiply.
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
  # Grouped convolutions need no factor: the kernel's "i" is the number of
  # features of one feature group, the output's batch that of one batch group.
  batch_and_features = (
    output.dims[out.index("b")] * output.dims[out.index("f")]
  )
  return 2.0 * batch_and_features * right.dims[rhs.index("i")] * pairs


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
  """Counts the multiplications along one spatial dim of a convolution.

  Args:
    size: Elements of the input.
    outputs: Elements of the result.
    window: Elements of the kernel.
    stride: Step of the window from one output to the next.
    padding: Number of zeros before the first element.
    base_dilation: Distance of adjacent input elements, with zeros in between.
    window_dilation: Distance of adjacent kernel elements.

  Returns:
    The number of pairs (output element, kernel element) whose position is an
    element of the input, not a zero of padding or dilation.

  Example:
    >>> _valid_pairs(  # 3 taps on 4 elements, one zero of padding at each end
    ...   4, 4, 3, stride=1, padding=1, base_dilation=1, window_dilation=1
    ... )
    10
  """
  count = 0
  for w in range(window):
    for o in range(outputs):
      position = o * stride + w * window_dilation - padding
      inside = 0 <= position < (size - 1) * base_dilation + 1
      count += inside and position % base_dilation == 0
  return count
