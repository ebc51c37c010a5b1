"""Collectives between the depths of a ZeRO partition: gather, scatter, store.

A level is an axis of data-parallel ranks, such as the devices of a node or the
nodes. A tensor at depth d is partitioned over the d innermost levels, along its
flattened elements, padded with zeros to equal shards. Each layer, and each rank
of another axis, is partitioned separately. This device's shards at depth d are

    [*lead, lanes of level 0, ..., lanes of level d - 1, elements]

with level 0 the innermost; lanes are ranks of the level on this device. Shards
nest: a rank's shard at depth d + 1 is a slice of its shard at depth d. Gathers
proceed from the outermost level inwards, scatters from the innermost level
outwards, with one collective per level, or per hop of encoded gradients
(`Partition.hops`). Thus only a shard, never the whole tensor, crosses the outer
levels, which have the slowest links (MiCS, arXiv 2205.00119).

Trees have one leaf per tensor; each comes with a tree of `TensorSpec` of the
same structure.

Shape legend: lead = dims that are not partitioned (layers, tensor ranks); l_j =
lanes of level j, 0 the innermost; w, g, o, s = depths of weights, gradients,
optimizer and secondary copy; D = data-parallel ranks of this device; n =
elements of a tensor; k = elements of a shard.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel import collectives, quantize
from parallel.axes import Axis
from parallel.collectives import order_after, varying
from parallel.kernels.codec import api
from parallel.kernels.codec.reference import Codec, Encoded
from parallel.kernels.selection import Implementation
from parallel.plans.zero.partition import Partition


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """Shape and dtype of a parameter.

  Attributes:
    shape: Shape without ``lead`` dims; shards are slices of the flattened dims.
    dtype: Dtype of the gathered parameter and, without a codec, on the wire.
    form: Form of the shards, one of `parallel.plans.zero.partition.FORMS`.
    apart: Names of the levels whose ranks have separate tensors.
  """

  shape: tuple[int, ...]
  dtype: str
  form: str = "flat"
  apart: tuple[str, ...] = ()

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def unit(self) -> int:
    """Number of consecutive elements that no shard divides."""
    return math.prod(self.shape[1:]) if self.form == "rows" else 1


def _per_tensor(method: Callable[..., Any]) -> Callable[..., Any]:
  """Lets a method of `MeshPartition` take tensors with different partitions.

  Args:
    method: Method of a tree and of a tree of `TensorSpec`. It is called once
      for all tensors with equal partitions (`MeshPartition.of_tensor`).
  """

  @functools.wraps(method)
  def grouped(self: "MeshPartition", tree: Any, tensors: Any) -> Any:
    specs, treedef = jax.tree.flatten(tensors)
    groups: dict[MeshPartition, list[int]] = {}
    for place, tensor in enumerate(specs):
      groups.setdefault(self.of_tensor(tensor), []).append(place)
    if set(groups) <= {self}:
      return method(self, tree, tensors)
    leaves, results = treedef.flatten_up_to(tree), [None] * len(specs)
    done: list[Any] = []
    for own, places in groups.items():
      args = order_after([leaves[i] for i in places], done, self.ordered)
      done = method(own, args, [specs[i] for i in places])
      for place, result in zip(places, done, strict=True):
        results[place] = result
    return treedef.unflatten(results)

  return grouped


@dataclasses.dataclass(frozen=True)
class MeshPartition:
  """ZeRO partition of a training state on a mesh.

  Attributes:
    partition: Sharding depth of each part of the state.
    axes: One axis per level of data-parallel ranks, outermost first, in the
      partition's order.
    ordered: Whether collectives of different levels are ordered by data flow,
      which XLA:CPU requires (`collectives.order_after`).
    kernels: Implementations of the codecs, in order of preference; all send the
      same bits.

  Example:
    ZeRO-3 over one level of 2 ranks stores two shards of 3 elements, the last
    one padded.

    >>> from parallel.plans.zero.partition import Level, named
    >>> partition = named("zero3", [Level("data", 2)])
    >>> shards = MeshPartition(partition, (Axis("data", 2),))
    >>> tensor = TensorSpec((5,), "float32")
    >>> stored = shards.store(jnp.arange(5.0), tensor)
    >>> stored.tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]
    >>> shards.restore(stored, tensor).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
  """

  partition: Partition
  axes: tuple[Axis, ...]
  ordered: bool = False
  kernels: Implementation = "reference"

  @property
  def inner(self) -> tuple[Axis, ...]:
    """Axes of the levels of data-parallel ranks, innermost first.

    A tensor at depth d is sharded over the first d.
    """
    return self.axes[::-1]

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the mesh axes, outermost first."""
    return tuple(axis.name for axis in self.axes)

  @property
  def num_lanes(self) -> int:
    """D, the number of data-parallel ranks on this device."""
    return math.prod(axis.lanes for axis in self.axes)

  def of_tensor(self, tensor: TensorSpec) -> "MeshPartition":
    """Returns the partition of one tensor; see `Partition.of_tensor`."""
    return dataclasses.replace(
      self, partition=self.partition.of_tensor(tensor.form, tensor.apart),
      axes=tuple(x for x in self.axes if x.name not in tensor.apart),
    )

  def store(self, x: jax.Array, tensor: TensorSpec) -> jax.Array:
    """Splits a whole tensor into the shards that are stored between steps.

    It operates on arrays of logical shape, outside ``jax.shard_map``, where the
    dim of a level has all its ranks rather than those of one device.

    Args:
      x: ``[*lead, *shape]``, with any dims ``lead`` before the tensor's shape.
      tensor: Shape and dtype of the parameter.

    Returns:
      Shards of k elements, ``[*lead, size of level 0, ..., size of level o - 1,
      k]``, at the depth o of the optimizer state; level 0 is the innermost.
    """
    partition = self.of_tensor(tensor).partition
    lead = x.shape[: x.ndim - len(tensor.shape)]
    flat = _pad(
      x.reshape(*lead, tensor.size), partition.padded(tensor.size, tensor.unit)
    )
    # The innermost level is the leftmost dim and has the largest strides: its
    # slices are contiguous and are split further by the outer levels.
    sizes = [level.size for level in partition.inner[: partition.optimizer]]
    return flat.reshape(*lead, *sizes, -1)

  def restore(self, x: jax.Array, tensor: TensorSpec) -> jax.Array:
    """Joins stored shards to whole tensors; the inverse of `store`.

    Args:
      x: Shards, as `store` returns them.
      tensor: Shape and dtype of the parameter.

    Returns:
      ``[*lead, *shape]`` without the padding.
    """
    depth = self.of_tensor(tensor).partition.optimizer
    lead = x.shape[: x.ndim - depth - 1]
    return x.reshape(*lead, -1)[..., : tensor.size].reshape(
      *lead, *tensor.shape
    )

  @_per_tensor
  def working(self, stored: Any, tensors: Any) -> Any:
    """Gathers stored shards to the weights' depth in a step, once per step.

    Args:
      stored: Tree of shards of k elements at the depth o of the optimizer
        state, float32 ``[*lead, l_0 ... l_{o-1}, k]``, where l_j is the number
        of ranks on this device along level j of data-parallel ranks, and level
        0 the innermost.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{w-1}, k']`` for the depth w of weights, in
      the tensors' dtypes, or of `Encoded` with such payloads and scales. All
      ranks of a gathered level hold equal values.
    """

    # Weights are encoded before the first gather and stored encoded: they are
    # rounded once, and have few bits on every level and in memory.
    def to_wire(x, tensor):
      codec = self._codec(self.partition.weight_codec, tensor)
      return self._encode(x, codec) if codec else x.astype(tensor.dtype)

    on_wire = jax.tree.map(to_wire, stored, tensors)
    return self._gather(
      on_wire, self.partition.optimizer, self.partition.weights
    )

  @_per_tensor
  def materialise(self, weights: Any, tensors: Any) -> Any:
    """Gathers the weights of a step from their depth to whole tensors.

    Args:
      weights: Result of `working`, or slices of its leading dims, such as one
        layer.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, *shape]``, equal on all data-parallel ranks.
    """
    whole = self._gather(weights, self.partition.weights, 0)

    # Each stored shard was encoded separately, so that no block crosses the end
    # of a stored shard, to whatever depth it has been gathered.
    def decode(tensor, x):
      codec = self._codec(self.partition.weight_codec, tensor)
      return self._decode(
        x, tensor, codec, self.partition.shard_size(tensor.size, tensor.unit)
      )

    return jax.tree.map(decode, tensors, whole)

  @_per_tensor
  def copy(self, whole: Any, tensors: Any) -> Any:
    """Slices this device's part of the secondary copy of the whole weights.

    Args:
      whole: Tree of ``[*lead, *shape]``, as `materialise` returns it.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{s-1}, k]``, or of `Encoded` with such
      payloads and scales: shards at the depth s of the copy, where l_j is the
      number of ranks on this device along level j of data-parallel ranks.
    """
    depth = self.partition.secondary or 0

    def part(tensor, x):
      codec = self._codec(self.partition.secondary_codec, tensor)
      lead = x.shape[: x.ndim - len(tensor.shape)]
      size = self.partition.padded(tensor.size, tensor.unit)
      x = _pad(x.reshape(*lead, tensor.size), size)
      sizes = [axis.size for axis in self.inner[:depth]]
      x = x.reshape(*lead, *sizes, -1)
      # No communication: each device has the whole tensor and slices its lanes.
      for level, axis in enumerate(self.inner[:depth]):
        first = lax.axis_index(axis.name) * axis.lanes
        x = lax.dynamic_slice_in_dim(
          x, first, axis.lanes, axis=len(lead) + level
        )
      return self._encode(x, codec) if codec else x

    return jax.tree.map(part, tensors, whole)

  @_per_tensor
  def materialise_copy(self, copies: Any, tensors: Any) -> Any:
    """Gathers the secondary copy of the weights to whole tensors.

    Args:
      copies: Result of `copy`, or slices of its leading dims.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, *shape]``, equal on all data-parallel ranks.
    """
    depth = self.partition.secondary or 0
    whole = self._gather(copies, depth, 0)

    def decode(tensor, x):
      codec = self._codec(self.partition.secondary_codec, tensor)
      size = self.partition.padded(tensor.size, tensor.unit)
      return self._decode(
        x, tensor, codec, size // self.partition.degree(depth)
      )

    return jax.tree.map(decode, tensors, whole)

  def sink(self, stored: jax.Array, tensor: TensorSpec) -> jax.Array:
    """Returns zeros of the shape and varying type that `reduce` returns.

    Args:
      stored: The parameter's stored shards on this device, as for `working`.
      tensor: Shape and dtype of the parameter.

    Returns:
      float32 ``[*lead, l_0, l_1, ..., k']``, where l_j is the number of ranks
      of level j on this device, for all levels.
    """
    own = self.of_tensor(tensor)
    depth = own.partition.optimizer
    lead = stored.shape[: stored.ndim - depth - 1]
    lanes = [axis.lanes for axis in own.inner]
    # A gradient shard is as long as this many shards of the optimizer state.
    parts = own.partition.degree(depth) // own.partition.degree(
      own.partition.gradients
    )
    zeros = jnp.zeros((*lead, *lanes, parts * stored.shape[-1]), jnp.float32)
    return varying(zeros, *collectives.varying_axes(stored), *self.names)

  @_per_tensor
  def reduce(self, gradients: Any, tensors: Any) -> Any:
    """Reduce-scatters the gradients of whole tensors to the gradients' depth.

    Args:
      gradients: Tree of ``[D, *lead, *shape]``, one summand for each of the D
        data-parallel ranks on this device, D in the order of ``axes``.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, l_0, l_1, ..., k]`` float32, where l_j is the number of
      ranks of level j on this device, for *all* levels. Along levels beyond the
      gradients' depth, each rank has a separate partial sum; `finish` adds
      these sums.
    """
    num_levels = len(self.axes)
    lanes = [axis.lanes for axis in self.axes]

    def lay_out(tensor, x):
      lead = x.shape[1 : x.ndim - len(tensor.shape)]
      x = x.astype(jnp.float32).reshape(*lanes, *lead, tensor.size)
      x = _pad(x, self.partition.padded(tensor.size, tensor.unit))
      # [*lanes outermost first, *lead, n] -> [*lead, l_0, l_1, ..., n]
      innermost_first = range(num_levels - 1, -1, -1)
      return jnp.moveaxis(
        x, list(innermost_first), [len(lead) + i for i in range(num_levels)]
      )

    laid_out = jax.tree.map(lay_out, tensors, gradients)
    return self._scatter(laid_out, 0, self.partition.gradients)

  @_per_tensor
  def finish(self, gradients: Any, tensors: Any) -> Any:
    """Sums gradients over the levels beyond their depth, once per step.

    This is a reduce-scatter for each level between the depth of gradients and
    the depth o of the optimizer state, and one all-reduce over the levels
    beyond depth o, which hold replicas of the optimizer state.

    Args:
      gradients: Result of `reduce`, or its sum over microbatches.
      tensors: Tree of `TensorSpec`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{o-1}, k]`` float32, sums over all
      data-parallel ranks, with the layout of stored weights (`working`).
    """
    depth, num_levels = self.partition.optimizer, len(self.axes)
    tree = self._scatter(gradients, self.partition.gradients, depth)
    if depth == num_levels:
      return tree
    names = tuple(axis.name for axis in self.inner[depth:])

    def all_reduce(x):
      # x: [*lead, l_0, l_1, ..., k]. The last dims before k are lanes of the
      # levels over which the optimizer state is not sharded.
      beyond = tuple(range(x.ndim - 1 - (num_levels - depth), x.ndim - 1))
      return lax.psum(jnp.sum(x, axis=beyond), names)

    return jax.tree.map(all_reduce, tree)

  def _codec(self, name: str, tensor: TensorSpec) -> Codec | None:
    """Returns the codec with a name; None if the tensor is not encoded."""
    shard = self.partition.shard_size(tensor.size, tensor.unit)
    if name == "none" or not self.partition.is_coded(shard):
      return None
    return Codec(name, self.partition.block)

  def _gather(self, tree: Any, upper: int, lower: int) -> Any:
    """Gathers shards along the last dim, from depth ``upper`` to ``lower``.

    A depth is the number of innermost levels of data-parallel ranks over which
    tensors are sharded. The outermost level is gathered first. Its ranks hold
    the slices of a shard of the next inner level, which are concatenated in
    rank order.
    """
    for axis in self.inner[lower:upper][::-1]:

      # The gathered level has the last dim of lanes: [..., l, k] -> [..., size
      # * k]. This also holds for payloads and scales of `Encoded`.
      def gather(x, axis=axis):
        return collectives.all_gather(
          jnp.moveaxis(x, -2, 0), axis, dim=x.ndim - 2
        )

      tree = self._in_order(jax.tree.map(gather, tree))
    return tree

  def _scatter(self, tree: Any, lower: int, upper: int) -> Any:
    """Reduce-scatters gradients from depth ``lower`` to depth ``upper``.

    A depth is the number of innermost levels of data-parallel ranks over which
    tensors are sharded. Shapes are those that `reduce` returns. The innermost
    level is reduced first, so that only a summed shard is sent over the next
    outer level. With a codec each hop adds one rounding.
    """
    partition = self.partition
    codec = None
    if partition.gradient_codec != "none":
      codec = Codec(partition.gradient_codec, partition.block)
    inside = partition.degree(partition.optimizer) // partition.degree(lower)

    def is_coded(x):  # depends on the size of optimizer shards
      return codec is not None and partition.is_coded(x.shape[-1] // inside)

    coded = jax.tree.map(is_coded, tree)
    for hop in partition.hops(lower, upper, any(jax.tree.leaves(coded))):

      def scatter(x, with_codec, hop=hop):
        if with_codec:
          return self._scatter_coded(x, hop, codec)
        for level in hop:
          # The dim of the level's lanes keeps its position and k gets shorter:
          # before, lanes are the summands, afterwards the slices of the sum.
          dim = x.ndim - 1 - len(self.axes) + level
          x = collectives.reduce_scatter(
            jnp.moveaxis(x, dim, 0), self.inner[level], dim=x.ndim - 2
          )
          x = jnp.moveaxis(x, 0, dim)
        return x

      tree = self._in_order(jax.tree.map(scatter, tree, coded))
    return tree

  def _scatter_coded(
    self, x: jax.Array, hop: range, codec: Codec
  ) -> jax.Array:
    """Reduce-scatters a gradient over the levels ``hop`` at once, encoded.

    The shape of x is that of a result of `reduce`. The levels of data-parallel
    ranks with the indices ``hop`` form one joint axis over several mesh axes,
    whose devices and lanes (ranks on a device) are numbered outermost level
    first.
    """
    axes = [self.inner[level] for level in hop]
    dims = [x.ndim - 1 - len(self.axes) + level for level in hop]
    joint = Axis(
      axes[0].name if len(axes) == 1 else tuple(a.name for a in axes[::-1]),
      math.prod(axis.size for axis in axes),
      math.prod(axis.devices for axis in axes),
    )
    lanes = [axis.lanes for axis in axes[::-1]]
    front = list(range(len(dims)))
    x = jnp.moveaxis(x, dims[::-1], front)
    rest = x.shape[len(dims) : -1]
    # Slices nest with the innermost level first: [(devices, lanes) of each
    # level, innermost first, k] -> [devices, lanes, k], outermost level first.
    places = [n for axis in axes for n in (axis.devices, axis.lanes)]
    slices = x.reshape(joint.lanes, *rest, *places, -1)
    first = 1 + len(rest)
    order = [first + 2 * i + part for part in (0, 1) for i in front[::-1]]
    slices = slices.transpose(*range(first), *order, slices.ndim - 1)
    mine = quantize.reduce_scatter(
      slices.reshape(joint.lanes, *rest, -1), joint, codec, self.kernels
    )
    return jnp.moveaxis(mine.reshape(*lanes, *rest, -1), front, dims[::-1])

  def _in_order(self, tree: Any) -> Any:
    """Orders each leaf after all leaves if XLA:CPU needs an order."""
    return order_after(tree, tree, self.ordered)

  def _encode(self, x: jax.Array, codec: Codec) -> Encoded:
    """Encodes the last dim, which is one shard, in blocks of the codec."""
    return api.encode(x, codec, implementation=self.kernels)

  def _decode(
    self, x: Any, tensor: TensorSpec, codec: Codec | None, k: int
  ) -> jax.Array:
    """Joins, and with a codec decodes, gathered shards to whole tensors.

    Args:
      x: ``[*lead, padded n]``; with a codec, `Encoded` with the payloads and
        scales of all shards concatenated in the last dims.
      tensor: Shape and dtype of the parameter.
      codec: Codec of x, or None.
      k: Number of elements of each shard that was encoded.

    Returns:
      ``[*lead, *shape]``.
    """
    if codec:
      # The last block of each shard is padded, so shards are separated and
      # decoded one by one: [*lead, shards, bytes] -> [*lead, shards, k].
      lead = x.scales.shape[:-1]
      shards = Encoded(
        x.payload.reshape(*lead, -1, codec.payload_bytes(k)),
        x.scales.reshape(*lead, -1, codec.num_scales(k)),
      )
      x = api.decode(shards, k, codec, implementation=self.kernels)
      x = x.astype(tensor.dtype).reshape(*lead, -1)
    lead = x.shape[:-1]
    return x[..., : tensor.size].reshape(*lead, *tensor.shape)


def _pad(x: jax.Array, size: int) -> jax.Array:
  """Pads the last dim with zeros at its end to ``size`` elements."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
