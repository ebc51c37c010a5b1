"""Generation is drawing token by token without a cache, on a trained model."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from caatnet.data.tokenizers import Bytes
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.generate import Generation
from caatnet.inference.requests import Request, stacked
from caatnet.inference.sampling import sample
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from tests.caatnet.inference.decoding_test import TOLERANCE, put
from tests.caatnet.models.transformer_test import (
  init_params,
  make_config,
  make_program,
)

CONTEXT, VOCAB = 32, 64


@functools.cache
def trained(replicas=1, devices=1):
  """A model of text with structure, so that tokens vary and most are sure."""
  config = make_config(0.5, sliding_window=9, num_kv_heads=4)
  program = make_program(config, 4, devices, replicas, 1)
  if replicas > 1 or devices > 1:
    return program, trained()[1]
  rng = np.random.default_rng(0)
  follows = rng.permutation(VOCAB)
  tokens = rng.integers(0, VOCAB, (150, 8, 17))
  for t in range(1, 17):
    sure = rng.random((150, 8)) < 0.8
    tokens[..., t] = np.where(sure, follows[tokens[..., t - 1]], tokens[..., t])
  optimizer = optax.adam(1e-2)

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
    train, mesh=program.layout.mesh, in_specs=(program.whole_specs, P()),
    out_specs=program.whole_specs, check_vma=False,
  )
  return program, jax.device_get(jax.jit(f)(init_params(program), tokens))


def make_decoder(program, params, num_pages=24, chunk=6):
  capacity = Capacity(batch=3, context=CONTEXT, page_size=4, chunk=chunk)
  shape = CacheShape(2, num_pages, 4, 1, 4, "float32", "heads")
  weights = make_weights(program, put(program, params), True, False)
  return Decoder(program, weights, capacity, shape)


def make_requests(number=11):
  rng = np.random.default_rng(3)
  return [
    Request(
      tuple(rng.integers(0, VOCAB, rng.integers(1, 16)).tolist()),
      Stops(int(rng.integers(1, 18)), frozenset([7] if i % 4 == 0 else [])),
      temperature=0.7 * (i % 2), seed=i,
    )
    for i in range(number)
  ]


@functools.cache
def without_cache():
  """A function of tokens, positions and draws: next tokens, and margins."""
  program, params = trained()

  def draw(params, tokens, positions, sampling):
    model = program.model
    logits = model.logits(params, tokens)  # [R, B, T, V]
    last = logits[:, jnp.arange(tokens.shape[0]), positions]  # [R, B, V]
    drawn, logprobs = sample(
      last, model.token_ids(), positions, sampling, program.layout.tensor,
      False,
    )
    every = jax.lax.all_gather(last, "tensor", axis=0, to="invarying")
    two = jax.lax.top_k(jnp.concatenate([*every.reshape(4, -1, 16)], -1), 2)[0]
    return drawn, logprobs, two[:, 0] - two[:, 1]

  f = jax.shard_map(
    draw, mesh=program.layout.mesh,
    in_specs=(program.whole_specs, P(), P(), P()), out_specs=P(),
  )
  return functools.partial(jax.jit(f), params)


def expected(requests):
  """Each request's tokens, log-probabilities and margins of greedy choices."""
  texts = [list(r.prompt) for r in requests]
  found = [[] for _ in requests]
  for _ in range(CONTEXT):
    tokens = np.zeros((len(texts), CONTEXT), np.int32)
    for row, text in zip(tokens, texts, strict=True):
      row[: len(text)] = text[:CONTEXT]
    positions = np.array([min(len(t), CONTEXT) - 1 for t in texts], np.int32)
    drawn = without_cache()(tokens, positions, stacked(requests))
    for text, rows, *values in zip(
      texts, found, *map(np.asarray, drawn), strict=True
    ):
      text.append(int(values[0]))
      rows.append(values)
  return found


def expect(completions, requests):
  """They are what is drawn without a cache, up to the first near tie."""
  ties = 0
  for request, completion, rows in zip(
    requests, completions, expected(requests), strict=True
  ):
    for token, logprob, (other, other_logprob, margin) in zip(
      completion.tokens, completion.logprobs, rows, strict=False
    ):
      if token != other:
        assert request.temperature == 0
        assert margin <= 2 * TOLERANCE
        ties += 1
        break
      assert logprob == pytest.approx(other_logprob, abs=TOLERANCE)
    drawn, stops = completion.tokens, request.stops
    assert 7 not in drawn[:-1] or not stops.ids
    assert len(drawn) == min(stops.max_tokens, CONTEXT) or drawn[-1] == 7
  assert ties == 0  # of these few tokens; 1 in 10,000 may be
  assert len({t for c in completions for t in c.tokens}) > 20
  assert np.mean([p for c in completions for p in c.logprobs]) > -1.5


def test_tokens_are_those_drawn_without_a_cache():
  requests = make_requests()
  decoder = make_decoder(*trained())
  completions = Generation(decoder, requests, Bytes()).run()
  expect(completions, requests)
  # Few shapes: no, one or all decodes, with a chunk or without.
  shapes = set(decoder.shapes)
  assert len(shapes) <= 5
  # What the cache holds of others does not matter, nor does the order.
  again = Generation(decoder, requests[::-1], Bytes()).run()
  assert [c.tokens for c in again[::-1]] == [c.tokens for c in completions]
  assert decoder.shapes == shapes


def test_replicas_with_few_pages_draw_the_same_tokens():
  # A request of 8 pages waits until all others have ended.
  requests = make_requests()
  decoder = make_decoder(*trained(2, 4), num_pages=8, chunk=16)
  expect(Generation(decoder, requests, Bytes()).run(), requests)
