"""Ways to sum an array over a mesh axis, by the names that configs use.

A route takes the place of ``lax.psum`` in a door of `parallel.tensor` or in a
function of `parallel.collectives`. Each route gives all devices the same bits.
"""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import Reduction


def sum_by_scatter_gather(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis by a reduce-scatter and an all-gather.

  Rows are padded to a multiple of n. If b are then the bytes of the array, the
  reduce-scatter has an operand of b bytes, the all-gather one of b / n.

  Args:
    x: ``[..., K]``, one summand per device; its rows are cut into n parts.
    name: The mesh axis.

  Returns:
    ``[..., K]``, the sum, the same on every device.
  """
  rows, restore = _rows(x, lax.axis_size(name))
  mine = lax.psum_scatter(rows, name, scatter_dimension=0, tiled=True)
  return restore(lax.all_gather(mine, name, tiled=True, to="invarying"))


def sum_by_ring(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis by permutes around a ring, both ways.

  Half of the rows goes each way, so that both directions of the links are in
  use. The reduce-scatter takes n - 1 steps and the all-gather n - 1 more; with
  arrays of b bytes, a device sends b / (2 n) bytes per step and direction. Each
  part is summed once, along the ring, and then copied, so all devices hold the
  same bits.

  Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC
  69, 2009.

  Args:
    x: ``[..., K]``, one summand per device; its rows are cut into 2 n parts.
    name: The mesh axis.

  Returns:
    ``[..., K]``, the sum; device-varying by type, though equal on all devices.
  """
  n = lax.axis_size(name)
  rows, restore = _rows(x, 2 * n)
  up, down = jnp.split(rows, 2)
  return restore(
    jnp.concatenate([_ring(up, name, n, 1), _ring(down, name, n, -1)])
  )


def sum_by_one_shot(x: jax.Array, name: str) -> jax.Array:
  """Sums over a mesh axis after one all-gather of all summands.

  One step takes the place of reduce-scatter and all-gather, for n / 2 times
  the bytes of a ring. Each device adds the summands in the order of devices,
  in float32 if x is narrower, and rounds once; so all devices hold the same
  bits.

  Args:
    x: ``[...]``, one summand per device.
    name: The mesh axis.

  Returns:
    ``[...]``, the sum, the same on every device.
  """
  wide = x.dtype
  if jnp.issubdtype(wide, jnp.floating):
    wide = jnp.promote_types(wide, jnp.float32)
  total = jnp.zeros(x.shape, wide)
  for part in parts_of_all(x, name):
    total = total + part.astype(wide)
  return total.astype(x.dtype)


def parts_of_all(x: jax.Array, name: str) -> jax.Array:
  """Gathers every device's array, in the order of devices.

  Args:
    x: ``[...]``.
    name: The mesh axis.

  Returns:
    ``[n, ...]``, the same on every device.
  """
  joined = lax.all_gather(x, name, tiled=True, to="invarying")
  return joined.reshape(lax.axis_size(name), *x.shape)


def _ring(x: jax.Array, name: str, n: int, step: int) -> jax.Array:
  """Sums ``[rows, K]`` around one ring, in the direction of ``step`` = 1, -1.

  Reduce-scatter: a partial sum of every part travels around the ring, each
  device adds its own summand and sends it on. All-gather: the complete part
  travels around the ring once more.
  """
  # rows divide by n: [rows, K] -> [n parts, rows / n, K]
  parts = x.reshape(n, -1, x.shape[-1])
  here = lax.axis_index(name)
  pairs = [(i, (i + step) % n) for i in range(n)]

  def part(number):
    return lax.dynamic_index_in_dim(parts, number % n, keepdims=False)

  # Device i starts the sum of part i, so all n parts are under way at once.
  # After ``hop`` hops a device holds the part that started that many devices
  # back, ``here - step * hop``, and must add its own summand of that one.
  moving = part(here)
  for hop in range(1, n):
    moving = lax.ppermute(moving, name, pairs) + part(here - step * hop)
  # n - 1 hops have brought part here - step * (n - 1), modulo n the part
  # ``here + step``: complete, since all n devices have added to it. The other
  # parts arrive one by one from the device behind, which holds the part before.
  total = jnp.zeros_like(parts)
  for hop in range(n):
    number = (here + step - step * hop) % n
    total = lax.dynamic_update_index_in_dim(total, moving, number, 0)
    if hop < n - 1:  # the last part has arrived: nothing to send on
      moving = lax.ppermute(moving, name, pairs)
  return total.reshape(x.shape)


def _rows(x: jax.Array, parts: int):
  """Flattens ``[..., K]`` to ``[rows, K]``, padded to a multiple of ``parts``.

  Returns the rows, and a function that takes rows back to the shape of x.
  """
  shape = x.shape
  rows = x.reshape(-1, shape[-1])
  padding = -rows.shape[0] % parts
  padded = jnp.pad(rows, ((0, padding), (0, 0)))
  return padded, lambda y: y[: rows.shape[0]].reshape(shape)


# Ways to sum over a mesh axis, by the names that configs use. They differ in
# what they send and when, and, by rounding, in the last bits of the sum.
ROUTES: dict[str, Reduction] = {
  "psum": lax.psum,
  "scatter_gather": sum_by_scatter_gather,
  "ring": sum_by_ring,
  "one_shot": sum_by_one_shot,
}
