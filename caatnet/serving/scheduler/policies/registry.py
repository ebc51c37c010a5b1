"""Registry of policies by name.

A new policy is a file in this directory and an entry of `POLICIES`.
"""

from collections.abc import Callable

from caatnet.serving.cache.pages import Pages
from caatnet.serving.scheduler.policies.base import Policy
from caatnet.serving.scheduler.policies.dlpm import DeficitLongestPrefix
from caatnet.serving.scheduler.policies.experts import ExpertsPolicy
from caatnet.serving.scheduler.policies.first_come import FirstCome
from caatnet.serving.scheduler.policies.shortest_first import ShortestFirst
from caatnet.serving.scheduler.policies.strict_priority import StrictPriority
from caatnet.serving.scheduler.policies.vtc import VirtualTokenCounter
from parallel.base.checks import known

POLICIES: dict[str, Callable[[Pages], Policy]] = {
  "first_come": lambda pages: FirstCome(),
  "strict_priority": lambda pages: StrictPriority(),
  "shortest_first": lambda pages: ShortestFirst(),
  "vtc": lambda pages: VirtualTokenCounter(),
  "dlpm": lambda pages: DeficitLongestPrefix(
    lambda request: len(pages.find(request.block_hashes))
  ),
  "experts": lambda pages: ExpertsPolicy(),
}


def make(name: str, pages: Pages) -> Policy:
  """Returns a policy with an empty queue.

  Args:
    name: A key of `POLICIES`.
    pages: Pages of the cache, for policies that look up cached prefixes.

  Raises:
    ValueError: The name is not in `POLICIES`.
  """
  known("policy ", name, POLICIES)
  return POLICIES[name](pages)
