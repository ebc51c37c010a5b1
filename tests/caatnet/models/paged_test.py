"""Shapes of caches, and the layout of a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.models.paged import Batch, Cache, CacheShape, StateShape


def test_cache_counts_bytes_of_pages_and_states():
  states = (StateShape((3, 4)), StateShape((5,), "bfloat16"))
  shape = CacheShape(2, 16, 8, 4, 64, "bfloat16", "heads", states=states,
                     num_states=6)
  assert [tuple(c) for c in shape.components] == [
    (True, 16, 2 * 2 * 8 * 4 * 64 * 2), (False, 6, 2 * 12 * 4),
    (False, 6, 2 * 5 * 2),
  ]
  assert shape.size_bytes == sum(
    c.num_blocks * c.block_bytes for c in shape.components
  )
  assert [x.shape for x in shape.state_arrays()] == [(12, 3, 4), (12, 5)]
  assert (shape.paged, shape.shares_prefixes) == (True, False)
  pages = dataclasses.replace(shape, states=(), num_states=0)
  assert (pages.paged, pages.shares_prefixes) == (True, True)
  assert len(pages.components) == 1
  fixed = dataclasses.replace(shape, num_kv_heads=0)
  assert (fixed.paged, fixed.pages()) == (False, ())
  assert fixed.components == shape.components[1:]


def test_padding_writes_to_no_layer():
  """A negative slot of a layer would be the last one of the layer before."""
  shape = CacheShape(2, 3, 4, 1, 8, "float32", "heads")
  zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), shape.pages())
  rows = np.zeros(1, "i4")
  none, places = np.zeros(3, "i4"), np.array([-1, 5, -1], "i4")
  batch = Batch(none, none, places,
                np.zeros((1, 3), "i4"), rows, rows, 0)
  ones = jnp.ones((1, 3, 1, 8))
  cache = Cache(zeros, shape).write(jnp.int32(1), ones, ones, batch)
  written = sum(float(x.sum()) for x in jax.tree.leaves(cache.pages))
  assert written == 2 * 8  # one key and one value


@pytest.mark.parametrize(("decodes", "chunks", "length", "parts"), [
  (0, 2, 5, [(slice(0, 2), slice(0, 10), 5)]),
  (3, 0, 0, [(slice(0, 3), slice(0, 3), 1)]),
  (3, 2, 4, [(slice(0, 3), slice(0, 3), 1), (slice(3, 5), slice(3, 11), 4)]),
])
def test_step_has_decodes_and_then_chunks(decodes, chunks, length, parts):
  size, sequences = decodes + chunks * length, decodes + chunks
  tokens, rows = np.zeros(size, "i4"), np.zeros(sequences, "i4")
  batch = Batch(tokens, tokens, tokens, np.zeros((sequences, 2), "i4"), rows,
                rows, decodes)
  assert batch.parts == parts
