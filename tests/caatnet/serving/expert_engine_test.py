"""Engine with several experts: each gives the tokens that it gives alone.

Weights arrive after random delays, some loads fail, and an expert is replaced
while it has requests. The arrays of an evicted expert are deleted, so a step
that reads them is an error. The reference has no cache and one expert.
"""

import dataclasses
import functools
import itertools
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from caatnet.inference.requests import Request as Drawing
from caatnet.inference.requests import stack_sampling_params
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.serving import differences
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.device import DecoderExecutor, SamplingState
from caatnet.serving.engine.device_weights import WeightUploader
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.expert_weights import ExpertWeights, StoredExpert
from caatnet.serving.engine.warm_up import warm_up
from caatnet.serving.experts import WHOLE_FORM
from caatnet.serving.requests import Request, State
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.experts import ExpertsPolicy
from caatnet.serving.scheduler.scheduler import Scheduler
from parallel.plans.placement.slots import Slots
from tests import pairwise
from tests.caatnet.inference.decoding_test import put
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)
from tests.caatnet.serving import device_test
from tests.caatnet.serving.device_test import (
  CONTEXT,
  MOST,
  NUM_PAGES,
  PAGE_SIZE,
  SETTINGS,
)
from tests.caatnet.serving.device_test import SLOTS as PLACES
from tests.caatnet.serving.scheduler_test import drawn

# (p, tensor ranks, devices, layers)
SUBJECTS = ((1.0, 1, 1, 1), (0.5, 2, 2, 1), (1.0, 2, 1, 1), (0.5, 1, 1, 1))
NAMES = ("a", "b", "c", "d", "bad")


@functools.cache
def params(p, ranks, layers, number):
  """Returns the parameters of an expert, numpy arrays."""
  drawn_ = draw_params(make_program(make_config(p, layers), ranks))
  rng = np.random.default_rng(number)
  return jax.tree.map(
    lambda x: np.asarray(x + 0.2 * rng.standard_normal(x.shape), np.float32),
    drawn_,
  )


def fresh(subject):
  """Returns a decoder without weights and with an empty cache."""
  decoder = device_test.fresh(subject)
  device = WeightUploader(decoder.program, False, False)
  decoder.weights = device.abstract
  return decoder, device


class Deleting(ExpertWeights):
  """Deletes the arrays of a slot that is cleared."""

  def clear(self, slot):
    for x in jax.tree.leaves(self._slots[slot]):
      x.delete()
    super().clear(slot)


class Run:
  """Random requests for several experts, one of which cannot be loaded."""

  def __init__(self, subject, case):
    p, ranks, _, layers = subject
    self.subject, self.rng = subject, np.random.default_rng(case["seed"])
    self.delays = np.random.default_rng(case["seed"])
    decoder, device = fresh(subject)
    self.keys = {name: f"{name}@1" for name in NAMES}
    self.base = params(p, ranks, layers, len(NAMES) + 1)
    self.trees, self.stored = {}, {}
    for number, key in enumerate((*self.keys.values(), "a@2")):
      found = StoredExpert(
        case["form"], differences.encode(
          params(p, ranks, layers, number), self.base, case["form"]
        ), "base@1", lambda: self.base,
      )
      self.stored[key] = found
      self.trees[key] = jax.tree.map(
        np.array, differences.restore(self.base, found.arrays, found.form)
      )
      for x in jax.tree.leaves((found.arrays, self.base)):
        x.setflags(write=False)  # nothing is written back
    self.weights = Deleting(
      device, case["slots"], case["host"], self.read
    )
    slots = Slots(
      case["slots"], case["eviction"], ("b@1",) if case["pinned"] else ()
    )
    self.policy = ExpertsPolicy(
      slots, case["switch_s"], case["deadline_s"], case["prefetch"],
      case["patience"],
    )
    self.pages = Pages(NUM_PAGES, PAGE_SIZE)
    self.executor = DecoderExecutor(decoder, 20, weights=self.weights)
    scheduler = Scheduler(
      Limits(
        slots=PLACES, tokens=12, chunks=((1, 8), (2, 4)),
        preempt=case["preempt"],
      ),
      self.policy, self.pages, HostCache(20, PAGE_SIZE, reserve=True),
      self.executor.costs,
    )
    self.engine = Engine(scheduler, self.executor)
    self.requests = []

  def read(self, key):
    time.sleep(self.delays.exponential(3e-3))
    if key == "bad@1":
      # Also errors that end a thread.
      raise [ValueError, MemoryError, SystemExit][self.delays.integers(3)](
        "its file is damaged"
      )
    return self.stored[key]

  def add(self, prompt):
    number = len(self.requests)
    most = int(self.rng.integers(1, CONTEXT - len(prompt) + 1))
    drawing = Drawing(
      tuple(prompt), Stops(most), seed=number, **SETTINGS[number % 2]
    )
    request = Request(
      number, prompt, most, expert=self.keys[self.rng.choice(NAMES)],
      arrival_s=self.executor.now(), payload=SamplingState(drawing),
    )
    self.requests.append(request)
    self.engine.scheduler.add(request)

  def play(self, count):
    common = self.rng.integers(0, 64, 2 * PAGE_SIZE).tolist()
    while len(self.requests) < count or not self.engine.idle:
      left = count - len(self.requests)
      if left and self.rng.random() < 0.3:
        own = self.rng.integers(0, 64, self.rng.integers(1, 8)).tolist()
        # Equal prefixes, so that another expert's pages would be found.
        self.add((common if self.rng.random() < 0.7 else []) + own)
      if left == count // 2:
        self.keys["a"] = "a@2"
      self.engine.step(
        self.executor.now() + 1e-3 if left else float("inf")
      )
    self.executor.close()

  def alone(self, key):
    """Returns next tokens of all requests by one expert, without a cache."""
    p, ranks, _, layers = self.subject
    tokens = np.zeros((MOST, CONTEXT), np.int32)
    for row, request in zip(tokens, self.requests, strict=False):
      row[: request.length] = request.all_tokens()
    asked = [r.payload.drawing for r in self.requests]
    asked += [None] * (MOST - len(asked))
    program = make_program(make_config(p, layers), ranks)
    found, _ = device_test.forward(p, ranks, layers).func(
      put(program, self.trees[key]), tokens,
      stack_sampling_params([r for r in asked for _ in range(CONTEXT)]),
    )
    return np.asarray(found).reshape(MOST, CONTEXT)


TABLE = pairwise.rows(
  {
    "subject": SUBJECTS, "form": (WHOLE_FORM, "int8", "low_rank"),
    "slots": (2, 1, 3), "host": (0, 1, 3),
    "eviction": ("lookahead", "lru", "lfu"), "prefetch": (1, 0, 2),
    "switch_s": (0.0, 3e-3), "deadline_s": (0.02, 9.0), "patience": (1.0, 0.0),
    "pinned": (True, False), "preempt": ("swap", "recompute", "cost"),
  },
  lambda row: row["pinned"] and row["slots"] == 1,
)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
@given(seed=st.integers(0, 2**32 - 1))
@drawn(1)
def test_tokens_equal_those_of_the_expert_alone(row, seed):
  case = row | {"seed": seed}
  run = Run(row["subject"], case)
  run.play(18)
  for key in {request.expert for request in run.requests} - {"bad@1"}:
    expected = run.alone(key)
    for i, request in enumerate(run.requests):
      if request.expert == key:
        assert request.state is State.FINISHED
        first, count = len(request.prompt) - 1, request.max_tokens
        assert request.tokens == expected[i, first : first + count].tolist()
  bad = [r for r in run.requests if r.expert == "bad@1"]
  assert {r.state for r in bad} <= {State.FAILED}
  assert all(
    r.error == "expert bad@1 could not be loaded: its file is damaged"
    for r in bad
  )
  moved, counts = run.weights.moved.values(), run.policy.slots.counts
  loads = sum(each.loads for each in moved)
  # Each load has one miss; a load without a request has none.
  assert loads == counts.loads >= counts.misses
  size = run.weights.device.size_bytes
  if case["form"] != WHOLE_FORM:  # of the parameters in its file
    (size,) = {
      sum(x.nbytes for x in jax.tree.leaves(stored.arrays))
      for stored in run.stored.values()
    }
  assert sum(m.bytes for m in moved) == loads * size
  assert bool(bad) == (run.weights.moved["bad"].failures > 0)
  assert len(run.weights.on_host) <= case["host"]
  assert run.pages.num_available == run.pages.num_pages


def test_experts_run_the_same_programs():
  decoder, device = fresh(SUBJECTS[0])
  sizes = []
  for number in (0, 0, 1, 2):  # the first time compiles
    weights = device.put(device.on_host(params(1.0, 1, 1, number)))
    for _ in itertools.islice(warm_up(decoder, 4, weights), 2):
      pass
    sizes.append(decoder._run._cache_size())
  assert len(set(sizes[1:])) == 1


@pytest.fixture
def device():
  return fresh(SUBJECTS[0])[1]


def equal(a, b):
  same = jax.tree.map(
    lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b
  )
  return all(jax.tree.leaves(same))


@pytest.mark.parametrize(("dtype", "apart", "coded"), [
  ("float32", False, False), ("bfloat16", True, True),
])
def test_weights_of_a_slot_equal_those_of_one_model(dtype, apart, coded):
  config = make_config(0.5, 1, dtype=dtype)
  program = make_program(config, 2, 2)
  tree = params(0.5, 2, 1, 0)
  one = make_weights(program, put(program, tree), apart, coded)
  device = WeightUploader(program, apart, coded)
  found = device.put(device.on_host(tree))
  assert jax.tree.all(jax.tree.map(
    lambda x, y: x.dtype == y.dtype and x.sharding == y.sharding, found,
    one.params,
  ))
  assert equal(found, one.params)
  assert device.size_bytes == sum(
    x.nbytes for x in jax.tree.leaves(one.params)
  )
  # Restored on the device, from a base there.
  base = params(0.5, 2, 1, 1)
  stored = differences.encode(tree, base, "int8")
  restored = differences.restore(base, stored, "int8")
  expected = device.put(device.on_host(jax.tree.map(np.asarray, restored)))
  actual = device.put_difference(device.put_base(base), stored, "int8")
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      np.asarray(x, np.float32), np.asarray(y, np.float32), 2e-2, 2e-2
    ) if x.dtype != np.uint8 else None,
    actual, expected,
  )


class Faulty(WeightUploader):
  """Fails at one point of a load."""

  def __init__(self, device, point):
    self.__dict__ |= vars(device)
    self.point = point

  def on_host(self, tree):
    if self.point == "convert":
      raise MemoryError
    return super().on_host(tree)

  def put(self, weights):
    found = super().put(weights)
    if self.point == "copied":
      raise SystemExit("killed")
    return found


@pytest.mark.parametrize(("point", "reason"), [
  ("read", "no such file"), ("convert", "MemoryError"), ("copied", "killed"),
  ("shape", "norm of the expert is float32[3], but the model needs "
   "float32[32]"),
  ("name", "other of the expert is float32[1], but the model needs no "
   "parameter"),
])
def test_failed_load_leaves_its_slot_empty(device, point, reason):
  tree = params(1.0, 1, 1, 0)
  found = dict(tree)
  norm = next(k for k, x in tree.items() if not isinstance(x, dict)
              and x.shape == (32,))
  if point == "shape":
    found[norm] = np.zeros(3, np.float32)
    reason = reason.replace("norm", norm)
  elif point == "name":
    found["other"] = np.zeros(1, np.float32)

  def read(key):
    if point == "read":
      raise ValueError("no such\nfile")
    return StoredExpert(WHOLE_FORM, found)

  weights = ExpertWeights(Faulty(device, point), 1, 0, read)
  weights.clear(0)
  assert weights.load("a@1", 0) == f"expert a@1 could not be loaded: {reason}"
  with pytest.raises(AssertionError, match="slot 0 has no weights"):
    weights.params(0)
  assert dataclasses.astuple(weights.moved["a"])[:3] == (0, 1, 0)
  # The next load of the slot succeeds.
  weights.device = device
  weights._read = lambda key: StoredExpert(WHOLE_FORM, tree)
  assert weights.load("a@1", 0) == ""
  assert equal(weights.params(0), device.put(device.on_host(tree)))


def test_differences_are_restored_from_their_own_bases(device):
  """Two bases in turn, one of which cannot be read at first."""
  trees = [params(1.0, 1, 1, number) for number in range(4)]
  stored = {
    f"{i}@1": differences.encode(trees[i + 2], trees[i], "int8")
    for i in range(2)
  }
  unread = ["1"]

  def read(key):
    number = key[0]

    def read_base():
      if number in unread:
        unread.remove(number)
        raise ValueError("base is damaged")
      return trees[int(number)]

    return StoredExpert("int8", stored[key], f"base{number}@1", read_base)

  weights = ExpertWeights(device, 1, 2, read)
  errors = []
  for key in ("0@1", "1@1", "1@1", "0@1", "0@1", "1@1"):
    weights.clear(0)
    errors.append(weights.load(key, 0))
    if not errors[-1]:
      base = device.put_base(trees[int(key[0])])
      assert equal(
        weights.params(0), device.put_difference(base, stored[key], "int8")
      )
  assert [bool(error) for error in errors] == [0, 1, 0, 0, 0, 0]
  assert errors[1].endswith("could not be loaded: base is damaged")


def test_host_memory_has_the_most_recent_experts(device):
  reads = []

  def read(key):
    reads.append(key)
    return StoredExpert(WHOLE_FORM, params(1.0, 1, 1, 0))

  weights = ExpertWeights(device, 1, 2, read)
  for key in ("a@1", "b@1", "a@1", "c@1", "b@1", "a@2"):
    weights.clear(0)
    assert weights.load(key, 0) == ""
  assert reads == ["a@1", "b@1", "c@1", "b@1", "a@2"]
  assert weights.on_host == ("b@1", "a@2")
  assert weights.moved["a"].files == 2
  assert weights.moved["a"].loads == 3
  weights.forget("b@1")
  assert weights.on_host == ("a@2",)


def engine_of(read):
  """Returns an engine with two empty slots, and its weights."""
  decoder, device = fresh(SUBJECTS[0])
  weights = ExpertWeights(device, 2, 0, read)
  executor = DecoderExecutor(decoder, 0, weights=weights)
  policy, pages = ExpertsPolicy(Slots(2, "lru")), Pages(NUM_PAGES, PAGE_SIZE)
  return Engine(Scheduler(
    Limits(slots=PLACES), policy, pages, HostCache(0, PAGE_SIZE, reserve=False),
    executor.costs,
  ), executor), weights


def short(number, expert, most):
  """Returns a request of two tokens."""
  drawing = Drawing((1, 2), Stops(most))
  return Request(
    number, [1, 2], most, expert=expert, payload=SamplingState(drawing)
  )


def test_time_without_steps_is_exposed():
  """Each load runs while the only requests wait for it."""
  tree = params(1.0, 1, 1, 0)

  def read(key):
    time.sleep(0.05)
    return StoredExpert(WHOLE_FORM, tree)

  engine, weights = engine_of(read)
  for number, expert in enumerate(("a@1", "b@1")):
    engine.scheduler.add(short(number, expert, 3))
    while not engine.idle:
      engine.step()
  engine.executor.close()
  for name in "ab":
    assert 0.04 < weights.moved[name].exposed_s < 5


def test_an_expert_decodes_while_another_one_is_loaded():
  """The load of b does not end before a has decoded all of its tokens."""
  tree, decoded = params(1.0, 1, 1, 0), threading.Event()

  def read(key):
    if key == "b@1" and not decoded.wait(60):
      raise ValueError("no steps while it was read")
    return StoredExpert(WHOLE_FORM, tree)

  engine, weights = engine_of(read)
  first, second = short(0, "a@1", CONTEXT - 2), short(1, "b@1", 3)
  engine.scheduler.add(first)
  while not first.tokens:
    engine.step()
  engine.scheduler.add(second)
  while not engine.idle:
    if first.state is State.FINISHED:
      decoded.set()
    engine.step()
  engine.executor.close()
  assert second.state is State.FINISHED, second.error
  assert first.end_s < second.scheduled_s
  assert (weights.moved["b"].loads, weights.moved["b"].failures) == (1, 0)
