"""Serving engine on a real cache: tokens equal those of one forward pass.

The reference has no cache: it computes the logits of all tokens at once. Pages
that no sequence may read are overwritten with NaN at every turn, and copies
end after random delays. A page that is read too early, too late or from the
wrong place therefore gives NaN or other tokens.
"""

import copy
import dataclasses
import functools
import itertools
import math
import time

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.config import nanobatches
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.requests import stack_sampling_params
from caatnet.inference.sampling import sample
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.device import DecoderExecutor, SamplingState
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.executor import Chunk, Copy, EngineStep
from caatnet.serving.requests import FINAL_STATES, Request, State
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.priorities import Priorities
from caatnet.serving.scheduler.scheduler import Scheduler
from tests.caatnet.inference.decoding_test import put
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)
from tests.caatnet.serving.scheduler_test import SOAK, drawn

CONTEXT, PAGE_SIZE, NUM_PAGES, SLOTS = 24, 4, 13, 3
STOP = frozenset(range(0, 64, 9))
SETTINGS = ({}, {"temperature": 1.0})
MOST = 32  # Most requests of a schedule.

# (p, tensor ranks, devices, layers, nano-batches): lanes on two devices, and
# two layers, as copies must cover every layer.
SUBJECTS = ((0.5, 4, 2, 2, 1), (0.5, 4, 2, 2, 2))
if SOAK:
  SUBJECTS = [
    (p, ranks, devices, 2, 1 + (ranks > 1))
    for p, ranks in itertools.product((0.0, 0.25, 0.5, 1.0), (1, 2, 4, 8))
    for devices in (1, 2, 4, 8) if devices <= ranks
  ]


@functools.cache
def subject(p, ranks, devices, layers, pieces=1):
  """Returns a compiled decoder."""
  config = make_config(p, layers)
  program = make_program(config, ranks, devices)
  params = draw_params(program)
  shape = CacheShape(
    config.num_layers, NUM_PAGES, PAGE_SIZE, config.num_kv_heads // ranks,
    config.head_width, "float32", "heads",
  )
  weights = make_weights(program, put(program, params), False, False)
  capacity = Capacity(SLOTS, CONTEXT, PAGE_SIZE, 8)
  cuts = nanobatches.build(str(pieces), "", program, shape, SLOTS)
  return Decoder(program, weights, capacity, shape, cuts)


def fresh(subject_):
  """Returns a decoder with its own cache that shares the compiled programs."""
  found = copy.copy(subject(*subject_))
  found._state = jax.tree.map(jnp.copy, found._state)
  return found


@functools.cache
def forward(p, ranks, layers):
  """Returns a function: tokens ``[B, T]``, sampling -> next token of each."""
  program = make_program(make_config(p, layers), ranks)
  model, tensor = program.model, program.layout.tensor
  params = put(program, draw_params(program))

  def draw(params, tokens, sampling):
    logits = model.logits(params, tokens)  # [ranks, B, T, slice]
    positions = np.tile(np.arange(tokens.shape[1], dtype="i4"), len(tokens))
    return sample(
      logits.reshape(ranks, positions.size, -1), model.token_ids(), positions,
      sampling, tensor, False,
    )

  f = jax.jit(jax.shard_map(
    draw, mesh=program.layout.mesh,
    in_specs=(program.unpartitioned_specs, P(), P()), out_specs=P(),
  ))
  return functools.partial(f, params)


def alone(subject_, requests):
  """Returns next tokens and log-probabilities of one forward without cache."""
  p, ranks, _, layers, _ = subject_
  tokens = np.zeros((MOST, CONTEXT), np.int32)
  for row, request in zip(tokens, requests, strict=False):
    whole = request.all_tokens()
    row[: len(whole)] = whole
  asked = [r.payload.drawing for r in requests]
  asked += [None] * (MOST - len(asked))
  found = forward(p, ranks, layers)(
    tokens, stack_sampling_params([r for r in asked for _ in range(CONTEXT)])
  )
  return [np.asarray(x).reshape(MOST, CONTEXT) for x in found]


class Watched(DecoderExecutor):
  """Executor with slow copies that asserts that no step conflicts with one."""

  def __init__(self, decoder, num_host_pages, rng):
    super().__init__(decoder, num_host_pages)
    self._rng, self._open = rng, {}
    # Copies of a layer at a time, of a few, or whole.
    self.host.part_bytes = int(rng.choice([1, 2000, self.host.part_bytes]))

  def copy(self, copy):
    self._open[copy.number] = copy
    super().copy(copy)

  def wait(self, until_s):
    events = super().wait(until_s)
    for event in events:
      assert not event.failed, "a step has read an unreadable page"
      if event.copy is not None:
        self._open.pop(event.copy.number, None)
    return events

  def submit(self, step):
    for number in step.after:  # the step, and each later one, waits for these
      self._open.pop(number, None)
    parts = [(s, t, 1) for s, t in zip(step.slots, step.positions, strict=True)]
    parts += [(c.request.slot, c.start, c.length) for c in step.chunks]
    for slot, start, count in parts:
      table = step.tables[slot]
      pages = table[: -(-(start + count) // PAGE_SIZE)].tolist()
      read, written = set(pages), set(pages[start // PAGE_SIZE :])
      for under_way in self._open.values():
        if under_way.kind != "in":
          assert not written & set(under_way.source), "written under a copy"
        if under_way.kind != "out":
          assert not read & set(under_way.target), "read before it is there"
    super().submit(step)

  def shares_memory(self):
    """Returns whether a page of the host cache aliases one of the device."""
    return any(
      np.shares_memory(kept, np.asarray(shard.data))
      for kept, x in zip(
        self.host.arrays, jax.tree.leaves(self.decoder.cache.pages), strict=True
      )
      for shard in x.addressable_shards
    )

  def _begin(self, work):
    late_s = self._rng.exponential(4e-3)

    def later():
      time.sleep(late_s)
      return work()

    super()._begin(later)


class Run:
  """Random schedule of requests, preemptions and copies on a decoder."""

  def __init__(self, subject_, case):
    self.rng = np.random.default_rng(case["seed"])
    decoder = fresh(subject_)
    self.pages = Pages(NUM_PAGES, PAGE_SIZE)
    self.executor = Watched(decoder, 20, self.rng)
    self.scheduler = Scheduler(
      case["limits"], registry.make(case["policy"], self.pages), self.pages,
      HostCache(20, PAGE_SIZE, reserve=True), self.executor.costs,
    )
    self.engine = Engine(self.scheduler, self.executor)
    self.priorities = Priorities("random", 0.1, 3, case["seed"])
    self.requests, self.spoilt = [], set()
    self.spoil()

  def add(self, prompt, conversation=None):
    most = int(self.rng.integers(1, CONTEXT - len(prompt) + 1))
    drawing = Drawing(
      tuple(prompt), Stops(most, STOP), seed=len(self.requests),
      **SETTINGS[len(self.requests) % len(SETTINGS)],
    )
    request = Request(
      len(self.requests), prompt, most, arrival_s=self.executor.now(),
      client=int(self.rng.integers(3)), priority=self.priorities.first(),
      conversation=conversation, more=conversation is not None,
      stop=STOP, payload=SamplingState(drawing),
    )
    self.requests.append(request)
    self.scheduler.add(request)

  def spoil(self):
    """Overwrites the pages that were freed since the last call with NaN."""
    free = set(np.flatnonzero(self.pages.states() == 0).tolist())
    for page in free - self.spoilt:
      self.executor.host.spoil(page, 1)
    self.spoilt = free

  def play(self, count):
    common = self.rng.integers(0, 64, 2 * PAGE_SIZE).tolist()
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
          self.scheduler.update(r)
      if self.requests and self.rng.random() < 0.02:
        self.scheduler.cancel(
          self.requests[self.rng.integers(len(self.requests))],
          self.executor.now(),
        )
      self.engine.step(self.executor.now() + 1e-3 if count else math.inf)
      self.spoil()
      self.pages.check()
      for r in self.requests:
        if r.more and r.state is State.FINISHED and r.number not in talked:
          talked.add(r.number)
          prompt = [*r.prompt.tolist(), *r.tokens, 5]
          if len(prompt) < CONTEXT and len(self.requests) + count < MOST:
            self.add(prompt, r.conversation)


CASE = st.fixed_dictionaries({
  "seed": st.integers(0, 2**32 - 1),
  "policy": st.sampled_from(sorted(registry.POLICIES)),
  "limits": st.builds(
    Limits, slots=st.just(SLOTS), tokens=st.just(12),
    chunks=st.sampled_from([((1, 8),), ((1, 8), (2, 4))]),
    preempt=st.sampled_from(["recompute", "swap", "swap", "cost"]),
    wait_s=st.sampled_from([0.0, 100.0]), keep_turns=st.booleans(),
    copy_on_write=st.booleans(),
  ),
})


@pytest.mark.rotated(2)
@pytest.mark.parametrize("subject_", SUBJECTS)
@given(case=CASE)
@drawn(3)
def test_tokens_equal_those_of_one_forward_without_a_cache(subject_, case):
  run = Run(subject_, case)
  run.play(16)
  run.executor.close()
  assert not run.executor.shares_memory()
  tokens, logprobs = alone(subject_, run.requests)
  for i, request in enumerate(run.requests):
    assert request.state in FINAL_STATES
    first, count = len(request.prompt) - 1, len(request.tokens)
    where = slice(first, first + count)
    assert request.tokens == tokens[i, where].tolist()
    np.testing.assert_allclose(
      request.payload.logprobs[:count], logprobs[i, where], rtol=0, atol=2e-4
    )
    ended = [token in STOP for token in request.tokens]
    assert not any(ended[:-1])
    if request.state is State.FINISHED:
      assert ended[-1] or count == request.max_tokens
  assert run.pages.num_available == run.pages.num_pages


class Slow(DecoderExecutor):
  """Executor that adds a delay to copies or chunks, and to new sizes of copies.

  The delays exceed the times of copies and steps of the tiny model.
  """

  DELAY_S = 0.03

  def __init__(self, decoder, what):
    super().__init__(decoder, 20)
    self._what, self._seen = what, set()

  def _receive(self, sent, *args):
    delayed = self._what == "chunks" and bool(sent.steps[0].chunks)
    time.sleep(self.DELAY_S * delayed)
    return super()._receive(sent, *args)

  def copy(self, copy):
    shape = copy.kind, len(copy.source)
    if shape not in self._seen:  # stands for compilation
      self._seen.add(shape)
      time.sleep(2 * self.DELAY_S)
    time.sleep(self.DELAY_S * (self._what == "copies"))
    super().copy(copy)


@pytest.mark.parametrize("slow", ["copies", "chunks"])
def test_first_preemption_follows_the_measured_costs(slow):
  executor = Slow(fresh(SUBJECTS[0]), slow)
  calibrate(executor)
  pages = Pages(NUM_PAGES, PAGE_SIZE)
  scheduler = Scheduler(
    Limits(slots=1, preempt="cost"), registry.make("strict_priority", pages),
    pages, HostCache(20, PAGE_SIZE, reserve=False), executor.costs,
  )
  engine = Engine(scheduler, executor)
  for number, priority in enumerate((1.0, 0.0)):
    drawing = Drawing((1, 2, 3, 4, 5), Stops(4))
    scheduler.add(Request(
      number, drawing.prompt, 4, priority=priority,
      payload=SamplingState(drawing)
    ))
    engine.step()  # the second request preempts the first
  (decision,) = scheduler.counts.decisions
  assert decision.able
  assert decision.swapped == (slow == "chunks")
  executor.close()


class Counting(DecoderExecutor):
  """Executor that counts parts of copies, one layer of a run each."""

  def __init__(self, decoder):
    super().__init__(decoder, 20)
    self.host.part_bytes = 1
    self.begun = self.most = 0

  def _begin(self, work):
    super()._begin(work)
    self.begun += 1
    self.most = max(self.most, self._num_copies)


@pytest.mark.parametrize("waits", [False, True])
def test_parts_follow_one_another_unless_a_step_waits_for_the_copy(waits):
  """Page 1, which the step overwrites, is copied in both layers before it."""
  decoder, rng = fresh(SUBJECTS[0]), np.random.default_rng(0)
  decoder.cache = dataclasses.replace(decoder.cache, pages=jax.tree.map(
    lambda x: jax.device_put(rng.normal(size=x.shape).astype("f4"), x.sharding),
    decoder.cache.pages,
  ))
  executor = Counting(decoder)

  def contents(pages):
    """Returns pages on the device: levels, ranks, heads, layers, pages, ..."""
    return [
      np.array(x).reshape(*x.shape[:3], 2, NUM_PAGES, *x.shape[4:])
      [:, :, :, :, pages]
      for x in jax.tree.leaves(decoder.cache.pages)
    ]

  before = contents([1, 3, 4])
  executor.copy(Copy(0, "out", [1, 3, 4], [4, 5, 7], None))
  request = Request(0, [0], 1, payload=SamplingState(Drawing((0,), Stops(1))))
  request.slot, none = 0, np.zeros(0, np.int32)
  tables = np.full((SLOTS, CONTEXT // PAGE_SIZE), 1 if waits else 2, np.int32)
  executor.submit(EngineStep(
    0, [], none, none, (Chunk(request, 0, 1, draws=True),), tables,
    (0,) if waits else (), np.zeros(1, int), np.zeros(1, int),
  ))
  events = []
  while len(events) < 2:
    events += executor.wait(math.inf)
  assert (executor.begun, executor.most) == (4, 4 if waits else 1)
  for kept, x in zip(executor.host.arrays, before, strict=True):
    np.testing.assert_array_equal(kept[:, :, :, :, [4, 5, 7]], x)
  executor.copy(Copy(1, "in", [4, 5, 7], [8, 9, 11], None))
  while not executor.wait(math.inf):
    pass
  for x, y in zip(contents([8, 9, 11]), before, strict=True):
    np.testing.assert_array_equal(x, y)
  executor.close()
