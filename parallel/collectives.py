"""The verbs: collectives on lane-stacked arrays, inside ``jax.shard_map``.

A lane-stacked array ``x_R...`` has a leading dim of ``axis.lanes`` logical
ranks. Every verb works over R first, on the device, and over the mesh axis
second, so that a rank does not know how many devices there are. A rank's
number is ``device * lanes + lane``.

Shape legend: R = lanes on this device; N = logical ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis

# Sums an array over a mesh axis, given the array and the mesh axis's name; or
# gathers it, where a gather is asked for.
Reduction = Callable[[jax.Array, str], jax.Array]

# Elements of the minor dim that a TPU keeps together.
_TILE = 128


def varying_axes(x: jax.Array) -> frozenset[str]:
  """The mesh axes over which ``x`` may differ between devices, by type."""
  return jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array, *names: str) -> jax.Array:
  """Casts ``x`` to device-varying over the named mesh axes.

  The cast costs nothing forward; its transpose is an all-reduce. An axis over
  which ``x`` varies already is left alone.
  """
  missing = tuple(n for n in names if n not in varying_axes(x))
  return lax.pcast(x, missing, to="varying") if missing else x


def ranks_here(axis: Axis) -> jax.Array:
  """int32 ``[R]``: the numbers of this device's logical ranks."""
  return lax.axis_index(axis.name) * axis.lanes + jnp.arange(axis.lanes)


def after(tree: Any, results: Any, needed: bool = True) -> Any:
  """``tree`` itself, by data flow not before ``results`` are computed.

  XLA:CPU runs independent operations of a program in any order, collectives of
  different groups too; devices that choose differently wait for each other for
  ever (seen with jax 0.10.2). An ``optimization_barrier`` orders nothing there.

  Args:
    tree: Arrays to hold back.
    results: Arrays to wait for; a NaN at the head of one adds 1 to ``tree``,
      nothing else changes it.
    needed: Whether the backend is one that needs it; else ``tree`` as it is.
  """
  if not needed:
    return tree
  heads = [
    x.ravel()[0].astype(jnp.float32) for x in jax.tree.leaves(results)
    if x.size and x.dtype != jax.dtypes.float0
  ]
  late = jnp.asarray(sum(jnp.isnan(head).astype(jnp.int32) for head in heads))
  # By type the result would vary wherever ``late`` does; that it is 0 on all
  # devices, or all is lost, only we know.
  late = jax.shard_map(
    lambda late: late + 0,  # an argument passed on keeps its type
    axis_names=set(), in_specs=P(), out_specs=P(), check_vma=False,
  )(late)

  def delayed(x):
    no_value = x.dtype == jax.dtypes.float0  # the cotangent of an integer
    return x if no_value else x + late.astype(x.dtype)

  return jax.tree.map(delayed, tree)


def each_lane(
  f: Callable[..., Any], axis: Axis, *trees: Any
) -> Any:
  """Runs one rank's function for every lane, one lane after another.

  For whole programs of a rank, whose temporaries should not be there once per
  lane; cheap functions are lifted with ``jax.vmap``.

  Args:
    f: Works on trees ``[...]``; may communicate over other axes.
    axis: Whose lanes.
    *trees: ``[R, ...]``.

  Returns:
    The results, ``[R, ...]``.
  """
  if axis.lanes > 1:
    return lax.map(lambda args: f(*args), trees)
  result = f(*jax.tree.map(lambda x: x[0], trees))
  return jax.tree.map(lambda x: x[None], result)


def all_reduce(
  x: jax.Array, axis: Axis, *, via: Reduction | None = None
) -> jax.Array:
  """Sums over all logical ranks.

  Args:
    x: ``[R, ...]``, one summand per lane.
    axis: The axis to reduce over.
    via: Replaces ``lax.psum`` over the mesh axis, e.g. by a schedule's
      executor. Its result may be device-varying.

  Returns:
    ``[...]``, the sum, the same on every device.
  """
  return (via or lax.psum)(jnp.sum(x, axis=0), axis.name)


def sum_by_scatter_gather(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis: reduce-scatter, then all-gather.

  With n devices and b bytes, padded to n rows of K: operands of b and b / n.

  Args:
    x: ``[..., K]``; its rows are cut into n parts.
    name: The mesh axis.

  Returns:
    The sum, the same on every device.
  """
  rows, restore = _rows(x, lax.axis_size(name))
  mine = lax.psum_scatter(rows, name, scatter_dimension=0, tiled=True)
  return restore(lax.all_gather(mine, name, tiled=True, to="invarying"))


def sum_by_ring(x: jax.Array, name: str) -> jax.Array:
  """Sums ``[..., K]`` over a mesh axis by permutes around a ring, both ways.

  Half of the rows goes each way: reduce-scatter in n - 1 steps, all-gather in
  n - 1 more, each of b / (2 n) bytes and direction. Each part is summed in the
  order of one ring and then copied, so all devices hold the same bits. Source:
  Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009.

  Args:
    x: ``[..., K]``; its rows are cut into 2 n parts.
    name: The mesh axis.

  Returns:
    The sum; device-varying by type, though equal.
  """
  n = lax.axis_size(name)
  rows, restore = _rows(x, 2 * n)
  up, down = jnp.split(rows, 2)
  return restore(
    jnp.concatenate([_ring(up, name, n, 1), _ring(down, name, n, -1)])
  )


def sum_by_one_shot(x: jax.Array, name: str) -> jax.Array:
  """Sums over a mesh axis: everyone's array goes to everyone, who all add.

  One step in place of two, for n / 2 times the bytes of a ring. Added in the
  order of devices, in float32 if x is narrower, and rounded once: so all
  devices hold the same bits.

  Args:
    x: ``[...]``.
    name: The mesh axis.

  Returns:
    The sum, the same on every device.
  """
  wide = x.dtype
  if jnp.issubdtype(wide, jnp.floating):
    wide = jnp.promote_types(wide, jnp.float32)
  total = jnp.zeros(x.shape, wide)
  for part in parts_of_all(x, name):
    total = total + part.astype(wide)
  return total.astype(x.dtype)


def parts_of_all(x: jax.Array, name: str) -> jax.Array:
  """``[...] -> [n, ...]``: every device's, the same on all of them."""
  joined = lax.all_gather(x, name, tiled=True, to="invarying")
  return joined.reshape(lax.axis_size(name), *x.shape)


def _ring(x: jax.Array, name: str, n: int, step: int) -> jax.Array:
  parts = x.reshape(n, -1, x.shape[-1])
  here = lax.axis_index(name)
  pairs = [(i, (i + step) % n) for i in range(n)]

  def part(number):
    return lax.dynamic_index_in_dim(parts, number % n, keepdims=False)

  moving = part(here)
  for hop in range(1, n):
    moving = lax.ppermute(moving, name, pairs) + part(here - step * hop)
  # Part ``here + step`` is complete here; the others arrive one by one.
  total = jnp.zeros_like(parts)
  for hop in range(n):
    number = (here + step - step * hop) % n
    total = lax.dynamic_update_index_in_dim(total, moving, number, 0)
    if hop < n - 1:
      moving = lax.ppermute(moving, name, pairs)
  return total.reshape(x.shape)


def _rows(x: jax.Array, parts: int):
  """``[..., K] -> [rows, K]``, rows padded to a multiple, and the way back."""
  shape = x.shape
  rows = x.reshape(-1, shape[-1])
  padding = -rows.shape[0] % parts
  padded = jnp.pad(rows, ((0, padding), (0, 0)))
  return padded, lambda y: y[: rows.shape[0]].reshape(shape)


# Ways to sum over a mesh axis, by the names that configs use.
ROUTES: dict[str, Reduction] = {
  "psum": lax.psum,
  "scatter_gather": sum_by_scatter_gather,
  "ring": sum_by_ring,
  "one_shot": sum_by_one_shot,
}


def reduce_scatter(
  x: jax.Array, axis: Axis, *, dim: int = 0, via: Reduction | None = None
) -> jax.Array:
  """Sums over all logical ranks and leaves each rank its slice of the sum.

  Args:
    x: ``[R, ...]``; the dim ``dim`` (not counting R) divides by N.
    axis: The axis to reduce over.
    dim: The dim to scatter, in a rank's own array.
    via: Replaces ``lax.psum_scatter`` of dim 0 over the mesh axis.

  Returns:
    ``[R, ...]`` with ``dim`` N times shorter.
  """
  summed = jnp.moveaxis(jnp.sum(x, axis=0), dim, 0)
  mine = (via or _scatter)(summed, axis.name)
  return _split_lanes(jnp.moveaxis(mine, 0, dim), axis.lanes, dim)


def _scatter(x: jax.Array, name: str) -> jax.Array:
  """``lax.psum_scatter`` of dim 0, laid out so that XLA:TPU keeps it one.

  Along one of the two minor dims, whose elements lie in tiles, or of few rows,
  it makes a whole all-reduce and takes a slice (LOG.md, "20B").
  """
  n = lax.axis_size(name)
  shape = (x.shape[0] // n, *x.shape[1:])
  tiles = _in_tiles(x, n)
  return lax.psum_scatter(tiles, name, scatter_dimension=0).reshape(shape)


def _in_tiles(x: jax.Array, n: int) -> jax.Array:
  """``[n, rows, tile]``, or ``[n, elements]`` where tiles do not fit."""
  fits = x.size % (n * _TILE) == 0
  return x.reshape(n, -1, _TILE) if fits else x.reshape(n, -1)


def all_gather(
  x: jax.Array, axis: Axis, *, dim: int = 0, via: Reduction | None = None
) -> jax.Array:
  """Concatenates the slices of all logical ranks, in rank order.

  Args:
    x: ``[R, ...]``, one slice per lane.
    axis: The axis to gather over.
    dim: The dim to concatenate along, in a rank's own array.
    via: Replaces ``lax.all_gather`` of dim 0 over the mesh axis. Its result
      may be device-varying.

  Returns:
    ``[...]`` with ``dim`` N times longer, the same on every device.
  """
  mine = _join_lanes(x, dim)
  if via is not None:
    return jnp.moveaxis(via(jnp.moveaxis(mine, dim, 0), axis.name), 0, dim)
  return lax.all_gather(
    mine, axis.name, axis=dim, tiled=True, to="invarying"
  )


def all_to_all(
  x: jax.Array, axis: Axis, *, split_dim: int, concat_dim: int
) -> jax.Array:
  """Sends slice ``j`` of every rank's array to rank ``j``.

  Args:
    x: ``[R, ...]``; ``split_dim`` (not counting R) divides by N.
    axis: The axis to exchange over.
    split_dim: The dim whose N slices go to the N ranks.
    concat_dim: The dim along which a rank concatenates what it receives, in
      the order of the senders.

  Returns:
    ``[R, ...]`` with ``split_dim`` N times shorter, ``concat_dim`` N times
    longer.
  """
  lanes, devices = axis.lanes, axis.devices
  shape = x.shape[1:]
  slices = x.reshape(
    lanes,
    *shape[:split_dim],
    devices,
    lanes,
    shape[split_dim] // axis.size,
    *shape[split_dim + 1 :],
  )
  # -> [receiving device, receiving lane, sending lane, ...]
  slices = jnp.moveaxis(slices, (split_dim + 1, split_dim + 2), (0, 1))
  # Of one long row XLA:TPU makes a program that takes minutes to compile.
  wire = _in_tiles(slices, devices)
  wire = lax.all_to_all(wire, axis.name, 0, 0, tiled=True)
  slices = wire.reshape(slices.shape)
  # -> [receiving lane, ..., (sending device, sending lane, concat_dim), ...]
  slices = jnp.moveaxis(slices, (0, 2), (concat_dim + 1, concat_dim + 2))
  out = list(slices.shape)
  out[concat_dim + 1 : concat_dim + 4] = [
    axis.size * slices.shape[concat_dim + 3]
  ]
  return slices.reshape(out)


def permute(
  x: jax.Array, axis: Axis, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Moves arrays between logical ranks; zeros where nothing arrives.

  Args:
    x: ``[R, ...]``.
    axis: The axis whose ranks the pairs name.
    pairs: (source rank, destination rank); no rank sends or receives twice.

  Returns:
    ``[R, ...]``: what each rank received.

  Raises:
    ValueError: A rank out of range, or named twice on one side.
  """
  for side, ranks in zip(("source", "destination"), zip(*pairs, strict=True),
                         strict=False):
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(axis.size)):
      raise ValueError(
        f"permute over {axis}: every {side} must be a rank in "
        f"[0, {axis.size}) and appear once, got {sorted(ranks)}"
      )
  lanes = axis.lanes
  if axis.devices == 1:
    came_from = dict((there, source) for source, there in pairs)
    arrived = x[jnp.asarray([came_from.get(m, m) for m in range(lanes)])]
    filled = jnp.asarray([m in came_from for m in range(lanes)])
    return jax.vmap(jnp.where)(filled, arrived, jnp.zeros_like(x))
  routes: dict[tuple[int, int], list[tuple[int, int]]] = {}
  for source, destination in pairs:
    lane_pair = (source % lanes, destination % lanes)
    devices = (source // lanes, destination // lanes)
    routes.setdefault(lane_pair, []).append(devices)
  received = [jnp.zeros_like(x[0])] * lanes
  everywhere = {(d, d) for d in range(axis.devices)}
  for (source, destination), moves in sorted(routes.items()):
    if set(moves) == everywhere:  # stays on the device: no communication
      arrived = x[source]
    else:
      arrived = lax.ppermute(x[source], axis.name, moves)
    received[destination] = received[destination] + arrived
  return jnp.stack(received)


def _join_lanes(x: jax.Array, dim: int) -> jax.Array:
  """``[R, ..., s, ...] -> [..., R * s, ...]``."""
  moved = jnp.moveaxis(x, 0, dim)
  shape = moved.shape
  return moved.reshape(
    *shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]
  )


def _split_lanes(x: jax.Array, lanes: int, dim: int) -> jax.Array:
  """``[..., R * s, ...] -> [R, ..., s, ...]``."""
  shape = x.shape
  split = x.reshape(
    *shape[:dim], lanes, shape[dim] // lanes, *shape[dim + 1 :]
  )
  return jnp.moveaxis(split, dim, 0)
