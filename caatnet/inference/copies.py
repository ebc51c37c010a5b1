"""Copies of contiguous pages between a decoder's cache and host memory.

A run consists of adjacent pages, the same ones in every layer. Its length is
part of a program's shape, so runs should have few different lengths, as those
of a buddy allocator do. A run is copied in pieces of k layers. All runs of a
length have the same k, and the first layer is an argument, so there is one
program per length. A piece of the cache is first copied on the device, since
the next step, which is dispatched after that copy, donates the cache. The copy
is transferred to the host while later steps are computed.

Recurrent states, which are blocks of a fixed size, are copied in the same way
(`HostStates`); a run of states belongs to one sequence or to neighbouring
slots.

Shape legend: L = layers, N = pages of a layer, n = pages of a run, k = layers
of a piece.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.inference.decoder import Decoder, replica_spec
from caatnet.models.paged import Cache, CacheShape
from caatnet.program import Program

# Maximum bytes per device of one part of a copy, and of its staging buffer.
# Parts alternate with steps: a part delays a step by 0.1 ms at 1 TB/s, and
# smaller parts would take more steps (log/2026-11-27-copies-in-parts.md).
PART_BYTES = 64 << 20


class PageCopy(NamedTuple):
  """Piece of a copy: some layers of contiguous pages, and their host pages.

  Attributes:
    layer: Number of the first layer.
    num_layers: Number of layers, k.
    first: Number of the first of the pages on the device.
    pages: Host pages of the copy, one for each of the n pages on the device.
  """

  layer: int
  num_layers: int
  first: int
  pages: Sequence[int]


class HostPages:
  """Pages in host memory, and the copies from and to the device.

  Attributes:
    num_pages: Number of host pages.
    part_bytes: Maximum bytes of a part of a copy on one device. Only a single
      layer of a long range of pages may be larger.
    arrays: One numpy array for each array of the cache, of the same shape
      except for the number of pages: ``[..., L, num_pages, ...]``.
    calls: Number of copy programs that have been dispatched.
  """

  _of_states = False

  def __init__(self, decoder: Decoder, num_pages: int) -> None:
    """Allocates the memory.

    Args:
      decoder: Decoder whose pages are copied.
      num_pages: Number of host pages, each over all layers.
    """
    self._decoder = decoder
    self.num_pages, self.calls = num_pages, 0
    self.part_bytes = PART_BYTES
    shape = decoder.cache_shape
    self._dim = _block_dim(decoder.program, shape, self._of_states)
    self._read, self._write = make_copy_functions(
      decoder.program, shape, self._of_states
    )
    arrays = _arrays(decoder.cache, self._of_states)
    self._shardings = [x.sharding for x in arrays]
    self.arrays = [
      np.zeros(
        _split(x.shape, self._dim, shape.num_layers, num_pages), x.dtype
      )
      for x in arrays
    ]
    # Bytes of one page or state in one layer, on one device.
    num = shape.num_states if self._of_states else shape.num_pages
    self._block_bytes = sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in arrays
    ) // max(1, shape.num_layers * num)

  def parts(
    self, runs: Iterable[tuple[int, Sequence[int]]]
  ) -> list[list[PageCopy]]:
    """Divides a copy into parts to be moved one after another.

    Args:
      runs: First device page of each contiguous range, and its n host pages.

    Returns:
      The pieces of each part, each some layers of a range.
    """
    parts: list[list[PageCopy]] = []
    size, num_layers = math.inf, self._decoder.cache_shape.num_layers
    for first, pages in runs:
      layer_bytes = len(pages) * self._block_bytes
      # A divisor of the number of layers, so that one program copies all pieces
      # of a run.
      most = max(1, self.part_bytes // max(1, layer_bytes))
      num = max(
        k for k in range(1, num_layers + 1) if k <= most and not num_layers % k
      )
      for layer in range(0, num_layers, num):
        size += num * layer_bytes
        if size > self.part_bytes:
          parts.append([])
          size = num * layer_bytes
        parts[-1].append(PageCopy(layer, num, first, pages))
    return parts

  def read(self, piece: PageCopy) -> list[jax.Array]:
    """Starts copying a piece of the cache; `keep` stores it in host pages.

    Returns:
      The piece's arrays ``[..., k, n, ...]``, in transfer to the host.
    """
    self.calls += 1
    found = self._read(
      self._decoder.cache, np.int32(piece.layer), np.int32(piece.first),
      piece.num_layers, len(piece.pages),
    )
    for x in found:
      x.copy_to_host_async()
    return found

  def keep(self, arrays: Sequence[jax.Array], piece: PageCopy) -> None:
    """Waits for the arrays of a piece that was read, and stores them."""
    for kept, new in zip(self.arrays, arrays, strict=True):
      kept[self._at(piece)] = np.asarray(new)

  def stage(self, piece: PageCopy) -> list[jax.Array]:
    """Starts copying a piece from host pages to the device, for `write`.

    The host pages must not change before the transfer has ended.
    """
    return [
      jax.device_put(kept[self._at(piece)], sharding)
      for kept, sharding in zip(self.arrays, self._shardings, strict=True)
    ]

  def write(self, arrays: Sequence[Any], piece: PageCopy) -> None:
    """Overwrites a piece of the cache, before the next step.

    Args:
      arrays: Result of `stage` or `read`.
      piece: The layers, and the pages on the device.
    """
    self.calls += 1
    decoder = self._decoder
    decoder.cache = self._write(
      decoder.cache, arrays, np.int32(piece.layer), np.int32(piece.first)
    )

  def spoil(self, first: int, count: int) -> None:
    """Overwrites pages of the cache with NaN, so that tests detect reads.

    Integer codes become 0; the scales that they are multiplied by become NaN.

    Args:
      first: Number of the first page.
      count: Number of pages.
    """
    layers = self._decoder.cache_shape.num_layers
    arrays = [
      np.full(
        _split(x.shape, self._dim, layers, count),
        np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype,
      )
      for x in _arrays(self._decoder.cache, self._of_states)
    ]
    self.write(arrays, PageCopy(0, layers, first, range(count)))

  def _at(self, piece: PageCopy) -> Any:
    """Returns the index tuple that selects a piece of a host array."""
    layers = slice(piece.layer, piece.layer + piece.num_layers)
    return (*[slice(None)] * self._dim, layers, list(piece.pages))


class HostStates(HostPages):
  """Recurrent states in host memory, with the methods of `HostPages`.

  Block n of the cache is the state of the sequence in slot n. A sequence that
  is preempted between two steps resumes from a copy of its block. A sequence
  whose last token is undone resumes from a copy made before that token's step.
  """

  _of_states = True


def make_copy_functions(
  program: Program, cache_shape: CacheShape, of_states: bool = False
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
  """Returns jitted functions that read and write n contiguous pages; memoised.

  Args:
    program: The model on a mesh.
    cache_shape: Cache of one rank.
    of_states: Whether states are copied instead of pages.

  Returns:
    ``(cache, layer, first, k, n) -> piece``, with static k and n, and ``(cache,
    piece, layer, first) -> cache``, which donates the cache. A piece has an
    array ``[..., k, n, ...]`` for each array ``[..., L N, ...]`` of the cache.
  """
  return _make_copy_functions(program, cache_shape, of_states)


@functools.cache
def _make_copy_functions(
  program: Program, cache_shape: CacheShape, of_states: bool
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
  """Implements `make_copy_functions`."""
  layout = program.layout
  spec = P(*replica_spec(program), layout.tensor.name)
  dim = _block_dim(program, cache_shape, of_states)
  num = cache_shape.num_states if of_states else cache_shape.num_pages

  @functools.partial(jax.jit, static_argnums=(3, 4))
  def read(cache, layer, first, num_layers, count):
    def slices(arrays, layer, first):
      found = []
      for x in arrays:
        x = x.reshape(_split(x.shape, dim, cache_shape.num_layers, num))
        starts, sizes = [0] * x.ndim, list(x.shape)
        starts[dim : dim + 2] = layer, first
        sizes[dim : dim + 2] = num_layers, count
        found.append(lax.dynamic_slice(x, starts, sizes))
      return found

    return jax.shard_map(
      slices, mesh=layout.mesh, in_specs=(spec, P(), P()), out_specs=spec
    )(_arrays(cache, of_states), layer, first)

  @functools.partial(jax.jit, donate_argnums=0)
  def write(cache, piece, layer, first):
    def updates(arrays, piece, layer, first):
      # Layer by layer, without a reshape to a dim of layers: XLA:CPU would copy
      # a cache that has dims of size 1, such as a single lane.
      def of_layer(i, arrays):
        return [
          lax.dynamic_update_slice_in_dim(
            x, lax.dynamic_index_in_dim(new, i, dim, keepdims=False),
            (layer + i) * num + first, dim,
          )
          for x, new in zip(arrays, piece, strict=True)
        ]

      return lax.fori_loop(0, piece[0].shape[dim], of_layer, list(arrays))

    arrays, tree = jax.tree.flatten(cache.pages)
    if of_states:
      arrays = list(cache.states)
    arrays = jax.shard_map(
      updates, mesh=layout.mesh, in_specs=(spec, spec, P(), P()),
      out_specs=spec,
    )(arrays, piece, layer, first)
    if of_states:
      return dataclasses.replace(cache, states=tuple(arrays))
    return dataclasses.replace(cache, pages=tree.unflatten(arrays))

  return read, write


def _arrays(cache: Cache, of_states: bool) -> list[jax.Array]:
  """Returns a cache's arrays of states if `of_states`, else those of pages."""
  return list(cache.states) if of_states else jax.tree.leaves(cache.pages)


def _block_dim(program: Program, shape: CacheShape, of_states: bool) -> int:
  """Returns which dim of a cache's arrays is that of its pages or states."""
  lead = len(program.layout.data) + 1
  return lead + (not of_states and shape.order != "interleaved")


def _split(
  dims: Sequence[int], dim: int, num_layers: int, count: int
) -> tuple[int, ...]:
  """Splits the dim ``dim`` of a shape into layers and pages (or states)."""
  return (*dims[:dim], num_layers, count, *dims[dim + 1 :])
