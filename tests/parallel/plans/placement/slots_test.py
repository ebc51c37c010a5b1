"""Weight slots: bounds of evictions, and slots that must not be evicted."""

import collections
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from parallel.plans.placement import evictions
from parallel.plans.placement.slots import Slots, State, misses

ORDERS = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=60)
FEW = settings(max_examples=20, derandomize=True, database=None)


def least(order, size):
  """Returns the fewest misses over all eviction sequences."""

  @functools.cache
  def fewest(place, kept):
    if place == len(order):
      return 0
    one = order[place]
    if one in kept:
      return fewest(place + 1, kept)
    if len(kept) < size:
      return 1 + fewest(place + 1, kept | {one})
    return 1 + min(
      fewest(place + 1, kept - {other} | {one}) for other in kept
    )

  return fewest(0, frozenset())


@given(order=st.lists(st.sampled_from("abcde"), max_size=14),
       size=st.integers(1, 4))
@FEW
def test_belady_has_the_fewest_misses_of_all_eviction_sequences(order, size):
  assert misses(order, size, "belady") == least(tuple(order), size)


@pytest.mark.parametrize("eviction", evictions.EVICTIONS)
@given(order=ORDERS, size=st.integers(1, 7))
@FEW
def test_no_policy_has_fewer_misses_than_belady(eviction, order, size):
  found = misses(order, size, eviction)
  assert misses(order, size, "belady") <= found <= len(order)
  assert found >= len(set(order))


@given(order=ORDERS)
@FEW
def test_hits_of_lru_never_fall_with_more_slots(order):
  found = [misses(order, size, "lru") for size in range(1, 9)]
  assert found == sorted(found, reverse=True)
  assert found[-1] == len(set(order))


@pytest.mark.parametrize("eviction", evictions.EVICTIONS)
def test_one_expert_has_exactly_one_miss(eviction):
  for size in (1, 3):
    assert misses("a" * 20, size, eviction) == 1


def test_cyclic_requests_for_one_more_than_the_slots():
  """LRU always misses; Belady's hits are S - 1 of each S requests."""
  size = 4
  order = list(range(size + 1)) * 40
  assert misses(order, size, "lru") == len(order)
  again = len(order) - size
  assert misses(order, size, "belady") == size + -(-again // size)


@given(data=st.data(), size=st.integers(2, 5),
       eviction=st.sampled_from(sorted(evictions.EVICTIONS)))
@FEW
def test_slots_that_are_loading_used_or_pinned_are_never_evicted(
  data, size, eviction
):
  """Draws events in any permitted order."""
  names = "abcdefg"
  slots = Slots(size, eviction, pinned=("a",))
  held = []  # experts that must keep their slot
  for _ in range(25):
    name = data.draw(st.sampled_from(names))
    slot = slots.find(name)
    protected = {
      slots.expert(i) for i in range(size)
      if slots.state(i) is State.LOADING or slots.users(i)
      or slots.expert(i) == "a"
    } - {""}
    if slot is None:
      new = slots.reserve(name, data.draw(st.text("abcdefg", max_size=5)))
      others = {slots.expert(i) for i in range(size)} - {name}
      assert protected <= others
      if new is None:
        assert len(protected) == size
        continue
      assert slots.state(new) is State.LOADING
      assert slots.find(name) == new
    elif slots.state(slot) is State.LOADING:
      if data.draw(st.booleans()):
        slots.loaded(slot)
      else:
        slots.failed(slot)
        assert slots.find(name) is None
    elif data.draw(st.booleans()):
      slots.use(slot)
      held.append(slot)
    elif held:
      slots.release(held.pop())
    else:
      slots.touch(slot)
    for i in range(size):
      assert slots.users(i) == held.count(i)
      assert slots.state(i) is State.READY or not slots.users(i)
  counts = slots.counts
  assert counts.misses <= counts.loads + counts.failures


def test_empty_slots_are_used_before_any_eviction():
  slots = Slots(3, "lru")
  for name in "abc":
    slots.loaded(slots.reserve(name))
  assert slots.counts.evictions == 0
  assert slots.drop("b")
  assert slots.reserve("d") == 1
  assert slots.counts.evictions == 0


@pytest.mark.parametrize("renew", ["touch", "use"])
def test_lru_evicts_the_expert_whose_last_request_or_step_is_oldest(renew):
  slots = Slots(2, "lru")
  for name in "ab":
    slot = slots.reserve(name)
    slots.loaded(slot)
    slots.touch(slot)
  assert slots.select_slot("c") == slots.find("a")
  getattr(slots, renew)(slots.find("a"))
  if renew == "use":
    slots.release(slots.find("a"))
  assert slots.select_slot("c") == slots.find("b")


def test_lfu_remembers_evicted_experts_and_ties_go_to_the_oldest():
  slots = Slots(2, "lfu")

  def serve(name):
    slot = slots.find(name)
    if slot is None:
      slot = slots.reserve(name)
      slots.loaded(slot)
    slots.touch(slot)
    return {slots.expert(i) for i in range(2)} - {""}

  assert [serve(name) for name in "baaa"] == [{"b"}, *3 * [{"a", "b"}]]
  assert serve("c") == {"a", "c"}
  # Then the third request for b, as for a, which was used before.
  assert serve("b") == serve("b") == {"a", "b"}
  assert serve("d") == {"b", "d"}
  counts = slots.counts
  assert (counts.hits, counts.misses, counts.evictions) == (3, 5, 3)
  assert counts.hits_of == {"a": 2, "b": 1}
  assert counts.misses_of == collections.Counter("bacbd")
  # A load that fails frees its slot; a step counts the request of its expert.
  slots.failed(slots.reserve("e"))
  assert (slots.find("e"), counts.loads, counts.failures) == (None, 5, 1)
  slot = slots.reserve("f")
  slots.loaded(slot)
  assert slots.fresh("f")
  slots.use(slot)
  slots.release(slot)
  slots.touch(slot)
  assert (counts.misses_of["f"], counts.hits_of["f"]) == (1, 1)
  assert slots.drop("f")
  assert counts.evictions == 4


def test_an_expert_that_a_step_reads_is_not_dropped():
  slots = Slots(1, "lru")
  slots.reserve("a")
  assert not slots.drop("a")
  slots.loaded(0)
  slots.use(0)
  assert not slots.drop("a")
  assert slots.reserve("b") is None
  slots.release(0)
  assert slots.drop("a")
  assert slots.drop("a")
  assert slots.state(0) is State.EMPTY


def test_lookahead_keeps_the_experts_of_the_queue():
  slots = Slots(2, "lookahead")
  for name in "ab":
    slots.loaded(slots.reserve(name))
  assert slots.select_slot("a") == 1
  assert slots.select_slot("ba") == 0
  assert slots.select_slot("b", keep="a") == 1


@pytest.mark.parametrize(("args", "text"), [
  ((2, "mru"), "eviction='mru' must be one of"),
  ((0, "lru"), "slots=0 must be at least 1"),
  ((1, "lru", ("router",)), "slots=1 must be at least 2"),
])
def test_slots_without_room_are_refused(args, text):
  with pytest.raises(ValueError, match=text):
    Slots(*args)
