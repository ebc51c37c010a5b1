"""Eviction policies of weight slots: the expert that a new one replaces.

A policy is a function of the *residents* (experts in slots) that may be evicted
and of the experts of the waiting requests, in the order of service. A new
policy is a function and a row of `EVICTIONS`.

`farthest` evicts the resident whose next request is farthest. If it is given
the waiting requests only, it assumes that less frequent experts are requested
later. Given all later requests it is Belady's policy (IBM Systems Journal
1966), whose number of misses is minimal.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses


@dataclasses.dataclass(frozen=True)
class Resident:
  """Expert in a slot.

  Attributes:
    slot: Index of the slot.
    expert: Key of the expert.
    last: Number of the event (request, load or step) that last used the
      expert; larger is later.
    num_requests: Requests for the expert so far, also before its last load.
  """

  slot: int
  expert: str
  last: int
  num_requests: int


EvictionPolicy = Callable[[Sequence[Resident], Iterable[str]], Resident]


def least_recent(
  residents: Sequence[Resident], queue: Iterable[str]
) -> Resident:
  """Returns the resident that was used least recently; ignores ``queue``."""
  del queue
  return min(residents, key=lambda resident: resident.last)


def least_frequent(
  residents: Sequence[Resident], queue: Iterable[str]
) -> Resident:
  """Returns the least requested resident; of equal ones, the least recent.

  ``queue`` is ignored.
  """
  del queue
  return min(residents, key=lambda r: (r.num_requests, r.last))


def farthest(residents: Sequence[Resident], queue: Iterable[str]) -> Resident:
  """Returns the resident whose next request is last in the queue of experts.

  If the queue has no request for several residents, the one of them with the
  fewest requests so far is returned.

  Example:
    >>> residents = [Resident(i, name, i, 1) for i, name in enumerate("abc")]
    >>> farthest(residents, "cab").expert, farthest(residents, "ca").expert
    ('b', 'b')
    >>> farthest(residents, "c").expert
    'a'
  """
  left = {resident.expert: resident for resident in residents}
  for expert in queue:
    if len(left) == 1:
      break
    left.pop(expert, None)
  return least_frequent(list(left.values()), ())


EVICTIONS: dict[str, EvictionPolicy] = {
  "lru": least_recent,
  "lfu": least_frequent,
  "lookahead": farthest,
  "belady": farthest,
}
