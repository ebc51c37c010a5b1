"""Collectives on lane-stacked arrays, inside ``jax.shard_map``.

A lane-stacked array ``x_R...`` has a leading dim of ``axis.lanes`` logical
ranks. Every collective first combines the R lanes on each device and then
communicates over the mesh axis. Up to the rounding of sums, the result does not
depend on the number of devices that host the ranks. Lane ``lane`` of device
``device`` is rank ``device * lanes + lane``.

Shape legend: R = lanes on this device; N = logical ranks; n = devices of the
mesh axis; s = elements of one rank's slice.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis

# Function of an array and a mesh axis's name. As ``via`` of `all_reduce`, it
# sums the array over this axis; as ``via`` of `reduce_scatter`, it
# reduce-scatters dim 0; as ``via`` of `all_gather`, it gathers along dim 0.
Reduction = Callable[[jax.Array, str], jax.Array]


class CollectiveBackend(Protocol):
  """Interface of sums and gathers between processes, without a mesh axis.

  Attributes:
    rank: int32 ``[]``, rank of this process; each process has one rank.
  """

  rank: jax.Array

  def sum(self, x: jax.Array) -> jax.Array:
    """Returns the sum of x over all ranks, with x's shape."""
    ...

  def gather(self, x: jax.Array) -> jax.Array:
    """Joins the x ``[k, ...]`` of N ranks in rank order: ``[N k, ...]``."""
    ...


# Width of a TPU tile: 128 elements of the minor dim are contiguous in memory.
_TILE = 128


def varying_axes(x: jax.Array) -> frozenset[str]:
  """Returns the mesh axes over which ``x`` is device-varying by type."""
  return jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array, *names: str) -> jax.Array:
  """Casts ``x`` to device-varying over the named mesh axes.

  The cast costs nothing in the forward pass; its transpose is an all-reduce.
  Casting the inputs of a function before it is differentiated therefore keeps
  that all-reduce out of the function's backward pass. Axes over which ``x``
  already varies are ignored.

  Args:
    x: ``[...]``, any dtype.
    *names: Names of mesh axes.

  Returns:
    ``x``, device-varying over the named axes.
  """
  missing = tuple(n for n in names if n not in varying_axes(x))
  return lax.pcast(x, missing, to="varying") if missing else x


def on_cpu() -> bool:
  """Returns whether the enclosing ``jax.shard_map`` is on CPU devices."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.device_kind == "cpu"


def ranks_here(axis: Axis) -> jax.Array:
  """Returns the numbers of the R ranks on this device, int32 ``[R]``."""
  if axis.backend is not None:
    return axis.backend.rank[None]
  return lax.axis_index(axis.name) * axis.lanes + jnp.arange(axis.lanes)


def order_after(tree: Any, results: Any, needed: bool = True) -> Any:
  """Returns ``tree`` unchanged, with a data dependency on ``results``.

  XLA:CPU runs independent operations of a program in any order, including
  collectives of different device groups. Two devices that choose different
  orders deadlock until they are aborted (observed with jax 0.10.2).
  ``optimization_barrier`` does not help: XLA:CPU removes it before it schedules
  the program. A data dependency enforces the order.

  Args:
    tree: Arrays to delay.
    results: Arrays that must be computed first.
    needed: Whether the backend needs the dependency; if False, ``tree`` is
      returned without one.

  Returns:
    ``tree``, with the same values, dtypes and types.
  """
  if not needed:
    return tree
  # One element per array suffices for a dependency. ``late`` is always 0, also
  # for NaN, since the product of two consecutive integers is even; compilers do
  # not detect that, so the dependency is not optimised away.
  heads = [
    lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
    for x in jax.tree.leaves(results)
    if x.size and x.dtype != jax.dtypes.float0
  ]
  if not heads:
    return tree
  late = jnp.asarray(sum((head * (head + 1)) & 1 for head in heads))
  # ``tree`` must keep its type, but a sum with ``late`` varies over every mesh
  # axis that ``late`` varies over. ``late`` is 0 on all devices, which the type
  # check cannot verify: the cast to invarying is done without a check.
  late = jax.shard_map(
    # The addition is needed: an argument returned unchanged keeps its type.
    lambda late: late + 0,
    axis_names=set(), in_specs=P(), out_specs=P(), check_vma=False,
  )(late)

  def delayed(x):
    no_value = x.dtype == jax.dtypes.float0  # cotangent of an integer array
    return x if no_value else x + late.astype(x.dtype)

  return jax.tree.map(delayed, tree)


def order_both(tree: Any, results: Any, ordered: bool) -> tuple[Any, Any]:
  """Returns both trees, with operations on ``tree`` ordered after ``results``.

  Example: ``results`` is the output of one collective and ``tree`` the operand
  of another. ``tree`` is computed during the first collective, and the second
  one starts when the first has ended. Without this order XLA merges the two
  collectives into one, which overlaps with no computation.

  Args:
    tree: Arrays, such as operands of a collective.
    results: Results of an earlier collective. Callers use the second return
      value instead, so that consumers of the results also wait for ``tree``.
    ordered: Whether a data dependency is needed, as between CPU devices
      (`order_after`); otherwise an optimization barrier is used, whose outputs
      may vary over more mesh axes by type.
  """
  if ordered:
    return order_after(tree, results), results
  return lax.optimization_barrier((tree, results))


def each_lane(
  f: Callable[..., Any], axis: Axis, *trees: Any
) -> Any:
  """Runs a rank-local function for each lane (rank on this device) in turn.

  Intended for large functions, such as the whole step of a worker: a loop holds
  the temporaries of one lane at a time, whereas the memory of ``jax.vmap`` is
  proportional to the number of lanes. Use ``jax.vmap`` for small functions.

  Args:
    f: Function of one rank's trees ``[...]``; it may communicate over other
      axes.
    axis: Axis whose lanes the loop iterates over.
    *trees: Arguments of f for the R ranks on this device, ``[R, ...]``.

  Returns:
    Results of f, ``[R, ...]``.
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
    x: ``[R, ...]``, one summand for each of the R ranks (lanes) on this device.
    axis: Axis to reduce over.
    via: Replacement of ``lax.psum`` over the mesh axis, for example a function
      of `parallel.routes`. Its result may be device-varying by type.

  Returns:
    ``[...]``, the sum, equal on every device.

  Example:
    >>> from parallel.axes import make_mesh
    >>> axis = Axis("tensor", size=4)  # 4 lanes on one device
    >>> f = jax.jit(jax.shard_map(
    ...   lambda x: all_reduce(x, axis), mesh=make_mesh({"tensor": axis}),
    ...   in_specs=P("tensor"), out_specs=P(),
    ... ))
    >>> f(jnp.arange(8.0).reshape(4, 2)).tolist()
    [12.0, 16.0]
  """
  total = jnp.sum(x, axis=0)
  if axis.backend is not None:
    return axis.backend.sum(total)
  return (via or lax.psum)(total, axis.name)


def reduce_scatter(
  x: jax.Array, axis: Axis, *, dim: int = 0, via: Reduction | None = None
) -> jax.Array:
  """Sums over all logical ranks and returns each rank's slice of the sum.

  Args:
    x: ``[R, ...]``, one summand for each of the R ranks (lanes) on this device.
      The total number of ranks N divides the dim ``dim`` (not counting R).
    axis: Axis to reduce over.
    dim: Dim to scatter, counted without R.
    via: Replacement of ``lax.psum_scatter`` of dim 0 over the mesh axis.

  Returns:
    ``[R, ...]`` with ``dim`` N times shorter.

  Raises:
    ValueError: The ranks are separate processes (``axis.backend`` is set).
  """
  # A device receives the slices of all its lanes as one contiguous slice: the
  # lanes of a device are consecutive ranks, so their slices are adjacent.
  _check_has_mesh(axis, "a reduce-scatter")
  summed = jnp.sum(x, axis=0)
  if via is None:
    mine = _scatter(summed, axis, dim)
  else:
    mine = jnp.moveaxis(via(jnp.moveaxis(summed, dim, 0), axis.name), 0, dim)
  return _split_lanes(mine, axis.lanes, dim)


def _scatter(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
  """Reduce-scatters a dim, in a layout that XLA:TPU keeps as a reduce-scatter.

  XLA:TPU rewrites a reduce-scatter along one of the two minor (tiled) dims, or
  of few rows, into an all-reduce and a slice, which doubles the bytes on the
  links (docs/methods.md). Scattering a separate leading dim of size n avoids
  that. The order of the other dims is unchanged: moving all of ``dim`` to the
  front could leave a short minor dim, which XLA:TPU pads to 128.

  Args:
    x: ``[...]``, the sum over the ranks on this device.
    axis: Axis to reduce over.
    dim: Dim to scatter.

  Returns:
    ``[...]`` with ``dim`` n times shorter for n devices: the slices of the
    ranks on this device.
  """
  n = axis.devices
  # [..., n * k, ...] -> [..., n, k, ...] -> [n, ..., k, ...]
  parts = x.reshape(
    *x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]
  )
  slices = jnp.moveaxis(parts, dim, 0)
  tiles = _in_tiles(slices, n)
  mine = lax.psum_scatter(tiles, axis.name, scatter_dimension=0)
  return mine.reshape(slices.shape[1:])


def _in_tiles(x: jax.Array, n: int) -> jax.Array:
  """Reshapes x to ``[n, rows, 128]`` if possible, else ``[n, elements]``.

  Dim 0 of x has size n, one slice per device.
  """
  # A row of 128 elements must not extend over the slices of two devices.
  fits = x.size % (n * _TILE) == 0
  return x.reshape(n, -1, _TILE) if fits else x.reshape(n, -1)


def all_gather(
  x: jax.Array, axis: Axis, *, dim: int = 0, via: Reduction | None = None
) -> jax.Array:
  """Concatenates the slices of all logical ranks, in rank order.

  Args:
    x: ``[R, ...]``, one slice for each of the R ranks (lanes) on this device.
    axis: Axis to gather over.
    dim: Dim to concatenate along, counted without R.
    via: Replacement of ``lax.all_gather`` of dim 0 over the mesh axis. Its
      result may be device-varying by type.

  Returns:
    ``[...]`` with ``dim`` N times longer for N ranks, equal on every device.
  """
  mine = _join_lanes(x, dim)
  if axis.backend is not None:
    return jnp.moveaxis(axis.backend.gather(jnp.moveaxis(mine, dim, 0)), 0, dim)
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
    x: ``[R, ...]``, one array for each of the R ranks (lanes) on this device.
      The total number of ranks N divides the dim ``split_dim`` (not counting
      R).
    axis: Axis to exchange over.
    split_dim: Dim whose N slices are sent to the N ranks.
    concat_dim: Dim along which a rank concatenates the received slices, in the
      order of the sending ranks.

  Returns:
    ``[R, ...]`` with ``split_dim`` N times shorter and ``concat_dim`` N times
    longer.

  Raises:
    ValueError: The ranks are separate processes (``axis.backend`` is set).
  """
  _check_has_mesh(axis, "an all-to-all")
  lanes, devices = axis.lanes, axis.devices
  shape = x.shape[1:]
  # Slice device * lanes + lane is for that lane, so split_dim is reshaped to
  # (receiving device, receiving lane, elements).
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
  # [n, rows, 128]: XLA:TPU takes minutes to compile one long row per device.
  wire = _in_tiles(slices, devices)
  wire = lax.all_to_all(wire, axis.name, 0, 0, tiled=True)
  slices = wire.reshape(slices.shape)
  # After the all-to-all, dim 0 is the sending device.
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
  """Moves arrays between logical ranks; a rank that receives none gets zeros.

  Args:
    x: ``[R, ...]``, the array that each of the R ranks on this device (lanes)
      sends.
    axis: Axis whose ranks the pairs refer to.
    pairs: Pairs (source rank, destination rank); a rank is the source of at
      most one pair and the destination of at most one.

  Returns:
    ``[R, ...]``, the array that each rank receives.

  Raises:
    ValueError: A rank is out of range, or the source or the destination of two
      pairs; or the ranks are separate processes (``axis.backend`` is set).
  """
  _check_has_mesh(axis, "a permute")
  for side, ranks in zip(("source", "destination"), zip(*pairs, strict=True),
                         strict=False):
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(axis.size)):
      raise ValueError(
        f"permute over {axis}: every {side} must be a rank in "
        f"[0, {axis.size}) and appear once, got {sorted(ranks)}"
      )
  lanes = axis.lanes
  if axis.devices == 1:  # gather over R; no communication
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
    # Several mesh permutes may send to the same lane, on different devices. A
    # device that is not a destination receives zeros, so the permutes' results
    # are added.
    received[destination] = received[destination] + arrived
  return jnp.stack(received)


def permute_routes(
  axis: Axis, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], list[tuple[int, int]] | None]:
  """Returns the ``lax.ppermute`` calls that `permute` makes for some pairs.

  Args:
    axis: Axis whose ranks the pairs refer to.
    pairs: Pairs (source rank, destination rank).

  Returns:
    (source lane, destination lane) -> pairs (source device, destination device)
    of one call, where a lane is the index of a rank on its device; None if
    every device keeps its array, so that no call is made.

  Example:
    >>> ring = [(rank, (rank + 1) % 4) for rank in range(4)]
    >>> permute_routes(Axis("data", size=4, devices=2), ring)
    {(0, 1): None, (1, 0): [(0, 1), (1, 0)]}
  """
  # A mesh permute moves one array per device. Pairs with equal source lanes and
  # equal destination lanes contain each device at most once per side, so that
  # one permute serves all of them.
  routes: dict[tuple[int, int], list[tuple[int, int]] | None] = {}
  for source, destination in pairs:
    lane_pair = (source % axis.lanes, destination % axis.lanes)
    devices = (source // axis.lanes, destination // axis.lanes)
    routes.setdefault(lane_pair, []).append(devices)
  everywhere = {(d, d) for d in range(axis.devices)}
  # They are sorted, so that the order of the pairs does not change the program.
  return {
    lane_pair: None if set(moves) == everywhere else moves
    for lane_pair, moves in sorted(routes.items())
  }


def _check_has_mesh(axis: Axis, what: str) -> None:
  """Raises ValueError for an axis with a backend, which has no mesh axis.

  ``what`` is the name of the collective, for the message.
  """
  if axis.backend is not None:
    raise ValueError(
      f"{what} over the axis {axis.name!r} is not supported, since its ranks "
      "are separate processes, which support only sums and gathers"
    )


def _join_lanes(x: jax.Array, dim: int) -> jax.Array:
  """Joins the slices of R ranks along ``dim``, counted without R.

  The shape ``[R, ..., s, ...]`` becomes ``[..., R * s, ...]``.
  """
  moved = jnp.moveaxis(x, 0, dim)
  shape = moved.shape
  return moved.reshape(
    *shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]
  )


def _split_lanes(x: jax.Array, lanes: int, dim: int) -> jax.Array:
  """Splits ``dim`` into the slices of R ranks; the inverse of `_join_lanes`.

  The shape ``[..., R * s, ...]`` becomes ``[R, ..., s, ...]``; R is ``lanes``.
  """
  shape = x.shape
  split = x.reshape(
    *shape[:dim], lanes, shape[dim] // lanes, *shape[dim + 1 :]
  )
  return jnp.moveaxis(split, dim, 0)
