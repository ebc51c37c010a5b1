"""Properties of pages: buddy allocator, prefix search and host copies."""

import runpy
import sys
import types
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from caatnet.serving import compiling
from caatnet.serving.cache import page_loops, prefixes
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages, contiguous_runs
from caatnet.serving.engine.executor import Copy
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.running import RunningRequests
from tests.caatnet.serving import oracle
from tests.caatnet.serving.page_oracle import BuddyAllocator, DictPages

BOTH = pytest.mark.usefixtures("loops")
DRAWN = settings(
  max_examples=20, derandomize=True, phases=[Phase.generate],
  suppress_health_check=list(HealthCheck),
)


@pytest.fixture(params=["compiled", "interpreted"])
def loops(request):
  """Runs a test with compiled loops and with interpreted ones."""
  with oracle.interpreted(request.param == "interpreted"):
    yield


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
@DRAWN
def test_allocator_hands_out_each_page_once_and_merges_buddies(num_pages, seed):
  rng = np.random.default_rng(seed)
  allocator, held = BuddyAllocator(num_pages), []
  fresh = allocator.sizes()
  for _ in range(60):
    if rng.random() < 0.6:
      count = int(rng.integers(0, allocator.num_free + 1))
      if held and count and rng.random() < 0.5:
        after = held[-1][0] + held[-1][1]
        taken = allocator.take_at(after, count)
        if taken < count:  # the next page is not free
          end = after + taken
          assert end == num_pages or any(a <= end < a + n for a, n in held)
        if taken:
          held.append((after, taken))
      else:
        held += contiguous_runs(
          allocator.take(count, room=bool(rng.integers(2)))
        )
    elif held:
      start, n = held.pop(int(rng.integers(len(held))))
      allocator.give(range(start, start + n))
    pages = [p for start, n in held for p in range(start, start + n)]
    assert len(set(pages)) == len(pages)
    assert all(0 <= p < num_pages for p in pages)
    assert len(pages) + allocator.num_free == num_pages
  for start, n in held:
    allocator.give(range(start, start + n))
  assert allocator.sizes() == fresh


@pytest.mark.parametrize("count", [1, 5, 63, 64])
def test_empty_cache_hands_out_one_run(count):
  """Bounds copies: 63 blocks of 1,000 tokens take one copy, not six or 63."""
  assert len(list(contiguous_runs(BuddyAllocator(128).take(count)))) == 1


@BOTH
def test_growing_sequences_stay_in_few_runs():
  """Grows two sequences alternately."""
  pages = Pages(256, 16)
  one, two = pages.take(10).tolist(), pages.take(10).tolist()
  for _ in range(50):
    one += pages.take(1, one[-1]).tolist()
    two += pages.take(1, two[-1]).tolist()
  assert max(
    len(list(contiguous_runs(one))), len(list(contiguous_runs(two)))
  ) <= 3


@given(
  st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    min_size=1, max_size=12,
  ),
  st.sampled_from([1, 2, 3]),
)
@DRAWN
def test_found_pages_equal_those_of_a_trie(sequences, size):
  pages, trie = Pages(200, size), {}
  for number, tokens in enumerate(sequences):
    request = Request(number, tokens, 1)
    request.hash_pages(size)
    half = 1 + len(tokens) // 2  # hashes do not depend on when they were made
    drawn = np.array(tokens[half:], np.int32)
    other = Request(number, tokens[:half], 1)
    other.hash_pages(size)
    other.take(drawn, np.zeros(len(drawn)))
    other.hash_pages(size)
    assert other.block_hashes == request.block_hashes
    full = [tuple(tokens[i : i + size])
            for i in range(0, len(tokens) // size * size, size)]
    node, depth = trie, 0
    for part in full:
      if part not in node:
        break
      node, depth = node[part], depth + 1
    found = pages.find(request.block_hashes)
    assert len(found) == depth
    pages.hold(found)
    taken = pages.take(-(-len(tokens) // size) - depth)
    request.pages = np.concatenate([found, taken])
    pages.publish(request.pages[: len(full)], request.block_hashes)
    node = trie
    for part in full:
      node = node.setdefault(part, {})
    pages.check()
    if number % 2:
      pages.release(request.pages)
      pages.check()


@BOTH
def test_eviction_removes_the_end_of_a_prefix_first():
  """Finds the whole prefix after an eviction, except for its end."""
  pages = Pages(8, 1)
  request = Request(0, list(range(8)), 1)
  request.hash_pages(1)
  held = pages.take(8)
  pages.publish(held, request.block_hashes)
  pages.release(held)
  for count in range(1, 8):
    pages.take(1)
    found = pages.find(request.block_hashes)
    assert found.tolist() == held[: 8 - count].tolist()


@BOTH
def test_page_that_a_copy_reads_is_not_handed_out():
  pages = Pages(4, 1)
  held = pages.take(4)
  read = held[:2].tolist()
  pages.begin_read(read)
  pages.release(held)
  assert pages.num_available == 2
  assert pages.num_leaving == 2
  assert not set(pages.take(2)) & set(read)
  pages.end_read(read)
  assert set(pages.take(2)) == set(read)


class Sequences:
  """Random sequences that begin, share, grow, are copied and end.

  Attributes:
    seen: Pages handed out and allocator state after each step.
  """

  def __init__(self, seed, num_pages, in_turn, make, interpreted=False):
    self.rng, self.interpreted = np.random.default_rng(seed), interpreted
    self.pages = make(num_pages, 2, in_turn=in_turn)
    self.running = RunningRequests(num_pages, num_pages, 2)
    self.requests, self.copies, self.seen = [], [], []

  def begin(self):
    tokens = self.rng.integers(0, 2, int(self.rng.integers(1, 40)))
    request = Request(len(self.seen), tokens, int(self.rng.integers(1, 12)))
    request.hash_pages(2)
    found = self.pages.find(request.block_hashes)
    count = -(-len(tokens) // 2) - len(found)
    if count + self.pages.num_idle(found) > self.pages.num_available:
      return
    self.pages.hold(found)
    after = int(found[-1]) if len(found) else -1
    taken = self.pages.take(count, after)
    request.pages = np.concatenate([found, taken])
    self.running.add(request, len(tokens), len(tokens), 0.0)
    full = request.pages[: request.num_hashed]
    self.pages.publish(full, request.block_hashes)
    self.requests.append(request)

  def end(self):
    request = self.requests.pop(int(self.rng.integers(len(self.requests))))
    if self.rng.random() < 0.5:
      self.copies.append(request.pages.tolist())
      self.pages.begin_read(self.copies[-1])
    self.running.remove(request)
    self.pages.release(request.pages)

  def grow(self):
    slots = self.running.slots
    self.running.computed[slots] += self.rng.integers(0, 3, len(slots))
    np.minimum(
      self.running.computed, self.running.room, out=self.running.computed
    )
    able = slots[self.running.computed[slots] < self.running.longest[slots]]
    self.pages.grow(self.running, able.copy(), int(self.rng.integers(1, 4)))

  def step(self):
    with oracle.interpreted(self.interpreted):
      self.do()

  def do(self):
    draw = self.rng.random()
    if draw < 0.4 or not self.requests:
      self.begin()
    elif draw < 0.6:
      self.end()
    elif draw < 0.8 and self.copies:
      self.pages.end_read(self.copies.pop(0))
    else:
      self.grow()
    self.pages.check()
    self.seen.append((
      [r.pages.tolist() for r in self.requests],
      [self.running.tables[r.slot, : len(r.pages)].tolist()
       for r in self.requests],
      self.pages.states().tolist(), self.pages.sizes(),
      self.pages.num_available, self.pages.num_leaving,
      [self.pages.read(page) for page in range(self.pages.num_pages)],
    ))


@given(st.integers(0, 2**32 - 1), st.integers(20, 150), st.booleans())
@DRAWN
def test_array_pages_equal_dict_pages(seed, num_pages, in_turn):
  runs_ = [
    Sequences(seed, num_pages, in_turn, *how)
    for how in ((DictPages,), (Pages,), (Pages, True))
  ]
  for _ in range(100):
    for run in runs_:
      run.step()
      assert run.seen[-1] == runs_[0].seen[-1]
  for run in runs_:
    assert run.pages.counts == runs_[0].pages.counts
  for pages, table in zip(*runs_[0].seen[-1][:2], strict=True):
    assert pages == table


@BOTH
def test_publish_refuses_fewer_hashes_than_pages():
  """Guards compiled code, which would read behind the end of the hashes."""
  pages = Pages(4, 1)
  held = pages.take(2)
  with pytest.raises((ValueError, AssertionError)):
    pages.publish(held, b"a" * prefixes.HASH_BYTES)


def test_block_hashes_differ_between_processes():
  """Prevents a client from choosing prompts that collide with cached ones."""
  elsewhere = runpy.run_path(prefixes.__file__)["block_hashes"]
  tokens = np.arange(8, dtype=np.int32).tobytes()
  here = prefixes.block_hashes(prefixes.ROOT, tokens, 16)
  assert here == prefixes.block_hashes(prefixes.ROOT, tokens, 16)
  other = elsewhere(prefixes.ROOT, tokens, 16)
  assert not set(prefixes.split(here)) & set(prefixes.split(other))


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@DRAWN
def test_nearly_equal_block_hashes_are_distinguished(seed, num_pages):
  """Publishes and evicts hashes of few words, many with one home slot."""
  rng = np.random.default_rng(seed)
  both = [DictPages(num_pages, 1), Pages(num_pages, 1)]
  held = []
  for _ in range(80):
    count = int(rng.integers(1, num_pages + 1))
    if held and (rng.random() < 0.4 or count > both[0].num_available):
      run = held.pop(int(rng.integers(len(held))))
      for pages in both:
        pages.release(run)
    elif count <= both[0].num_available:
      block_hashes = rng.integers(-1, 2, (count, 4)).astype(np.int32).tobytes()
      taken = [pages.take(count) for pages in both]
      np.testing.assert_array_equal(*taken)
      held.append(taken[0])
      again = rng.integers(-1, 2, (count, 4)).astype(np.int32).tobytes()
      for pages in both:
        pages.publish(taken[0], block_hashes)
        pages.publish(taken[0], again)  # for pages that got no hash
    asked = rng.integers(-1, 2, (4, 4)).astype(np.int32).tobytes()
    known = b"".join(both[0].block_hashes())
    for hashes in (asked, known, known + asked):
      np.testing.assert_array_equal(*(pages.find(hashes) for pages in both))
    for pages in both:
      pages.check()
    assert both[0].counts == both[1].counts


def test_loops_are_interpreted_without_numba():
  here = page_loops.__file__, compiling.__file__
  with mock.patch.dict(sys.modules, {"numba": None}):
    plain = runpy.run_path(here[1])
    assert not plain["COMPILES"]
    with mock.patch.multiple(
      compiling, compiled=plain["compiled"], COMPILES=False
    ):
      loops = runpy.run_path(here[0])
  assert isinstance(loops["take"], types.FunctionType)
  assert isinstance(loops["view"](np.zeros(2)), memoryview)
  assert compiling.COMPILES  # numba is installed for the tests
  assert not isinstance(page_loops.take, types.FunctionType)


def test_runs_of_a_copy_are_contiguous_on_both_sides():
  copy = Copy(0, "out", (3, 4, 5, 9, 10), (0, 1, 7, 8, 9), "")
  assert copy.runs == [2, 1, 2]


def test_host_cache_leaves_room_behind_a_conversation():
  host = HostCache(64, 4, reserve=True)
  first = host.write("a", 17, pinned=False)  # five pages, and room for eight
  host.write("b", 4, pinned=False)
  second = host.write("a", 32, pinned=False)
  assert list(contiguous_runs(first[:4] + second)) == [(first[0], 8)]
  assert host.page_range_to_copy("a", 33) == (8, 9)
  # Room for five or eight pages is eight, for nine 16.
  assert (len(host.pages("a")), len(host.pages("b"))) == (8, 1)
  host.write("a", 33, pinned=False)
  assert (len(host.pages("a")), host.num_used) == (16, 17)


def test_the_host_copy_that_was_written_last_is_evicted_last():
  host = HostCache(3, 1, reserve=False)
  for owner, tokens in (("a", 1), ("b", 1), ("a", 2), ("new", 1)):
    host.write(owner, tokens, pinned=False)
  assert [host.valid(owner) for owner in ("a", "b", "new")] == [2, 0, 1]


def test_pinned_host_copies_are_not_evicted():
  host = HostCache(4, 1, reserve=False)
  host.write("waits", 2, pinned=True)
  host.write("old", 2, pinned=False)
  assert not host.fits("new", 3)
  host.write("new", 2, pinned=False)
  valid = [host.valid(owner) for owner in ("waits", "old", "new")]
  assert valid == [2, 0, 2]
  # Its own pages count once, also those of a pinned copy.
  assert host.fits("waits", 4)
  assert not host.fits("waits", 5)
  # It stays the only copy when tokens are added to it.
  host.write("waits", 2, pinned=False)
  assert host.num_pinned == 2
