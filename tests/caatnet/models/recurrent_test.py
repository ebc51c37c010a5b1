"""Gated linear recurrence, and its cache of one state per sequence."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.inference import batches
from caatnet.inference import decoder as decoders
from caatnet.inference.copies import HostStates
from caatnet.inference.weights import make_weights
from caatnet.models.lm.stateful import Block
from caatnet.models.paged import CacheSizes
from caatnet.models.recurrent import RecurrentConfig, RecurrentModel, Unit
from caatnet.program import Layout, Program
from parallel.axes import Axis, make_mesh
from parallel.plans.zero.partition import Level, Partition
from parallel.tensor.partial_sync import PartialSync

LAYERS, RANKS, VOCAB, SLOTS, PAGE = 3, 4, 29, 3, 8
CAPACITY = decoders.Capacity(SLOTS, 4 * PAGE, PAGE, 8)
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def make_config(p=0.5, **changes):
  sync = PartialSync(p)
  values = {
    "vocab_size": VOCAB, "width": 24, "num_layers": LAYERS, "num_heads": 4,
    "rnn_width": 16, "conv_width": 4, "ffn_width": 30,
    "syncs": ((sync, sync),) * LAYERS, "init_std": 0.3,
  }
  return RecurrentConfig(**(values | changes))


@functools.cache
def make(devices=1, **changes):
  """Returns a program, its parameters, and a step that returns logits."""
  axes = {
    "worker": Axis("worker", 1), "data": Axis("data", 1),
    "tensor": Axis("tensor", RANKS, devices),
  }
  layout = Layout(
    tuple(axes.values()), make_mesh(axes),
    Partition((Level("data", 1),)),
  )
  program = Program(
    RecurrentModel(make_config(**changes), axes["tensor"]), layout
  )
  params = jax.jit(
    program.init_params,
    out_shardings=layout.shardings(program.unpartitioned_specs),
  )(jax.random.key(0))
  sizes = CacheSizes(4 * SLOTS, PAGE, SLOTS, "", ("reference",))
  shape = program.model.cache_shape(sizes)
  kept = jax.tree.map(jnp.copy, params)
  weights = make_weights(program, params, True, False)
  forward = functools.partial(
    decoders.make_forward(program, weights, shape), weights.params
  )
  return program, kept, weights, shape, forward


def full_logits(devices, tokens, **changes):
  """Returns logits without a cache, ``[T, V]``, of tokens ``[T]``."""
  program, params, *_ = make(devices, **changes)
  f = jax.shard_map(
    program.model.logits, mesh=program.layout.mesh,
    in_specs=(program.unpartitioned_specs, P()), out_specs=P("tensor"),
  )
  found = np.asarray(jax.jit(f)(params, np.array(tokens, "i4")[None]))
  return np.moveaxis(found[:, 0], 0, 1).reshape(len(tokens), -1)[:, :VOCAB]


class Cached:
  """Sequences in the slots of a cache, each read in parts."""

  def __init__(self, devices=1):
    self.program, _, _, self.shape, self._forward = make(devices)
    self.cache = decoders.empty_state(self.program, CAPACITY, self.shape)[0]

  def read(self, decodes=(), chunks=(), length=8):
    """Returns the logits after each ``(slot, position, token)`` and chunk."""
    tables = np.arange(4 * SLOTS, dtype="i4").reshape(SLOTS, 4)
    slots, at, tokens = np.array(decodes, "i4").reshape(-1, 3).T
    batch = batches.batch_of(
      batches.Sizes(2, 1, length, 4), PAGE, tables, slots, at,
      [batches.Chunk(slot, start, part, True) for slot, start, part in chunks],
    )
    batch.tokens[: len(tokens)] = tokens
    batch = jax.tree.map(lambda x: x[None], batch)
    logits, self.cache = self._forward(self.cache, batch)
    logits = np.moveaxis(np.asarray(logits)[0], 0, 1)
    return logits.reshape(len(logits), -1)[:, :VOCAB]

  def state(self, slot):
    """Returns the state of a slot, arrays ``[layers x ranks, ...]``."""
    at = [layer * SLOTS + slot for layer in range(LAYERS)]
    return [np.array(x)[0][:, at] for x in self.cache.states]


def draw(length, seed=0):
  return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_recurrence_equals_its_equations():
  """Evaluates one step after another in float64."""
  rng = np.random.default_rng(0)
  heads, d, size, channels, length = 2, 3, 4, 6, 5
  unit = Unit(
    rng.normal(size=(size, channels)), rng.normal(size=channels),
    rng.normal(size=(heads, d, 2 * d)), rng.normal(size=heads * 2 * d),
    rng.normal(size=channels),
  )
  y = rng.normal(size=(1, length, 2 * channels))
  window, h = rng.normal(size=(1, size - 1, channels)), rng.normal(size=(1, 6))
  found, (new_window, new_h) = Unit(*(x.astype("f4") for x in unit))(
    y.astype("f4"), (window.astype("f4"), h.astype("f4")),
    np.ones((1, length), bool),
  )

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  inputs = np.concatenate([window[0], y[0, :, channels:]])
  state = h[0]
  for t in range(length):
    u = (inputs[t : t + size] * unit.conv).sum(axis=0) + unit.conv_bias
    both = np.stack([
      u[n * d : (n + 1) * d] @ unit.gates[n] for n in range(heads)
    ]) + unit.gates_bias.reshape(heads, 2 * d)
    r, i = sigmoid(both[:, :d]).ravel(), sigmoid(both[:, d:]).ravel()
    a = sigmoid(-unit.rate) ** (8 * r)  # softplus(x) = -log sigmoid(-x)
    state = a * state + np.sqrt(1 - a * a) * i * u
    gate = np.asarray(jax.nn.gelu(y[0, t, :channels].astype("f4")))
    np.testing.assert_allclose(found[0, t], gate * state, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(new_h[0], state, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(new_window[0], inputs[-3:], rtol=1e-6)


def test_all_norms_have_the_eps_of_the_config():
  """With a large one, layers add nothing to the embeddings of tokens."""
  tokens, eps = draw(9), 1e12
  _, params, *_ = make(1, norm_eps=eps)
  x = np.asarray(params["embedding"], "f8").reshape(-1, 24)[tokens]  # by rank
  head = np.concatenate(np.asarray(params["head"], "f8"), axis=1)[:, :VOCAB]
  found = full_logits(1, tokens, norm_eps=eps)
  np.testing.assert_allclose(found * eps**0.5, x @ head, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_tokens_one_by_one_equal_the_whole_sequence(devices):
  """Another sequence in the same steps has no effect."""
  tokens, other = draw(14), draw(14, 1)
  cached, expected = Cached(devices), full_logits(devices, tokens)
  logits = cached.read(chunks=[(1, 0, tokens[:6])])[2]
  np.testing.assert_allclose(logits, expected[5], **TOLERANCE)
  for t in range(6, 14):
    parts = {2: (2, 0, other[:7]), 4: (2, 7, other[7:9])}
    logits = cached.read([(1, t, tokens[t])], [parts[t - 6]] if t - 6 in parts
                         else [])
    np.testing.assert_allclose(logits[0], expected[t], **TOLERANCE)
    if t == 10:
      np.testing.assert_allclose(
        logits[2], full_logits(devices, other)[8], **TOLERANCE
      )


@pytest.mark.parametrize("cuts", [(1, 5), (5, 8), (3, 11)])
def test_prompt_in_chunks_equals_the_whole_prompt(cuts):
  """Compares logits and states; chunks may be shorter than the convolution."""
  tokens = draw(13)
  whole, parts = Cached(), Cached()
  expected = whole.read(chunks=[(0, 0, tokens)], length=16)[2]
  for start, stop in zip((0, *cuts), (*cuts, 13), strict=True):
    found = parts.read(chunks=[(2, start, tokens[start:stop])], length=8)[2]
  np.testing.assert_allclose(found, expected, **TOLERANCE)
  for x, y in zip(whole.state(0), parts.state(2), strict=True):
    assert np.abs(x).max() > 1e-3
    np.testing.assert_allclose(x, y, **TOLERANCE)


def test_padding_does_not_change_states():
  """Bit for bit: rows without a sequence, and the ends of chunks."""
  cached, tokens = Cached(), draw(5)
  cached.read(chunks=[(0, 0, tokens)])
  cached.read(chunks=[(2, 0, tokens)])
  before = cached.state(0), cached.state(2)
  cached.read([(1, 0, 3)])  # one decode of two, and no chunk
  jax.tree.map(np.testing.assert_array_equal, before,
               (cached.state(0), cached.state(2)))
  # Equal tokens with more padding give equal states.
  for length in (8, 16, 32):
    cached.read(chunks=[(1, 0, tokens)], length=length)
    for x, y in zip(cached.state(1), before[0], strict=True):
      np.testing.assert_allclose(x, y, **TOLERANCE)


def test_next_sequence_of_a_slot_starts_from_zeros():
  """The previous state is NaN, as after divergence."""
  cached, tokens = Cached(), draw(6)
  expected = cached.read(chunks=[(0, 0, tokens)])[2]
  cached.cache = dataclasses.replace(
    cached.cache,
    states=tuple(jnp.full_like(x, jnp.nan) for x in cached.cache.states),
  )
  found = cached.read(chunks=[(0, 0, tokens)])[2]
  np.testing.assert_array_equal(found, expected)


def test_states_are_restored_from_the_host_into_any_slot():
  """The copy from before a step undoes the token that the step read."""
  program, _, weights, shape, _ = make(2)
  decoder = decoders.Decoder(program, weights, CAPACITY, shape)
  tokens, cached = draw(9), Cached(2)
  cached.read(chunks=[(1, 0, tokens[:8])])
  expected = cached.read([(1, 8, tokens[8])])[0]

  cached = Cached(2)
  cached.read(chunks=[(1, 0, tokens[:8])])
  decoder.cache = cached.cache
  host = HostStates(decoder, 4)
  ((piece,),) = host.parts([(1, [3])])
  host.keep(host.read(piece), piece)
  cached.cache = decoder.cache
  cached.read([(1, 8, 5)])  # dropped
  decoder.cache = cached.cache
  host.spoil(0, SLOTS)
  host.write(host.stage(piece), piece._replace(first=0))
  cached.cache = decoder.cache
  assert np.isnan(cached.state(1)[1]).all()
  found = cached.read([(0, 8, tokens[8])])[0]
  np.testing.assert_array_equal(found, expected)


def test_gates_are_initialised_for_inputs_of_unit_variance():
  """Products of 64 inputs with gates of variance 1 / 64."""
  block = Block(
    make_config(rnn_width=256), Axis("tensor", 1), jnp.ones((2, 24)),
    nnx.Rngs(0),
  )
  assert np.std(block.gates[...]) == pytest.approx(1 / 8, rel=0.02)


def test_cache_components_have_a_fixed_size():
  """Each sequence has inputs of the convolution and a state; no pages."""
  _, _, _, shape, _ = make()
  channels = 16 // RANKS
  assert [tuple(c) for c in shape.components] == [
    (False, SLOTS, LAYERS * 3 * channels * 4),
    (False, SLOTS, LAYERS * channels * 4),
  ]
  assert shape.size_bytes == SLOTS * LAYERS * 4 * channels * 4
  assert not shape.shares_prefixes
  assert (shape.dtype, shape.order) == ("float32", "heads")
  longer = dataclasses.replace(shape, num_pages=10**6)
  assert longer.size_bytes == shape.size_bytes


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rnn_width": 18}, "num_heads=4 does not divide config.model.rnn_width"),
    ({"remat": "some"}, "remat='some' must be one of"),
    ({"num_heads": 2}, "config.parallel.tensor=4 does not divide config"),
  ],
)
def test_sizes_that_do_not_fit_name_their_keys(changes, message):
  with pytest.raises(ValueError, match=message):
    RecurrentModel(make_config(**changes), Axis("tensor", RANKS))


def test_quantised_states_are_refused():
  model = make()[0].model
  with pytest.raises(ValueError, match=r"config\.inference\.cache='int8' must"):
    model.cache_shape(CacheSizes(4, 4, 1, "int8", ()))


def test_sizes_of_recurrences_are_counted_by_hand():
  sync = PartialSync()
  config = RecurrentConfig(
    vocab_size=10, width=6, num_layers=2, ffn_width=5, num_heads=4,
    rnn_width=8, conv_width=3, syncs=((sync, sync),) * 2,
  )
  # Three projections, taps, two gates with a block for each head, and the MLP.
  products = 3 * 6 * 8 + 3 * 8 + 2 * 4 * 2 * 2 + 3 * 6 * 5
  assert config.num_product_weights == products
  assert config.layer_params == products + 4 * 8 + 2 * 6
  assert config.num_params == 2 * config.layer_params + 2 * 10 * 6 + 6
  assert [tuple(s) for s in config.state_shapes(2)] == [
    ((2, 4), "float32"), ((4,), "float32")
  ]
  with pytest.raises(ValueError, match="num_heads=3 does not divide"):
    dataclasses.replace(config, num_heads=3)
