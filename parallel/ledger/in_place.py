"""Detection of copies of arrays that a program should update in place.

A key-value cache occupies most of a device's memory; a decoding step reads a
part of it and writes a few rows. A program that copies the cache, or slices a
layer out of it, moves more bytes than the step needs and may run out of memory.

Such an array enters a program as a parameter and is passed through loops to
instructions that update it in place. XLA inserts a copy before a
``dynamic-update-slice`` or ``scatter`` that cannot be done in place. A
``bitcast`` is a view of the array and is followed. Any other instruction whose
result has the shape of the array allocates another array of that size.

XLA:TPU may keep a whole array in its vector memory during a program: it copies
the array there in slices, and back at the end. That is no fault.

XLA:CPU scatters 16-bit floats in float32: it widens the whole array and narrows
the result. Such conversions are listed separately from other copies.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
import re

from parallel.ledger import hlo

# Opcodes that pass an array on without allocating another one.
_PASS_ON = {
  "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
  "call", "opt-barrier", "add-dependency", "after-all", "domain", "async-done",
  "copy-done",
}
# Opcodes that XLA executes in the memory of their first operand, if it can.
_UPDATES = {"dynamic-update-slice", "scatter"}
# Opcodes whose result is a part of their operand.
_SLICES = {"slice", "dynamic-slice"}
# Starts of asynchronous slices, which return a tuple: operands, then results.
_SLICE_STARTS = {f"{opcode}-start" for opcode in _SLICES}
# Instructions whose result has as many elements as their operand: a fusion may
# apply them to a slice before it writes the slice.
_KEEPS_SIZE = {"bitcast", "reshape", "convert", "copy", "transpose"}
# Element types between which XLA:CPU converts arrays that it updates.
_NARROW, _WIDE = {"bfloat16", "float16"}, "float32"


@dataclasses.dataclass(frozen=True)
class Uses:
  """Uses of arrays in a program, other than passing and updating them in place.

  Attributes:
    faults: Descriptions of the instructions that copy or slice an array, and of
      the parameters that are not updated in place.
    gathers: Names of instructions that gather rows of an array, such as pages.
    kernels: jax's name stacks of the kernels with an array as an operand.
    widened: Descriptions of the instructions that convert a whole array of
      16-bit floats to float32, or back, and of copies of converted arrays.
  """

  faults: tuple[str, ...]
  gathers: tuple[str, ...]
  kernels: tuple[str, ...]
  widened: tuple[str, ...] = ()


def uses(
  module: hlo.Module, arrays: Sequence[hlo.Shape], parts: int = 1
) -> Uses:
  """Finds the uses of arrays that a program should update in place.

  Args:
    module: The compiled program.
    arrays: Shapes on one device of the arrays, which are parameters.
    parts: Number of equal parts of an array, such as layers. A slice is a fault
      if it is at least as large as one part.
  """
  seen_as = view_dims(module, arrays)
  faults = _not_aliased(module, arrays)
  widened, gathers, kernels = [], [], []
  narrow = any(array.dtype in _NARROW for array in arrays)
  seen = set()
  for computation, _ in module.runs():
    if computation.name in seen:  # called from two places
      continue
    seen.add(computation.name)
    for instruction in computation.instructions:
      what = _describe_copy(module, computation, instruction, seen_as, parts)
      if what:
        converts = narrow and _converts(module, computation, instruction)
        (widened if converts else faults).append(
          f"{what} {instruction.name}" + (
            f" ({instruction.op_name})" if instruction.op_name else ""
          )
        )
      if _gathers(module, computation, instruction, seen_as):
        gathers.append(instruction.name)
      # A kernel with an array, or a view of it, as an operand.
      if instruction.opcode == "custom-call" and any(
        operand.shapes and operand.shapes[0].dims in seen_as
        for operand in computation.operands(instruction)
      ):
        kernels.append(instruction.op_name)
  return Uses(
    tuple(faults), tuple(gathers), tuple(kernels), tuple(widened)
  )


def view_dims(
  module: hlo.Module, arrays: Iterable[hlo.Shape]
) -> set[tuple[int, ...]]:
  """Returns the shapes of arrays, of their bitcasts and of their reshapes.

  Args:
    module: The compiled program.
    arrays: Shapes of the arrays as parameters.
  """
  # Iterates to a fixed point: a view may be a view of a view.
  found, before = {array.dims for array in arrays}, 0
  while len(found) > before:
    before = len(found)
    for computation in module.computations.values():
      for instruction in computation.instructions:
        if instruction.opcode in ("bitcast", "reshape"):
          (operand,) = computation.operands(instruction)
          if operand.shapes[0].dims in found:
            found.add(instruction.shapes[0].dims)
  return found


def _not_aliased(
  module: hlo.Module, arrays: Sequence[hlo.Shape]
) -> list[str]:
  """Describes the arrays whose memory is not reused by any result."""
  # Shapes of the donated parameters; each may serve one of the arrays.
  left = [
    i.shapes[0] for i in module.computations[module.entry].instructions
    if i.opcode == "parameter" and int(i.literal) in module.aliased
  ]
  missing = []
  for array in arrays:
    match = next(
      (s for s in left if (s.dtype, s.dims) == (array.dtype, array.dims)), None
    )
    if match is None:
      missing.append(
        f"no result reuses the memory of a parameter {array.dtype}"
        f"{list(array.dims)}"
      )
    else:
      left.remove(match)
  return missing


def _describe_copy(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  views: set[tuple[int, ...]],
  parts: int,
) -> str:
  """Describes how an instruction copies or slices an array; else "".

  ``views`` are the dims of the arrays and of their views (`view_dims`);
  ``parts`` is the number of equal parts of an array, such as layers.
  """
  opcode = instruction.opcode
  # Pairs (computation, instruction that writes a result).
  roots = [(computation, instruction)]
  if opcode == "fusion":
    inner = module.computations[instruction.calls()[0]]
    roots = [(inner, root) for root in _results(inner, inner.root)]
  for owner, root in roots:
    if _slices(owner, root, views, parts):
      return "a slice:"
  whole = [s for s in instruction.shapes if s.dims in views]
  if not whole or opcode in _PASS_ON | _UPDATES | _SLICE_STARTS:
    return ""
  # A small array may be moved into a TPU's vector memory and back: no fault.
  if any(s.on_chip for s in whole):
    return ""
  if opcode == "fusion":
    # Results of the array's whole size that are neither updates nor parameters.
    copies = [
      root for _, root in roots
      if root.opcode not in _UPDATES | {"parameter"}
      and any(s.dims in views for s in root.shapes)
    ]
    return f"a copy ({copies[0].opcode} in a fusion):" if copies else ""
  if opcode == "custom-call":
    # Results that a kernel aliases to operands, such as {0}: (2, {}).
    kept = re.findall(r"\{\d*\}: \(", instruction.attribute(
      "output_to_operand_aliasing"
    ))
    return "a kernel's new array:" if len(kept) < len(whole) else ""
  return f"a copy ({opcode}):"


def _converts(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
) -> bool:
  """Returns whether an instruction converts, or copies a converted array.

  The conversion is between 16-bit floats and float32. Nothing else is computed
  on the way, and no dims are transposed.
  """
  dtypes = set()
  while not (dtypes & _NARROW and _WIDE in dtypes):
    inside = [(computation, instruction)]
    if instruction.opcode == "fusion" and len(instruction.operands) == 1:
      inner = module.computations[instruction.calls()[0]]
      inside = [
        (inner, i) for i in inner.instructions if i.opcode != "parameter"
      ]
    for owner, x in inside:
      if x.opcode not in ("bitcast", "convert", "copy"):
        return False
      (result,), (source,) = x.shapes, owner.operands(x)[0].shapes
      if x.opcode != "bitcast" and result.order != source.order:
        return False
      dtypes |= {result.dtype, source.dtype}
    instruction = computation.operands(instruction)[0]
  return True


def _results(
  computation: hlo.Computation, root: hlo.Instruction
) -> list[hlo.Instruction]:
  """Returns the results of a fusion with this root instruction.

  Bitcasts and tuples are replaced by their operands.
  """
  if root.opcode in ("tuple", "bitcast"):
    return [
      result for operand in computation.operands(root)
      for result in _results(computation, operand)
    ]
  return [root]


def _slices(
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  views: set[tuple[int, ...]],
  parts: int,
) -> bool:
  """Returns whether a result is a slice of at least one part of an array.

  ``views`` and ``parts`` are those of `_describe_copy`.
  """
  while instruction.opcode in _KEEPS_SIZE:
    instruction = computation.operands(instruction)[0]
  if instruction.opcode not in _SLICES | _SLICE_STARTS:
    return False
  operands = computation.operands(instruction)
  source, result = operands[0].shapes[0], instruction.shapes[0]
  if instruction.opcode in _SLICE_STARTS:
    result = instruction.shapes[sum(len(x.shapes) for x in operands)]
    if result.on_chip:  # one of the copies to vector memory
      return False
  # Slices smaller than a part (such as a layer) are what the step must read.
  return source.dims in views and (
    result.elements * parts >= source.elements
  )


def _gathers(
  module: hlo.Module,
  computation: hlo.Computation,
  instruction: hlo.Instruction,
  views: set[tuple[int, ...]],
) -> bool:
  """Returns whether an instruction, or its fusion, gathers from an array.

  ``views`` are the dims of the arrays and of their views (`view_dims`).
  """
  if instruction.opcode == "fusion":
    inner = module.computations[instruction.calls()[0]]
    return any(_gathers(module, inner, i, views) for i in inner.instructions)
  return instruction.opcode == "gather" and math.prod(
    instruction.shapes[0].dims
  ) > 0 and computation.operands(instruction)[0].shapes[0].dims in views
