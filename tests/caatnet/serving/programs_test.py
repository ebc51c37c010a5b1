"""Programs that are compiled while serving stop no running stream."""

import copy
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.config import serving
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.scoring import Scorer
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.device import Drawn
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


def fresh(*subject):
  """Returns a decoder with its own cache that shares the compiled programs."""
  found = copy.copy(small(*subject))
  found._state = jax.tree.map(jnp.copy, found._state)
  return found


def request(number, length, count, **options):
  """Returns a greedy request, whose prompt depends on its number only."""
  prompt = np.random.default_rng(number).integers(60, size=length)
  drawing = Drawing(tuple(prompt.tolist()), Stops(count), temperature=0.0)
  return Request(number, prompt, count, payload=Drawn(drawing), **options)


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
