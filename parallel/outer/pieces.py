"""Partition of an exchanged tree into pieces, sent in different steps."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.outer.base import Params
from parallel.outer.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Partition of every leaf of a tree into pieces of whole codec blocks.

  The index of a piece is known only at run time, so all pieces have one static
  size. The size is a multiple of the codec's block, so that a leaf is encoded
  in the same blocks whether it is sent in pieces or at once.

  Attributes:
    exchange: Mean over the workers; defines the block size.
    count: Number of pieces.
  """

  exchange: Exchange
  count: int

  def take(self, tree: Params, number: Any, dim: int) -> Params:
    """Slices a piece ``[..., m]`` of whole codec blocks out of each leaf.

    Args:
      tree: Arrays at the paths of parameters.
      number: Index of the piece, from 0; may be traced.
      dim: Number of leading worker dims, 0 or 1.

    Returns:
      Tree of ``[..., m]``. The last piece is padded with zeros.
    """

    def take(path, x):
      rows, size = self._rows(path, x, dim)
      return lax.dynamic_slice_in_dim(rows, number * size, size, -1)

    return jax.tree.map_with_path(take, tree)

  def put(self, tree: Params, part: Params, number: Any, dim: int) -> Params:
    """Writes the piece ``part`` back into each leaf of ``tree``.

    It is the inverse of `take`, whose other arguments it has.
    """

    def put(path, x, y):
      rows, size = self._rows(path, x, dim)
      rows = lax.dynamic_update_slice_in_dim(rows, y, number * size, -1)
      lead = rows.ndim - 1  # worker and block dims
      # Drop the padding: [..., count * size] -> x.shape.
      return rows[..., : math.prod(x.shape[lead:])].reshape(x.shape)

    return jax.tree.map_with_path(put, tree, part)

  def _rows(
    self, path: Any, x: jax.Array, dim: int
  ) -> tuple[jax.Array, int]:
    """Flattens the dims of a leaf that codec blocks cross, and pads them.

    Args:
      path: Path of the leaf among the parameters.
      x: The leaf.
      dim: Number of leading worker dims, 0 or 1.

    Returns:
      ``[..., pieces * size]``, and the size of a piece in elements.
    """
    lead = dim + self.exchange.num_block_dims(path)
    rows = x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))
    block = self.exchange.wire.block
    # Elements per piece, rounded up to whole blocks.
    size = -(-rows.shape[-1] // (self.count * block)) * block
    padding = self.count * size - rows.shape[-1]
    return jnp.pad(rows, [(0, 0)] * lead + [(0, padding)]), size
