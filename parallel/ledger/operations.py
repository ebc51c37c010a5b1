"""Parser of single StableHLO operations: meshes, groups, loops, types.

Differences between jax versions are handled in this file and in the ledger.
"""

from collections.abc import Mapping
import json
import re
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
import numpy as np

from parallel.ledger import silent

# Sharding of an array in the text of an attribute: <@mesh, [{"a"}, {}]>.
_SHARDING = re.compile(r"<@[^>]*>")
# Reducers whose names differ from those of StableHLO operations.
_REDUCTIONS = {
  "stablehlo.maximum": "max",
  "stablehlo.minimum": "min",
}


def mesh_sizes(op: ir.Operation) -> dict[str, int]:
  """Returns the axis sizes of an ``sdy.mesh``.

  The mesh is a typed attribute from jax 0.12 on, a dictionary before, and an
  attribute of sdy in older versions.
  """
  if "stablehlo.mesh" not in op.attributes:
    found = re.findall(r'"([^"]+)"\s*=\s*(\d+)', str(op.attributes["mesh"]))
    return {name: int(size) for name, size in found}
  mesh = op.attributes["stablehlo.mesh"]
  if isinstance(mesh, ir.DictAttr):
    axes = [ir.DictAttr(axis) for axis in ir.ArrayAttr(mesh["axes"])]
    return {axis["name"].value: axis["size"].value for axis in axes}
  axes = [stablehlo.MeshAxisAttr(a) for a in stablehlo.MeshAttr(mesh).axes]
  return {axis.name: axis.size for axis in axes}


def device_counts(module: ir.Module) -> list[int]:
  """Returns the numbers of replicas and partitions; [] if neither is given."""
  names = "mhlo.num_replicas", "mhlo.num_partitions"
  given = module.operation.attributes
  if not any(name in given for name in names):
    return []
  return [given[name].value if name in given else 1 for name in names]


def all_groups(module: ir.Module) -> list[list[list[int]]]:
  """Returns the device numbers of each group, for each collective.

  Groups written as mesh axes, and empty ones, are left out.
  """
  found = []

  def visit(op: ir.Operation) -> ir.WalkResult:
    if "replica_groups" in op.attributes and not groups_list_replicas(op):
      groups = op.attributes["replica_groups"]
      if isinstance(groups, ir.DenseIntElementsAttr) and len(groups):
        rows = np.array(groups).tolist()  # shorter groups are padded with -1
        found.append([[i for i in row if i >= 0] for row in rows])
    return ir.WalkResult.ADVANCE

  module.operation.walk(visit)
  return found


def groups_list_replicas(op: ir.Operation) -> bool:
  """Returns whether the groups of a collective list replicas, not devices.

  Such a group contains all partitions of its replicas, whose number the
  operation does not give. Source: the StableHLO specification, process groups.
  """
  return op.name in (
    "stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter"
  ) and "channel_handle" in op.attributes and (
    "use_global_device_ids" not in op.attributes
  )


def manual_axes(op: ir.Operation) -> set[str]:
  """Returns the manual axes of an ``sdy.manual_computation``."""
  return set(re.findall(r'"([^"]+)"', str(op.attributes["manual_axes"])))


class Shardings:
  """Shardings of arrays between manual computations and at the program's ends.

  Where the shardings of an array at two places differ, XLA reshards the array,
  which may communicate.
  """

  def __init__(self, functions: Mapping[str, ir.Operation]) -> None:
    """Collects shardings from a program's functions, "main" among them."""
    self._functions = functions
    self._calls: dict[str, list[ir.Operation]] = {}
    for function in functions.values():
      function.walk(self._visit)
    self._given = _parse_shardings(functions["main"], "arg_attrs")
    # Argument of main without a sharding -> that of its first use.
    self._chosen: dict[int, str] = {}

  def _visit(self, op: ir.Operation) -> ir.WalkResult:
    if op.name == "func.call":
      self._calls.setdefault(op.attributes["callee"].value, []).append(op)
    return ir.WalkResult.ADVANCE

  def changes(self, op: ir.Operation) -> bool:
    """Returns whether an operand of a manual computation may be resharded."""
    inside = _SHARDING.findall(str(op.attributes["in_shardings"]))
    return any(
      not self._has(value, sharding)
      for value, sharding in zip(op.operands, inside, strict=True)
    )

  def may_reshard_results(self) -> bool:
    """Returns whether a result of the program may be resharded."""
    main = self._functions["main"]
    wanted = _parse_shardings(main, "res_attrs")
    returned = list(main.regions[0].blocks[0].operations)[-1].operands
    return any(
      not self._has(value, sharding)
      for value, sharding in zip(returned, wanted, strict=False) if sharding
    )

  def _has(self, value: ir.Value, sharding: str) -> bool:
    """Returns whether a value is known to have a sharding."""
    if not isinstance(value, ir.BlockArgument):
      made = value.owner
      if made.name == "sdy.manual_computation":
        outside = _SHARDING.findall(str(made.attributes["out_shardings"]))
        return outside[ir.OpResult(value).result_number] == sharding
      if made.name == "func.call":
        body = self._functions[made.attributes["callee"].value].regions[0]
        returned = list(body.blocks[0].operations)[-1].operands
        return self._has(returned[ir.OpResult(value).result_number], sharding)
      return made.name == "stablehlo.constant"
    function = value.owner.owner.operation
    if function.name != "func.func":
      return False
    name, number = function.attributes["sym_name"].value, value.arg_number
    if name != "main":
      calls = self._calls.get(name, ())
      return all(self._has(call.operands[number], sharding) for call in calls)
    given = self._given[number] if self._given else ""
    if not given:
      given = self._chosen.setdefault(number, sharding)
    return given == sharding


def _parse_shardings(function: ir.Operation, name: str) -> list[str]:
  """Returns the shardings in a function's attributes, "" for none."""
  if name not in function.attributes:
    return []
  texts = map(str, function.attributes[name])
  return ["".join(_SHARDING.findall(text)[:1]) for text in texts]


class _Loop:
  """While loop: condition, body and state."""

  def __init__(self, loop: ir.Operation) -> None:
    self.initial = loop.operands
    # Both blocks have the loop's state as their arguments.
    self.condition, self.body = (region.blocks[0] for region in loop.regions)
    # The body returns the state of the next trip.
    self.new_values = list(self.body.operations)[-1].operands

  def constant(self, value: ir.Value) -> np.integer | None:
    """Returns the value of a constant, possibly carried unchanged in the state.

    None if the value is not a scalar integer constant.
    """
    if isinstance(value, ir.BlockArgument):
      n = value.arg_number
      if value.owner not in (self.condition, self.body):
        return None
      # A constant that the state carries: the body returns its argument.
      unchanged = self.new_values[n] == self.body.arguments[n]
      return self.constant(self.initial[n]) if unchanged else None
    attributes = value.owner.attributes
    if value.owner.name != "stablehlo.constant":
      return None
    if not isinstance(attributes["value"], ir.DenseIntElementsAttr):
      return None
    number = np.array(attributes["value"])
    return number[()] if number.ndim == 0 else None

  def step(self, n: int) -> int | None:
    """Returns the constant that the body adds to the n-th state element."""
    value, counter = self.new_values[n], self.body.arguments[n]
    if isinstance(value, ir.BlockArgument):
      return None
    op = value.owner
    if op.name not in ("stablehlo.add", "stablehlo.subtract"):
      return None
    left, right = op.operands
    # Addition is commutative; constant - counter is no counting loop.
    if op.name == "stablehlo.add" and right == counter:
      left, right = right, left
    size = self.constant(right)
    if left != counter or size is None:
      return None
    return int(size) if op.name == "stablehlo.add" else -int(size)


def trip_count(operation: ir.Operation) -> int | None:
  """Returns the trip count of a while loop with constant bounds and step.

  The result is None for any other loop. `lax.scan` and `lax.fori_loop` have
  this form: an integer in the loop's state starts at a constant, the body adds
  a constant to it, and the condition compares it with a constant.
  """
  loop = _Loop(operation)
  # The operand of the condition's return, a comparison.
  test = list(loop.condition.operations)[-1].operands[0]
  if isinstance(test, ir.BlockArgument):
    return None
  if test.owner.name != "stablehlo.compare":
    return None
  direction = stablehlo.ComparisonDirectionAttr(
    test.owner.attributes["comparison_direction"]
  ).value
  counter, bound = test.owner.operands
  # A constant on the left: n > i is equivalent to i < n.
  if loop.constant(counter) is not None:
    counter, bound = bound, counter
    direction = direction.translate(str.maketrans("LG", "GL"))
  if (
    not isinstance(counter, ir.BlockArgument)
    or counter.owner != loop.condition
  ):
    return None
  n = counter.arg_number
  first, last = loop.constant(loop.initial[n]), loop.constant(bound)
  by = loop.step(n)
  if first is None or last is None or by is None:
    return None
  trips = _trips(direction, int(first), int(last), by)
  if trips is None:
    return None
  # The formula does not hold for a counter that overflows.
  limits = np.iinfo(first.dtype)
  stays = limits.min <= int(first) + trips * by <= limits.max
  return trips if stays else None


def _trips(direction: str, first: int, last: int, by: int) -> int | None:
  """Returns the trips of `while first <direction> last: first += by`.

  None for an infinite loop and for other comparisons (EQ, NE).

  Example:
    >>> _trips("LT", 0, 10, 4), _trips("GE", 3, 0, -1)
    (3, 4)
  """
  # Counting down equals counting up with all signs inverted.
  if direction in ("GT", "GE"):
    first, last, by = -first, -last, -by
  elif direction not in ("LT", "LE"):
    return None
  if direction.endswith("E"):  # first <= last is first < last + 1
    last += 1
  if first >= last:
    return 0
  # (last - first) / by, rounded up.
  return -((first - last) // by) if by > 0 else None


def asynchronous_config(op: ir.Operation) -> dict[str, Any]:
  """Returns the JSON config of an asynchronous collective (jax 0.12)."""
  attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
  return json.loads(attributes["async_collective_config"].value)


class KernelSends(NamedTuple):
  """Messages of a Pallas kernel; ledgers count them as permutes.

  Attributes:
    axis: Mesh axis over which the kernel sends.
    shape: ``(messages per device, elements per message)``.
    dtype: NumPy name of the dtype of the elements.
  """

  axis: str
  shape: tuple[int, int]
  dtype: str


def kernel_sends(metadata: str) -> KernelSends | None:
  """Parses the messages in a kernel's metadata; None if there are none.

  Args:
    metadata: Text that contains the JSON written by
      ``parallel/kernels/calls.py``.
  """
  pattern = r'"(sends_over|messages|elements|dtype)":\s*"(\w+)"'
  found = dict(re.findall(pattern, metadata))
  if "sends_over" not in found:
    return None
  shape = int(found["messages"]), int(found["elements"])
  return KernelSends(found["sends_over"], shape, found["dtype"])


def kernel_metadata(op: ir.Operation) -> str:
  """Returns the metadata text of a custom call, or "" if it has none."""
  if "mhlo.frontend_attributes" not in op.attributes:
    return ""
  attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
  if "kernel_metadata" not in attributes:
    return ""
  return attributes["kernel_metadata"].value


def is_host_transfer(op: ir.Operation) -> bool:
  """Returns whether a send or receive is part of a callback to the host."""
  name = "mhlo.frontend_attributes"
  return name in op.attributes and any(
    f'"{handler}"' in str(op.attributes[name])
    for handler in silent.HOST_HANDLERS
  )


def config(op: ir.Operation) -> str:
  """Returns the backend config of a custom call, as text."""
  if "backend_config" not in op.attributes:
    return ""
  given = op.attributes["backend_config"]
  return given.value if isinstance(given, ir.StringAttr) else str(given)


def called_functions(op: ir.Operation) -> list[str]:
  """Returns the names of the functions that a custom call refers to."""
  if "called_computations" not in op.attributes:
    return []
  names = ir.ArrayAttr(op.attributes["called_computations"])
  return [ir.FlatSymbolRefAttr(name).value for name in names]


def reduction(region: ir.Region) -> str:
  """Returns the reduction of a collective: "add", "max", ... or "custom"."""
  # In a `shard_map` that is manual over some axes only, jax puts sharding
  # constraints (sdy.*) into the reducer; they compute nothing.
  names = [inner.operation.name for inner in region.blocks[0].operations]
  *body, _ = [name for name in names if not name.startswith("sdy.")]
  if len(body) != 1:
    return "custom"
  return _REDUCTIONS.get(body[0], body[0].removeprefix("stablehlo."))


def dtype_name(element_type: ir.Type) -> str:
  """Returns the NumPy name of an MLIR type: bf16 -> bfloat16, ui8 -> uint8."""
  name = str(element_type)
  if name == "i1":
    return "bool"
  if name.startswith("complex"):
    return {"complex<f32>": "complex64", "complex<f64>": "complex128"}[name]
  # Such as f8E4M3FN: f, 8 and E4M3FN make float8_e4m3fn.
  letters, bits, variant = re.fullmatch(r"([a-z]+)(\d+)(\w*)", name).groups()
  stem = {"f": "float", "bf": "bfloat", "i": "int", "ui": "uint"}[letters]
  return stem + bits + (f"_{variant.lower()}" if variant else "")
