"""Snapshot of a server's state, for its web page and its metrics.

The snapshot contains numbers only: no text of a prompt or a response, and no
name of a client.
"""

import collections
import dataclasses
import itertools
from typing import Any

from caatnet.serving.cache.pages import STATES
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.expert_weights import ExpertWeights, name_of
from caatnet.serving.requests import State
from caatnet.serving.scheduler.scheduler import Scheduler
from parallel.plans.placement.slots import Slots

# Maximum number of listed requests.
_MAX_LISTED_REQUESTS = 100
_LIVE = (
  State.WAITING, State.RUNNING, State.LEAVING, State.SWAPPED, State.ARRIVING
)


def describe(engine: Engine) -> dict[str, Any]:
  """Returns an engine's state as plain data.

  Must be called by the thread that runs the engine.

  Returns:
    The result of `of_scheduler`, with ``experts``: the result of `of_experts`,
    or None for a server of one model.
  """
  scheduler, experts = engine.scheduler, None
  weights = getattr(engine.executor, "weights", None)
  if weights is not None:
    experts = of_experts(scheduler.policy.slots, weights)
  return of_scheduler(scheduler) | {"experts": experts}


def of_experts(slots: Slots, weights: ExpertWeights) -> dict[str, Any]:
  """Returns the state of experts' weights as plain data.

  Returns:
    ``slots``: for each weight slot its expert's key, its state, and the number
    of steps under way that read it; ``host``: keys of the experts in host
    memory; ``evictions``; ``load_s``: median seconds of a load; ``counters``:
    for each expert that was used, hits and misses of its requests, loads,
    failures, bytes, files and exposed_s
    (`caatnet.serving.engine.expert_weights.LoadCounters`).
  """
  counters = {
    name: {"hits": 0, "misses": 0} | dataclasses.asdict(moved)
    for name, moved in list(weights.moved.items())
  }
  for kind, by_key in (
    ("hits", slots.counts.hits_of), ("misses", slots.counts.misses_of)
  ):
    for key, count in by_key.items():
      counters[name_of(key)][kind] += count
  return {
    "slots": [
      {
        "expert": slots.expert(slot), "state": slots.state(slot).value,
        "steps": slots.users(slot),
      }
      for slot in range(len(slots))
    ],
    "host": list(weights.on_host),
    "evictions": slots.counts.evictions,
    "load_s": weights.load_s,
    "counters": counters,
  }


def of_scheduler(scheduler: Scheduler) -> dict[str, Any]:
  """Returns a scheduler's state as plain data.

  Returns:
    ``requests``: number of requests by state; ``listed``: of up to 100 requests
    the number, state, prompt tokens, drawn tokens and their maximum, pages,
    preemptions and priority; ``slots``: maximum of running requests;
    ``page_size`` in tokens; ``pages``: number of pages by state; ``map``: one
    digit per page, the index of its state in ``page_states``; ``host_pages``:
    total and used pages; ``copies``: copied pages, recurrent states and ranges
    of contiguous pages (``runs``) by kind; ``prefixes``: pages found, not found
    and evicted; ``preemptions`` by kind; ``steps``; ``stalls``.
  """
  requests, pages = scheduler.requests, scheduler.pages
  counts = scheduler.counts
  found = collections.Counter(request.state for request in requests)
  states = pages.states()
  # One ASCII digit per page keeps the JSON small.
  digits = (states + ord("0")).astype("u1").tobytes().decode()
  host = scheduler.swapping.host
  return {
    "requests": {state.value: found[state] for state in _LIVE},
    "listed": [
      {
        "number": r.number, "state": r.state.value, "prompt": len(r.prompt),
        "drawn": r.length - len(r.prompt), "most": r.max_tokens,
        "pages": len(r.pages), "preempted": r.num_preempted,
        "priority": r.priority,
      }
      for r in itertools.islice(requests, _MAX_LISTED_REQUESTS)
    ],
    "slots": scheduler.limits.slots,
    "page_size": pages.page_size,
    "page_states": list(STATES),
    "pages": {
      name: digits.count(str(i)) for i, name in enumerate(STATES)
    },
    "map": digits,
    "host_pages": {"all": host.num_pages, "used": host.num_used},
    "copies": {
      kind: {
        "pages": counts.pages[kind], "states": counts.states[kind],
        "runs": counts.runs[kind].total(),
      }
      for kind in ("out", "in", "within")
    },
    "prefixes": {"hits": pages.counts.hits, "misses": pages.counts.misses,
                 "evicted": pages.counts.evicted},
    "preemptions": {
      kind: counts.preemptions[kind] for kind in ("swap", "recompute")
    },
    "steps": counts.steps,
    "stalls": counts.stalls,
  }
