"""Moves tensors between the depths of a partition: gather, scatter, store.

A tensor is partitioned along its flattened elements, padded with zeros to equal
shards. Each layer, and each lane of another axis, is partitioned by itself.
The shard at depth d lies on this device as

    [*lead, lanes of level 0, ..., lanes of level d - 1, elements]

with level 0 the innermost. Shards nest: a rank's shard at depth d + 1 is a
slice of its shard at depth d. Gathers go from the outermost level inwards,
scatters from the innermost level outwards, with one collective per level, or
per hop of coded gradients (`Partition.hops`). So only a shard crosses the outer
levels, which have the slowest links, and never the whole tensor (MiCS, arXiv
2205.00119).

Trees here have one leaf per tensor; a tree of `Tensor` of the same structure
goes with them.

Shape legend: lead = dims that are not partitioned (layers, tensor ranks); l_j =
lanes of level j, innermost first; w, g, o, s = depths of weights, gradients,
optimizer and secondary copy; D = data-parallel ranks of this device; n =
elements of a tensor; k = elements of a shard.
"""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel import collectives, quantize
from parallel.axes import Axis
from parallel.collectives import after, varying
from parallel.kernels.codec import api
from parallel.kernels.codec.reference import Codec, Encoded
from parallel.kernels.selection import Implementation
from parallel.zero.partition import Partition


@dataclasses.dataclass(frozen=True)
class Tensor:
  """What a partition must know of a parameter.

  Attributes:
    shape: The dims that are partitioned; shards are cut from them flattened.
    dtype: Dtype of the gathered parameter, and of what is sent without a codec.
  """

  shape: tuple[int, ...]
  dtype: str

  @property
  def size(self) -> int:
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Shards:
  """A partition on a mesh.

  Attributes:
    partition: Over which levels each part of the state is sharded.
    axes: One axis per level, outermost first, in the partition's order.
    ordered: Whether to order collectives of different levels by data flow,
      which XLA:CPU needs (`collectives.after`).
    kernels: Implementations of the codecs, in order of preference; all send
      the same bits.
  """

  partition: Partition
  axes: tuple[Axis, ...]
  ordered: bool = False
  kernels: Implementation = "reference"

  @property
  def inner(self) -> tuple[Axis, ...]:
    """The axes innermost first: ``inner[:depth]`` shard at that depth."""
    return self.axes[::-1]

  @property
  def names(self) -> tuple[str, ...]:
    """The names of the mesh axes, outermost first."""
    return tuple(axis.name for axis in self.axes)

  @property
  def num_lanes(self) -> int:
    """The number of data-parallel ranks of this device, D."""
    return math.prod(axis.lanes for axis in self.axes)

  def store(self, x: jax.Array, tensor: Tensor) -> jax.Array:
    """Lays a whole tensor out in the shards that are stored between steps.

    It works on arrays of logical shape, outside ``jax.shard_map``, where a
    level's dim has all its ranks and not a device's lanes.

    Args:
      x: ``[*lead, *shape]``.
      tensor: Shape and dtype of the parameter.

    Returns:
      ``[*lead, size of level 0, ..., size of level o - 1, k]``.
    """
    partition = self.partition
    lead = x.shape[: x.ndim - len(tensor.shape)]
    flat = _pad(x.reshape(*lead, tensor.size), partition.padded(tensor.size))
    # The innermost level is the leftmost dim and so has the largest strides:
    # its slices are contiguous, and each is cut again by the levels outside.
    sizes = [level.size for level in partition.inner[: partition.optimizer]]
    return flat.reshape(*lead, *sizes, -1)

  def restore(self, x: jax.Array, tensor: Tensor) -> jax.Array:
    """Puts stored shards together again; the inverse of `store`.

    Args:
      x: ``[*lead, size of level 0, ..., size of level o - 1, k]``.
      tensor: Shape and dtype of the parameter.

    Returns:
      ``[*lead, *shape]`` without the padding.
    """
    lead = x.shape[: x.ndim - self.partition.optimizer - 1]
    return x.reshape(*lead, -1)[..., : tensor.size].reshape(
      *lead, *tensor.shape
    )

  def working(self, stored: Any, tensors: Any) -> Any:
    """Gathers stored shards to the weights of a step, once per step.

    Args:
      stored: Tree of ``[*lead, l_0 ... l_{o-1}, k]`` float32.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{w-1}, k']`` in the tensors' dtypes, or of
      `Encoded` with such payloads and scales. All ranks of a level that was
      gathered hold the same.
    """

    # Weights are encoded before the first gather and stay encoded at depth w:
    # one rounding in all, and few bits on every level and in memory.
    def to_wire(x, tensor):
      codec = self._codec(self.partition.weight_codec, tensor)
      return self._encode(x, codec) if codec else x.astype(tensor.dtype)

    on_wire = jax.tree.map(to_wire, stored, tensors)
    return self._gather(
      on_wire, self.partition.optimizer, self.partition.weights
    )

  def materialise(self, weights: Any, tensors: Any) -> Any:
    """Gathers the weights of a step to whole tensors.

    Args:
      weights: What `working` returned, or slices of its leading dims, such as
        one layer.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, *shape]``, equal on all data-parallel ranks.
    """
    whole = self._gather(weights, self.partition.weights, 0)

    # What was encoded is the stored shard, so blocks of codes end with it,
    # whatever depths it has been gathered through since.
    def decode(tensor, x):
      codec = self._codec(self.partition.weight_codec, tensor)
      return self._decode(x, tensor, codec, self.partition.shard(tensor.size))

    return jax.tree.map(decode, tensors, whole)

  def copy(self, whole: Any, tensors: Any) -> Any:
    """Cuts this device's part of the secondary copy out of whole tensors.

    Args:
      whole: Tree of ``[*lead, *shape]``, as `materialise` returns it.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{s-1}, k]``, or of `Encoded` with such
      payloads and scales.
    """
    depth = self.partition.secondary

    def part(tensor, x):
      codec = self._codec(self.partition.secondary_codec, tensor)
      lead = x.shape[: x.ndim - len(tensor.shape)]
      size = self.partition.padded(tensor.size)
      x = _pad(x.reshape(*lead, tensor.size), size)
      sizes = [axis.size for axis in self.inner[:depth]]
      x = x.reshape(*lead, *sizes, -1)
      # Nothing is sent: each device has the whole tensor and takes its lanes.
      for level, axis in enumerate(self.inner[:depth]):
        first = lax.axis_index(axis.name) * axis.lanes
        x = lax.dynamic_slice_in_dim(
          x, first, axis.lanes, axis=len(lead) + level
        )
      return self._encode(x, codec) if codec else x

    return jax.tree.map(part, tensors, whole)

  def materialise_copy(self, copies: Any, tensors: Any) -> Any:
    """Gathers the secondary copy to whole tensors.

    Args:
      copies: What `copy` returned, or slices of its leading dims.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, *shape]``, equal on all data-parallel ranks.
    """
    depth = self.partition.secondary
    whole = self._gather(copies, depth, 0)

    def decode(tensor, x):
      codec = self._codec(self.partition.secondary_codec, tensor)
      k = self.partition.padded(tensor.size) // self.partition.degree(depth)
      return self._decode(x, tensor, codec, k)

    return jax.tree.map(decode, tensors, whole)

  def sink(self, stored: jax.Array) -> jax.Array:
    """Returns zeros of the shape and varying type that `reduce` returns.

    Args:
      stored: ``[*lead, l_0 ... l_{o-1}, k]``, the parameter's stored shard.
    """
    depth = self.partition.optimizer
    lead = stored.shape[: stored.ndim - depth - 1]
    lanes = [axis.lanes for axis in self.inner]
    # A gradient at depth g is as long as this many shards at depth o >= g.
    parts = self.partition.degree(depth) // self.partition.degree(
      self.partition.gradients
    )
    zeros = jnp.zeros((*lead, *lanes, parts * stored.shape[-1]), jnp.float32)
    return varying(zeros, *collectives.varying_axes(stored), *self.names)

  def reduce(self, gradients: Any, tensors: Any) -> Any:
    """Reduce-scatters gradients of whole tensors over the g inner levels.

    Args:
      gradients: Tree of ``[D, *lead, *shape]``, one summand per lane of this
        device, D in the order of ``axes``.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, l_0, l_1, ..., k]`` float32, with the lanes of *all*
      levels. Along a level beyond g, each rank has a sum of its own, which
      `finish` adds up.
    """
    num_levels = len(self.axes)
    lanes = [axis.lanes for axis in self.axes]

    def lay_out(tensor, x):
      lead = x.shape[1 : x.ndim - len(tensor.shape)]
      x = x.astype(jnp.float32).reshape(*lanes, *lead, tensor.size)
      x = _pad(x, self.partition.padded(tensor.size))
      # [*lanes outermost first, *lead, n] -> [*lead, l_0, l_1, ..., n]
      innermost_first = range(num_levels - 1, -1, -1)
      return jnp.moveaxis(
        x, list(innermost_first), [len(lead) + i for i in range(num_levels)]
      )

    laid_out = jax.tree.map(lay_out, tensors, gradients)
    return self._scatter(laid_out, 0, self.partition.gradients)

  def finish(self, gradients: Any) -> Any:
    """Sums reduced gradients over the other levels, once per step.

    Levels between g and o take a reduce-scatter each. The levels beyond o hold
    replicas of the optimizer state and take one all-reduce together.

    Args:
      gradients: What `reduce` returned, or sums of it over microbatches.

    Returns:
      Tree of ``[*lead, l_0 ... l_{o-1}, k]`` float32, sums over all
      data-parallel ranks, with the layout of stored weights.
    """
    depth, num_levels = self.partition.optimizer, len(self.axes)
    tree = self._scatter(gradients, self.partition.gradients, depth)
    if depth == num_levels:
      return tree
    names = tuple(axis.name for axis in self.inner[depth:])

    def all_reduce(x):
      # x: [*lead, l_0, l_1, ..., k]; the lanes of the levels beyond o are the
      # last dims before k.
      beyond = tuple(range(x.ndim - 1 - (num_levels - depth), x.ndim - 1))
      return lax.psum(jnp.sum(x, axis=beyond), names)

    return jax.tree.map(all_reduce, tree)

  def _codec(self, name: str, tensor: Tensor) -> Codec | None:
    """Returns the codec of a name for a tensor; None if it is not coded."""
    shard = self.partition.shard(tensor.size)
    if name == "none" or not self.partition.is_coded(shard):
      return None
    return Codec(name, self.partition.block)

  def _gather(self, tree: Any, upper: int, lower: int) -> Any:
    """Gathers along the last dim, from depth ``upper`` to ``lower``.

    Outermost level first: its ranks hold the slices of one shard of the next
    level inwards, so the slices join to that shard in rank order.
    """
    for axis in self.inner[lower:upper][::-1]:

      # The level that is gathered has the last dim of lanes: [..., l, k] ->
      # [..., size * k]. The same holds for payloads and scales of `Encoded`.
      def gather(x, axis=axis):
        return collectives.all_gather(
          jnp.moveaxis(x, -2, 0), axis, dim=x.ndim - 2
        )

      tree = self._in_order(jax.tree.map(gather, tree))
    return tree

  def _scatter(self, tree: Any, lower: int, upper: int) -> Any:
    """Reduce-scatters ``[*lead, l_0, l_1, ..., k]`` between two depths.

    Innermost level first, so that what goes out to the next level is a shard
    that is already summed. Each hop adds one rounding if there is a codec.
    """
    partition = self.partition
    codec = None
    if partition.gradient_codec != "none":
      codec = Codec(partition.gradient_codec, partition.block)
    inside = partition.degree(partition.optimizer) // partition.degree(lower)

    def is_coded(x):  # by its shard at the optimizer's depth
      return codec is not None and partition.is_coded(x.shape[-1] // inside)

    coded = jax.tree.map(is_coded, tree)
    for hop in partition.hops(lower, upper, any(jax.tree.leaves(coded))):

      def scatter(x, with_codec, hop=hop):
        if with_codec:
          return self._scatter_coded(x, hop, codec)
        for level in hop:
          # The dim of the level's lanes stays where it is and k gets shorter:
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
    """Reduce-scatters encoded ``[*lead, l_0, l_1, ..., k]`` in one hop.

    The ranks of the hop's levels are those of one axis over several mesh axes,
    whose devices and lanes are numbered outermost level first.
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
    # Slices nest with the innermost level outside: [(devices, lanes) of each
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
    """Lets each leaf wait for all leaves, where XLA:CPU needs an order."""
    return after(tree, tree, self.ordered)

  def _encode(self, x: jax.Array, codec: Codec) -> Encoded:
    """Encodes along the last dim, in blocks that end with a shard."""
    return api.encode(x, codec, implementation=self.kernels)

  def _decode(
    self, x: Any, tensor: Tensor, codec: Codec | None, k: int
  ) -> jax.Array:
    """Makes whole tensors of gathered elements.

    Args:
      x: ``[*lead, padded n]``; with a codec, `Encoded` with the payloads and
        scales of all shards side by side in the last dims.
      tensor: Shape and dtype of the parameter.
      codec: The codec that x is encoded with, or None.
      k: Elements of a shard when it was encoded.

    Returns:
      ``[*lead, *shape]``.
    """
    if codec:
      # A shard fills up its last block, so shards are told apart and decoded
      # one by one: [*lead, shards, bytes] -> [*lead, shards, k].
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
