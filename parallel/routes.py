"""Implementations of a sum over a mesh axis, by the names that configs use.

An implementation (*route*) replaces ``lax.psum`` in a column- or row-parallel
projection of `parallel.tensor` or in a function of `parallel.collectives`. Its
result is bitwise equal on all devices.

Shape legend: n = devices of the mesh axis; K = last dim.
"""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import Reduction


def sum_by_scatter_gather(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis by a reduce-scatter and an all-gather.

  Rows are padded to a multiple of n. For a padded array of b bytes, the operand
  of the reduce-scatter has b bytes and the operand of the all-gather b / n.

  Args:
    x: ``[..., K]``, one summand per device; its rows are split into n parts.
    name: Name of the mesh axis.

  Returns:
    ``[..., K]``, the sum, equal on every device.

  Example:
    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import Axis, make_mesh
    >>> from parallel.collectives import all_reduce
    >>> axis = Axis("tensor", size=4)  # 4 lanes on one device
    >>> f = jax.jit(jax.shard_map(
    ...   lambda x: all_reduce(x, axis, via=sum_by_scatter_gather),
    ...   mesh=make_mesh({"tensor": axis}), in_specs=P("tensor"), out_specs=P(),
    ... ))
    >>> f(jnp.ones([4, 1, 2])).tolist()
    [[4.0, 4.0]]
  """
  rows, restore = _to_padded_rows(x, lax.axis_size(name))
  mine = lax.psum_scatter(rows, name, scatter_dimension=0, tiled=True)
  return restore(lax.all_gather(mine, name, tiled=True, to="invarying"))


def sum_by_ring(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis by permutes around a bidirectional ring.

  Each direction carries half of the rows, which uses both directions of
  full-duplex links. The reduce-scatter takes n - 1 steps and the all-gather
  n - 1 more; for an array of b bytes, a device sends b / (2 n) bytes per step
  and direction. Each part is summed once along the ring and then copied, so
  that the sums are bitwise equal on all devices.

  Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC
  69, 2009.

  Args:
    x: ``[..., K]``, one summand per device; its rows are split into 2 n parts.
    name: Name of the mesh axis.

  Returns:
    ``[..., K]``, the sum; device-varying by type, though equal on all devices.
  """
  n = lax.axis_size(name)
  rows, restore = _to_padded_rows(x, 2 * n)
  up, down = jnp.split(rows, 2)
  return restore(
    jnp.concatenate([_ring(up, name, n, 1), _ring(down, name, n, -1)])
  )


def sum_by_one_shot(x: jax.Array, name: str) -> jax.Array:
  """Sums over a mesh axis by one all-gather of all summands.

  One step replaces reduce-scatter and all-gather, but sends n / 2 times the
  bytes of a ring. Each device adds the summands in the order of the devices, in
  float32 if the dtype of x is narrower, and rounds the sum once, so that the
  sums are bitwise equal on all devices.

  Args:
    x: ``[...]``, one summand per device.
    name: Name of the mesh axis.

  Returns:
    ``[...]`` in the dtype of x, the sum, equal on every device.
  """
  wide = x.dtype
  if jnp.issubdtype(wide, jnp.floating) and wide.itemsize < 4:
    wide = jnp.float32
  total = jnp.zeros(x.shape, wide)
  for part in gather_parts(x, name):
    total = total + part.astype(wide)
  return total.astype(x.dtype)


def gather_parts(x: jax.Array, name: str) -> jax.Array:
  """Gathers the arrays of all devices along a new dim 0, in device order.

  Args:
    x: ``[...]``.
    name: Name of the mesh axis.

  Returns:
    ``[n, ...]``, equal on every device.
  """
  joined = lax.all_gather(x, name, tiled=True, to="invarying")
  return joined.reshape(lax.axis_size(name), *x.shape)


def _ring(x: jax.Array, name: str, n: int, step: int) -> jax.Array:
  """Sums ``[rows, K]`` around a ring of the n devices of the axis ``name``.

  Messages go from device i to device i + ``step``, 1 or -1.

  Reduce-scatter: the partial sum of each part travels around the ring; each
  device adds its summand and forwards the result. All-gather: the complete
  parts travel around the ring a second time.
  """
  # rows divide by n: [rows, K] -> [n parts, rows / n, K]
  parts = x.reshape(n, -1, x.shape[-1])
  here = lax.axis_index(name)
  pairs = [(i, (i + step) % n) for i in range(n)]

  def part(number):
    return lax.dynamic_index_in_dim(parts, number % n, keepdims=False)

  # Device i starts the sum of part i, so that all n partial sums travel at
  # once. After ``hop`` hops, device ``here`` holds the partial sum of part
  # ``here - step * hop``, to which it adds its own summand.
  moving = part(here)
  for hop in range(1, n):
    moving = lax.ppermute(moving, name, pairs) + part(here - step * hop)
  # After n - 1 hops a device holds part here - step * (n - 1), which is
  # ``here + step`` modulo n. The part is complete: all n devices have added to
  # it. The other parts arrive one per hop from the preceding device, whose part
  # precedes this one.
  total = jnp.zeros_like(parts)
  for hop in range(n):
    number = (here + step - step * hop) % n
    total = lax.dynamic_update_index_in_dim(total, moving, number, 0)
    if hop < n - 1:  # the part that arrives last is not forwarded
      moving = lax.ppermute(moving, name, pairs)
  return total.reshape(x.shape)


def _to_padded_rows(x: jax.Array, parts: int):
  """Flattens ``[..., K]`` to ``[rows, K]``, padded to a multiple of ``parts``.

  Returns the rows, and the inverse function from rows to the shape of x.
  """
  shape = x.shape
  rows = x.reshape(-1, shape[-1])
  padding = -rows.shape[0] % parts
  padded = jnp.pad(rows, ((0, padding), (0, 0)))
  return padded, lambda y: y[: rows.shape[0]].reshape(shape)


# Name in configs -> function that sums. They differ in bytes sent, in number
# of steps and, since they add in different orders, in the last bits of the sum.
ROUTES: dict[str, Reduction] = {
  "psum": lax.psum,
  "scatter_gather": sum_by_scatter_gather,
  "ring": sum_by_ring,
  "one_shot": sum_by_one_shot,
}
