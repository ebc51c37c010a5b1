"""Properties of the generation loop: tokens do not depend on batching."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference import buckets
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request, stack_sampling_params
from caatnet.inference.sampling import sample
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from caatnet.serving.generate import Generation, Speed
from tests.caatnet.inference.decoding_test import logits_without_cache, put
from tests.caatnet.models.transformer_test import (
  init_params,
  make_config,
  make_program,
)

CONTEXT, PAGE_SIZE = 24, 8
STOP = frozenset(range(0, 64, 9))

# Prompts shorter and longer than a chunk, up to one below the full context.
LENGTHS = (1, 9, 23, 4, 17, 8, 2, 12, 20, 3, 6)
SETTINGS = (
  {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5},
  {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
)


def requests():
  rng = np.random.default_rng(0)
  return [
    Request(
      tuple(rng.integers(0, 64, length).tolist()),
      Stops(3 + 5 * (i % 3), STOP if i % 2 else frozenset()),
      **SETTINGS[i % len(SETTINGS)], seed=i % 3,
    )
    for i, length in enumerate(LENGTHS)
  ]


ALONE, TOGETHER = "one at a time", "replicas, lanes on devices"
SERVER = "lanes on devices"  # used by other tests of serving
# Ranks, devices, replicas, their devices; batch, pages of a replica.
SUBJECTS = {
  ALONE: (4, 1, 1, 1, 1, 3),
  # Pages for two whole contexts only: slots wait for pages.
  TOGETHER: (4, 2, 2, 2, 3, 7),
  SERVER: (4, 2, 1, 1, 4, 8),
}


CONFIG = make_config(p=0.5, layers=1)


@functools.cache
def trained():
  """Returns parameters trained until four of five next tokens are certain."""
  program = make_program(CONFIG, 4)
  rng = np.random.default_rng(0)
  follows = rng.permutation(64)
  tokens = rng.integers(0, 64, (100, 8, 17))
  for t in range(1, 17):
    sure = rng.random((100, 8)) < 0.8
    tokens[..., t] = np.where(sure, follows[tokens[..., t - 1]], tokens[..., t])
  optimizer = optax.adam(2e-2)

  def loss(params, batch):
    return jnp.mean(program.model.scores(params, batch)["loss"])

  def step(carry, batch):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
    return (optax.apply_updates(params, updates), state), None

  def train(params, batches):
    state = optimizer.init(params)
    return jax.lax.scan(step, (params, state), batches)[0][0]

  f = jax.shard_map(
    train, mesh=program.layout.mesh,
    in_specs=(program.unpartitioned_specs, P()),
    out_specs=program.unpartitioned_specs, check_vma=False,
  )
  return jax.device_get(jax.jit(f)(init_params(program), tokens))


@functools.cache
def subject(name):
  """Returns a decoder, its program and parameters; compiled once."""
  *places, batch, num_pages = SUBJECTS[name]
  program, params = make_program(CONFIG, *places), trained()
  config = program.model.config
  shape = CacheShape(
    config.num_layers, num_pages, PAGE_SIZE,
    config.num_kv_heads // program.layout.tensor.size, config.head_width,
    "float32", "heads",
  )
  weights = make_weights(program, put(program, params), False, False)
  decoder = Decoder(program, weights, Capacity(batch, CONTEXT, PAGE_SIZE, 8),
                    shape)
  return decoder, program, params


def run(name, asked, **how):
  decoder, _, _ = subject(name)
  pieces = [""] * len(asked)

  def on_text(index, text):
    pieces[index] += text

  ended = []
  generation = Generation(
    decoder, asked, ByteTokenizer(), on_text, ended.append
  )
  found = generation.run(**how)
  assert pieces == [completion.text for completion in found]
  assert sorted(ended) == [
    i for i, completion in enumerate(found)
    if completion.reason != "interrupted"
  ]
  return found, generation


def by_hand(asked, found):
  """Returns tokens drawn from the logits of all tokens before each position."""
  _, program, params = subject(ALONE)
  more = len(LENGTHS) - len(asked)  # one shape, and thus program, for all
  asked, found = [*asked, *asked[:1] * more], [*found, *found[:1] * more]
  tokens = np.zeros((len(asked), CONTEXT), np.int32)
  for row, request, completion in zip(tokens, asked, found, strict=True):
    whole = (*request.prompt, *completion.tokens)
    row[: len(whole)] = whole
  logits = logits_without_cache(program, params, tokens)
  axis = make_program(program.model.config, 1).layout
  rows = [(i, t) for i in range(len(asked)) for t in range(CONTEXT)]

  def draw(logits, positions, sampling):
    ids = jax.lax.axis_index("tensor") + np.arange(64)[None]
    return sample(logits[None], ids, positions, sampling, axis.tensor, True)

  drawn = jax.jit(
    jax.shard_map(
      draw, mesh=axis.mesh, in_specs=(P(), P(), P()), out_specs=P()
    )
  )(
    logits.reshape(len(rows), -1), np.array([t for _, t in rows], np.int32),
    stack_sampling_params([asked[i] for i, _ in rows]),
  )
  return [np.asarray(x).reshape(len(asked), CONTEXT) for x in drawn]


def max_tokens(request):
  return min(request.stops.max_tokens, CONTEXT - len(request.prompt))


def test_tokens_equal_those_drawn_from_logits_without_a_cache():
  asked = requests()
  found, generation = run(ALONE, asked)
  tokens, logprobs = by_hand(asked, found)
  for i, (request, completion) in enumerate(zip(asked, found, strict=True)):
    first, count = len(request.prompt) - 1, len(completion.tokens)
    where = slice(first, first + count)
    assert completion.tokens == tuple(tokens[i, where])
    np.testing.assert_allclose(
      completion.logprobs, logprobs[i, where], rtol=0, atol=2e-4
    )
    # The sequence also ends at the first stop id or at its limit.
    most = max_tokens(request)
    expected = tokens[i, first : first + most]
    stopped = [t in request.stops.ids for t in expected]
    assert count == (1 + stopped.index(True) if any(stopped) else most)
    assert (completion.reason == "stop_id") == any(stopped)
  assert {c.reason for c in found} == {"stop_id", "max_tokens", "context"}
  # Sanity of the case: most tokens are likely, but they are not all equal.
  assert len({t for c in found for t in c.tokens}) > 20
  assert np.median([p for c in found for p in c.logprobs]) > -1
  speed = generation.speed
  assert speed.prompt_tokens == sum(LENGTHS)
  # The last chunk of a prompt gives a token as well. A sequence that a stop id
  # ends before its limit takes part in one more step.
  assert speed.decoded_tokens == sum(
    min(len(completion.tokens), max_tokens(request) - 1)
    if completion.reason == "stop_id" else len(completion.tokens) - 1
    for request, completion in zip(asked, found, strict=True)
  )


def test_last_token_that_top_k_keeps_can_be_drawn():
  """Covers a logit equal to the top-k threshold, without rounding."""
  asked = [Request(
    (0, 16, 11, 2, 27, 5), Stops(18), temperature=0.7, top_k=5, seed=11
  )]
  (found,), _ = run(ALONE, asked)
  tokens, logprobs = by_hand(asked, [found])
  assert found.tokens == tuple(tokens[0, 5:23])
  assert logprobs[0, 6] < -3  # the fifth


def same(ours, theirs):
  for a, b in zip(ours, theirs, strict=True):
    assert (a.text, a.tokens, a.reason) == (b.text, b.tokens, b.reason)
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_replicas_slots_and_devices_do_not_change_tokens():
  asked = requests()
  expected, _ = run(ALONE, asked)
  found, generation = run(TOGETHER, asked)
  same(found, expected)
  assert generation.speed.prompt_tokens == sum(LENGTHS)
  steps = [scheduler.counts.steps for scheduler in generation._schedulers]
  assert len(steps) > 1
  assert min(steps) > max(steps) // 2  # replicas share the requests


def test_speed_counts_all_replicas_and_omits_compilation(monkeypatch):
  def step(num_drawn, *chunks):
    return types.SimpleNamespace(
      drawing=[0] * num_drawn,
      chunks=[types.SimpleNamespace(length=length) for length in chunks],
    )

  speed = Speed()
  speed.add(types.SimpleNamespace(steps=[None, step(3), step(2)]), 1.5)
  speed.add(types.SimpleNamespace(steps=[step(4), step(2, 5, 7), None]), 2.0)
  speed.add(types.SimpleNamespace(steps=[step(1, 8), step(1)]), 3.0)
  assert speed == Speed(20, 5.0, 5, 1.5)
  decoder, _, _ = subject(ALONE)
  monkeypatch.setattr(decoder, "compile_seconds", 0.0)
  monkeypatch.setattr(decoder, "shapes", set())  # shared with other tests

  def on_text(index, text):
    decoder.compile_seconds += 1e6

  generation = Generation(
    decoder, [Request((1, 2), Stops(4))], ByteTokenizer(), on_text
  )
  generation.run()
  speed = generation.speed
  # Compilation after the last token is not in the time of any step.
  assert speed.prompt_seconds + speed.decode_seconds == (
    pytest.approx(-3e6, rel=1e-2)
  )


def test_order_of_requests_does_not_change_tokens():
  """Reversal gives each request another slot, other pages and neighbours."""
  asked = requests()
  expected, _ = run(TOGETHER, asked)
  found, _ = run(TOGETHER, asked[::-1])
  same(found[::-1], expected)


def test_interrupt_returns_the_tokens_drawn_so_far():
  asked = requests()
  expected, _ = run(TOGETHER, asked)
  calls = iter(range(99))
  found, _ = run(TOGETHER, asked, interrupted=lambda: next(calls) == 6)
  reasons = [completion.reason for completion in found]
  assert {"interrupted"} < set(reasons)
  for ours, whole in zip(found, expected, strict=True):
    count = len(ours.tokens)
    if ours.reason == "interrupted":
      assert count < len(whole.tokens)
    assert ours.tokens == whole.tokens[:count]
    assert whole.text.startswith(ours.text) or "\ufffd" in ours.text
  # The interrupted run leaves no state for the next one.
  again, _ = run(TOGETHER, asked)
  assert [c.tokens for c in again] == [c.tokens for c in expected]


@pytest.mark.parametrize(("length", "num_chunks"), [(8, 1), (9, 2), (23, 3)])
def test_prompt_is_read_in_whole_chunks(length, num_chunks):
  """A step reads up to `Capacity.chunk` tokens, here 8."""
  steps = []
  asked = Request(tuple(range(length)), Stops(24), temperature=1.0, top_k=5)
  (found,), _ = run(ALONE, [asked], interrupted=lambda: steps.append(1))
  # The last chunk draws a token, and the last call waits for the last step.
  assert len(steps) == num_chunks + len(found.tokens) - 1 + 1


def test_one_program_is_compiled_per_shape():
  """Runs greedy and sampled requests in the same batch."""
  decoder, _, _ = subject(ALONE)
  asked = requests()
  run(ALONE, asked)
  # One shape reads a chunk, and one decodes.
  assert len(decoder.shapes) == 2
  run(ALONE, asked[::-1])
  assert len(decoder.shapes) == 2


def test_first_token_does_not_wait_for_the_program_of_the_next_step(
  monkeypatch
):
  decoder, _, _ = subject(ALONE)
  monkeypatch.setattr(decoder, "shapes", set())
  compiled = []
  Generation(
    decoder, [Request((1, 2), Stops(4))], ByteTokenizer(),
    lambda index, text: compiled.append(len(decoder.shapes)),
  ).run()
  assert compiled == [1, 2, 2, 2]


def test_growing_block_tables_do_not_change_tokens(monkeypatch):
  """Compares tables that start at one page with tables of all pages."""
  asked = [
    Request(tuple(range(PAGE_SIZE)), Stops(16), temperature=1.0, top_k=5)
  ]
  expected, _ = run(ALONE, asked)
  monkeypatch.setattr(buckets, "SHORT", PAGE_SIZE)
  decoder, _, _ = subject(ALONE)
  monkeypatch.setattr(decoder, "shapes", set())
  same(Generation(decoder, asked, ByteTokenizer()).run(), expected)
  assert {sizes[3][-1] for sizes, *_ in decoder.shapes} == {1, 2, 3}


def test_cache_larger_than_memory_is_refused_with_its_size():
  decoder, program, _ = subject(ALONE)
  shape = dataclasses.replace(decoder.cache_shape, num_pages=10**9)
  with pytest.raises(ValueError, match=r"takes 512\.0 GB, more than"):
    Decoder(program, decoder.weights, decoder.capacity, shape)


@pytest.mark.parametrize(
  ("prompt", "message"),
  [((1,) * 24, "prompt 2: the prompt has 24 tokens, which leaves no room in "
    "config.inference.context=24"),
   ((1, 64), "prompt 2: the prompt has the token 64; tokens must lie in")],
)
def test_invalid_prompt_is_refused_before_any_prompt_is_read(
  prompt, message
):
  decoder, _, _ = subject(ALONE)
  with pytest.raises(ValueError, match=message):
    Generation(
      decoder, [Request((1,), Stops(1)), Request(prompt, Stops(1))],
      ByteTokenizer()
    )


def test_nan_logits_of_a_diverged_model_raise(monkeypatch):
  decoder, _, _ = subject(ALONE)
  nan = jax.tree.map(lambda x: x * np.nan, decoder.weights.params)
  monkeypatch.setattr(
    decoder, "weights", dataclasses.replace(decoder.weights, params=nan)
  )
  with pytest.raises(ValueError, match="prompt 1: the model's logits are"):
    run(ALONE, requests())
