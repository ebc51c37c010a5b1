"""Copies of page runs between a decoder's cache and host memory.

Recurrent states, which are blocks of a fixed size, are copied in the same way
(`HostStates`); a run of states belongs to one sequence or to neighbouring
slots.

A run consists of adjacent pages, the same ones in every layer. Its length is
part of a program's shape, so lengths should come in few sizes, as those of a
buddy allocator do. Reading makes a copy of the run on the device before the
next step is dispatched, since that step donates the cache. The run is
transferred to the host while later steps are computed.

Shape legend: L = layers, N = pages of a layer, n = pages of a run.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.inference.decoder import Decoder, replica_spec
from caatnet.models.paged import Cache, CacheShape
from caatnet.program import Program


class HostPages:
  """Pages in host memory, and the copies from and to the device.

  Attributes:
    num_pages: Number of host pages.
    arrays: One numpy array for each array of the cache, of the same shape
      except for the number of pages: ``[..., L, num_pages, ...]``.
    calls: Number of started copy programs.
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
    shape = decoder.cache_shape
    self._dim = _dim(decoder.program, shape, self._of_states)
    self._read, self._write = make_copies(
      decoder.program, shape, self._of_states
    )
    arrays = _arrays(decoder.cache, self._of_states)
    self._shardings = [x.sharding for x in arrays]
    self.arrays = [
      np.zeros(_split(x.shape, self._dim, shape, num_pages), x.dtype)
      for x in arrays
    ]

  def read(self, first: int, count: int) -> list[jax.Array]:
    """Starts copying a run of the cache; `keep` stores it in host pages.

    Args:
      first: First page of the run.
      count: n.

    Returns:
      The run's arrays ``[..., L, n, ...]``, in transfer to the host.
    """
    self.calls += 1
    run = self._read(self._decoder.cache, np.int32(first), count)
    for x in run:
      x.copy_to_host_async()
    return run

  def keep(self, run: Sequence[jax.Array], pages: Sequence[int]) -> None:
    """Waits for a run that was read, and stores it.

    Args:
      run: Result of `read`.
      pages: n host pages.
    """
    for kept, new in zip(self.arrays, run, strict=True):
      kept[self._at(pages)] = np.asarray(new)

  def stage(self, pages: Sequence[int]) -> list[jax.Array]:
    """Starts copying pages to the device as a run, for `write`.

    Args:
      pages: n host pages, which must not change before the transfer has ended.
    """
    return [
      jax.device_put(kept[self._at(pages)], sharding)
      for kept, sharding in zip(self.arrays, self._shardings, strict=True)
    ]

  def write(self, run: Sequence[Any], first: int) -> None:
    """Overwrites a run of the cache, before the next step.

    Args:
      run: Result of `stage` or `read`.
      first: First page of the run.
    """
    self.calls += 1
    decoder = self._decoder
    decoder.cache = self._write(decoder.cache, run, np.int32(first))

  def spoil(self, first: int, count: int) -> None:
    """Overwrites a run of the cache with NaN, so that tests detect reads of it.

    Integer codes become 0; the scales that they are multiplied by become NaN.

    Args:
      first: First page of the run.
      count: n.
    """
    run = [
      np.full(
        _split(x.shape, self._dim, self._decoder.cache_shape, count),
        np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype,
      )
      for x in _arrays(self._decoder.cache, self._of_states)
    ]
    self.write(run, first)

  def _at(self, pages: Sequence[int]) -> Any:
    """Returns the index tuple that selects pages of a host array."""
    return (*[slice(None)] * (self._dim + 1), list(pages))


class HostStates(HostPages):
  """Recurrent states in host memory, with the methods of `HostPages`.

  Block n of the cache is the state of the sequence in slot n. A sequence that
  is preempted between two steps resumes from a copy of its block; a sequence
  whose last token is withdrawn, from a copy of the block before that step.
  """

  _of_states = True


def make_copies(
  program: Program, cache_shape: CacheShape, of_states: bool = False
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
  """Returns the jitted copies of a run of pages, cached by their arguments.

  Args:
    program: The model on a mesh.
    cache_shape: Cache of one rank.
    of_states: Whether states are copied instead of pages.

  Returns:
    ``(cache, first, count) -> run``, with ``count`` static, and ``(cache, run,
    first) -> cache``, which donates the cache. A run has an array ``[..., L, n,
    ...]`` for each array ``[..., L N, ...]`` of the cache.
  """
  return _make_copies(program, cache_shape, of_states)


@functools.cache
def _make_copies(
  program: Program, cache_shape: CacheShape, of_states: bool
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
  """Implements `make_copies`."""
  layout = program.layout
  spec = P(*replica_spec(program), layout.tensor.name)
  dim = _dim(program, cache_shape, of_states)
  num = cache_shape.num_states if of_states else cache_shape.num_pages

  def apart(x):
    return x.reshape(_split(x.shape, dim, cache_shape, num))

  @functools.partial(jax.jit, static_argnames="count")
  def read(cache, first, count):
    def slices(arrays, first):
      return [
        lax.dynamic_slice_in_dim(apart(x), first, count, dim + 1)
        for x in arrays
      ]

    return jax.shard_map(
      slices, mesh=layout.mesh, in_specs=(spec, P()), out_specs=spec
    )(_arrays(cache, of_states), first)

  @functools.partial(jax.jit, donate_argnums=0)
  def write(cache, run, first):
    def updates(arrays, run, first):
      # Without a dim of layers: for a reshape, XLA:CPU copies a cache with dims
      # of size 1, such as a single lane.
      def of_layer(layer, arrays):
        return [
          lax.dynamic_update_slice_in_dim(
            x, lax.dynamic_index_in_dim(new, layer, dim, keepdims=False),
            layer * num + first, dim,
          )
          for x, new in zip(arrays, run, strict=True)
        ]

      return lax.fori_loop(0, cache_shape.num_layers, of_layer, list(arrays))

    arrays, tree = jax.tree.flatten(cache.pages)
    if of_states:
      arrays = list(cache.states)
    arrays = jax.shard_map(
      updates, mesh=layout.mesh, in_specs=(spec, spec, P()), out_specs=spec
    )(arrays, run, first)
    if of_states:
      return dataclasses.replace(cache, states=tuple(arrays))
    return dataclasses.replace(cache, pages=tree.unflatten(arrays))

  return read, write


def _arrays(cache: Cache, of_states: bool) -> list[jax.Array]:
  """Returns the arrays of pages or of states."""
  return list(cache.states) if of_states else jax.tree.leaves(cache.pages)


def _dim(program: Program, shape: CacheShape, of_states: bool) -> int:
  """Returns the dim of blocks of a cache's arrays ``[*levels, ranks, ...]``."""
  lead = len(program.layout.data) + 1
  return lead + (not of_states and shape.order != "interleaved")


def _split(
  dims: Sequence[int], dim: int, shape: CacheShape, count: int
) -> tuple[int, ...]:
  """Returns the shape of ``count`` blocks of each layer."""
  return (*dims[:dim], shape.num_layers, count, *dims[dim + 1 :])
