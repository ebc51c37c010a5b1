"""Properties of the scheduler: equal tokens as alone, consistent pages.

Schedules are random: arrivals, preemptions, swaps, cancellations, deadlines,
priorities, shared prefixes, conversations, and copies that take time.
"""

import dataclasses
import itertools
import math
import os

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.simulator import CopyTimes, Simulator
from caatnet.serving.requests import FINAL_STATES, Request, State
from caatnet.serving.scheduler import running
from caatnet.serving.scheduler.limits import PREEMPTION_MODES, Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.priorities import Priorities
from caatnet.serving.scheduler.scheduler import Scheduler
from tests import pairwise
from tests.caatnet.serving import oracle
from tests.caatnet.serving.page_oracle import DictPages

CHUNKS = ((), (), ((1, 9),), ((1, 1),), ((9, 3),), ((1, 5), (3, 2)))
CASE = st.fixed_dictionaries({
  "seed": st.integers(0, 2**32 - 1),
  "policy": st.sampled_from(sorted(registry.POLICIES)),
  "page_size": st.sampled_from([1, 2, 4]),
  "tight": st.booleans(),
  "host_pages": st.sampled_from([0, 9, 200]),
  "steps_ahead": st.sampled_from([1, 2, 2, 3]),
  "in_turn": st.booleans(),
  "pages": st.sampled_from([Pages, DictPages]),
  "interpreted": st.booleans(),
  "priorities": st.sampled_from(["none", "random", "markov"]),
  "limits": st.builds(
    Limits,
    slots=st.sampled_from([1, 2, 5]),
    tokens=st.sampled_from([5, 9]),
    chunks=st.sampled_from(CHUNKS),
    whole_prompt=st.booleans(),
    growth=st.sampled_from([1, 3]),
    preempt=st.sampled_from(["recompute", "swap", "swap", "cost"]),
    wait_s=st.sampled_from([0.0, 0.02, 100.0]),
    keep_turns=st.booleans(),
    copy_on_write=st.booleans(),
  ),
})



def case_of(
  seed, policy, page_size, host_pages, *, limits, tight=False, steps_ahead=2,
  in_turn=False, pages=Pages, interpreted=False, priorities="none",
):
  """Returns a case as a dict of its parts."""
  return locals()


# Factor of the number of cases; with it, cases are new in each run (a soak).
SOAK = int(os.environ.get("SERVING_SOAK", "0"))


def drawn(count):
  """Returns settings of `count` reproducible cases without shrinking."""
  return settings(
    max_examples=count * max(SOAK, 1), derandomize=not SOAK,
    database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
  )


# Preemption order of a policy where its value is not the whole key.
ORDERS = {
  "strict_priority": lambda r: (r.priority, r.number),
  "shortest_first": lambda r: (len(r.prompt) + r.max_tokens, r.number),
}


class Run:
  """Random schedule with invariants that are checked at each turn."""

  def __init__(self, case, stops=(frozenset(),)):
    self.rng = oracle.rng_of(case["seed"])
    # End conditions, one per request in turn.
    self.case, self.stops = case, stops
    size = case["page_size"]
    longest = 24
    num_pages = -(-longest // size) + (0 if case["tight"] else 20)
    kinds = {
      "paged": case.get("paged", True), "states": case.get("states", False)
    }
    if not kinds["paged"]:  # one page per sequence: the whole context
      size, num_pages = longest, case["limits"].slots
    self.pages = case["pages"](
      num_pages, size, reuse=not kinds["states"], in_turn=case["in_turn"]
    )
    self.host = HostCache(
      case["host_pages"], size, reserve=bool(case["seed"] % 2),
      keep=case.get("keep", True), **kinds,
    )
    self.executor = oracle.Oracle(
      num_pages, case["host_pages"], size,
      lambda copy: float(self.rng.exponential(2.0)), **kinds,
    )
    self.scheduler = Scheduler(
      case["limits"], registry.make(case["policy"], self.pages), self.pages,
      self.host, self.executor.costs,
    )
    self.engine = Engine(self.scheduler, self.executor, case["steps_ahead"])
    self.priorities = Priorities(
      case["priorities"], frequency=0.2, levels=3, seed=case["seed"]
    )
    self.requests = []
    self.waited = 0  # copies that steps wait for
    self.ended = {}
    self.victim = self.scheduler.policy.victim
    self.scheduler.policy.victim = self.last

  def last(self, running):
    """Asks for the preemption victim: the last running request in order."""
    found = self.victim(running)
    value = self.scheduler.policy.value
    order = ORDERS.get(self.case["policy"], lambda r: (value(r), r.number))
    assert found is max(
      (r for r in self.requests if r.state is State.RUNNING), key=order
    )
    return found

  def request(self, prompt, at, conversation=None):
    room = 24 - len(prompt)
    request = Request(
      len(self.requests), prompt, int(self.rng.integers(1, room + 1)),
      client=int(self.rng.integers(3)), arrival_s=at,
      priority=self.priorities.first(), conversation=conversation,
      more=conversation is not None,
      stop=self.stops[len(self.requests) % len(self.stops)],
      deadline_s=at + 20 if self.rng.random() < 0.2 else np.inf,
    )
    self.requests.append(request)
    return request

  def play(self, count=12):
    with oracle.interpreted(self.case["interpreted"]):
      self._play(count)

  def _play(self, count):
    times = np.cumsum(self.rng.exponential(1.5, count))
    coming = list(zip(times, oracle.prompts(self.rng, count, 12), strict=True))
    turns = 0
    for _ in range(20000):
      now = self.executor.now()
      while coming and coming[0][0] <= now:
        at, prompt = coming.pop(0)
        talks = self.rng.random() < 0.4
        talk = len(self.requests) if talks else None
        self.scheduler.add(self.request(prompt, at, talk))
      if not coming and self.engine.idle:
        assert not self.host.num_pinned  # no request is left that needs a copy
        return
      self.disturb(now)
      self.check(self.engine.step(coming[0][0] if coming else np.inf))
      for request in self.requests:
        if request.state in FINAL_STATES and request.number not in self.ended:
          self.ended[request.number] = request.state
          self.check_end(request)
          if request.more and request.state is State.FINISHED and turns < 6:
            turns += 1
            prompt = [*request.prompt, *request.tokens, 1]
            if self.rng.random() < 0.2:  # the client changes the conversation
              prompt[0] = 2 - prompt[0]
            if len(prompt) < 24:
              at = self.executor.now()
              self.scheduler.add(
                self.request(prompt, at, request.conversation)
              )
    raise AssertionError("it does not end")

  def disturb(self, now):
    if self.priorities.due():
      for r in self.priorities.update(self.scheduler.requests):
        self.scheduler.update(r)
    if self.requests and self.rng.random() < 0.02:
      victim = self.requests[self.rng.integers(len(self.requests))]
      self.scheduler.cancel(victim, now)

  def check(self, step):
    self.pages.check()
    self.host.check()
    for number, state in self.ended.items():
      assert self.requests[number].state is state
    limits = self.case["limits"]
    if limits.wait_s == 100:  # every copy is short
      assert all(r.state is not State.ARRIVING for r in self.requests)
    if limits.preempt == "recompute" and not limits.keep_turns:
      assert not self.host.num_used
    if step is not None:
      self.waited += len(step.after)
      waits = limits.wait_s or self.pages.counts.copied or self.host.states
      assert waits or not step.after
      lengths = [chunk.length for chunk in step.chunks]
      assert not (lengths and limits.chunks) or any(
        len(lengths) <= count and max(lengths) <= length
        for count, length in limits.chunks
      )
      read = *step.decodes, *(chunk.request for chunk in step.chunks)
      for request in read:  # else it has expired
        assert request.tokens or self.executor.now() < request.deadline_s

  def check_end(self, request):
    """Checks a request that has ended in this turn."""
    limits = self.case["limits"]
    if request.state is State.EXPIRED:
      assert not request.tokens
      assert request.end_s >= request.deadline_s
    first = request.state is State.FINISHED and (
      request.conversation == request.number and not request.num_preempted
    )
    if first and limits.keep_turns and limits.preempt == "recompute" and (
      self.case["host_pages"] == 200 and not self.host.states
    ):
      assert self.host.valid(request.owner) >= request.length - 1


@pytest.mark.parametrize("stops", [
  (frozenset(),),
  (frozenset((0,)), lambda token: token == 1, frozenset(), frozenset((0, 2)),
   frozenset(range(1, 99, 3))),
])
@given(case=CASE)
@example(case=case_of(  # ends with restored pages before its first step
  4126347408, "dlpm", 4, 9, tight=True, steps_ahead=1, in_turn=True,
  limits=Limits(2, 9, preempt="swap", keep_turns=True, copy_on_write=False),
))
@example(case=case_of(  # cancelled during the copy from the host
  4294967295, "first_come", 1, 200, steps_ahead=1,
  limits=Limits(1, 9, whole_prompt=False, keep_turns=True, copy_on_write=False),
))
@example(case=case_of(  # has pages when cancelled before its restore
  8, "first_come", 2, 200, priorities="markov",
  limits=Limits(5, 5, whole_prompt=False, preempt="swap", keep_turns=True),
))
@example(case=case_of(  # all running ones are preempted, others restored
  0, "dlpm", 4, 200, tight=True, steps_ahead=1,
  limits=Limits(2, 5, whole_prompt=False, keep_turns=True, copy_on_write=False),
))
@example(case=case_of(  # the host is full while a turn is copied to it
  14007, "shortest_first", 1, 9, tight=True,
  limits=Limits(
    5, 9, whole_prompt=False, preempt="swap", wait_s=0.02, keep_turns=True,
    copy_on_write=False,
  ),
))
@example(case=case_of(  # the next turn begins before the last is copied
  5010768, "strict_priority", 2, 9, priorities="random",
  limits=Limits(
    5, 9, chunks=((1, 9),), whole_prompt=False, preempt="swap", wait_s=0.02,
    keep_turns=True,
  ),
))
@drawn(40)
def test_each_request_gets_the_tokens_of_a_run_alone(stops, case):
  run = Run(case, stops)
  run.play()
  for request in run.requests:
    assert request.state in FINAL_STATES
    expected = oracle.alone(
      request.prompt, request.max_tokens, request.is_end
    )
    assert len(request.token_times) == len(request.tokens)
    assert request.token_times == sorted(request.token_times)
    if request.state is State.FINISHED:
      assert request.tokens == expected
    else:
      assert request.tokens == expected[: len(request.tokens)]
  # All pages are returned, and idle ones merge into the initial groups.
  assert run.pages.num_available == run.pages.num_pages
  taken = run.pages.take(run.pages.num_pages)
  run.pages.release(taken)
  if not run.case["in_turn"]:
    fresh = Pages(run.pages.num_pages, 1)
    assert run.pages.sizes() == fresh.sizes()


# All pairs of the scheduler's options, with too few pages for all requests.
TABLE = pairwise.rows(
  {
    "policy": sorted(registry.POLICIES), "preempt": PREEMPTION_MODES,
    "chunks": ((), ((1, 9),), ((9, 3),)), "wait_s": (0.0, 0.02, 100.0),
    "states": (False, True), "keep_turns": (True, False),
    "copy_on_write": (True, False), "growth": (1, 3),
    "whole_prompt": (True, False), "steps_ahead": (1, 3),
    "host_pages": (200, 9), "priorities": ("none", "markov"),
  },
  # Without prefix reuse, as with a recurrent state, no page is copied to write.
  lambda row: row["states"] and row["copy_on_write"],
)
LIMITS = [field.name for field in dataclasses.fields(Limits)]


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_change_no_token(row):
  limits = {name: row[name] for name in LIMITS if name in row}
  rest = {name: row[name] for name in row if name not in LIMITS}
  states, policy = rest.pop("states"), rest.pop("policy")
  run = Run(case_of(
    20, policy, 2, limits=Limits(slots=5, tokens=9, **limits), tight=True,
    **rest,
  ) | {"states": states})
  run.play(16)
  finished = 0
  for request in run.requests:
    expected = oracle.alone(
      request.prompt, request.max_tokens, request.is_end
    )
    finished += request.state is State.FINISHED
    if request.state is not State.FINISHED:
      expected = expected[: len(request.tokens)]
    assert request.tokens == expected
  assert finished > 8
  # Pages are conserved, and every preemption and copy is counted once.
  assert run.pages.num_available == run.pages.num_pages
  counts = run.scheduler.counts
  assert counts.preemptions.total() == len(counts.decisions) == sum(
    request.num_preempted for request in run.requests
  )
  assert counts.preemptions.total()
  assert counts.waited == run.waited
  for kind in ("in", "out"):
    moved = [x for x in run.executor.moved if x.kind == kind]
    assert counts.pages[kind] == sum(len(x.source) for x in moved)
  if row["preempt"] != "cost" and row["host_pages"] == 200:
    assert counts.preemptions[row["preempt"]]
  if row["preempt"] == "swap":  # pages of copies under way suffice once
    assert counts.stalls


@pytest.mark.parametrize("paged", [False, True])
@given(case=CASE, keep=st.booleans())
@drawn(35)
def test_recurrent_state_follows_its_sequence(paged, case, keep):
  """Checks, with and without pages, that each state has seen its tokens."""
  kinds = {"paged": paged, "states": True, "keep": keep}
  if not paged:  # without pages only priorities preempt
    kinds |= {"policy": "strict_priority", "priorities": "markov"}
    case["limits"] = dataclasses.replace(case["limits"], slots=2)
  run = Run(case | kinds, (frozenset((0,)), frozenset(), lambda t: t == 1))
  run.play()
  counts = run.scheduler.counts
  for request in run.requests:
    expected = oracle.alone(
      request.prompt, request.max_tokens, request.is_end
    )
    if request.state is State.FINISHED:
      assert request.tokens == expected
    else:
      assert request.tokens == expected[: len(request.tokens)]
  assert run.pages.num_available == run.pages.num_pages
  for kind in ("in", "out"):
    moved = [x for x in run.executor.moved if x.kind == kind]
    assert counts.states[kind] == sum(x.state is not None for x in moved)
  if not paged:
    assert not counts.pages.total()
    # A slot is the only resource of a sequence.
    assert not counts.stalls


def outcome(run, first, *more):
  """Plays a conversation, and returns the number of cached prompt tokens."""
  found, prompt = [], list(first)
  for number, (count, said) in enumerate([*more]):
    request = Request(
      number, prompt, count, conversation=0, more=True, stop=frozenset((0,))
    )
    replay(run.engine, [request])
    assert request.tokens == oracle.alone(prompt, count, request.is_end)
    found.append(request.num_hits)
    prompt = [*prompt, *request.tokens, *said]
  return found


@pytest.mark.parametrize(("keep", "steps_ahead"), [
  (True, 1), (True, 2), (True, 3), (False, 2)
])
def test_next_turn_continues_from_the_kept_state(keep, steps_ahead):
  """With more steps ahead the state may have read a dropped token."""
  limits = Limits(2, 99, preempt="swap", keep_turns=keep, wait_s=100)
  run = Run(
    case_of(0, "first_come", 4, 9, limits=limits, steps_ahead=steps_ahead)
    | {"paged": False, "states": True}
  )
  prompts = [1, 2, 1, 1, 2, 2, 1]
  found = outcome(run, prompts, (2, [1, 2]), (2, [2]), (1, []))
  stopped = oracle.alone(prompts, 2, lambda t: t == 0)
  assert found[0] == 0
  assert (found[1] > len(prompts) - 1) == keep
  assert found[1] in (0, len(prompts) + len(stopped) - 1,
                      len(prompts) + len(stopped))


@given(case=CASE)
@drawn(8)
def test_compiled_interpreted_and_dict_pages_decide_equally(case):
  runs = [
    Run(
      case | {"pages": pages, "interpreted": interpreted},
      (frozenset((0,)), frozenset()),
    )
    for pages, interpreted in (
      (DictPages, True), (Pages, True), (Pages, False)
    )
  ]
  steps = []
  for run in runs:
    made, check = [], run.check

    def kept(step, made=made, check=check):
      check(step)
      if step is not None:
        made.append((
          step.positions.tolist(),
          [(c.request.number, c.start, c.length) for c in step.chunks],
          [(r.number, tuple(r.pages)) for r in step.drawn],
        ))

    run.check = kept
    run.play()
    steps.append(made)
  for run, made in zip(runs, steps, strict=True):
    assert made == steps[0]
    assert run.scheduler.counts == runs[0].scheduler.counts
    assert run.pages.counts == runs[0].pages.counts


@pytest.mark.parametrize("stop", [{-1}, {3, 2**31}])
def test_end_ids_that_are_no_tokens_are_refused(stop):
  with pytest.raises(ValueError, match="must be token ids"):
    Request(0, [1], 1, stop=stop)


def test_short_prompts_share_a_step_and_long_ones_are_chunked():
  """Gives a step one chunk of 8 tokens or four of 2; the rest follows next."""
  pages = Pages(60, 4)
  executor = oracle.Oracle(60, 0, 4, lambda copy: 0.0)
  limits = Limits(slots=8, tokens=16, chunks=((1, 8), (4, 2)))
  scheduler = Scheduler(
    limits, registry.make("first_come", pages), pages, HostCache(0, 4, False),
    executor.costs,
  )
  for number, length in enumerate([2, 1, 5, 2, 1, 8, 1]):
    scheduler.add(Request(number, [number] * length, 1))
  found = []
  while step := scheduler.step(0.0):
    found.append([(c.request.number, c.length) for c in step.chunks])
  assert found == [
    [(0, 2), (1, 1), (2, 2), (3, 2)], [(2, 3)], [(4, 1), (5, 2), (6, 1)],
    [(5, 6)],
  ]


@given(case=CASE)
@drawn(10)
def test_swap_copies_only_pages_that_the_host_lacks(case):
  """Compares the pages moved with contexts less the valid host copies."""
  case = case | {
    "limits": dataclasses.replace(
      case["limits"], preempt="swap", keep_turns=True
    ),
    "host_pages": 200, "tight": True,
  }
  run = Run(case)
  moved, size = [], case["page_size"]
  write = run.host.write

  def watched(owner, tokens, pinned):
    valid = run.host.valid(owner)
    pages = write(owner, tokens, pinned)
    changed = max(0, -(-tokens // size) - valid // size)
    assert len(pages) == (changed if tokens > valid else 0)
    assert write(owner, tokens, pinned) == []  # no token was decoded since
    moved.append(len(pages))
    return pages

  run.host.write = watched
  run.play()
  assert sum(moved) == run.scheduler.counts.pages["out"]
  out = [c for c in run.executor.moved if c.kind == "out"]
  assert sum(len(c.source) for c in out) == sum(moved)


def copy_s(kind, pages):
  """Returns the seconds of a copy on `oracle.COPIES`: 2 ms for each run."""
  breaks = sum(b != a + 1 for a, b in itertools.pairwise(pages))
  runs = breaks + 1 if pages else 0
  return runs * 2e-3 + len(pages) * 1000 / {"out": 1e6, "in": 2e6}[kind]


@given(case=CASE)
@drawn(8)
def test_preemption_takes_the_cheaper_of_swap_and_recompute(case):
  """The price of a swap includes the copy back, of all pages of the request."""
  case = case | {
    "limits": dataclasses.replace(case["limits"], preempt="cost"),
    "tight": True, "host_pages": 200,
  }
  run, size = Run(case), case["page_size"]
  preempt = run.scheduler.swapping.preempt

  def watched(request, computed, slot):
    # Pages with tokens; `growth` may have allocated more.
    pages = request.pages[: math.ceil(computed / size)].tolist()
    valid = run.host.valid(request.owner)
    result = preempt(request, computed, slot)
    decision = run.scheduler.counts.decisions[-1]
    assert decision.recompute_s == pytest.approx(0.1 * computed)
    if decision.able:
      lacking = pages[valid // size :] if computed > valid else []
      swap_s = copy_s("out", lacking) + copy_s("in", pages)
      assert decision.swap_s == pytest.approx(swap_s)
      assert decision.swapped == (swap_s < 0.1 * computed)
    return result

  run.scheduler.swapping.preempt = watched
  run.play()


@pytest.mark.parametrize(("paged", "states"), [
  (True, False), (True, True), (False, True),
])
@pytest.mark.parametrize(("out_s", "in_s"), [
  (0.04, 0.04), (0.04, 0.07), (0.07, 0.04), (0.04, 0.057), (0.11, 0.01),
  (0.01, 0.11), (0.2, 0.2), (0.3, 0.2),
])
def test_swap_is_priced_both_ways(out_s, in_s, paged, states):
  """Five tokens are read again in 0.5 s; a page of one takes these times.

  A recurrent state takes as long as a run of one page.
  """
  copies = CopyTimes(1, 1, 5e-3, 1 / out_s, 1 / in_s, math.inf)
  pages = Pages(20, 1, reuse=not states)
  executor = Simulator(oracle.Times(), copies, most=8)
  scheduler = Scheduler(
    Limits(slots=1, preempt="cost"), registry.make("strict_priority", pages),
    pages, HostCache(20, 1, reserve=False, paged=paged, states=states),
    executor.costs,
  )
  engine = Engine(scheduler, executor)
  for number, priority in enumerate((1.0, 0.0)):
    scheduler.add(Request(number, [1] * 5, 4, priority=priority))
    engine.step()  # the second request preempts the first
  (decision,) = scheduler.counts.decisions
  assert decision.able
  assert decision.recompute_s == pytest.approx(0.5)
  # Adjacent pages are one run, of 5 ms.
  copied, runs = 5 * paged + states, paged + states
  swap_s = copied * (out_s + in_s) + 2 * runs * 5e-3
  assert decision.swap_s == pytest.approx(swap_s)
  assert decision.swapped == (swap_s < 0.5)


@given(case=CASE)
@drawn(8)
def test_mean_in_system_is_rate_times_mean_latency(case):
  """Little's law, which is exact over a run that has drained."""
  run = Run(case)
  area, last, inside = 0.0, 0.0, 0
  run.play()
  events = [(r.arrival_s, 1) for r in run.requests]
  events += [(r.end_s, -1) for r in run.requests]
  for time, change in sorted(events):
    area += inside * (time - last)
    inside, last = inside + change, time
  latencies = [r.end_s - r.arrival_s for r in run.requests]
  assert inside == 0
  assert area == pytest.approx(sum(latencies))


@pytest.mark.parametrize("copied", [True, False])
def test_prompt_of_whole_pages_is_found_in_the_cache(copied):
  """Reuses all but the last token with copy on write, else all but a page."""
  pages = Pages(9, 4)
  executor = oracle.Oracle(9, 0, 4, lambda copy: 0.0)
  engine = Engine(
    Scheduler(
      Limits(copy_on_write=copied), registry.make("first_come", pages), pages,
      HostCache(0, 4, False), executor.costs,
    ),
    executor,
  )
  requests = [Request(number, [1] * 8, 3) for number in range(2)]
  for request in requests:
    replay(engine, [request])
  assert requests[0].tokens == requests[1].tokens
  assert requests[1].num_hits == (7 if copied else 4)
  assert pages.counts.copied == copied
  # Of a prompt's full pages before its last token, the first had one to fill.
  assert (pages.counts.misses, pages.counts.hits) == (1, 1 + copied)


def test_request_that_never_fits_is_refused():
  pages = Pages(2, 4)
  executor = oracle.Oracle(2, 0, 4, lambda copy: 0.0)
  scheduler = Scheduler(
    Limits(), registry.make("first_come", pages), pages, HostCache(0, 4, False),
    executor.costs,
  )
  request = Request(0, [1] * 5, 5)
  scheduler.add(request)
  assert request.state is State.REFUSED
  assert scheduler.idle
  scheduler.add(Request(1, [1] * 5, 4))
  assert not scheduler.idle


@pytest.mark.parametrize("kept", [3, 16])
def test_outputs_longer_than_the_token_buffer_are_complete(kept, monkeypatch):
  """Reads tokens only at the end, so that buffer rows are soon reused."""
  monkeypatch.setattr(running, "_KEPT", kept)
  run = Run(case_of(1, "first_come", 4, 200, limits=Limits(5, 9)))
  monkeypatch.setattr(run, "check", lambda step: None)
  run.play()
  whole = [r for r in run.requests if r.state is State.FINISHED]
  assert max(len(r.tokens) for r in whole) > kept
  for request in whole:
    assert request.tokens == oracle.alone(
      request.prompt, request.max_tokens, request.is_end
    )
    assert len(request.token_times) == len(request.tokens)
