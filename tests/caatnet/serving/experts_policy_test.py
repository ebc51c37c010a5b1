"""Policy `experts`: tokens as alone, no starvation, loads that pay.

Steps compute with the weights that the last load has brought to their slot, so
that a wrong slot, an early step and a page of another expert change tokens.
"""

import numpy as np
import pytest

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.executor import CompletionEvent
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request, State
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.experts import ExpertsPolicy
from caatnet.serving.scheduler.policies.first_come import FirstCome
from caatnet.serving.scheduler.scheduler import Scheduler
from parallel.plans.placement.slots import Slots, misses
from tests.caatnet.serving import oracle

LONGEST = 24


def root(expert):
  """Returns the value before the first token: the weights of an expert."""
  return sum(map(ord, expert)) + 1


class WithWeights(oracle.Oracle):
  """Oracle with slots of weights, some of whose loads fail."""

  def __init__(self, *args, num_slots, load_s, fails):
    super().__init__(*args)
    self._load_s = lambda load: (load_s(),) * 2
    self._fails, self.failed = fails, set()
    self.weights = [None] * num_slots
    self._reading = []

  def load(self, load):
    assert load.slot not in self._reading, "a step under way reads the slot"
    self.weights[load.slot] = None
    super().load(load)

  def _end(self, event):
    if event.load is not None and self._fails(event.load.expert):
      event = CompletionEvent(
        event.time_s, load=event.load, error="corrupt file"
      )
    super()._end(event)

  def submit(self, step):
    expert = self.weights[step.weights]
    requests = [*step.decodes, *(chunk.request for chunk in step.chunks)]
    assert {request.expert for request in requests} == {expert}
    self.root = root(expert)
    self._reading.append(step.weights)
    super().submit(step)

  def wait(self, until_s=np.inf):
    events = super().wait(until_s)
    for event in events:
      if event.load is not None and event.error:
        self.failed.add(event.load.expert)
      elif event.load is not None:
        self.weights[event.load.slot] = event.load.expert
      elif event.step is not None:
        self._reading.remove(event.step.weights)
    return events


class Case:
  """Random experts, requests, limits and loads."""

  def __init__(self, seed, fails=0.0):
    rng = self.rng = oracle.rng_of(seed)
    draw = rng.choice
    size = int(draw([1, 2, 4]))
    num_pages = -(-LONGEST // size) + int(draw([0, 20]))
    num_slots = int(draw([1, 1, 2, 3]))
    self.names = [f"e{i}@1" for i in range(draw([1, 2, 4, 6]))]
    bad = {name for name in self.names if rng.random() < fails}
    host_pages = int(draw([0, 9, 200]))
    self.executor = WithWeights(
      num_pages, host_pages, size, lambda copy: float(rng.exponential(2.0)),
      num_slots=num_slots, load_s=lambda: float(rng.exponential(3.0)),
      fails=lambda name: name in bad,
    )
    self.pages = Pages(num_pages, size)
    self.host = HostCache(host_pages, size, reserve=True)
    self.slots = Slots(num_slots, str(draw(["lru", "lfu", "lookahead"])))
    self.policy = ExpertsPolicy(
      self.slots, float(draw([0.0, 3.0])), float(draw([0.0, 20.0, 1e9])),
      int(draw([0, 1, 2])), float(draw([0.0, 1.0, 5.0])),
    )
    limits = Limits(
      slots=int(draw([1, 2, 5])), tokens=9, growth=int(draw([1, 3])),
      preempt=str(draw(["recompute", "swap", "cost"])),
      wait_s=float(draw([0.0, 0.02, 100.0])), keep_turns=True,
      whole_prompt=bool(draw([True, False])),
    )
    self.scheduler = Scheduler(
      limits, self.policy, self.pages, self.host, self.executor.costs
    )
    self.engine = Engine(self.scheduler, self.executor, int(draw([1, 2, 3])))
    times = np.cumsum(rng.exponential(1.5, 14))
    prompts = oracle.prompts(rng, 14, LONGEST // 2)
    self.requests = [
      Request(
        i, prompts[i], int(rng.integers(1, LONGEST - len(prompts[i]) + 1)),
        expert=str(draw(self.names)), arrival_s=float(times[i]),
        conversation=int(draw(3)) if rng.random() < 0.3 else None, more=True,
        stop=frozenset([0]) if rng.random() < 0.3 else frozenset(),
      )
      for i in range(14)
    ]

  def play(self, watch=None):
    cancelled = self.requests[3:: 6]

    def check(engine, step):
      self.pages.check()
      now = self.executor.now()
      for request in cancelled:
        late = request.arrival_s + 4 <= now
        if late and request in self.scheduler.requests:
          self.scheduler.cancel(request, now)
      if watch is not None:
        watch(engine, step)

    replay(self.engine, self.requests, check)
    return cancelled


@pytest.mark.parametrize("seed", range(40))
def test_tokens_of_each_expert_equal_those_alone(seed):
  """Draws slots, evictions, prefetches, preemptions, swaps, cancellations."""
  case = Case(seed)
  cancelled = case.play()
  for request in case.requests:
    if request in cancelled and request.state is State.CANCELLED:
      continue
    assert request.state is State.FINISHED
    assert request.tokens == oracle.alone(
      request.prompt, request.max_tokens, request.is_end, root(request.expert)
    )
  counts = case.slots.counts
  assert counts.misses <= counts.loads
  # A request is a hit or a miss once; a reload for it is another miss.
  admitted = sum(r.scheduled_s is not None for r in case.requests)
  assert counts.hits <= admitted <= counts.hits + counts.misses
  assert case.slots.users(0) == 0
  used = {request.expert for request in case.requests}
  if len(used) <= len(case.slots):
    assert counts.evictions == 0
    assert counts.loads == len(used)


@pytest.mark.parametrize("seed", range(15))
def test_failed_loads_end_the_requests_of_their_expert_only(seed):
  case = Case(seed, fails=0.4)
  cancelled = case.play()
  for request in case.requests:
    if request.state is State.FAILED:
      assert request.expert in case.executor.failed
      assert request.error == "corrupt file"
    elif request.state is not State.CANCELLED:
      assert request.expert not in case.executor.failed
      assert request.tokens == oracle.alone(
        request.prompt, request.max_tokens, request.is_end, root(request.expert)
      )
    else:
      assert request in cancelled
  assert case.slots.counts.failures >= len(case.executor.failed)
  assert case.scheduler.idle


class Times:
  """Model of step times: 10 ms per step."""

  def step_s(self, contexts, chunks):
    del contexts, chunks
    return 0.01


def serve(
  requests, *, slots, load_s=0.2, switch_s=None, watch=None, **options
):
  """Serves requests with many pages; returns policy and simulator."""
  pages = Pages(2000, 16)
  simulator = Simulator(Times(), load_s=lambda load: (load_s, load_s))
  policy = ExpertsPolicy(slots, switch_s or load_s, **options)
  scheduler = Scheduler(
    Limits(slots=256), policy, pages, HostCache(0, 16, False), simulator.costs
  )
  replay(Engine(scheduler, simulator), requests, watch)
  return policy, simulator


def mixed(count, experts, output, rate=1e9, seed=0):
  """Returns requests of experts in turn."""
  rng = oracle.rng_of(seed)
  times = rng.exponential(1 / rate, count).cumsum()
  return [
    Request(i, rng.integers(1000, size=8), output,
            expert=f"e{i % experts}", arrival_s=float(times[i]))
    for i in range(count)
  ]


@pytest.mark.parametrize("experts", [2, 5])
def test_a_mixed_queue_is_not_switched_between_every_two_requests(experts):
  requests = mixed(100, experts, 10)
  slots = Slots(1, "lookahead")
  serve(requests, slots=slots, deadline_s=1e9)
  assert slots.counts.loads == experts
  assert slots.counts.misses + slots.counts.hits == 100


@pytest.mark.parametrize("deadline_s", [1.0, 4.0])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_expert_waits_longer_than_the_deadline_allows(deadline_s, prefetch):
  """Some experts always have requests; patience alone would starve others."""
  experts, load_s, patience = 6, 0.2, 20.0
  requests = [
    Request(i, [1] * 8, 40, expert=f"e{i % 2}", arrival_s=0.05 * i)
    for i in range(400)
  ] + [
    Request(400 + i, [1] * 8, 4, expert=f"e{2 + i % 4}", arrival_s=0.5 * i)
    for i in range(40)
  ]
  requests.sort(key=lambda request: request.arrival_s)
  slots = Slots(2, "lookahead")
  served = dict.fromkeys(f"e{i}" for i in range(experts))
  longest = 0.0

  def watch(engine, step):
    nonlocal longest
    now = engine.executor.now()
    if step is not None:
      served[slots.expert(step.weights)] = now
    for request in engine.scheduler.requests:
      since = max(request.arrival_s, served[request.expert] or 0.0)
      longest = max(longest, now - since)

  serve(requests, slots=slots, watch=watch, deadline_s=deadline_s,
        prefetch=prefetch, patience=patience)
  min_s = min(patience * load_s, deadline_s)
  bound = deadline_s + experts * (load_s + min_s + 0.05)
  assert deadline_s < longest <= bound


def test_without_a_deadline_patience_alone_starves_an_expert():
  """Shows that the bound of the deadline is not met by itself."""
  requests = [
    Request(i, [1] * 8, 40, expert="e0", arrival_s=0.05 * i)
    for i in range(400)
  ] + [Request(400, [1] * 8, 4, expert="e1", arrival_s=0.02)]
  requests.sort(key=lambda request: request.arrival_s)
  serve(requests, slots=Slots(1, "lru"), deadline_s=1e9, patience=50.0)
  late = next(request for request in requests if request.expert == "e1")
  assert late.ttft_s > 15
  requests = [
    Request(r.number, r.prompt, r.max_tokens, expert=r.expert,
            arrival_s=r.arrival_s) for r in requests
  ]
  serve(requests, slots=Slots(1, "lru"), deadline_s=2.0, patience=50.0)
  late = next(request for request in requests if request.expert == "e1")
  assert 2 <= late.ttft_s < 3


def test_cost_of_a_switch_is_that_of_recent_loads():
  """Patience is measured in switches, whose time may change while serving."""
  counts = []
  for slow_s in (0.2, 5.0):  # from the tenth load on
    slots = Slots(1, "lru")
    serve(
      mixed(300, 4, 100, rate=20.0), slots=slots, deadline_s=1e9,
      switch_s=lambda s=slots, t=slow_s: t if s.counts.loads > 9 else 0.2,
    )
    counts.append(slots.counts.loads)
  assert 9 < counts[1] < counts[0] // 2


def test_loads_ahead_run_under_steps_of_other_experts():
  exposed = []
  for prefetch in (0, 1):
    requests = mixed(60, 6, 50, rate=4.0)
    _, simulator = serve(
      requests, slots=Slots(3, "lookahead"), prefetch=prefetch
    )
    exposed.append(simulator.exposed_s)
  assert exposed[1] < 0.5 * exposed[0]


def test_seconds_of_loads_are_misses_times_those_of_one():
  requests = mixed(80, 7, 6, rate=8.0)
  slots = Slots(3, "lru")
  _, simulator = serve(requests, slots=slots)
  assert slots.counts.loads == slots.counts.misses
  assert simulator.loaded_s == pytest.approx(0.2 * slots.counts.misses)


def test_a_request_whose_expert_loads_waits():
  (request,) = mixed(1, 1, 3)
  serve([request], slots=Slots(1, "lru"))
  assert request.ttft_s == pytest.approx(0.2 + 0.01)
  assert request.state is State.FINISHED


def test_one_model_is_served_as_first_come_first_served():
  runs = []
  for policy in (ExpertsPolicy(), FirstCome()):
    pages = Pages(40, 4)
    executor = oracle.Oracle(40, 0, 4, lambda copy: 0.0)
    scheduler = Scheduler(
      Limits(slots=4, tokens=16), policy, pages, HostCache(0, 4, False),
      executor.costs,
    )
    rng = oracle.rng_of(3)
    requests = [
      Request(i, rng.integers(3, size=9), 12, arrival_s=0.7 * i)
      for i in range(30)
    ]
    replay(Engine(scheduler, executor), requests)
    runs.append([(r.scheduled_s, r.end_s, r.tokens) for r in requests])
  assert runs[0] == runs[1]



@pytest.mark.parametrize("experts", [("e0", "e0"), ("e0", "e1")])
def test_a_turn_reads_no_host_copy_of_another_expert(experts):
  executor = WithWeights(
    20, 50, 4, lambda copy: 0.0, num_slots=2, load_s=lambda: 1.0,
    fails=lambda name: False,
  )
  pages = Pages(20, 4, reuse=False)
  scheduler = Scheduler(
    Limits(keep_turns=True, preempt="swap"), ExpertsPolicy(Slots(2, "lru")),
    pages, HostCache(50, 4, reserve=True), executor.costs,
  )
  engine = Engine(scheduler, executor)
  first = Request(0, [1] * 9, 6, expert=experts[0], conversation=1, more=True)
  replay(engine, [first])
  prompt = [*first.all_tokens(), 2]
  second = Request(
    1, prompt, 4, expert=experts[1], conversation=1,
    arrival_s=executor.now() + 50,
  )
  replay(engine, [second])
  assert second.tokens == oracle.alone(
    prompt, 4, second.is_end, root(experts[1])
  )
  assert (second.num_hits > 0) == (experts[0] == experts[1])


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_hits_are_those_of_the_slots_alone_for_the_same_order(
  eviction, num_slots
):
  """Requests arrive one after another, so that the order is given."""
  rng = oracle.rng_of(num_slots)
  order = [f"e{i}" for i in rng.zipf(1.5, 60) % 6]
  requests = [
    Request(i, [1] * 8, 3, expert=expert, arrival_s=10.0 * i)
    for i, expert in enumerate(order)
  ]
  slots = Slots(num_slots, eviction)
  serve(requests, slots=slots)
  assert slots.counts.misses == misses(order, num_slots, eviction)
  assert slots.counts.hits == len(order) - slots.counts.misses
