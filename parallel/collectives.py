"""Collectives on lane-stacked arrays, inside ``jax.shard_map``.

A lane-stacked array ``x_R...`` has a leading dim of ``axis.lanes`` logical
ranks. Every collective works over R first, on the device, and over the mesh
axis second, so the result does not depend on how many devices carry the ranks.
A rank's number is ``device * lanes + lane``.

Shape legend: R = lanes on this device; N = logical ranks; n = devices of the
mesh axis; K = last dim.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis

# Takes an array and the name of a mesh axis, and reduces the array over that
# axis. As the ``via`` of `reduce_scatter` and `all_gather` it scatters or
# gathers dim 0 instead.
Reduction = Callable[[jax.Array, str], jax.Array]


class Carrier(Protocol):
  """What carries an axis' sums and gathers in place of a mesh axis.

  Attributes:
    rank: int32 ``[]``, the rank of this process, which has one lane.
  """

  rank: jax.Array

  def sum(self, x: jax.Array) -> jax.Array:
    """Returns the sum ``[...]`` of all ranks' ``[...]``."""
    ...

  def gather(self, x: jax.Array) -> jax.Array:
    """Returns all ranks' ``[k, ...]`` in rank order, ``[N * k, ...]``."""
    ...


# Width of a TPU's tiles: a row of 128 elements of the minor dim lies together.
_TILE = 128


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Returns the mesh axes over which ``x`` may differ, as its type says."""
  return jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array, *names: str) -> jax.Array:
  """Casts ``x`` to device-varying over the named mesh axes.

  The cast costs nothing forward; its transpose is an all-reduce. So a cast
  before a function is differentiated keeps that all-reduce out of the
  function's backward. An axis over which ``x`` varies already is left alone.
  """
  missing = tuple(n for n in names if n not in varying_axes(x))
  return lax.pcast(x, missing, to="varying") if missing else x


def ranks_here(axis: Axis) -> jax.Array:
  """Returns the numbers of this device's logical ranks, int32 ``[R]``."""
  if axis.carrier is not None:
    return axis.carrier.rank[None]
  return lax.axis_index(axis.name) * axis.lanes + jnp.arange(axis.lanes)


def after(tree: Any, results: Any, needed: bool = True) -> Any:
  """Returns ``tree`` unchanged, but not before ``results`` are computed.

  XLA:CPU runs independent operations of a program in any order, also two
  collectives of different groups. Two devices that choose different orders
  wait for each other until they are aborted (seen with jax 0.10.2). An
  ``optimization_barrier`` does not help: XLA:CPU removes it before it orders
  the program. So the order is made a data dependency.

  Args:
    tree: Arrays to hold back.
    results: Arrays to wait for.
    needed: Whether the backend needs the order; if not, nothing is added.

  Returns:
    ``tree``.
  """
  if not needed:
    return tree
  # One element per array is enough to depend on it. What is added is 0, for NaN
  # too, but compilers do not see that: the product of two neighbouring integers
  # is even.
  heads = [
    lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
    for x in jax.tree.leaves(results)
    if x.size and x.dtype != jax.dtypes.float0
  ]
  late = jnp.asarray(sum((head * (head + 1)) & 1 for head in heads))
  # ``tree`` must keep its type, but a sum with ``late`` varies over every mesh
  # axis that ``late`` varies over. We know that ``late`` is 0 on all devices;
  # the type check does not, so the cast to invarying is one without a check.
  late = jax.shard_map(
    # An argument that is returned as it is would keep its type.
    lambda late: late + 0,
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

  This is for large functions, such as the whole step of a worker: a loop keeps
  the temporaries of one lane at a time, where ``jax.vmap`` would keep those of
  all lanes. Small functions are lifted with ``jax.vmap``.

  Args:
    f: A function of one rank's trees ``[...]``; it may communicate over other
      axes.
    axis: The axis whose lanes to loop over.
    *trees: The arguments of f, ``[R, ...]``.

  Returns:
    The results of f, ``[R, ...]``.
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
    via: Replaces ``lax.psum`` over the mesh axis, for example with a
      schedule's executor. Its result may be device-varying by type.

  Returns:
    ``[...]``, the sum, the same on every device.
  """
  total = jnp.sum(x, axis=0)
  if axis.carrier is not None:
    return axis.carrier.sum(total)
  return (via or lax.psum)(total, axis.name)


def reduce_scatter(
  x: jax.Array, axis: Axis, *, dim: int = 0, via: Reduction | None = None
) -> jax.Array:
  """Sums over all logical ranks and leaves each rank its slice of the sum.

  Args:
    x: ``[R, ...]``, one summand per lane; N divides the dim ``dim`` (not
      counting R).
    axis: The axis to reduce over.
    dim: The dim to scatter, in a rank's own array.
    via: Replaces ``lax.psum_scatter`` of dim 0 over the mesh axis.

  Returns:
    ``[R, ...]`` with ``dim`` N times shorter.
  """
  # A device receives the slices of all its lanes as one: lanes of a device are
  # neighbours in rank order, so their slices are too.
  _needs_mesh(axis, "a reduce-scatter")
  summed = jnp.sum(x, axis=0)
  if via is None:
    mine = _scatter(summed, axis, dim)
  else:
    mine = jnp.moveaxis(via(jnp.moveaxis(summed, dim, 0), axis.name), 0, dim)
  return _split_lanes(mine, axis.lanes, dim)


def _scatter(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
  """Reduce-scatters a dim, in a layout of which XLA:TPU makes one too.

  XLA:TPU turns a reduce-scatter along one of the two minor dims, which lie in
  tiles, or one of few rows, into a whole all-reduce and a slice: twice the
  bytes on the links (LOG.md, "partitions of 20B"). So devices get a leading
  dim of their own, which is the one that is scattered. The other dims stay as
  they are: were all of ``dim`` in front, a short one would be the minor one,
  for which XLA:TPU takes 128 places.
  """
  n = axis.devices
  parts = x.reshape(
    *x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]
  )
  slices = jnp.moveaxis(parts, dim, 0)
  tiles = _in_tiles(slices, n)
  mine = lax.psum_scatter(tiles, axis.name, scatter_dimension=0)
  return mine.reshape(slices.shape[1:])


def _in_tiles(x: jax.Array, n: int) -> jax.Array:
  """Reshapes to ``[n, rows, 128]``, or ``[n, elements]`` if tiles do not fit.

  Rows must not cross from one device's slice into the next one's.
  """
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
      may be device-varying by type.

  Returns:
    ``[...]`` with ``dim`` N times longer, the same on every device.
  """
  mine = _join_lanes(x, dim)
  if axis.carrier is not None:
    return jnp.moveaxis(axis.carrier.gather(jnp.moveaxis(mine, dim, 0)), 0, dim)
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
    x: ``[R, ...]``; N divides the dim ``split_dim`` (not counting R).
    axis: The axis to exchange over.
    split_dim: The dim whose N slices go to the N ranks.
    concat_dim: The dim along which a rank concatenates what it receives, in
      the order of the senders.

  Returns:
    ``[R, ...]`` with ``split_dim`` N times shorter, ``concat_dim`` N times
    longer.
  """
  _needs_mesh(axis, "an all-to-all")
  lanes, devices = axis.lanes, axis.devices
  shape = x.shape[1:]
  # A slice's number is device * lanes + lane: split_dim -> (receiving device,
  # receiving lane, elements).
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
  # In tiles, since XLA:TPU takes minutes to compile one long row per device.
  wire = _in_tiles(slices, devices)
  wire = lax.all_to_all(wire, axis.name, 0, 0, tiled=True)
  slices = wire.reshape(slices.shape)
  # The all-to-all has turned dim 0 into the sending device.
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
    x: ``[R, ...]``, what each lane sends.
    axis: The axis whose ranks the pairs name.
    pairs: Pairs of source rank and destination rank; no rank sends or receives
      twice.

  Returns:
    ``[R, ...]``, what each rank received.

  Raises:
    ValueError: A rank is out of range or named twice on one side.
  """
  _needs_mesh(axis, "a permute")
  for side, ranks in zip(("source", "destination"), zip(*pairs, strict=True),
                         strict=False):
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(axis.size)):
      raise ValueError(
        f"permute over {axis}: every {side} must be a rank in "
        f"[0, {axis.size}) and appear once, got {sorted(ranks)}"
      )
  lanes = axis.lanes
  if axis.devices == 1:  # a gather over R; nothing is sent
    came_from = dict((there, source) for source, there in pairs)
    arrived = x[jnp.asarray([came_from.get(m, m) for m in range(lanes)])]
    filled = jnp.asarray([m in came_from for m in range(lanes)])
    return jax.vmap(jnp.where)(filled, arrived, jnp.zeros_like(x))
  received = [jnp.zeros_like(x[0])] * lanes
  for (source, destination), moves in permute_routes(axis, pairs).items():
    if moves is None:
      arrived = x[source]
    else:
      arrived = lax.ppermute(x[source], axis.name, moves)
    # Several routes may end in one lane, on different devices; a device that a
    # route does not reach gets zeros from it, so the sum joins the routes.
    received[destination] = received[destination] + arrived
  return jnp.stack(received)


def permute_routes(
  axis: Axis, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], list[tuple[int, int]] | None]:
  """Returns the mesh permutes that `permute` makes, each of one rank's array.

  Args:
    axis: The axis whose ranks the pairs name.
    pairs: Pairs of source rank and destination rank.

  Returns:
    (source lane, destination lane) -> pairs of devices; None where all stays
    on its device, so that nothing is sent.
  """
  # A mesh permute moves one array per device. Pairs with the same lanes at both
  # ends name each device at most once per side, so they share one permute.
  routes: dict[tuple[int, int], list[tuple[int, int]] | None] = {}
  for source, destination in pairs:
    lane_pair = (source % axis.lanes, destination % axis.lanes)
    devices = (source // axis.lanes, destination // axis.lanes)
    routes.setdefault(lane_pair, []).append(devices)
  everywhere = {(d, d) for d in range(axis.devices)}
  # Sorted, so that the program does not depend on the order of the pairs.
  return {
    lane_pair: None if set(moves) == everywhere else moves
    for lane_pair, moves in sorted(routes.items())
  }


def _needs_mesh(axis: Axis, what: str) -> None:
  """Refuses what no carrier carries."""
  if axis.carrier is not None:
    raise ValueError(
      f"{what} over the axis {axis.name!r}, whose ranks are in processes of "
      "their own: these exchange sums and gathers only"
    )


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
