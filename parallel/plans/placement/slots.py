"""Weight slots: which expert is in which device buffer, and evictions.

A slot is a set of device buffers for the parameters of one expert. All slots
have equal shapes, so the compiled programs take the buffers of any slot as
arguments. A slot is EMPTY, LOADING (an expert's weights are being copied to it)
or READY. A slot that is loading, in use by a step, or has a pinned expert is
never evicted. Weights are read-only, so an eviction copies nothing.

This is bookkeeping without threads, clocks and jax: a server and a simulator
make the same decisions. Source: the runtime of Samba-CoE (SN40L, arXiv
2405.07518), section V, which evicts the least recently used expert.

Example:
  Three requests on one slot:

  >>> slots = Slots(1, "lru")
  >>> for expert in ("a", "a", "b"):
  ...   slot = slots.find(expert)
  ...   if slot is None:
  ...     slot = slots.reserve(expert)
  ...     slots.loaded(slot)
  ...   slots.touch(slot)
  >>> slots.counts.hits, slots.counts.misses, slots.counts.loads
  (1, 2, 2)
"""

import collections
from collections.abc import Collection, Iterable, Sequence
import dataclasses
import enum

from parallel.base.checks import at_least, known
from parallel.plans.placement.evictions import EVICTIONS, Resident


class State(enum.Enum):
  """State of a slot."""

  EMPTY = "empty"
  LOADING = "loading"
  READY = "ready"


@dataclasses.dataclass
class Counts:
  """Counters of weight slots.

  Attributes:
    hits: Requests whose expert was in a slot.
    misses: Requests whose expert had to be loaded for them.
    loads: Completed loads, including those of experts that no request used.
    failures: Loads that failed.
    evictions: Experts that were replaced.
    hits_of: Hits by expert.
    misses_of: Misses by expert.
  """

  hits: int = 0
  misses: int = 0
  loads: int = 0
  failures: int = 0
  evictions: int = 0
  hits_of: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  misses_of: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )


@dataclasses.dataclass
class _Slot:
  """Weight slot.

  Attributes:
    expert: Key of the expert; "" for none.
    state: State of the slot.
    users: Number of running steps that read it.
    last: Number of the event that last used it; larger is later.
    fresh: Whether no request has used the expert since its load.
  """

  expert: str = ""
  state: State = State.EMPTY
  users: int = 0
  last: int = 0
  fresh: bool = False


class Slots:
  """Assignment of experts to slots.

  Attributes:
    pinned: Experts that are never evicted.
    counts: Counters of requests and loads.
  """

  def __init__(
    self, num_slots: int, eviction: str, pinned: Collection[str] = ()
  ) -> None:
    """Makes empty slots.

    Args:
      num_slots: Number of slots, larger than the number of pinned experts.
      eviction: A key of `EVICTIONS`.
      pinned: Experts that are never evicted once they are loaded.

    Raises:
      ValueError: The policy is unknown, or all slots would be pinned.
    """
    known("eviction=", eviction, EVICTIONS)
    at_least("slots", num_slots, 1 + len(pinned))
    self.pinned = frozenset(pinned)
    self.counts = Counts()
    self._evict = EVICTIONS[eviction]
    self._slots = [_Slot() for _ in range(num_slots)]
    self._where: dict[str, int] = {}
    self._num_requests: collections.Counter[str] = collections.Counter()
    self._events = 0

  def __len__(self) -> int:
    return len(self._slots)

  def find(self, expert: str) -> int | None:
    """Returns the slot that an expert is in or loading to; None for none."""
    return self._where.get(expert)

  def state(self, slot: int) -> State:
    """Returns the state of a slot."""
    return self._slots[slot].state

  def expert(self, slot: int) -> str:
    """Returns the expert of a slot; "" for an empty one."""
    return self._slots[slot].expert

  def users(self, slot: int) -> int:
    """Returns the number of steps under way that read a slot."""
    return self._slots[slot].users

  def ready(self, expert: str) -> bool:
    """Returns whether an expert can be used by a step."""
    slot = self._where.get(expert)
    return slot is not None and self._slots[slot].state is State.READY

  def fresh(self, expert: str) -> bool:
    """Returns whether no request has used an expert since its load began."""
    return self._slots[self._where[expert]].fresh

  def select_slot(
    self, queue: Iterable[str] = (), keep: Collection[str] = (),
    used: bool = True,
  ) -> int | None:
    """Returns the slot for a load: an empty one, else one to evict; or None.

    Args:
      queue: Experts of the waiting requests in the order of service.
      keep: Experts that must not be evicted now.
      used: Whether the slot may be in use by running steps, for whose end the
        load then has to wait.
    """
    residents: list[Resident] = []
    for number, slot in enumerate(self._slots):
      if slot.state is State.EMPTY:
        return number
      name = slot.expert
      if slot.state is State.LOADING or name in self.pinned or name in keep:
        continue
      if used or not slot.users:
        residents.append(
          Resident(number, name, slot.last, self._num_requests[name])
        )
    return self._evict(residents, queue).slot if residents else None

  def reserve(
    self, expert: str, queue: Iterable[str] = (), slot: int | None = None
  ) -> int | None:
    """Reserves a slot for the load of an expert, evicting one if necessary.

    Args:
      expert: Expert without a slot.
      queue: Experts of the waiting requests in the order of service.
      slot: Slot from `select_slot` that is not in use; None to select one.

    Returns:
      The slot, which is LOADING until `loaded` or `failed`; None if all slots
      are loading, in use or pinned.
    """
    assert expert not in self._where, expert
    if slot is None:
      slot = self.select_slot(queue, used=False)
    if slot is None:
      return None
    found = self._slots[slot]
    assert found.state is not State.LOADING
    assert not found.users
    assert found.expert not in self.pinned
    if found.state is State.READY:
      del self._where[found.expert]
      self.counts.evictions += 1
    self._events += 1
    self._slots[slot] = _Slot(
      expert, State.LOADING, last=self._events, fresh=True
    )
    self._where[expert] = slot
    return slot

  def loaded(self, slot: int) -> None:
    """Marks a slot as READY: its weights are complete."""
    assert self._slots[slot].state is State.LOADING
    self._slots[slot].state = State.READY
    self.counts.loads += 1

  def failed(self, slot: int) -> None:
    """Marks a slot as EMPTY, since its load has failed."""
    assert self._slots[slot].state is State.LOADING
    self.counts.failures += 1
    self._clear(slot)

  def drop(self, expert: str) -> bool:
    """Empties the slot of an expert that was removed or replaced.

    Returns:
      Whether the expert has no slot now; False if it is loading or in use.
    """
    slot = self._where.get(expert)
    if slot is None:
      return True
    found = self._slots[slot]
    if found.state is State.LOADING or found.users:
      return False
    self._clear(slot)
    return True

  def _clear(self, slot: int) -> None:
    del self._where[self._slots[slot].expert]
    self._slots[slot] = _Slot()

  def touch(self, slot: int) -> None:
    """Counts a request for the slot's expert as a miss or as a hit.

    The first request after a load is a miss.
    """
    found = self._slots[slot]
    assert found.state is State.READY
    self._events += 1
    self._num_requests[found.expert] += 1
    found.last = self._events
    if found.fresh:
      self.counts.misses += 1
      self.counts.misses_of[found.expert] += 1
    else:
      self.counts.hits += 1
      self.counts.hits_of[found.expert] += 1
    found.fresh = False

  def use(self, slot: int) -> None:
    """Counts one more step that reads a slot."""
    found = self._slots[slot]
    assert found.state is State.READY
    if found.fresh:  # the load was for requests that have been counted before
      self.touch(slot)
    self._events += 1
    found.last = self._events
    found.users += 1

  def release(self, slot: int) -> None:
    """Counts one step less that reads a slot."""
    assert self._slots[slot].users
    self._slots[slot].users -= 1


def misses(order: Sequence[str], num_slots: int, eviction: str) -> int:
  """Returns the misses of requests that are served one after another.

  Args:
    order: Experts of the requests in the order of service.
    num_slots: Number of slots.
    eviction: A key of `EVICTIONS`, which is given all later requests.

  Example:
    Cyclic requests for one expert more than there are slots:

    >>> order = "abc" * 10
    >>> misses(order, 2, "lru"), misses(order, 2, "belady")
    (30, 16)
  """
  slots = Slots(num_slots, eviction)
  for number, expert in enumerate(order):
    slot = slots.find(expert)
    if slot is None:
      later = (order[i] for i in range(number + 1, len(order)))
      slot = slots.reserve(expert, later)
      assert slot is not None
      slots.loaded(slot)
    slots.touch(slot)
  return slots.counts.misses
