"""Pages copied to the host and back: exact contents, no aliasing, in place."""

import jax
import numpy as np
import pytest

from caatnet.inference.copies import HostPages, HostStates, make_copies
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.weights import make_weights
from caatnet.models.paged import Cache, CacheShape, StateShape
from tests import users
from tests.caatnet.models.transformer_test import (
  init_params,
  make_config,
  make_program,
)

LAYERS, PAGES, PAGE_SIZE = 2, 8, 4
# (order, dtype, ranks, devices, replicas, their devices).
SUBJECTS = {
  "heads, lanes on devices": ("heads", "float32", 4, 2, 1, 1),
  "interleaved codes": ("interleaved", "int8", 2, 1, 1, 1),
  "heads, a lane of replicas": ("heads", "float32", 4, 4, 2, 1),
  "packed, replicas": ("packed", "bfloat16", 2, 1, 2, 2),
}


def make(name):
  order, dtype, *sizes = SUBJECTS[name]
  config = make_config(
    layers=LAYERS, num_kv_heads=4, head_width=64 if order == "packed" else None
  )
  program = make_program(config, *sizes)
  weights = make_weights(program, init_params(program), False, False)
  shape = CacheShape(
    LAYERS, PAGES, PAGE_SIZE, 4 // sizes[0], config.head_width, dtype, order
  )
  capacity = Capacity(2, PAGES * PAGE_SIZE // 2, PAGE_SIZE, PAGE_SIZE)
  return Decoder(program, weights, capacity, shape)


def fill(decoder):
  """Fills the cache with random numbers that identify each element."""
  rng = np.random.default_rng(0)
  cache = decoder.cache
  pages = jax.tree.map(
    lambda x: jax.device_put(
      rng.integers(-100, 100, x.shape).astype(x.dtype), x.sharding
    ),
    cache.pages,
  )
  decoder.cache = Cache(pages, cache.shape)


def contents(decoder, page):
  """Returns all elements of a page, over layers and ranks."""
  shape = decoder.cache.shape
  dim = len(decoder.program.layout.data) + 1 + (shape.order != "interleaved")
  at = [layer * PAGES + page for layer in range(LAYERS)]
  return [
    np.take(np.array(x, np.float32), at, dim)
    for x in jax.tree.leaves(decoder.cache.pages)
  ]


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", SUBJECTS)
def test_run_is_restored_elsewhere_and_nothing_else_changes(name):
  decoder = make(name)
  assert decoder.state_bytes == 0  # no recurrent states
  fill(decoder)
  before = [contents(decoder, page) for page in range(PAGES)]
  host = HostPages(decoder, 5)
  run = host.read(2, 2)
  host.spoil(2, 2)  # while the copy may still be in flight
  host.keep(run, [4, 1])
  spoilt = [contents(decoder, page) for page in range(PAGES)]
  for page in range(PAGES):
    assert same(spoilt[page], before[page]) == (page not in (2, 3))
  assert all(
    any(np.isnan(x).all() for x in spoilt[page]) for page in (2, 3)
  )
  host.write(host.stage([1, 4]), 5)  # the run's second page, then its first
  after = [contents(decoder, page) for page in range(PAGES)]
  for page, source in {5: 3, 6: 2}.items():
    assert same(after[page], before[source])
  for page in (0, 1, 4, 7):
    assert same(after[page], before[page])
  assert host.calls == 3  # including the call of `spoil`


def test_states_of_slots_are_copied():
  """Three slots of a cache without pages."""
  program = make_program(make_config(layers=LAYERS), 2)
  weights = make_weights(program, init_params(program), False, False)
  shape = CacheShape(
    LAYERS, PAGES, PAGE_SIZE, 0, 8, "float32", "heads",
    states=(StateShape((3,)), StateShape((2, 2))), num_states=3,
  )
  decoder = Decoder(program, weights, Capacity(3, 8, PAGE_SIZE, 4), shape)
  assert decoder.state_bytes == 2 * LAYERS * (3 + 4) * 4  # on two ranks
  rng = np.random.default_rng(0)
  decoder.cache = Cache((), shape, tuple(
    jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)
    for x in decoder.cache.states
  ))

  def states(slot):
    dim = len(program.layout.data) + 1
    at = [layer * 3 + slot for layer in range(LAYERS)]
    return [np.take(np.array(x), at, dim) for x in decoder.cache.states]

  before = [states(slot) for slot in range(3)]
  host = HostStates(decoder, 4)
  host.keep(host.read(1, 1), [3])
  host.spoil(1, 1)
  assert all(np.isnan(x).all() for x in states(1))
  host.write(host.stage([3]), 0)
  assert same(states(0), before[1])
  assert same(states(2), before[2])
  assert host.calls == 3


def test_host_pages_do_not_alias_device_memory():
  decoder = make("heads, lanes on devices")
  fill(decoder)
  host = HostPages(decoder, 2)
  run = host.read(0, 2)
  host.keep(run, [0, 1])
  for kept, new, x in zip(
    host.arrays, run, jax.tree.leaves(decoder.cache.pages), strict=True
  ):
    assert not np.shares_memory(kept, np.asarray(new))
    for shard in x.addressable_shards:
      assert not np.shares_memory(kept, np.asarray(shard.data))


@pytest.mark.parametrize("name", ["heads, lanes on devices",
                                  "heads, a lane of replicas"])
def test_write_allocates_no_copy_of_the_pages(name):
  decoder = make(name)
  read, write = make_copies(decoder.program, decoder.cache_shape)
  run = jax.eval_shape(lambda cache: read(cache, 0, 1), decoder.cache)
  memory = users.compiled(
    write.lower(decoder.cache, run, np.int32(0))
  ).memory_analysis()
  assert memory.temp_size_in_bytes < decoder.cache_shape.size_bytes / 2


def test_run_is_written_in_place():
  """Keeps the buffers of the cache on every device."""
  decoder = make("heads, lanes on devices")
  host = HostPages(decoder, 2)

  def buffers():
    return [
      shard.data.unsafe_buffer_pointer()
      for x in jax.tree.leaves(decoder.cache.pages)
      for shard in x.addressable_shards
    ]

  before = buffers()
  host.write(host.stage([0, 1]), 3)
  assert buffers() == before
