"""Updates of moments in host memory, one layer after another.

XLA copies arguments from host memory as early as it can: a program that copies
all moments to the device before it updates them has all of them in device
memory at one time. Here a loop copies the moments of one layer, updates them,
and copies them back into the same memory. A large parameter that belongs to no
layer is updated in a separate loop over pieces of the parameter.

CPUs have one memory, so on CPUs all parameters are updated at once. The
operations are the same, but a compiler may round them differently in a loop:
XLA:CPU, for example, fuses different pairs of products and sums.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.tree_util import keystr

from caatnet.program import Program, is_spec, make_suffix_lookup

# Maximum bytes of a piece; smaller arrays are not cut.
_MAX_PIECE_BYTES = 2**24
# Maps the path of an array to the name of its stack of layers or parameter, and
# the path of a step count to None.
OwnerOfPath = Callable[[tuple[Any, ...]], str | None]


def apply(
  program: Program, f: Callable[[Any, Any], Any], changed: Any, fixed: Any
) -> Any:
  """Computes ``f(changed, fixed)``; ``changed`` may be in host memory.

  Runs inside ``jax.shard_map``; W is the number of workers on the device.

  Args:
    program: The model on a mesh.
    f: Elementwise function of trees in device memory. It is called for one
      parameter or stack of layers at a time; all other arrays are then None.
    changed: Tree of ``[W, ...]``. Arrays whose paths end with the path of a
      parameter may be in host memory. Other arrays are step counts, which are
      passed to every call.
    fixed: Tree of ``[W, ...]`` in device memory, with the structure of the
      parameters.

  Returns:
    The result of ``f``, with the structure and memory of ``changed``.
  """
  if program.layout.moments != "device" and not program.layout.on_cpu:
    return apply_in_parts(program, f, changed, fixed)
  return jax.tree.map(
    _to_memory_of, changed, f(jax.tree.map(_to_device, changed), fixed)
  )


def apply_in_parts(
  program: Program, f: Callable[[Any, Any], Any], changed: Any, fixed: Any,
  piece: int = _MAX_PIECE_BYTES,
) -> Any:
  """Computes ``f(changed, fixed)`` as `apply` does, layer by layer.

  Args:
    program, f, changed, fixed: Arguments of `apply`.
    piece: Maximum bytes of a piece of a parameter that is not in the layers.
  """
  stacks = program.model.stacks
  owners = jax.tree.map_with_path(
    lambda path, _: path[0].key if path[0].key in stacks else keystr(path),
    program.split(program.specs).trained, is_leaf=is_spec,
  )
  # Moments by row or column are not cut like their parameter.
  alike = all(shape == "same" for _, shape in program.moments)
  find = make_suffix_lookup(owners)
  done = changed
  for owner in dict.fromkeys(jax.tree.leaves(owners)):
    old, others = (
      jax.tree.map_with_path(
        lambda path, x, owner=owner: x if find(path) in (None, owner) else None,
        tree,
      ) for tree in (changed, fixed)
    )
    x = jax.tree.leaves(others)[0]
    if owner in stacks:
      # Arrays are [W, layers, ...] or [W, stages, layers, ...].
      dim = 1 if program.layout.stages is None else 2
      count = x.shape[dim]
    else:
      dim, count = _choose_cut(x, piece) if alike else (0, 1)
    new = _loop(f, old, others, find, dim, count)
    done = jax.tree.map(lambda x, y: x if y is None else y, done, new)
  return done


def _choose_cut(x: jax.Array, piece: int) -> tuple[int, int]:
  """Returns the dim along which to cut an array, and the number of parts.

  Parts have at most ``piece`` bytes, if the dim is large enough.

  The last dim is never cut, since devices copy whole rows.
  """
  for dim in range(1, x.ndim - 1):
    size = x.shape[dim]
    if size > 1:
      counts = [n for n in range(1, size + 1) if size % n == 0]
      return dim, next(
        (n for n in counts if x.size * x.dtype.itemsize <= n * piece), size
      )
  return 0, 1


def _loop(
  f: Callable[[Any, Any], Any], old: Any, others: Any, find: OwnerOfPath,
  dim: int, count: int,
) -> Any:
  """Computes ``f(old, others)`` in ``count`` parts along a dim.

  Arrays whose path ``find`` maps to None, such as step counts, are not cut.
  """

  def step(number: jax.Array, now: Any) -> Any:
    def part(x: jax.Array) -> jax.Array:
      size = x.shape[dim] // count
      return _to_device(
        lax.dynamic_slice_in_dim(x, number * size, size, dim)
      )

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
      return lax.dynamic_update_slice_in_dim(
        x, _to_memory_of(x, new), number * (x.shape[dim] // count), dim
      )

    # Each part reads the step counts of ``old``, so that they increase once.
    mine = jax.tree.map_with_path(
      lambda path, first, x: first if find(path) is None else part(x), old, now
    )
    return jax.tree.map_with_path(
      lambda path, x, new: new if find(path) is None else put(x, new),
      now, f(mine, jax.tree.map(part, others)),
    )

  return lax.fori_loop(0, count, step, old)


def _on_host(x: jax.Array) -> bool:
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def _to_device(x: jax.Array) -> jax.Array:
  return jax.device_put(x, jax.memory.Space.Device) if _on_host(x) else x


def _to_memory_of(x: jax.Array, new: jax.Array) -> jax.Array:
  """Copies ``new`` to the kind of memory, host or device, that holds ``x``."""
  return jax.device_put(new, jax.memory.Space.Host) if _on_host(x) else new
