"""Warm-up compiles every shape that serving executes."""

import collections
import dataclasses
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from caatnet.config import serving
from caatnet.inference import batches, buckets, copies
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.device import SamplingState
from caatnet.serving.engine.engine import replay
from caatnet.serving.options import DEFAULTS
from caatnet.serving.requests import Request, State
from tests.caatnet.serving.small_server import CONTEXT, PAGES, decoder


@pytest.mark.parametrize("chunk", [1, 8, 16, 17, 64, 100, 256, 512, 3000])
@pytest.mark.parametrize("batch", [1, 2, 3, 16, 100])
def test_shape_of_any_step_is_among_the_compiled_ones(chunk, batch):
  capacity = Capacity(batch, 4096, 64, chunk)
  known = warm_up.shapes(
    SimpleNamespace(capacity=capacity), serving.BATCH_SIZE_FACTOR
  )
  table = buckets.chunk_sizes(chunk, batch)
  assert table[0] == (1, chunk)
  assert len(table) > 1 or batch == 1 or chunk < 4 * buckets.MIN_CHUNK
  for most, longest in table:
    assert most * longest <= chunk
    for count in range(1, min(most, batch) + 1):
      for length in {1, longest // 5 + 1, longest}:
        for decodes in {0, 1, batch}:
          for context in (1, 1024, 1025, 4096):
            sizes = batches.sizes_of(
              capacity, np.full(decodes, context), [(0, length)] * count,
              serving.BATCH_SIZE_FACTOR,
            )
            assert sizes in known


def _without_weights(known):
  """Returns a decoder like a given one, with shapes instead of weights."""
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    known.weights.params,
  )
  return Decoder(
    known.program, dataclasses.replace(known.weights, params=shapes),
    known.capacity, known.cache_shape,
  )


def test_steps_run_programs_compiled_before_the_weights_were_there(caplog):
  known, compiled = decoder(), []
  model = _without_weights(known)
  with warm_up.compile_in_background(
    model, serving.BATCH_SIZE_FACTOR,
    lambda steps, count: compiled.extend([*steps, count])
  ):
    model.weights = known.weights
  assert "_state" not in vars(model)  # memory for reading
  model.cache  # noqa: B018 (allocated by a program of its own)
  with jax.log_compiles():
    ran = list(warm_up.warm_up(model, serving.BATCH_SIZE_FACTOR))
  assert compiled == [*ran, len(ran)]
  assert ran == warm_up.shapes(model, serving.BATCH_SIZE_FACTOR)
  assert not [x for x in caplog.messages if "XLA compilation" in x]
  with jax.log_compiles():  # the same steps, compiled by their first call
    list(warm_up.warm_up(_with_weights(known), serving.BATCH_SIZE_FACTOR))
  assert len([x for x in caplog.messages if "XLA compilation" in x]) >= len(ran)


def _with_weights(known):
  model = _without_weights(known)
  model.weights = known.weights
  return model


def test_failed_read_ends_the_compilation():
  model, started, compiled = _without_weights(decoder()), threading.Event(), []

  def progress(steps, count):
    for step in steps:
      compiled.append(step)
      started.set()

  def read():
    assert started.wait(600)
    raise ValueError("damaged")

  compiling = warm_up.compile_in_background(
    model, serving.BATCH_SIZE_FACTOR, progress
  )
  with pytest.raises(ValueError, match="damaged"), compiling:
    read()
  assert 0 < len(compiled) < len(
    warm_up.shapes(model, serving.BATCH_SIZE_FACTOR)
  )


def test_page_copies_are_compiled_without_swap():
  """Also covers a chunk longer than the context."""
  model = decoder()
  model.capacity = dataclasses.replace(model.capacity, chunk=2 * CONTEXT)
  programs = copies.make_copy_functions(model.program, model.cache_shape)
  for program in programs:
    program.clear_cache()
  options = dataclasses.replace(DEFAULTS, preempt="recompute", keep_turns=False)
  calibrate(serving.engine(model, options).executor)
  assert [program._cache_size() for program in programs] == [1, 1]


def test_no_program_is_compiled_while_serving(monkeypatch):
  """Several short prompts, copies of many lengths both ways."""
  monkeypatch.setattr(buckets, "MIN_CHUNK", 4)
  model = decoder()
  model.shapes = set()  # shared with other tests
  options = dataclasses.replace(DEFAULTS, preempt="swap", host_pages=PAGES)
  engine = serving.engine(model, options)
  warm_up.prepare(
    engine, lambda steps, _: collections.deque(steps, maxlen=0)
  )
  programs = copies.make_copy_functions(model.program, model.cache_shape)
  before = set(model.shapes), [f._cache_size() for f in programs]
  rng = np.random.default_rng(0)
  requests = []

  def serve(longest, count):
    """Serves prompts of lengths up to `longest` concurrently."""
    first = len(requests)
    for number in range(first, first + count):
      prompt = rng.integers(60, size=int(rng.integers(1, longest)))
      drawing = Drawing(tuple(prompt.tolist()), Stops(CONTEXT - len(prompt)))
      requests.append(Request(
        number, prompt, CONTEXT - len(prompt), payload=SamplingState(drawing)
      ))
    replay(engine, requests[first:])

  serve(CONTEXT - 30, 12)
  serve(4, 4)
  serve(4, 1)
  assert all(r.state is State.FINISHED for r in requests)
  counts = engine.scheduler.counts
  assert counts.preemptions["swap"] > 1, counts
  assert before == (model.shapes, [f._cache_size() for f in programs])
