"""Copies runs of pages between a decoder's cache and the host's memory.

The states of sequences, which are blocks of a fixed size, are copied in the
same way (`HostStates`); a run of them is that of one sequence, or of
neighbours.

A run is pages that lie one after another, the same ones of every layer. Its
length is part of a program's shape, so lengths should come in few sizes, as
those of a buddy allocator do. Reading makes a run of its own on the device,
before the next step may be given the cache: that step donates it, and nothing
could read it then. What is copied to the host is that run, while later steps
are computed.

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
  """Pages in the host's memory, and the copies that fill and read them.

  Attributes:
    num_pages: How many pages there are.
    arrays: For each array of the cache one of numpy, which differs from it in
      the number of pages only: ``[..., L, num_pages, ...]``.
    calls: How many programs that copy have been started.
  """

  _of_states = False

  def __init__(self, decoder: Decoder, num_pages: int) -> None:
    """Takes the memory.

    Args:
      decoder: Whose pages are kept.
      num_pages: How many pages of all layers are kept at a time.
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
    """Starts to copy a run of the cache; `keep` puts it into the host's pages.

    Args:
      first: The first page of the run.
      count: n.

    Returns:
      The run's arrays ``[..., L, n, ...]``, on their way to the host.
    """
    self.calls += 1
    run = self._read(self._decoder.cache, np.int32(first), count)
    for x in run:
      x.copy_to_host_async()
    return run

  def keep(self, run: Sequence[jax.Array], pages: Sequence[int]) -> None:
    """Waits for a run that was read, and keeps it.

    Args:
      run: What `read` returned.
      pages: n pages of the host.
    """
    for kept, new in zip(self.arrays, run, strict=True):
      kept[self._at(pages)] = np.asarray(new)

  def stage(self, pages: Sequence[int]) -> list[jax.Array]:
    """Starts to copy pages to the device, where `write` finds them as a run.

    Args:
      pages: n pages of the host, which must not change before they are there.
    """
    return [
      jax.device_put(kept[self._at(pages)], sharding)
      for kept, sharding in zip(self.arrays, self._shardings, strict=True)
    ]

  def write(self, run: Sequence[Any], first: int) -> None:
    """Overwrites a run of the cache, before the next step.

    Args:
      run: What `stage` returned, or `read`.
      first: The first page of the run.
    """
    self.calls += 1
    decoder = self._decoder
    decoder.cache = self._write(decoder.cache, run, np.int32(first))

  def spoil(self, first: int, count: int) -> None:
    """Overwrites a run of the cache with NaN, so that reading it is seen.

    Codes in few bits stay: NaN are the scales that they are multiplied by.

    Args:
      first: The first page of the run.
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
    return (*[slice(None)] * (self._dim + 1), list(pages))


class HostStates(HostPages):
  """States of sequences in the host's memory, by the methods of `HostPages`.

  Block n of the cache is the state of the sequence in slot n. A sequence that
  is preempted between two steps continues from a copy of its block; one whose
  last token is taken back, from a copy of the block before that step.
  """

  _of_states = True


def make_copies(
  program: Program, cache_shape: CacheShape, of_states: bool = False
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
  """Makes the jitted copies of a run of pages, the same ones for equal caches.

  Args:
    program: The model on a mesh.
    cache_shape: One rank's cache.
    of_states: Whether states are copied, not pages.

  Returns:
    ``(cache, first, count) -> run``, with ``count`` static, and ``(cache, run,
    first) -> cache``, which donates the cache. A run has an array for each of
    the cache's, ``[..., L, n, ...]`` in place of ``[..., L N, ...]``.
  """
  return _make_copies(program, cache_shape, of_states)


@functools.cache
def _make_copies(
  program: Program, cache_shape: CacheShape, of_states: bool
) -> tuple[Callable[..., list[jax.Array]], Callable[..., Cache]]:
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
      return [
        lax.dynamic_update_slice_in_dim(apart(x), new, first, dim + 1).reshape(
          x.shape
        )
        for x, new in zip(arrays, run, strict=True)
      ]

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
