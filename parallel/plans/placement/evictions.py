"""Eviction policies of weight slots: the resident that a load replaces.

A policy is a function of the residents that may be evicted and of the experts
of the requests that wait, in the order of service. A new policy is a function
and a row of `EVICTIONS`.

`farthest` evicts the resident whose next request is farthest. Given the experts
of waiting requests it looks ahead over the queue, beyond which it assumes that
less frequent experts are requested later. Given all later requests it is
Belady's policy (IBM Systems Journal 1966), whose number of misses is minimal.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses


@dataclasses.dataclass(frozen=True)
class Resident:
  """Expert in a slot.

  Attributes:
    slot: Index of the slot.
    expert: Key of the expert.
    last: Number of the last event that used it; larger is later.
    num_requests: Number of its requests so far, also before its last load.
  """

  slot: int
  expert: str
  last: int
  num_requests: int


Eviction = Callable[[Sequence[Resident], Iterable[str]], Resident]


def least_recent(
  residents: Sequence[Resident], queue: Iterable[str]
) -> Resident:
  """Returns the resident that was used least recently."""
  del queue
  return min(residents, key=lambda resident: resident.last)


def least_frequent(
  residents: Sequence[Resident], queue: Iterable[str]
) -> Resident:
  """Returns the resident with the fewest requests; ties: least recent."""
  del queue
  return min(residents, key=lambda r: (r.num_requests, r.last))


def farthest(residents: Sequence[Resident], queue: Iterable[str]) -> Resident:
  """Returns the resident whose next request is farthest.

  Residents without a request in the queue are evicted first, the least frequent
  of them.

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


EVICTIONS: dict[str, Eviction] = {
  "lru": least_recent,
  "lfu": least_frequent,
  "lookahead": farthest,
  "belady": farthest,
}
