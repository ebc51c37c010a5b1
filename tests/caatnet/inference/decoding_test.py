"""Decoding with a cache gives the logits of a forward without one.

Each subject is a model on a mesh. Sequences are cut at random into chunks and
single tokens, several in one step, and pages are placed at random. All steps of
a subject have one shape, so each subject compiles two programs.
"""

import functools
import itertools
import time

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.inference import batches
from caatnet.inference import decoder as decoders
from caatnet.inference.weights import make_weights
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import Batch, CacheShape
from caatnet.models.transformer.positions import LinearScaling, Llama3Scaling
from parallel.tensor.partial_sync import PartialSync
from tests import pairwise, users
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)

# Difference of float32 sums in another order, for logits of this size.
TOLERANCE = 2e-4
PAGE_SIZE, PAGES, NUM_PAGES = 4, 5, 24
DECODES, CHUNK = 3, 6
LENGTHS = (17, 5, 11, 14)


def syncs(*fractions):
  return tuple((PartialSync(a), PartialSync(b)) for a, b in fractions)


# Changes of the config; ranks, devices, replicas, and their devices.
CASES = {
  "one rank": ({}, 1, 1, 1, 1),
  "p = .5, lanes": ({"p": 0.5}, 8, 1, 1, 1),
  "p per layer, lanes on devices": (
    {"syncs": syncs((0.5, 0.0), (1.0, 0.25))}, 4, 2, 1, 1,
  ),
  "replicas in lanes": ({"p": 0.5}, 2, 1, 2, 1),
  "Llama 3, devices": (
    {"p": 0.5, "num_kv_heads": 4, "rope_base": 100.0,
     "rope_scaling": Llama3Scaling(4.0, 1.0, 3.0, 32)}, 4, 4, 1, 1,
  ),
  "Mistral, replicas on devices": (
    {"p": 0.25, "num_kv_heads": 4, "head_width": 6, "sliding_window": 5},
    2, 2, 2, 2,
  ),
  "Qwen, padded heads": (
    {"p": 0.5, "qkv_bias": True, "qk_norm": True, "tied_embeddings": True,
     "rope_scaling": LinearScaling(2.0)}, 3, 1, 1, 1,
  ),
  "a device of padding": (
    {"p": 0.5, "qkv_bias": True, "qk_norm": True, "num_heads": 6,
     "num_kv_heads": 3, "head_width": 6, "ffn_width": 5, "vocab_size": 9},
    4, 4, 1, 1,
  ),
}


def make(case):
  changes, ranks, devices, replicas, replica_devices = CASES[case]
  config = make_config(**changes)
  program = make_program(config, ranks, devices, replicas, replica_devices)
  return program, draw_params(program)


def put(program, params):
  return jax.device_put(
    params, program.layout.shardings(program.unpartitioned_specs)
  )


def logits_without_cache(program, params, tokens):
  """Returns logits of all positions, float32 ``[B, T, vocabulary]``."""
  slices = jax.jit(
    jax.shard_map(
      program.model.logits, mesh=program.layout.mesh,
      in_specs=(program.unpartitioned_specs, P()),
      out_specs=P(program.layout.tensor.name),
    )
  )(put(program, params), tokens)
  joined = np.moveaxis(np.asarray(slices), 0, -2)
  joined = joined.reshape(*tokens.shape, -1)
  return joined[..., : program.model.config.vocab_size]


def make_decode(program, params, cache_shape, apart, sizes=(), coded=False):
  """Returns a function: state and batch -> logits of all tokens, and state."""
  weights = make_weights(program, put(program, params), apart, coded)
  cuts = NanobatchRule(lambda batch: sizes, True)
  f = decoders.make_forward(program, weights, cache_shape, cuts)
  return functools.partial(f, weights.params)


def steps(rng, lengths):
  """Cuts sequences into steps, each a list of rows (sequence, positions)."""
  done = [0] * len(lengths)
  while any(d < n for d, n in zip(done, lengths, strict=True)):
    rows = []
    order = rng.permutation(len(lengths))
    for sequence in order:
      left = lengths[sequence] - done[sequence]
      if not left or rng.random() < 0.2:
        continue
      if len(rows) < DECODES and rng.random() < 0.6:
        rows.append((len(rows), sequence, 1))
      elif not any(row == DECODES for row, _, _ in rows):
        count = int(rng.integers(1, min(left, CHUNK) + 1))
        rows.append((DECODES, sequence, count))
    yield [(row, s, range(done[s], done[s] + n)) for row, s, n in rows]
    for _, sequence, count in rows:
      done[sequence] += count


def make_batch(tokens, tables, rows):
  """Returns the batch of one replica, and the places of its logits."""
  size = DECODES + CHUNK
  arrays = {
    "tokens": np.zeros(size), "positions": np.full(size, -1),
    "places": np.full(size, -1),
    # Out of range for any cache: padding must not be read.
    "tables": np.full((DECODES + 1, PAGES), 10**6),
    "rows": np.arange(size), "sequences": np.full(DECODES + 1, -1),
  }
  arrays["positions"][DECODES:] = np.arange(CHUNK)
  found = []
  for row, sequence, positions in rows:
    at = np.arange(row, row + len(positions))
    if row == DECODES:
      arrays["positions"][DECODES:] += positions.start
    where = np.array(positions)
    pages = tables[sequence][where // PAGE_SIZE]
    arrays["tokens"][at] = tokens[sequence, where]
    arrays["positions"][at] = where
    arrays["places"][at] = pages * PAGE_SIZE + where % PAGE_SIZE
    used = positions.stop // PAGE_SIZE + (positions.stop % PAGE_SIZE > 0)
    arrays["tables"][row, :used] = tables[sequence][:used]
    found += [(i, sequence, p) for i, p in zip(at, positions, strict=True)]
  batch = Batch(
    **{k: v.astype(np.int32) for k, v in arrays.items()}, num_decodes=DECODES
  )
  return batch, found


def decoded(
  case, seed, dtype="float32", apart=False, poison=None, sizes=(), coded=False
):
  """Returns logits of all sequences, ``[replicas, sequences, T, V]``."""
  program, params = make(case)
  config, layout = program.model.config, program.layout
  replicas = layout.num_data_ranks
  rng = np.random.default_rng(seed)
  tokens = rng.integers(
    0, config.vocab_size, (replicas, len(LENGTHS), max(LENGTHS))
  )
  tables = [
    np.split(rng.permutation(NUM_PAGES)[: PAGES * len(LENGTHS)], len(LENGTHS))
    for _ in range(replicas)
  ]
  shape = CacheShape(
    config.num_layers, NUM_PAGES, PAGE_SIZE,
    -(-config.num_kv_heads // layout.tensor.size), config.head_width, dtype,
    "heads",
  )
  capacity = decoders.Capacity(len(LENGTHS), PAGES * PAGE_SIZE, PAGE_SIZE, 8)
  cache, _ = decoders.empty_state(program, capacity, shape)
  if poison is not None:
    cache = jax.tree.map(lambda x: np.full(x.shape, poison, x.dtype), cache)
  decode = make_decode(program, params, shape, apart, sizes, coded)
  out = np.full((*tokens.shape, config.vocab_size), np.nan, np.float32)
  plans = [list(steps(rng, LENGTHS)) for _ in range(replicas)]
  for plan in itertools.zip_longest(*plans, fillvalue=[]):
    made = [
      make_batch(tokens[d], tables[d], rows) for d, rows in enumerate(plan)
    ]
    batch = jax.tree.map(lambda *x: np.stack(x), *(b for b, _ in made))
    logits, cache = decode(cache, batch)  # [D, R, N, V]
    joined = np.moveaxis(np.asarray(logits), 1, 2)
    joined = joined.reshape(*joined.shape[:2], -1)
    for d, (_, found) in enumerate(made):
      for row, sequence, position in found:
        out[d, sequence, position] = joined[d, row, : config.vocab_size]
  return program, params, tokens, out


def expect(program, params, tokens, found, tolerance):
  """Compares the logits at each position with those without a cache."""
  flat = tokens.reshape(-1, tokens.shape[-1])
  expected = logits_without_cache(program, params, flat)
  expected = expected.reshape(found.shape)
  for sequence, length in enumerate(LENGTHS):
    assert not np.isnan(found[:, sequence, :length]).any()
    np.testing.assert_allclose(
      found[:, sequence, :length], expected[:, sequence, :length],
      rtol=0, atol=tolerance,
    )


@pytest.mark.rotated
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_without_a_cache(case):
  # Alternates between both layouts of layers.
  apart = bool(list(CASES).index(case) % 2)
  # Unwritten slots must not affect the result, whatever they contain.
  found = decoded(case, seed=1, apart=apart, poison=np.nan)
  expect(*found, TOLERANCE)


def test_logits_of_quantised_keys_and_values_are_near():
  program, params, tokens, found = decoded("p = .5, lanes", 2, "int8")
  expect(program, params, tokens, found, 0.2)
  # The cache is really quantised: exact tolerances fail.
  with pytest.raises(AssertionError):
    expect(program, params, tokens, found, TOLERANCE)


# Cuts of the 3 decodes and the chunk of 6: within the chunk, at a border.
@pytest.mark.rotated
@pytest.mark.parametrize(("case", "sizes"), [
  ("p = .5, lanes", (5, 4)),
  ("p per layer, lanes on devices", (2, 3, 4)),
  ("replicas in lanes", (8, 1)),
  ("Llama 3, devices", (1,) * 9),
  ("Mistral, replicas on devices", (3, 3, 3)),
  ("a device of padding", (3, 6)),
])
def test_logits_of_nano_batches_equal_those_without_a_cache(case, sizes):
  found = decoded(
    case, seed=1, apart=len(sizes) > 2, poison=np.nan, sizes=sizes
  )
  expect(*found, TOLERANCE)


QUANTISED = pairwise.rows(
  {
    "case": ("replicas in lanes", "p = .5, lanes"),
    "sizes": ((5, 4), (2, 3, 4), (8, 1)), "dtype": ("int8", "float32"),
    "coded": (True, False), "apart": (True, False),
  },
  lambda row: row["dtype"] == "float32" and not row["coded"],
)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("row", QUANTISED, ids=pairwise.label)
def test_quantised_logits_of_nano_batches_equal_those_of_one_batch(row):
  cut, one = (
    decoded(**row | {"sizes": sizes}, seed=2)[-1]
    for sizes in (row["sizes"], ())
  )
  np.testing.assert_allclose(cut, one, rtol=0, atol=TOLERANCE)


def test_step_reads_the_newest_token_unless_the_host_knows_it():
  """Slots 0 to 2 have the same prompt; slot 3 continues it by token 0."""
  begun = time.perf_counter()
  program, params = make("replicas in lanes")
  config = program.model.config
  shape = CacheShape(
    config.num_layers, 8, PAGE_SIZE, 4, config.head_width, "float32", "heads",
  )
  weights = make_weights(program, put(program, params), False, False)
  capacity = decoders.Capacity(4, 2 * PAGE_SIZE, PAGE_SIZE, 4)
  decoder = decoders.Decoder(program, weights, capacity, shape)
  assert decoder.num_replicas == 2
  tables = np.arange(8, dtype="i4").reshape(4, 2)
  drawing = batches.SlotSampling(4)

  def step(slots, position, chunks, tokens=()):
    """Returns tokens and log-probabilities of both replicas."""
    made = []
    for replica in range(2):
      batch = batches.batch_of(
        batches.Sizes(4, len(chunks), 4, 2), PAGE_SIZE, tables,
        np.array(slots, int), np.full(len(slots), position),
        [batches.Chunk(slot, 0, [*x[:2], 9 + replica, *x[2:]], True)
         for slot, x in chunks],
      )
      for row, known in enumerate(tokens):
        batch.tokens[row] = -1 if known is None else known[replica]
      made.append(batch)
    batch = jax.tree.map(lambda *x: np.stack(x), *made)
    sampling = jax.tree.map(
      lambda *x: np.stack(x), *(drawing.of(b.sequences) for b in made)
    )
    return map(np.asarray, decoder.step(batch, sampling, False)[:2])

  chunks = [(0, [5, 9]), (1, [5, 9]), (2, [5, 9]), (3, [5, 9, 0])]
  first, logprobs = step([], 0, chunks)
  assert first.shape == logprobs.shape == (2, 8)
  newest = first[:, 4]
  assert (first[:, 4:7] == newest[:, None]).all()
  assert (first[0] != first[1]).any()
  found, found_logprobs = step([0, 1, 2], 3, [], [None, newest, (0, 0)])
  np.testing.assert_array_equal(found[:, 0], found[:, 1])
  np.testing.assert_allclose(found_logprobs[:, 0], found_logprobs[:, 1])
  # Equals the last chunk of the first step.
  np.testing.assert_array_equal(found[:, 2], first[:, 7])
  np.testing.assert_allclose(
    found_logprobs[:, 2], logprobs[:, 7], rtol=0, atol=1e-5
  )
  # The padding of the second step has not changed the newest token of slot 3.
  found, found_logprobs = step([2, 3], 4, [])
  np.testing.assert_array_equal(found[:, 0], found[:, 1])
  np.testing.assert_allclose(
    found_logprobs[:, 0], found_logprobs[:, 1], rtol=0, atol=1e-5
  )
  assert len(decoder.shapes) == 2
  assert 0 < decoder.compile_seconds < time.perf_counter() - begun


def test_cache_that_does_not_fit_is_an_error_with_its_size_and_settings():
  program, params = make("one rank")
  config = program.model.config
  pages = 2**38  # beyond any address space
  shape = CacheShape(
    config.num_layers, pages, PAGE_SIZE, config.num_kv_heads,
    config.head_width, "float32", "heads",
  )
  gigabytes = 4e-9 * 2 * pages * PAGE_SIZE * (
    config.num_layers * config.num_kv_heads * config.head_width
  )
  weights = make_weights(program, put(program, params), False, False)
  capacity = decoders.Capacity(2, 3 * PAGE_SIZE, PAGE_SIZE, 8)
  with pytest.raises(ValueError, match=(
    rf"a rank takes {gigabytes:,.1f} GB.*: {pages:,} pages of 4 positions; set "
    "config.inference.pages, or reduce batch=2 or context=12"
  )):
    decoders.Decoder(program, weights, capacity, shape)


def test_token_of_one_sequence_is_written_in_place():
  """XLA:CPU copies no pages, although the layers are not in a loop."""
  program, params = make("one rank")
  config = program.model.config
  pages = 256
  shape = CacheShape(
    config.num_layers, pages, PAGE_SIZE, config.num_kv_heads,
    config.head_width, "float32", "heads",
  )
  weights = make_weights(program, put(program, params), True, False)
  capacity = decoders.Capacity(1, PAGES * PAGE_SIZE, PAGE_SIZE, 8)
  cache, _ = jax.eval_shape(
    lambda: decoders.empty_state(program, capacity, shape)
  )
  batch = Batch(
    *(jax.ShapeDtypeStruct((1, *dims), np.int32)
      for dims in ((1,), (1,), (1,), (1, PAGES), (1,), (1,))),
    num_decodes=1,
  )
  memory = users.compiled(decoders.make_forward(program, weights, shape).lower(
    weights.params, cache, batch
  )).memory_analysis()
  assert memory.alias_size_in_bytes == shape.size_bytes
  assert memory.temp_size_in_bytes < shape.size_bytes / 4
