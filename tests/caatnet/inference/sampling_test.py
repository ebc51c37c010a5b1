"""Properties of sampling: distribution, and independence of the batch."""

import functools

import jax
from jax.extend import random as jax_random
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
from scipy import special

from caatnet.inference import sampling as lib
from caatnet.inference.filters import FILTERS
from parallel.axes import Axis, make_mesh
from parallel.kernels.codec import threefry
from parallel.ledger import ledger

V, S = 50, 1024  # 3, 8 and 24 ranks pad the vocabulary


def rows(settings):
  """Returns a batch with these settings in turn and seeds 0 to 4."""
  plain = {"temperature": 1.0} | {k: f.neutral for k, f in FILTERS.items()}
  full = [
    plain | settings[i % len(settings)] | {"seed": i % 5} for i in range(S)
  ]
  return lib.Sampling(*(
    np.array([row[key] for row in full], dtype)
    for key, dtype in lib.DTYPES.items()
  ))


PLAIN = [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"min_p": 0.1}]
FILTERED = [
  *PLAIN, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.5},
  {"top_k": 20, "top_p": 0.9, "min_p": 0.2, "temperature": 2.0},
]

# Each filter alone.
EXAMPLES = [{name: row.example} for name, row in FILTERS.items()]
LOCAL = [
  {name: row.example} for name, row in FILTERS.items() if not row.gathers
]


def batch():
  rng = np.random.default_rng(0)
  logits = 3 * rng.normal(size=(S, V)).astype("f4")
  return logits, rng.integers(0, 1000, S).astype("i4")


@functools.cache
def sampler(ranks, devices, filters):
  """Returns `sample` on dense logits ``[S, V]``, and its mesh."""
  axis = Axis("tensor", ranks, devices)
  mesh = make_mesh({"tensor": axis})
  width = -(-V // ranks)

  def ours(logits, positions, sampling):
    return lib.sample(
      logits, jax.lax.axis_index("tensor") * axis.lanes * width
      + jnp.arange(axis.lanes * width).reshape(axis.lanes, width),
      positions, sampling, axis, filters,
    )

  def cut(logits, positions, sampling):
    padding = ((0, 0), (0, ranks * width - V))
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf)
    slices = jnp.moveaxis(padded.reshape(-1, ranks, width), 1, 0)
    mapped = jax.shard_map(
      ours, mesh=mesh, in_specs=(P("tensor"), P(), P()), out_specs=P()
    )
    return mapped(slices, positions, sampling)

  return jax.jit(cut), mesh


def draw(logits, positions, sampling, ranks=1, devices=1, filters=True):
  return jax.tree.map(
    np.asarray, sampler(ranks, devices, filters)[0](logits, positions, sampling)
  )


def by_hand(logits, position, row):
  """Draws by the filters of Hugging Face and the same noise, in float64."""
  logits = logits.astype("f8")
  if row.temperature == 0:
    return int(np.argmax(logits))
  z = logits / np.float64(row.temperature)
  if row.top_k:
    z = np.where(z >= np.sort(z)[-row.top_k], z, -np.inf)
  order = np.argsort(-z)
  before = np.cumsum(special.softmax(z)[order]) - special.softmax(z)[order]
  kept = np.zeros(V, bool)
  kept[order[before < np.float64(row.top_p)]] = True
  if row.top_p < 1:
    z = np.where(kept, z, -np.inf)
  share = special.softmax(z)
  z = np.where(share >= np.float64(row.min_p) * share.max(), z, -np.inf)
  # 64 bits, of which u takes 48; the word of the higher ones is first.
  counts = np.concatenate([np.zeros(V), np.arange(V)]).astype("u4")
  key = np.array([row.seed, position], np.uint32)
  words = np.asarray(jax_random.threefry_2x32(key, counts)).astype("u8")
  bits = (words[:V] << 32 | words[V:]) >> 16
  u = 1 - (bits.astype("f8") + 0.5) / 2**48
  return int(np.argmax(z - np.log(-np.log(u))))


def test_tokens_equal_those_drawn_by_hand():
  logits, positions = batch()
  sampling = rows(FILTERED)
  tokens, logprobs = draw(logits, positions, sampling)
  for i, token in enumerate(tokens[:256]):
    row = lib.Sampling(*(field[i] for field in sampling))
    assert token == by_hand(logits[i], positions[i], row), (i, row)
  # Log-probabilities of the model, without temperature and filters.
  expected = special.log_softmax(logits.astype("f8"), -1)
  expected = np.take_along_axis(expected, tokens[:, None], -1)[:, 0]
  np.testing.assert_allclose(logprobs, expected, rtol=0, atol=3e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("ranks", "devices", "filters"),
  # The last two of eight devices have only padding of the vocabulary.
  [(2, 2, True), (3, 3, False), (24, 8, True)],
)
def test_ranks_and_devices_do_not_change_tokens(ranks, devices, filters):
  logits, positions = batch()
  sampling = rows(FILTERED + EXAMPLES if filters else PLAIN + LOCAL)
  tokens, logprobs = draw(logits, positions, sampling)
  ours = draw(logits, positions, sampling, ranks, devices, filters)
  np.testing.assert_array_equal(ours[0], tokens)
  np.testing.assert_allclose(ours[1], logprobs, rtol=0, atol=2e-6)


def test_slot_and_batch_do_not_change_tokens():
  logits, positions = batch()
  sampling = rows(FILTERED)
  expected = draw(logits, positions, sampling)
  order = np.random.default_rng(1).permutation(S)[:17]  # a subset of the rows
  ours = draw(
    logits[order], positions[order], jax.tree.map(lambda x: x[order], sampling)
  )
  for mine, theirs in zip(ours, expected, strict=True):
    np.testing.assert_array_equal(mine, theirs[order])


def test_unused_filters_change_no_bit():
  logits, positions = batch()
  for a, b in zip(
    *(draw(logits, positions, rows(PLAIN + LOCAL), 2, 2, filters)
      for filters in (False, True)), strict=True,
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  "settings",
  [{"temperature": 1e-38}, *({n: f.greedy} for n, f in FILTERS.items()),
   {"temperature": 1e-38, "top_k": 3, "top_p": 0.1, "min_p": 0.9}],
  ids=str,
)
def test_limit_of_each_setting_is_greedy(settings):
  logits, positions = batch()
  greedy = draw(logits, positions, rows([{"temperature": 0.0}]))
  np.testing.assert_array_equal(greedy[0], np.argmax(logits, -1))
  ours = draw(logits, positions, rows([settings]))
  for mine, theirs in zip(ours, greedy, strict=True):
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", FILTERS)
def test_filter_removes_the_least_probable_tokens(name):
  """With equal noise, the drawn token changes only if it is removed."""
  row = FILTERS[name]
  assert all(map(row.fits, (row.neutral, row.greedy, row.example)))
  assert not row.used(row.neutral)
  assert row.used(row.example)
  logits, positions = batch()
  before, after = (
    draw(logits, positions, rows([{name: value}]))[0][:, None]
    for value in (row.neutral, row.example)
  )
  rise = np.take_along_axis(logits, after, 1) - np.take_along_axis(
    logits, before, 1
  )
  assert (rise[before != after] > 0).all()
  assert 0 < (before != after).mean() < 1
  # Filters that gather have no effect in the program without filters.
  alone = draw(logits, positions, rows([{name: row.example}]), filters=False)[0]
  np.testing.assert_array_equal(
    alone[:, None], before if row.gathers else after
  )


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (8, 4)])
def test_greedy_takes_the_lowest_id_of_equal_logits(ranks, devices):
  logits, positions = batch()
  for i, row in enumerate(logits):
    row[[i % V, (7 * i + 3) % V, V - 1]] = 20.0
  tokens, _ = draw(
    logits, positions, rows([{"temperature": 0.0}]), ranks, devices
  )
  np.testing.assert_array_equal(tokens, np.argmax(logits, -1))


@pytest.mark.parametrize("settings", [[{}], [{}, {"temperature": 1.0}]])
def test_greedy_distinguishes_adjacent_numbers(settings):
  """Applies to all-greedy batches, and to those with sampled sequences."""
  logits = np.full((S, V), -1e-3, "f4")
  best = np.arange(S) % (V - 1) + 1
  logits[:, 0] = np.nextafter(np.float32(1e-3), np.float32(0))
  logits[np.arange(S), best] = 1e-3
  settings = [{"temperature": 0.0} | row for row in settings]
  tokens, _ = draw(logits, np.zeros(S, "i4"), rows(settings))
  step = len(settings)
  np.testing.assert_array_equal(tokens[::step], best[::step])


def test_smallest_set_and_share_include_their_bounds():
  """Draws from probabilities 1/2, 1/4 and 1/8 with bounds equal to sums."""
  logits = np.full((S, V), -np.inf, "f4")
  logits[:, :4] = -np.log([1.0, 2.0, 4.0, 4.0])
  positions = np.arange(S).astype("i4")
  for settings, kept in (
    ({"top_p": 0.5}, {0}), ({"top_p": 0.501}, {0, 1}),
    ({"top_p": 0.75}, {0, 1}), ({"top_p": 0.751}, {0, 1, 2, 3}),
    ({"min_p": 0.5}, {0, 1}), ({"min_p": 0.501}, {0}),
    ({"top_k": 3}, {0, 1, 2, 3}), ({"top_k": 2}, {0, 1}),
  ):
    tokens, _ = draw(logits, positions, rows([settings]))
    assert set(tokens.tolist()) == kept, settings


# Keys and counters whose upper 23 random bits are all 0, or 24 are all 1.
RARE = [(0, 5297128), (1, 9691597), (2, 5211022), (5, 27449592), (6, 22099467)]
COMMON = [(0, 3184748), (0, 24820701), (3, 20994762)]


def test_rare_noise_has_48_random_bits():
  key, index = np.array(RARE + COMMON, "u4").T
  zeros = np.zeros_like(key)
  found = np.asarray(lib._gumbel(zeros, key, index))
  x, y = (np.asarray(w, "u8") for w in threefry.words(zeros, key, index))
  rest = (((x << 32 | y) >> 16) + 0.5) / 2.0**48
  few = len(RARE)
  assert (rest[:few] < 2.0**-23).all()
  np.testing.assert_allclose(
    found[:few], -np.log(-np.log1p(-rest[:few])), rtol=0, atol=5e-6
  )
  # The others would round to 1, which has an infinite noise.
  assert (rest[few:] > 1 - 2.0**-24).all()
  np.testing.assert_allclose(found[few:], -np.log(24 * np.log(2)), rtol=1e-6)


@pytest.mark.parametrize(
  "settings", [{}, {"temperature": 2.0}, {"top_k": 20, "top_p": 0.9}]
)
def test_tokens_have_the_distribution_of_the_model(settings):
  """Varies positions or seeds: a chi-square test with fixed draws."""
  row = np.random.default_rng(2).normal(size=V).astype("f4")
  z = row.astype("f8") / settings.get("temperature", 1.0)
  if "top_k" in settings:
    z = np.where(z >= np.sort(z)[-20], z, -np.inf)
    order = np.argsort(-z)
    probs = special.softmax(z)[order]
    z[order[np.cumsum(probs) - probs >= 0.9]] = -np.inf
  probs = special.softmax(z)
  sampling = rows([settings])
  one = np.full(S, 3)
  for seeds, positions in ((one, np.arange(S)), (np.arange(S), one)):
    tokens, _ = draw(
      np.tile(row, (S, 1)), positions.astype("i4"),
      sampling._replace(seed=seeds.astype("u4")),
    )
    found = np.bincount(tokens, minlength=V)
    assert not found[probs == 0].any()
    possible = probs > 0
    expected = S * probs[possible]
    chi_square = np.sum((found[possible] - expected) ** 2 / expected)
    assert 0.001 < special.chdtr(possible.sum() - 1, chi_square) < 0.999


def test_draws_of_adjacent_positions_and_seeds_are_independent():
  """Compares the frequency of equal tokens with 1 / V."""
  logits = np.zeros((S, V), "f4")
  at = np.arange(S).astype("i4")
  sampling = rows([{}])

  def drawn(seed, position):
    seeds = np.broadcast_to(seed, S).astype("u4")
    return draw(
      logits, np.broadcast_to(position, S).astype("i4"),
      sampling._replace(seed=seeds),
    )[0]

  first = drawn(3, at)
  for other in (drawn(4, at), np.roll(first, 1), drawn(at, 3)):
    same = (first == other).mean()  # expected: 1 / V, with a deviation of 0.004
    assert abs(same - 1 / V) < 0.015


@pytest.mark.parametrize(
  ("ranks", "devices", "filters"), [(3, 3, False), (8, 4, True)]
)
def test_sent_bytes_equal_the_formula(ranks, devices, filters):
  logits, positions = batch()
  f, mesh = sampler(ranks, devices, filters)
  entries = ledger.collectives(
    f.lower(logits, positions, rows(FILTERED)), mesh
  )
  expected = lib.sampling_reductions(
    Axis("tensor", ranks, devices), num_sequences=S, vocab_size=V,
    filters=filters,
  )
  found = {
    (e.phase, e.dtype, e.shape, e.kind): e.count for e in ledger.merge(entries)
  }
  assert found == {tuple(key): count for key, count in expected.items()}


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (3, 3), (8, 4)])
def test_top_logprobs_are_those_of_the_largest_logits(ranks, devices):
  """8 ranks have fewer tokens each than are returned; some logits are equal."""
  logits, _ = batch()
  logits = np.round(logits, 1)
  axis = Axis("tensor", ranks, devices)
  width = -(-V // ranks)
  padded = np.full((S, ranks * width), -np.inf, "f4")
  padded[:, :V] = logits
  slices = np.moveaxis(padded.reshape(S, ranks, width), 1, 0)
  ids = np.arange(ranks * width, dtype="i4").reshape(ranks, width)
  f = jax.jit(jax.shard_map(
    lambda *arrays: lib.top_logprobs(*arrays[:2], axis, arrays[2]),
    mesh=make_mesh({"tensor": axis}),
    in_specs=(P("tensor"), P("tensor"), P()), out_specs=P(),
  ))
  asked = np.zeros(S, "i4")
  asked[3] = 1  # one sequence is enough
  found = f(slices, ids, asked)
  np.testing.assert_array_equal(
    found.ids,
    np.argsort(-logits, axis=-1, stable=True)[:, : lib.NUM_TOP_TOKENS]
  )
  expected = np.sort(special.log_softmax(logits.astype("f8"), -1))[:, ::-1]
  np.testing.assert_allclose(
    found.logprobs, expected[:, : lib.NUM_TOP_TOKENS], rtol=0, atol=3e-6
  )
