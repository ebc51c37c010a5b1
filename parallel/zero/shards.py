"""Moves tensors between the depths of a partition: gather, scatter, store.

A tensor of a layer or of a rank of another axis is cut along its flattened
elements, padded with zeros. Its shard at depth d lies on this device as

    [*lead, lanes of level 0, ..., lanes of level d - 1, elements]

with level 0 the innermost: shards nest, so the shard at depth d + 1 of a rank
is a slice of its shard at depth d. Gathers go from the outermost level
inwards, scatters from the innermost outwards, one collective per level: what
crosses the outer levels is a shard, not the tensor (MiCS, arXiv 2205.00119).

All trees here have one leaf per tensor, and a tree of `Tensor` beside them.

Shape legend: lead = dims that are not partitioned (layers, tensor ranks); l_j =
lanes of level j, innermost first; n = elements of a tensor; k = of a shard.
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
    shape: The dims that are partitioned, as one.
    dtype: Of the gathered parameter, and on the wire without a codec.
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
    partition: Which level has which part.
    axes: The levels' axes, outermost first, as the partition has them.
    ordered: Order collectives of different levels by data flow, which XLA:CPU
      needs (`collectives.after`).
    kernels: Of the codecs, see `parallel.quantize.Wire.implementation`.
  """

  partition: Partition
  axes: tuple[Axis, ...]
  ordered: bool = False
  kernels: Implementation = "reference"

  @property
  def inner(self) -> tuple[Axis, ...]:
    """Innermost first."""
    return self.axes[::-1]

  @property
  def names(self) -> tuple[str, ...]:
    """The mesh axes, outermost first."""
    return tuple(axis.name for axis in self.axes)

  @property
  def num_lanes(self) -> int:
    """Data-parallel ranks of this device."""
    return math.prod(axis.lanes for axis in self.axes)

  def store(self, x: jax.Array, tensor: Tensor) -> jax.Array:
    """``[*lead, *shape] -> [*lead, sizes of inner levels, k]``, logical."""
    partition = self.partition
    lead = x.shape[: x.ndim - len(tensor.shape)]
    flat = _pad(x.reshape(*lead, tensor.size), partition.padded(tensor.size))
    sizes = [level.size for level in partition.inner[: partition.optimizer]]
    return flat.reshape(*lead, *sizes, -1)

  def restore(self, x: jax.Array, tensor: Tensor) -> jax.Array:
    """The inverse of ``store``."""
    lead = x.shape[: x.ndim - self.partition.optimizer - 1]
    return x.reshape(*lead, -1)[..., : tensor.size].reshape(
      *lead, *tensor.shape
    )

  def working(self, stored: Any, tensors: Any) -> Any:
    """Stored shards -> weights for a step, at depth ``weights``.

    Args:
      stored: Tree of ``[*lead, l_0 ... l_{o-1}, k]`` float32.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, l_0 ... l_{w-1}, k']`` in the tensors' dtypes, or of
      `Encoded` with such payloads and scales; the same on all ranks of a level
      that was gathered.
    """
    codec = self._codec(self.partition.weight_codec)

    def to_wire(x, tensor):
      return self._encode(x, codec) if codec else x.astype(tensor.dtype)

    on_wire = jax.tree.map(to_wire, stored, tensors)
    return self._gather(
      on_wire, self.partition.optimizer, self.partition.weights
    )

  def materialise(self, weights: Any, tensors: Any) -> Any:
    """What ``working`` gave (or a slice of its lead) -> whole tensors.

    Returns:
      Tree of ``[*lead, *shape]``, equal on all data-parallel ranks.
    """
    whole = self._gather(weights, self.partition.weights, 0)
    codec = self._codec(self.partition.weight_codec)

    def decode(tensor, x):
      return self._decode(x, tensor, codec, self.partition.shard(tensor.size))

    return jax.tree.map(decode, tensors, whole)

  def copy(self, whole: Any, tensors: Any) -> Any:
    """This device's part of the secondary copy of whole tensors.

    Returns:
      Tree of ``[*lead, l_0 ... l_{s-1}, k]`` or of `Encoded` ones.
    """
    depth = self.partition.secondary
    codec = self._codec(self.partition.secondary_codec)

    def part(tensor, x):
      lead = x.shape[: x.ndim - len(tensor.shape)]
      size = self.partition.padded(tensor.size)
      x = _pad(x.reshape(*lead, tensor.size), size)
      sizes = [axis.size for axis in self.inner[:depth]]
      x = x.reshape(*lead, *sizes, -1)
      for level, axis in enumerate(self.inner[:depth]):
        first = lax.axis_index(axis.name) * axis.lanes
        x = lax.dynamic_slice_in_dim(
          x, first, axis.lanes, axis=len(lead) + level
        )
      return self._encode(x, codec) if codec else x

    return jax.tree.map(part, tensors, whole)

  def materialise_copy(self, copies: Any, tensors: Any) -> Any:
    """What ``copy`` gave -> whole tensors; as ``materialise``."""
    depth = self.partition.secondary
    codec = self._codec(self.partition.secondary_codec)
    whole = self._gather(copies, depth, 0)

    def decode(tensor, x):
      k = self.partition.padded(tensor.size) // self.partition.degree(depth)
      return self._decode(x, tensor, codec, k)

    return jax.tree.map(decode, tensors, whole)

  def sink(self, stored: jax.Array) -> jax.Array:
    """Zeros of the shape that ``reduce`` gives, for a stored shard."""
    depth = self.partition.optimizer
    lead = stored.shape[: stored.ndim - depth - 1]
    lanes = [axis.lanes for axis in self.inner]
    parts = self.partition.degree(depth) // self.partition.degree(
      self.partition.gradients
    )
    zeros = jnp.zeros((*lead, *lanes, parts * stored.shape[-1]), jnp.float32)
    return varying(zeros, *collectives.varying_axes(stored), *self.names)

  def reduce(self, gradients: Any, tensors: Any) -> Any:
    """Sums gradients of whole tensors over the innermost g levels.

    Args:
      gradients: Tree of ``[D, *lead, *shape]``, one summand per lane of this
        device, D in the order of ``axes``.
      tensors: Tree of `Tensor`.

    Returns:
      Tree of ``[*lead, l_0, l_1, ..., k]`` float32 with the lanes of *all*
      levels: of those beyond g, each rank's own sum.
    """
    num_levels = len(self.axes)
    lanes = [axis.lanes for axis in self.axes]

    def lay_out(tensor, x):
      lead = x.shape[1 : x.ndim - len(tensor.shape)]
      x = x.astype(jnp.float32).reshape(*lanes, *lead, tensor.size)
      x = _pad(x, self.partition.padded(tensor.size))
      innermost_first = range(num_levels - 1, -1, -1)
      return jnp.moveaxis(
        x, list(innermost_first), [len(lead) + i for i in range(num_levels)]
      )

    laid_out = jax.tree.map(lay_out, tensors, gradients)
    return self._scatter(laid_out, 0, self.partition.gradients)

  def finish(self, gradients: Any) -> Any:
    """Sums what ``reduce`` gave over the other levels, once per step.

    Returns:
      Tree of ``[*lead, l_0 ... l_{o-1}, k]``: the sums, as weights are stored.
    """
    depth, num_levels = self.partition.optimizer, len(self.axes)
    tree = self._scatter(gradients, self.partition.gradients, depth)
    if depth == num_levels:
      return tree
    names = tuple(axis.name for axis in self.inner[depth:])

    def all_reduce(x):
      beyond = tuple(range(x.ndim - 1 - (num_levels - depth), x.ndim - 1))
      return lax.psum(jnp.sum(x, axis=beyond), names)

    return jax.tree.map(all_reduce, tree)

  def _codec(self, name: str) -> Codec | None:
    return None if name == "none" else Codec(name, self.partition.block)

  def _gather(self, tree: Any, upper: int, lower: int) -> Any:
    """Along the last dim, from depth ``upper`` to ``lower``."""
    for axis in self.inner[lower:upper][::-1]:

      def gather(x, axis=axis):  # [..., l, k] -> [..., size * k]
        return collectives.all_gather(
          jnp.moveaxis(x, -2, 0), axis, dim=x.ndim - 2
        )

      tree = self._in_order(jax.tree.map(gather, tree))
    return tree

  def _scatter(self, tree: Any, lower: int, upper: int) -> Any:
    """``[*lead, l_0, l_1, ..., k]``, reduce-scatter from depth to depth."""
    codec = self._codec(self.partition.gradient_codec)
    for level, axis in enumerate(self.inner[lower:upper], lower):

      def scatter(x, level=level, axis=axis):
        dim = x.ndim - 1 - len(self.axes) + level
        x = jnp.moveaxis(x, dim, 0)
        if codec:
          x = quantize.reduce_scatter(x, axis, codec, self.kernels)
        else:
          x = collectives.reduce_scatter(x, axis, dim=x.ndim - 2)
        return jnp.moveaxis(x, 0, dim)

      tree = self._in_order(jax.tree.map(scatter, tree))
    return tree

  def _in_order(self, tree: Any) -> Any:
    return after(tree, tree, self.ordered)

  def _encode(self, x: jax.Array, codec: Codec) -> Encoded:
    return api.encode(x, codec, implementation=self.kernels)

  def _decode(
    self, x: Any, tensor: Tensor, codec: Codec | None, k: int
  ) -> jax.Array:
    """``[*lead, n padded]`` or encoded shards of k -> ``[*lead, *shape]``."""
    if codec:
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
  """Zeros after the last dim's elements."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
