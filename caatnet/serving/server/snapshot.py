"""Snapshot of a server's state, for its web page and its metrics.

The snapshot contains numbers only: no text of a prompt or a response, and no
name of a client.
"""

import collections
import itertools
from typing import Any

from caatnet.serving.cache.pages import STATES
from caatnet.serving.requests import State
from caatnet.serving.scheduler.scheduler import Scheduler

# Maximum number of listed requests.
_LISTED = 100
_LIVE = (
  State.WAITING, State.RUNNING, State.LEAVING, State.SWAPPED, State.ARRIVING
)


def describe(scheduler: Scheduler) -> dict[str, Any]:
  """Returns a scheduler's state as plain data.

  Must be called by the thread that runs the scheduler.

  Returns:
    ``requests``: number of requests by state; ``listed``: number, state, tokens
    read and drawn, pages and preemptions of up to 100 requests; ``pages``:
    number of pages by state; ``map``: one digit per page, the index of its
    state in ``page_states``; ``host_pages``: total and used pages; ``copies``:
    copied pages, states and runs by kind; ``prefixes``: pages found, not found
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
      for r in itertools.islice(requests, _LISTED)
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
