"""What is compiled before serving is all that serving runs."""

import collections
import dataclasses

import numpy as np

from caatnet.build import serving
from caatnet.inference import buckets, copies
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.serving import warm_up
from caatnet.serving.device import Drawn
from caatnet.serving.engine import replay
from caatnet.serving.options import DEFAULTS
from caatnet.serving.requests import Request, State
from tests.caatnet.serving.small_server import CONTEXT, PAGES, decoder


def test_nothing_is_compiled_while_it_serves(monkeypatch):
  """Long contexts, several short prompts, copies of many lengths both ways."""
  monkeypatch.setattr(buckets, "SHORT", CONTEXT // 2)
  monkeypatch.setattr(buckets, "MIN_CHUNK", 4)
  model = decoder()
  model.shapes = set()  # other tests share it
  options = dataclasses.replace(DEFAULTS, preempt="swap", host_pages=PAGES)
  engine = serving.engine(model, options)
  warm_up.prepare(
    engine.executor, lambda steps, _: collections.deque(steps, maxlen=0)
  )
  programs = copies.make_copies(model.program, model.cache_shape)
  before = set(model.shapes), [f._cache_size() for f in programs]
  rng = np.random.default_rng(0)
  requests = []
  for number in range(16):
    longest = 4 if number % 4 > 1 else CONTEXT - 30
    prompt = rng.integers(60, size=int(rng.integers(1, longest)))
    drawing = Drawing(tuple(prompt.tolist()), Stops(CONTEXT - len(prompt)))
    requests.append(Request(
      number, prompt, CONTEXT - len(prompt), payload=Drawn(drawing)
    ))
  replay(engine, requests[:-1])
  replay(engine, requests[-1:])  # a short prompt, and nothing beside it
  assert all(r.state is State.FINISHED for r in requests)
  counts = engine.scheduler.counts
  assert counts.preemptions["swap"] > 1, counts
  assert before == (model.shapes, [f._cache_size() for f in programs])
