"""The engine on a real cache: each request gets what it would get alone.

Pages that nobody may read are overwritten with NaN at every turn, and copies
end late, at random. So a page that is read too early, too late or in another's
place gives NaN, or other tokens.
"""

import functools
import math
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from caatnet.data.tokenizers import Bytes
from caatnet.inference.generate import Generation
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.serving.device import DecoderExecutor, Drawn
from caatnet.serving.engine import Engine
from caatnet.serving.host import Host
from caatnet.serving.pages import Pages
from caatnet.serving.policies import registry
from caatnet.serving.priorities import Priorities
from caatnet.serving.requests import ENDS, Request, State
from caatnet.serving.scheduler import Limits, Scheduler
from tests.caatnet.inference import generate_test
from tests.caatnet.inference.generate_test import CONTEXT, PAGE_SIZE
from tests.caatnet.serving.scheduler_test import drawn

SETTINGS = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5})


@functools.cache
def subject(name):
  """A decoder that no other test uses, so that the shapes it saw are ours."""
  return generate_test.subject.__wrapped__(name)[0]


def alone(requests):
  """What follows each of them in runs of one at a time."""
  drawings = [request.payload.drawing for request in requests]
  decoder = subject(generate_test.ALONE)
  return Generation(decoder, drawings, Bytes()).run()


class Late(DecoderExecutor):
  """Its copies take their time, up to that of several steps."""

  def __init__(self, decoder, num_host_pages, rng):
    super().__init__(decoder, num_host_pages)
    self._rng = rng

  def _begin(self, pool, work):
    late_s = self._rng.exponential(4e-3) if pool is self._copies else 0.0

    def later():
      time.sleep(late_s)
      return work()

    super()._begin(pool, later)


class Run:
  """A random schedule on the decoder of `generate_test`."""

  def __init__(self, case):
    self.rng = np.random.default_rng(case["seed"])
    decoder = subject(generate_test.SERVER)
    shape = decoder.cache_shape
    self.pages = Pages(shape.num_pages, PAGE_SIZE)
    self.executor = Late(decoder, 20, self.rng)
    self.scheduler = Scheduler(
      case["limits"], registry.make(case["policy"], self.pages), self.pages,
      Host(20, PAGE_SIZE, reserve=True), self.executor.costs,
    )
    self.engine = Engine(self.scheduler, self.executor)
    self.priorities = Priorities("random", 0.1, 3, case["seed"])
    self.requests, self.spoilt = [], set()
    self.spoil()

  def add(self, prompt, conversation=None):
    most = int(self.rng.integers(1, CONTEXT - len(prompt) + 1))
    drawing = Drawing(
      tuple(prompt), Stops(most, generate_test.STOP), seed=len(self.requests),
      **SETTINGS[len(self.requests) % len(SETTINGS)],
    )
    request = Request(
      len(self.requests), prompt, most, arrival_s=self.executor.now(),
      client=int(self.rng.integers(3)), priority=self.priorities.first(),
      conversation=conversation, more=conversation is not None,
      ends=generate_test.STOP.__contains__, payload=Drawn(drawing),
    )
    self.requests.append(request)
    self.scheduler.add(request)

  def spoil(self):
    """Overwrites what has become free since the last call."""
    pages = self.pages
    free = {
      page for page in range(pages.num_pages)
      if not pages._holders[page] and page not in pages._idle
      and page not in pages._waiting
    }
    for page in free - self.spoilt:
      self.executor.host.spoil(page, 1)
    self.spoilt = free

  def play(self, count):
    common = self.rng.integers(0, 64, PAGE_SIZE).tolist()
    talked = set()
    while count or not self.engine.idle:
      if count and self.rng.random() < 0.3:
        count -= 1
        own = self.rng.integers(0, 64, self.rng.integers(1, 8)).tolist()
        shared = common if self.rng.random() < 0.5 else []
        talk = len(self.requests) if self.rng.random() < 0.5 else None
        self.add(shared + own, talk)
      if self.priorities.due():
        for r in self.priorities.update(self.scheduler.requests):
          self.scheduler.policy.update(r)
      if self.requests and self.rng.random() < 0.02:
        self.scheduler.cancel(
          self.requests[self.rng.integers(len(self.requests))],
          self.executor.now(),
        )
      self.engine.turn(self.executor.now() + 1e-3 if count else math.inf)
      self.spoil()
      self.pages.check()
      for r in self.requests:
        if r.more and r.state is State.FINISHED and r.number not in talked:
          talked.add(r.number)
          prompt = [*r.prompt.tolist(), *r.tokens, 5]
          if len(prompt) < CONTEXT:
            self.add(prompt, r.conversation)


CASE = st.fixed_dictionaries({
  "seed": st.integers(0, 2**32 - 1),
  "policy": st.sampled_from(sorted(registry.POLICIES)),
  "limits": st.builds(
    Limits, slots=st.sampled_from([2, 4]), tokens=st.just(12),
    chunk=st.just(8), chunks=st.just(1),
    preempt=st.sampled_from(["recompute", "swap", "swap", "cost"]),
    wait_s=st.sampled_from([0.0, 100.0]), keep_turns=st.booleans(),
    copy_on_write=st.booleans(),
  ),
})


@given(case=CASE)
@drawn(10)
def test_everyone_gets_what_a_run_alone_gives(case):
  run = Run(case)
  run.play(10)
  run.executor.close()
  for request, expected in zip(
    run.requests, alone(run.requests), strict=True
  ):
    assert request.state in ENDS
    count = len(request.tokens)
    if request.state is State.FINISHED:
      assert count == len(expected.tokens)
    assert request.tokens == list(expected.tokens[:count])
    np.testing.assert_allclose(
      request.payload.logprobs[:count], expected.logprobs[:count], rtol=0,
      atol=2e-4,
    )
  assert run.pages.num_available == run.pages.num_pages
