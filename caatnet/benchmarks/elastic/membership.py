"""Exhaustive state search of the membership protocol."""

import time
from typing import Any

from rich.console import Console

from caatnet.show import tables
from parallel.base.checks import known
from parallel.peers.membership.coordinator import Rules
from parallel.peers.membership.search import search
from parallel.peers.membership.world import FaultBudget, SearchBounds


def run(config: Any) -> dict[str, Any]:
  """Searches, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/membership.py.

  Raises:
    ValueError: An item of config.benchmark.worlds has an unknown key.
  """
  rows = [_search_world(world, config.benchmark.most)
          for world in config.benchmark.worlds]
  tables.print_table(
    "all states of peers and a coordinator with faults",
    "peers | rounds | accidents | states | complete=all | seconds:.0f | "
    "problem", rows,
  )
  for row in rows:
    for line in row["trace"]:
      print(line)
  return {"benchmark": "membership", "rows": rows}


def _search_world(world: Any, most: int) -> dict[str, Any]:
  world = dict(world)
  peers, rounds = world.pop("peers"), world.pop("rounds")
  rules = Rules(world.pop("least"), world.pop("quorum", 0))
  for accident in world:
    known("config.benchmark.worlds: ", accident, FaultBudget._fields)
  start = time.perf_counter()
  with Console(stderr=True).status("searching") as status:
    found = search(
      SearchBounds(peers, rounds, FaultBudget(**world), rules, most),
      progress=lambda n: status.update(f"{peers} peers: {n:,} states"),
    )
  accidents = ", ".join(f"{n} {kind}" for kind, n in world.items())
  if rules.quorum:
    accidents = ", ".join(filter(None, [accidents, f"quorum {rules.quorum}"]))
  return {
    "peers": peers, "rounds": rounds, "accidents": accidents or "none",
    "states": found.states, "complete": found.complete,
    "problem": found.problem, "trace": list(found.trace),
    "seconds": time.perf_counter() - start,
  }
