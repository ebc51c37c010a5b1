r"""Compares a program on several devices with the same program on one.

  PYTHON tests/foreign/equal_program.py PROJECT FUNCTION DEVICES [DTYPE]

FUNCTION of with_PROJECT.py returns (jitted function, arguments) and takes no
layout. On one device, each mesh that it makes has the first device only, while
`jax.device_count` and the sizes that depend on it are those of all devices.
"""

import importlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

# Behind the project's packages: the names of folders here are common ones.
sys.path.append(str(pathlib.Path(__file__).parents[2]))


class _Builder:
  """Builds a program on all devices, or, for the layout {}, on one."""

  def __init__(self, project: str, function: str, dtype: str) -> None:
    module = importlib.import_module(f"with_{project}")
    self.function, self.dtype = getattr(module, function), dtype
    self.on_one, self.layout = False, {}
    new = Mesh.__new__

    def first_device(cls, devices, axis_names, *args, **kwargs):
      mesh = new(cls, devices, axis_names, *args, **kwargs)
      self.layout = {k: n for k, n in mesh.shape.items() if n > 1}
      if self.on_one:
        first = mesh.devices[(slice(1),) * mesh.devices.ndim]
        mesh = new(cls, first, axis_names, *args, **kwargs)
      return mesh

    Mesh.__new__ = first_device
    self.leaves = jax.tree.leaves(self.function()[1])

  def __call__(self, layout):
    self.on_one = not layout  # also while the step is traced
    step, args = self.function()
    leaves, tree = jax.tree.flatten_with_path(tuple(args))
    args = [
      self.argument(jax.tree_util.keystr(path), x, found)
      for (path, x), found in zip(leaves, self.leaves, strict=True)
    ]
    if all(map(_is_plain, args)) and hasattr(step, "trace"):
      return step, tree.unflatten(args)

    def plain(*numbers):
      found = zip(args, tree.flatten_up_to(numbers), strict=True)
      results = step(*tree.unflatten(
        old if new is None else jax.random.wrap_key_data(new)
        if _is_key(old) else new for old, new in found
      ))
      return [*map(_numbers, jax.tree.leaves(results))]  # a tree has its mesh

    return jax.jit(plain), tree.unflatten(map(_numbers, args))

  def argument(self, name, x, found):
    """Returns an argument with the sharding of ``x``.

    Its size and values are those of ``found`` on all devices: a size may depend
    on that of the mesh, and a program may take a step to make its state. Second
    moments that have only a shape are positive.
    """
    if not _is_plain(x):
      return x
    is_floating = jnp.issubdtype(x.dtype, jnp.floating)
    dtype = self.dtype if is_floating else x.dtype
    if isinstance(x, jax.ShapeDtypeStruct) and ".nu" in name:
      found = np.random.default_rng(0).random(found.shape)
    elif isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(found.shape, dtype, sharding=x.sharding)
    x, sharding = np.asarray(found, dtype), getattr(x, "sharding", None)
    return x if sharding is None else jax.device_put(x, sharding)


def _is_key(x) -> bool:
  return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_plain(x) -> bool:
  return hasattr(x, "dtype") and not _is_key(x)


def _numbers(x):
  """Returns the numbers of a leaf: None for a function, data of a key."""
  if not _is_key(x):
    return x if hasattr(x, "dtype") else None
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.eval_shape(jax.random.key_data, x)
  return jax.random.key_data(x)


def main(
  project: str, function: str, devices: str, dtype: str = "float32"
) -> None:
  """Prints the comparison as a line of JSON.

  Args:
    project: Project of `with_PROJECT.py`.
    function: Name of the function that returns (jitted function, arguments).
    devices: Number of virtual CPU devices.
    dtype: Dtype of floating arguments.
  """
  from parallel.ledger.equal import check

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", int(devices))
  builder = _Builder(project, function, dtype)
  try:
    (report,) = check.check(builder, [builder.layout], steps=1)
  except ValueError as error:
    report = check.LayoutReport(builder.layout, "refused", str(error))
  results = report.results
  print(json.dumps({
    "verdict": report.verdict, "text": check.describe(report),
    "relative": max((x.relative for x in results), default=0),
    "own": max((x.own for x in results), default=0),
    "wide": max((x.wide for x in results), default=0),
  }))


if __name__ == "__main__":
  main(*sys.argv[1:])
