"""Registry of placement policies, keyed by the names that configs use.

A policy receives a problem and returns a `Placement`. All policies but
"optimum" are greedy and have the layout of ZeRO-Offload: the CPU runs the
optimizer, weights stay on the device if they fit there, and the inputs of
layers are saved on the host.
"""

from collections.abc import Callable

from parallel.base import checks
from parallel.plans.placement import (
  dram_only,
  interleave,
  largest_first,
  latency_first,
  optimum,
)
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import Problem

POLICIES: dict[str, Callable[[Problem], Placement]] = {
  "dram_only": dram_only.place,
  "interleave": interleave.place,
  "largest_first": largest_first.place,
  "latency_first": latency_first.place,
  "optimum": optimum.place,
}


def place(problem: Problem, policy: str) -> Placement:
  """Returns the placement of a policy; see `parallel.plans.placement.problem`.

  Raises:
    ValueError: The policy is unknown, or "optimum" finds no placement. The
      placement of another policy may exceed the capacity of a tier
      (`Cost.missing`).
  """
  checks.known("policy ", policy, POLICIES)
  return POLICIES[policy](problem)
