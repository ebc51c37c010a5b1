"""What single StableHLO operations say: meshes, groups, loops, types.

Differences between jax versions in the text of a module end here.
"""

from collections.abc import Iterator
import itertools
import json
import math
import re
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
import numpy as np

_REDUCTIONS = {
  "stablehlo.maximum": "max",
  "stablehlo.minimum": "min",
}


def mesh_sizes(mesh: ir.Attribute) -> dict[str, int]:
  """Axis sizes; a typed attribute from jax 0.12 on, a dictionary before."""
  if isinstance(mesh, ir.DictAttr):
    axes = [ir.DictAttr(axis) for axis in ir.ArrayAttr(mesh["axes"])]
    return {axis["name"].value: axis["size"].value for axis in axes}
  axes = [stablehlo.MeshAxisAttr(a) for a in stablehlo.MeshAttr(mesh).axes]
  return {axis.name: axis.size for axis in axes}


def groups_of_axes(
  sizes: dict[str, int],
) -> Iterator[tuple[frozenset[frozenset[int]], tuple[str, ...]]]:
  """Yields each set of mesh axes, after the replica groups that it makes."""
  devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
  dims = [dim for dim, size in enumerate(sizes.values()) if size > 1]
  for chosen in itertools.chain.from_iterable(
    itertools.combinations(dims, n) for n in range(len(dims) + 1)
  ):
    last = range(devices.ndim - len(chosen), devices.ndim)
    group_size = math.prod(devices.shape[dim] for dim in chosen)
    rows = np.moveaxis(devices, chosen, tuple(last)).reshape(-1, group_size)
    groups = frozenset(frozenset(row) for row in rows.tolist())
    yield groups, tuple(list(sizes)[dim] for dim in chosen)


def trip_count(loop: ir.Operation) -> int | None:
  """Trips of a while loop that counts between constants, else None."""
  condition, body = (region.blocks[0] for region in loop.regions)
  new_values = list(body.operations)[-1].operands

  def constant(value: ir.Value) -> np.integer | None:
    if isinstance(value, ir.BlockArgument):
      n = value.arg_number
      if value.owner not in (condition, body):
        return None
      unchanged = new_values[n] == body.arguments[n]
      return constant(loop.operands[n]) if unchanged else None
    attributes = value.owner.attributes
    if value.owner.name != "stablehlo.constant":
      return None
    if not isinstance(attributes["value"], ir.DenseIntElementsAttr):
      return None
    number = np.array(attributes["value"])
    return number[()] if number.ndim == 0 else None

  def step(value: ir.Value, counter: ir.Value) -> int | None:
    if isinstance(value, ir.BlockArgument):
      return None
    op = value.owner
    if op.name not in ("stablehlo.add", "stablehlo.subtract"):
      return None
    left, right = op.operands
    if op.name == "stablehlo.add" and right == counter:
      left, right = right, left
    size = constant(right)
    if left != counter or size is None:
      return None
    return int(size) if op.name == "stablehlo.add" else -int(size)

  test = list(condition.operations)[-1].operands[0]
  if isinstance(test, ir.BlockArgument):
    return None
  if test.owner.name != "stablehlo.compare":
    return None
  direction = stablehlo.ComparisonDirectionAttr(
    test.owner.attributes["comparison_direction"]
  ).value
  counter, bound = test.owner.operands
  if constant(counter) is not None:
    counter, bound = bound, counter
    direction = direction.translate(str.maketrans("LG", "GL"))
  if not isinstance(counter, ir.BlockArgument) or counter.owner != condition:
    return None
  n = counter.arg_number
  first, last = constant(loop.operands[n]), constant(bound)
  by = step(new_values[n], body.arguments[n])
  if first is None or last is None or by is None:
    return None
  trips = _trips(direction, int(first), int(last), by)
  if trips is None:
    return None
  limits = np.iinfo(first.dtype)
  stays = limits.min <= int(first) + trips * by <= limits.max
  return trips if stays else None


def _trips(direction: str, first: int, last: int, by: int) -> int | None:
  """Trips of `while first <direction> last: first += by`; None if endless."""
  if direction in ("GT", "GE"):
    first, last, by = -first, -last, -by
  elif direction not in ("LT", "LE"):
    return None
  if direction.endswith("E"):
    last += 1
  if first >= last:
    return 0
  return -((first - last) // by) if by > 0 else None


def asynchronous_config(op: ir.Operation) -> dict[str, Any]:
  """What an explicit asynchronous collective of jax 0.12 says of itself."""
  attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
  return json.loads(attributes["async_collective_config"].value)


class KernelSends(NamedTuple):
  """What a Pallas kernel sends; ledgers count it as permutes.

  Attributes:
    axis: The mesh axis.
    shape: (messages, elements of one), of a device.
    dtype: Of the elements.
  """

  axis: str
  shape: tuple[int, int]
  dtype: str


def kernel_sends(metadata: str, results: int) -> KernelSends | None:
  """Reads what a kernel says of itself; None: it sends nothing.

  Args:
    metadata: Text that holds the JSON that ``parallel/kernels/calls.py`` wrote.
    results: Elements of the custom call's results.
  """
  pattern = r'"(sends_over|messages|elements|dtype|results)":\s*"(\w+)"'
  found = dict(re.findall(pattern, metadata))
  if "sends_over" not in found:
    return None
  lanes = results // int(found["results"])
  shape = lanes * int(found["messages"]), int(found["elements"])
  return KernelSends(found["sends_over"], shape, found["dtype"])


def kernel_metadata(op: ir.Operation) -> str:
  """A custom call's; empty where there is none."""
  if "mhlo.frontend_attributes" not in op.attributes:
    return ""
  attributes = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
  if "kernel_metadata" not in attributes:
    return ""
  return attributes["kernel_metadata"].value


def called(op: ir.Operation) -> list[str]:
  """Names of the functions that a custom call is given."""
  if "called_computations" not in op.attributes:
    return []
  names = ir.ArrayAttr(op.attributes["called_computations"])
  return [ir.FlatSymbolRefAttr(name).value for name in names]


def reduction(region: ir.Region) -> str:
  """What a collective reduces with: "add", "max", ..."""
  # A region that is manual over some axes only adds sharding constraints.
  names = [inner.operation.name for inner in region.blocks[0].operations]
  *body, _ = [name for name in names if not name.startswith("sdy.")]
  if len(body) != 1:
    return "custom"
  return _REDUCTIONS.get(body[0], body[0].removeprefix("stablehlo."))


def dtype_name(element_type: ir.Type) -> str:
  """The numpy name of an MLIR type: bf16 is bfloat16, ui8 is uint8."""
  name = str(element_type)
  if name == "i1":
    return "bool"
  if name.startswith("complex"):
    return {"complex<f32>": "complex64", "complex<f64>": "complex128"}[name]
  letters, bits, variant = re.fullmatch(r"([a-z]+)(\d+)(\w*)", name).groups()
  stem = {"f": "float", "bf": "bfloat", "i": "int", "ui": "uint"}[letters]
  return stem + bits + (f"_{variant.lower()}" if variant else "")
