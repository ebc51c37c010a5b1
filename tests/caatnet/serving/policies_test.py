"""Properties of scheduling policies: bounds of fairness and order."""

import itertools

import numpy as np
import pytest

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import clients, registry
from caatnet.serving.scheduler.policies.base import Policy
from caatnet.serving.scheduler.policies.dlpm import DeficitLongestPrefix
from caatnet.serving.scheduler.policies.vtc import VirtualTokenCounter
from caatnet.serving.scheduler.priorities import Priorities
from caatnet.serving.scheduler.running import RunningRequests
from caatnet.serving.scheduler.scheduler import Scheduler
from tests.caatnet.serving import oracle


def serve(policy, requests, *, slots=4, pages=400, watch=None, tokens=64):
  """Serves requests with a policy, and returns the scheduler."""
  cache = Pages(pages, 4)
  executor = oracle.Oracle(pages, 0, 4, lambda copy: 0.0)
  made = policy(cache) if callable(policy) else registry.make(policy, cache)
  scheduler = Scheduler(
    Limits(slots=slots, tokens=tokens), made, cache, HostCache(0, 4, False),
    executor.costs,
  )
  replay(Engine(scheduler, executor), requests, watch)
  return scheduler


def backlog(seed, weights=(1.0, 1.0), count=60, arrival=0.0):
  """Returns requests of clients that are backlogged from the start."""
  rng = oracle.rng_of(seed)
  return [
    Request(
      i, rng.integers(1000, size=rng.integers(1, 20)), int(rng.integers(1, 20)),
      client=i % len(weights), weight=weights[i % len(weights)],
      arrival_s=arrival * i,
    )
    for i in range(count)
  ]


def service(requests):
  """Returns service by client: w_p per prompt token, w_q per drawn token."""
  found = {}
  for r in requests:
    if r.scheduled_s is not None:
      own = len(r.prompt) - r.num_hits + 2 * len(r.tokens)
      found[r.client] = found.get(r.client, 0) + own
  return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0)])
def test_vtc_keeps_backlogged_clients_within_the_bound(seed, weights):
  """Checks theorem 4.4 of VTC, with tokens counted when they are drawn."""
  requests = backlog(seed, weights)
  slots = 4
  bound = 2 * max(20, 2 * slots * 40)
  seen = []

  def watch(engine, step):
    waiting = {r.client for r in engine.scheduler.policy.waiting()}
    if waiting == {0, 1}:
      found = service(requests)
      got = [found.get(c, 0) / weights[c] for c in (0, 1)]
      seen.append(got)
      assert abs(got[0] - got[1]) <= bound

  serve("vtc", requests, slots=slots, watch=watch)
  assert len(seen) > 50
  last = seen[-1]
  assert last[0] / last[1] == pytest.approx(1.0, abs=bound / min(last))


def test_service_is_proportional_to_weights():
  """Serves a backlogged client of twice the weight twice as much."""
  requests = backlog(0, (2.0, 1.0), count=250)
  ratios = []

  def watch(engine, step):
    waiting = {r.client for r in engine.scheduler.policy.waiting()}
    if waiting == {0, 1}:
      found = service(requests)
      if len(found) == 2:
        ratios.append(found[0] / found[1])

  serve("vtc", requests, watch=watch)
  assert ratios[-1] == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_vtc_with_one_client_equals_first_come(seed):
  runs = []
  for policy in ("vtc", "first_come"):
    requests = backlog(seed, (1.0,), arrival=0.7)
    serve(policy, requests)
    runs.append([(r.scheduled_s, r.end_s) for r in requests])
  assert runs[0] == runs[1]


def test_returning_client_has_no_credit_for_its_absence():
  """Checks the lift: without it, the second client would be served alone."""
  requests = backlog(1, (1.0,), count=80)
  late = backlog(2, (1.0,), count=40)
  for r in late:
    r.client, r.arrival_s, r.number = 1, 60.0, r.number + 100
  serve("vtc", [*requests, *late])
  start = min(r.scheduled_s for r in late)
  first = [r for r in requests if r.scheduled_s > start]
  between = [r for r in first if r.scheduled_s < late[20].scheduled_s]
  assert len(between) > 8


def test_arrival_lifts_counters_below_those_of_queued_clients_only():
  policy = registry.make("vtc", Pages(8, 4))
  policy.counters.update({0: 3.0, 1: 5.0, 2: 1.0})
  for client in range(3):
    request = Request(client, [1], 1, client=client)
    policy.arrived(request)
    policy.push(request)
  assert policy.counters == {0: 3.0, 1: 5.0, 2: 3.0}


def test_urgent_request_preempts_others():
  slow = [Request(i, [1] * 8, 30, priority=1.0) for i in range(4)]
  urgent = Request(4, [2] * 8, 4, priority=0.0, arrival_s=5.0)
  scheduler = serve("strict_priority", [*slow, urgent], slots=2)
  assert urgent.end_s < min(r.end_s for r in slow)
  assert len(scheduler.counts.decisions) == 1


def test_shortest_requests_are_served_first():
  requests = backlog(3, (1.0,), count=20)
  serve("shortest_first", requests, slots=1)
  work = [len(r.prompt) + r.max_tokens
          for r in sorted(requests, key=lambda r: r.scheduled_s)]
  assert work == sorted(work)


@pytest.mark.parametrize("name", registry.POLICIES)
def test_each_policy_serves_all_requests_in_order_of_value(name):
  """Uses one slot and deadlines for half of the requests (others infinite)."""
  requests = backlog(4, (1.0,), count=20)
  for r in requests[::2]:
    r.deadline_s = 1e9 - r.number
  scheduler = serve(name, requests, slots=1)
  assert all(len(r.tokens) == r.max_tokens for r in requests)
  policy = scheduler.policy
  if type(policy).key is Policy.key:  # else the policy orders its queue itself
    order = sorted(requests, key=lambda r: r.scheduled_s)
    assert order == sorted(requests, key=policy.key)


@pytest.mark.parametrize("value", [float("nan"), None, "soon"])
def test_policy_value_that_is_not_a_number_is_named(value):
  policy = Policy()
  policy.value = lambda request: value
  with pytest.raises(
    ValueError, match=f"Policy.value={value!r} of request 0 must be a number"
  ):
    policy.push(backlog(0)[0])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0)])
def test_dlpm_client_without_shared_prefix_waits_one_quantum_at_most(weights):
  """Checks deficits: the prompts of the first client are always cached."""
  rng = np.random.default_rng(0)
  same = rng.integers(1000, size=12)
  requests = [
    Request(i, [*same, i] if i % 2 == 0 else rng.integers(1000, size=13), 6,
            client=i % 2, weight=weights[i % 2])
    for i in range(240)
  ]
  quantum, charge, slots, seen = 100.0, 13 + 2 * 6, 2, []

  def watch(engine, step):
    if {r.client for r in engine.scheduler.policy.waiting()} == {0, 1}:
      found = service(requests)
      seen.append([found.get(c, 0) / weights[c] for c in (0, 1)])

  serve(
    lambda cache: DeficitLongestPrefix(
      lambda r: len(cache.find(r.block_hashes)), quantum
    ), requests, slots=slots, watch=watch,
  )
  ahead = np.abs(np.subtract(*np.transpose(seen))).max()
  assert quantum / 2 < ahead <= quantum + 2 * slots * charge
  assert min(seen[-1]) > 5 * quantum


def test_dlpm_serves_longest_prefixes_first():
  """Groups requests with equal prefixes, within a quantum."""
  rng = np.random.default_rng(0)
  starts = [rng.integers(1000, size=40) for _ in range(4)]
  requests = [
    Request(i, [*starts[i % 4], i], 2, client=i % 2) for i in range(64)
  ]
  serve("dlpm", requests, slots=1)
  hits = sum(r.num_hits for r in requests)
  assert hits == (64 - 4) * 40
  order = [r.number % 4 for r in sorted(requests, key=lambda r: r.scheduled_s)]
  changes = sum(a != b for a, b in itertools.pairwise(order))
  assert changes < 8


def test_counters_grow_by_the_costs_of_each_kind_of_token():
  """Neither a preempted request's prompt nor clients without tokens count."""
  policy = VirtualTokenCounter(input_cost=3.0, output_cost=5.0)
  first = Request(0, [1], 1, client="a", weight=2.0)
  policy.admitted(first, 7)
  assert policy.counters == {"a": 3 * 7 / 2}
  first.num_preempted = 1
  policy.admitted(first, 7)
  policy.served([("a", 2.0), ("b", 4.0), ("c", 4.0)], [3, 0, 2])
  assert policy.counters == {"a": 10.5 + 5 * 3 / 2, "c": 5 * 2 / 4}
  usual = VirtualTokenCounter()
  usual.admitted(Request(0, [1], 1, client="a"), 7)
  usual.served([("a", 1.0)], [3])
  assert usual.counters == {"a": 7 + 2 * 3}


def test_deficits_shrink_by_service_and_are_refilled_by_weight():
  policy = DeficitLongestPrefix(lambda r: 0, quantum=10.0, output_cost=3.0)
  for number, client in enumerate("ab"):
    request = Request(number, [1], 1, client=client, weight=1.0 + 2 * number)
    policy.arrived(request)
    policy.push(request)
  policy.admitted(Request(2, [1], 1, client="a"), 15)
  policy.served([("a", 1.0), ("b", 3.0)], [2, 4])
  assert policy.deficits == {"a": -21, "b": -12}
  assert policy.peek().client == "b"  # the first to have a positive deficit
  assert policy.deficits == {"a": -11, "b": 18}
  usual = registry.make("dlpm", Pages(8, 4))
  usual.push(first := Request(0, [1], 1, client="a"))
  assert usual.peek() is first
  usual.served([("a", 1.0)], [3])
  assert usual.deficits == {"a": 8192 - 2 * 3}


def test_requests_of_equal_priority_do_not_displace_each_other():
  policy = registry.make("strict_priority", Pages(8, 4))
  running = RunningRequests(2, 4, 4)
  running.add(Request(0, [1], 1, priority=2.0), 0, 1, 2.0)
  for priority, displaces in ((1.0, True), (2.0, False), (3.0, False)):
    waiting = Request(1, [1], 1, priority=priority)
    assert policy.displaces(waiting, running) == displaces


def test_priorities_change_as_often_and_as_far_as_their_process_says():
  count = 4000
  requests = [Request(i, [1], 1) for i in range(count)]
  made = Priorities("markov", 0.1, levels=5, stay=0.8, seed=1)
  first = np.array([made.first() for _ in requests])
  assert np.bincount(first.astype(int)).tolist() == (
    pytest.approx([count / 5] * 5, rel=0.1)
  )
  for request, priority in zip(requests, first, strict=True):
    request.priority = priority
  changed = made.update(requests)
  moves = np.array([r.priority for r in requests]) - first
  assert set(moves.tolist()) == {-1, 0, 1}
  assert [r.number for r in changed] == np.flatnonzero(moves).tolist()
  inside = (first > 0) & (first < 4)
  assert (moves[inside] == 0).mean() == pytest.approx(0.8, abs=0.03)
  # One of two moves from the last levels is beyond them.
  assert (moves[~inside] == 0).mean() == pytest.approx(0.9, abs=0.03)
  assert sum(made.due() for _ in range(count)) == pytest.approx(400, rel=0.2)
  Priorities("random", levels=3).update(requests)
  assert {r.priority for r in requests} == {0, 1, 2}
  none = Priorities()
  assert (none.first(), none.due(), none.levels) == (0, False, 8)


def test_queue_stays_in_order_when_removed_requests_leave_it():
  """The heap is rebuilt when most of its entries have been removed."""
  policy, rng = registry.make("shortest_first", Pages(8, 4)), oracle.rng_of(0)
  requests = [
    Request(i, [1], int(n)) for i, n in enumerate(rng.integers(1, 1000, 300))
  ]
  for request in requests:
    policy.push(request)
  for request in requests[:290]:
    policy.remove(request)
    policy.push(request)
    policy.remove(request)
  assert len(policy) == 10
  assert len(policy._heap) < 100
  order = []
  while request := policy.peek():
    policy.remove(request)
    order.append(request.max_tokens)
  assert order == sorted(r.max_tokens for r in requests[290:])


def test_only_absent_clients_are_forgotten(monkeypatch):
  monkeypatch.setattr(clients, "_REMEMBERED", 3)
  policy = registry.make("vtc", Pages(8, 4))
  policy.counters.update(dict.fromkeys((0, 1, 2, 4), 1.0))
  for number in range(2):
    policy.arrived(Request(number, [1], 1, client=2 * number))
  assert policy.counters.keys() == {0, 1, 2, 4}  # one is present, three absent
  policy.counters.update(dict.fromkeys(range(9), 1.0))
  policy.arrived(Request(3, [1], 1, client=0))
  assert policy.counters == {0: 1.0, 2: 1.0}
