"""Pages copied to the host and back: exact contents, no aliasing, in place."""

import collections
import copy
import functools
import itertools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from caatnet.inference.copies import (
  PART_BYTES,
  HostPages,
  HostStates,
  make_copy_functions,
)
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


def pieces(host, first, pages):
  """Returns the pieces of one run."""
  return [piece for part in host.parts([(first, pages)]) for piece in part]


@pytest.mark.parametrize("part_bytes", [1, PART_BYTES])
@pytest.mark.parametrize("name", SUBJECTS)
def test_run_is_restored_elsewhere_and_nothing_else_changes(name, part_bytes):
  """A layer at a time, and all layers at once."""
  decoder = make(name)
  assert decoder.state_bytes == 0  # no recurrent states
  fill(decoder)
  before = [contents(decoder, page) for page in range(PAGES)]
  host = HostPages(decoder, 5)
  host.part_bytes = part_bytes
  runs = [(piece, host.read(piece)) for piece in pieces(host, 2, [4, 1])]
  assert len(runs) == (LAYERS if part_bytes == 1 else 1)
  host.spoil(2, 2)  # while the copies may still be in flight
  for piece, run in runs:
    host.keep(run, piece)
  spoilt = [contents(decoder, page) for page in range(PAGES)]
  for page in range(PAGES):
    assert same(spoilt[page], before[page]) == (page not in (2, 3))
  assert all(
    any(np.isnan(x).all() for x in spoilt[page]) for page in (2, 3)
  )
  # The run's second page, then its first.
  for piece in pieces(host, 5, [1, 4]):
    host.write(host.stage(piece), piece)
  after = [contents(decoder, page) for page in range(PAGES)]
  for page, source in {5: 3, 6: 2}.items():
    assert same(after[page], before[source])
  for page in (0, 1, 4, 7):
    assert same(after[page], before[page])
  assert host.calls == 1 + 2 * len(runs)  # including the call of `spoil`


@given(
  part_bytes=st.integers(1, 5000), num_layers=st.integers(1, 12),
  lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_parts_cover_each_layer_of_each_page_once(
  part_bytes, num_layers, lengths
):
  """A part exceeds the limit only if it is one layer of one run."""
  host = copy.copy(first_host())
  host.part_bytes = part_bytes
  host._decoder = SimpleNamespace(
    cache_shape=SimpleNamespace(num_layers=num_layers)
  )
  starts = itertools.accumulate(lengths, initial=0)
  runs = [
    (20 + start, range(start, start + n))
    for start, n in zip(starts, lengths, strict=False)
  ]
  seen, shapes = [], collections.defaultdict(set)
  for part in host.parts(runs):
    size = sum(p.num_layers * len(p.pages) for p in part) * host._block_bytes
    assert size <= part_bytes or [p.num_layers for p in part] == [1]
    for p in part:
      shapes[len(p.pages)].add(p.num_layers)
      seen += [
        (p.layer + i, p.first + j, page)
        for i in range(p.num_layers) for j, page in enumerate(p.pages)
      ]
  assert sorted(seen) == [
    (layer, 20 + page, page)
    for layer in range(num_layers) for page in range(sum(lengths))
  ]
  assert all(len(each) == 1 for each in shapes.values())  # one program each


@functools.cache
def first_host():
  decoder = make("heads, lanes on devices")
  host = HostPages(decoder, 1)
  (component,) = decoder.cache_shape.components  # of each of two lanes
  assert host._block_bytes * LAYERS == 2 * component.block_bytes
  return host


def test_layers_share_programs_and_one_layer_is_staged():
  decoder = make("heads, lanes on devices")
  host = HostPages(decoder, 2)
  host.part_bytes = 1
  read, write = make_copy_functions(decoder.program, decoder.cache_shape)
  sizes = [
    users.compiled(
      read.lower(decoder.cache, np.int32(0), np.int32(0), k, 2)
    ).memory_analysis().output_size_in_bytes
    for k in (1, LAYERS)
  ]
  staged = 2 * host._block_bytes
  pointers = sizes[0] - staged  # XLA:CPU counts the tuple of the results
  assert sizes == [staged + pointers, LAYERS * staged + pointers]
  for program in (read, write):
    program.clear_cache()
  for piece in pieces(host, 0, [0, 1]):
    host.write(host.read(piece), piece)
  assert host.calls == 2 * LAYERS
  assert [f._cache_size() for f in (read, write)] == [1, 1]


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
  host.part_bytes = 1
  for piece in pieces(host, 1, [3]):
    host.keep(host.read(piece), piece)
  host.spoil(1, 1)
  assert all(np.isnan(x).all() for x in states(1))
  for piece in pieces(host, 0, [3]):
    host.write(host.stage(piece), piece)
  assert same(states(0), before[1])
  assert same(states(2), before[2])
  assert host.calls == 1 + 2 * LAYERS


def test_host_pages_do_not_alias_device_memory():
  decoder = make("heads, lanes on devices")
  fill(decoder)
  host = HostPages(decoder, 2)
  (piece,) = pieces(host, 0, [0, 1])
  run = host.read(piece)
  host.keep(run, piece)
  for kept, new, x in zip(
    host.arrays, run, jax.tree.leaves(decoder.cache.pages), strict=True
  ):
    assert not np.shares_memory(kept, np.asarray(new))
    for shard in x.addressable_shards:
      assert not np.shares_memory(kept, np.asarray(shard.data))


@pytest.mark.parametrize("name", ["heads, lanes on devices",
                                  "heads, a lane of replicas"])
@pytest.mark.parametrize("num_layers", [1, LAYERS])
def test_copies_allocate_no_copy_of_the_pages(name, num_layers):
  decoder = make(name)
  read, write = make_copy_functions(decoder.program, decoder.cache_shape)
  zero = np.int32(0)
  lowered = read.lower(decoder.cache, zero, zero, num_layers, 1)
  run = lowered.out_info
  for each in (lowered, write.lower(decoder.cache, run, zero, zero)):
    memory = users.compiled(each).memory_analysis()
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
  host.part_bytes = 1
  for piece in pieces(host, 3, [0, 1]):
    host.write(host.stage(piece), piece)
  assert buffers() == before
