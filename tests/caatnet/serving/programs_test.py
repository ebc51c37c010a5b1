"""Programs of a server: no stream waits for the compiler, or has other bits.

A program that is compiled while serving stops no running stream. With
``batch_invariant`` the tokens of a request, and the bits of their
log-probabilities, do not depend on other requests.
"""

import dataclasses
import functools
import itertools
import threading

import jax
import numpy as np

from caatnet.config import serving
from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.scoring import Scorer
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.device import SamplingState
from caatnet.serving.generate import Generation
from caatnet.serving.options import DEFAULTS
from caatnet.serving.requests import Request, State
from tests.caatnet.inference.decoding_test import put
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)

CONTEXT, PAGE_SIZE = 96, 8


@functools.cache
def small(dtype, batch, pages, **changes):
  """Returns a decoder that has no program yet."""
  program = make_program(make_config(1.0, 1, dtype=dtype, **changes), 1)
  config = program.model.config
  shape = CacheShape(
    config.num_layers, pages, PAGE_SIZE, config.num_kv_heads,
    config.head_width, dtype, "heads",
  )
  weights = make_weights(program, put(program, draw_params(program)), True,
                         False)
  return Decoder(
    program, weights, Capacity(batch, CONTEXT, PAGE_SIZE, 32), shape
  )


def request(number, length, count, **sampling):
  """Returns a request, greedy by default; its prompt depends on its number."""
  prompt = np.random.default_rng(number).integers(60, size=length)
  drawing = Drawing(
    tuple(prompt.tolist()), Stops(count), **{"temperature": 0.0} | sampling
  )
  return Request(number, prompt, count, payload=SamplingState(drawing))


class Compiler:
  """Compiler of a decoder that waits before each program.

  Attributes:
    begun: Whether a program is being compiled, or waits for that.
    go: Whether programs may be compiled.
    error: Raised instead of compiling, if set.
  """

  def __init__(self, decoder):
    self.begun, self.go, self.error = threading.Event(), threading.Event(), None
    self._compile, decoder.compile = decoder.compile, self

  def __call__(self, *arguments):
    self.begun.set()
    assert self.go.wait(60), "the running stream got no tokens"
    if self.error:
      raise self.error
    self._compile(*arguments)


def check_greedy(decoder, requests):
  """Compares drawn tokens with one forward pass without a cache."""
  scorer = Scorer(decoder.program, decoder.weights, CONTEXT, 2)
  rows = [x.all_tokens() for x in requests]
  for x, scores in zip(requests, scorer.score(rows), strict=True):
    assert x.state is State.FINISHED
    assert len(x.tokens) == x.max_tokens
    assert scores.greedy[len(x.prompt) - 1 :].all()


def cold():
  """Returns an idle engine that compiles on demand, and its compiler."""
  known = small("float32", 4, 48)
  decoder = Decoder(
    known.program, known.weights, known.capacity, known.cache_shape
  )
  engine, compiler = serving.engine(decoder, DEFAULTS), Compiler(decoder)
  warm_up.prepare(engine, None)
  return engine, compiler


def until(engine, done):
  """Steps an engine until a condition holds."""
  while not done():
    engine.step()
  return True


def settle(engine):
  """Waits until no program is being compiled."""
  engine.executor.programs._thread.submit(lambda: None).result()


def test_copies_are_measured_without_warm_up():
  """Copies that cost 0 are never worse than a prompt that is read again."""
  engine, _ = cold()
  costs = engine.executor.costs
  assert all(costs.copy_s(kind, 1, 1) > 0 for kind in ("in", "out"))


def test_stream_goes_on_while_a_new_shape_is_compiled(caplog):
  engine, compiler = cold()
  first, second = request(0, 5, 60), request(1, 40, 9)
  compiler.go.set()
  engine.scheduler.add(first)
  until(engine, lambda: len(first.tokens) > 3)
  settle(engine)
  compiler.go.clear()
  compiler.begun.clear()
  engine.scheduler.add(second)  # two decodes, longer chunks
  until(engine, lambda: compiler.begun.is_set() and len(first.tokens) > 20)
  assert second.state is State.WAITING
  compiler.go.set()
  settle(engine)  # both requests run from here on
  with jax.log_compiles():  # by this thread, which submits the steps
    until(engine, lambda: engine.idle)
  check_greedy(engine.executor.decoder, [first, second])
  engine.executor.close()
  assert not [x for x in caplog.messages if "XLA compilation" in x]


def test_error_of_the_compiler_fails_only_its_request():
  engine, compiler = cold()
  first, second, third = (
    request(0, 5, 60), request(1, 40, 9), request(1, 40, 9)
  )
  compiler.go.set()
  engine.scheduler.add(first)
  until(engine, lambda: len(first.tokens) > 3)
  settle(engine)
  compiler.error = RuntimeError("no memory")
  engine.scheduler.add(second)
  until(engine, lambda: second.state is State.FAILED)
  assert second.error.endswith(": no memory")
  compiler.error = None
  engine.scheduler.add(third)  # compiles the program again
  until(engine, lambda: engine.idle)
  check_greedy(engine.executor.decoder, [first, third])
  engine.executor.close()


def served(decoder, options, requests):
  """Returns tokens and log-probabilities by number, and preemptions.

  One request arrives per three turns of the engine.
  """
  engine, coming = serving.engine(decoder, options), list(requests)
  for turn in itertools.count():
    if coming and not turn % 3:
      engine.scheduler.add(coming.pop(0))
    if not coming and engine.idle:
      break
    engine.step(engine.executor.now())
  engine.executor.close()
  assert all(x.state is State.FINISHED for x in requests)
  found = {
    x.number: (x.tokens, x.payload.logprobs[: x.max_tokens]) for x in requests
  }
  return found, engine.scheduler.counts.preemptions


LENGTHS = (5, 40, 17, 33, 9, 26, 70, 12)


@functools.cache
def invariant():
  """Returns a decoder whose bits otherwise depend on the batch."""
  known = small("bfloat16", 8, 24, width=256)
  return Decoder(
    known.program, known.weights,
    dataclasses.replace(known.capacity, chunk=8, batch_invariant=True),
    known.cache_shape,
  )


def test_requests_are_the_same_bits_alone_and_in_any_batch():
  decoder, rng = invariant(), np.random.default_rng(0)
  recompute, swap = (
    dataclasses.replace(DEFAULTS, preempt=name, host_pages=48)
    for name in ("recompute", "swap")
  )
  alone = {}
  for number, length in enumerate(LENGTHS):  # nothing is in the cache
    alone |= served(decoder, recompute, [request(number, length, 24)])[0]
  for options in (recompute, swap):
    others = [  # in the same steps; the last one shares a prefix
      request(8, 30, 30, temperature=1.0, top_p=0.8), request(1, 40, 9),
    ]
    others[-1].number = 9
    mine = [request(i, LENGTHS[i], 24) for i in rng.permutation(8)]
    found, preemptions = served(decoder, options, [*others, *mine])
    assert preemptions[options.preempt]
    assert {i: found[i] for i in alone} == alone
    assert len(decoder.shapes) == 1


def test_generated_texts_are_the_same_bits_alone_and_together():
  decoder = invariant()
  asked = [
    request(i, length, 24, **[{}, {"temperature": 1.0, "top_p": 0.8}][i % 2])
    .payload.drawing for i, length in enumerate(LENGTHS)
  ]
  alone = [Generation(decoder, [x], ByteTokenizer()).run()[0] for x in asked]
  assert Generation(decoder, asked, ByteTokenizer()).run() == alone
