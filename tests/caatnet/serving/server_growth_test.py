"""Memory of a server does not grow with the number of served requests."""

import gc
import types

import pytest

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine
from caatnet.serving.requests import Request
from caatnet.serving.scheduler import counts
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import clients, registry
from caatnet.serving.scheduler.scheduler import Scheduler
from tests.caatnet.serving import oracle


def num_objects(root):
  """Counts the objects reachable from one, except modules and functions."""
  seen, todo = {id(root)}, [root]
  while todo:
    for found in gc.get_referents(todo.pop()):
      leaf = isinstance(found, type | types.ModuleType | types.FunctionType)
      if id(found) not in seen and not leaf:
        seen.add(id(found))
        todo.append(found)
  return len(seen)


@pytest.mark.parametrize("policy", sorted(registry.POLICIES))
def test_number_of_objects_does_not_grow_with_requests(policy, monkeypatch):
  """Gives each request another client, and cancels many."""
  monkeypatch.setattr(counts, "_KEPT", 5)
  monkeypatch.setattr(clients, "_REMEMBERED", 20)
  rng = oracle.rng_of(0)
  pages = Pages(8, 4)
  executor = oracle.Oracle(8, 40, 4, lambda copy: float(rng.exponential(1)))
  scheduler = Scheduler(
    Limits(slots=5, tokens=8, preempt="cost", keep_turns=True),
    registry.make(policy, pages), pages, HostCache(40, 4, reserve=True),
    executor.costs,
  )
  engine = Engine(scheduler, executor)

  def serve(first, count):
    """Serves requests, some of which wait in the queue until cancelled."""
    for number in range(first, first + count):
      scheduler.add(Request(
        number, oracle.prompts(rng, 1, 12)[0], int(rng.integers(1, 12)),
        client=f"client {number}", priority=float(rng.integers(3)),
        conversation=number, more=bool(number % 2), weight=1 + number / 1e6,
        arrival_s=executor.now(),
        deadline_s=executor.now() + 50 if number % 3 else float("inf"),
      ))
      for _ in range(8):
        engine.step(executor.now() + 1)
      if len(scheduler.requests) > 6:
        leaver = scheduler.requests[int(rng.integers(6))]
        scheduler.cancel(leaver, executor.now())
    while not engine.idle:
      engine.step()
    executor.moved.clear()  # log for other tests
    return num_objects(scheduler)

  serve(0, 100)
  before = serve(100, 100)
  after = serve(200, 200)
  assert scheduler.counts.preemptions.total() > 10
  # Caches differ in their contents, but their size is bounded.
  assert after < before + 150
