"""Simulated time of schedules: ASTRA-sim's figures, conservation, bounds."""

import collections
import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from parallel.plans.network import simulate, trace
from parallel.plans.network.routed import chunk_bytes, on_links
from parallel.plans.schedules import builders
from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology import builders as topologies
from parallel.plans.topology.graph import Link, Topology

MIB = 2**20
# ASTRA-sim's "50 GB/s" are 50 * 2^30 bytes per second; 500 ns.
ASTRA = {"bandwidth": 50 * 2**30, "latency_s": 500e-9}
NETS = {
  "ring": topologies.ring(16, **ASTRA),
  "switch": topologies.switch(16, **ASTRA),
  "fully connected": topologies.fully_connected(16, **ASTRA),
}


def everybody_to_everybody(net, rotated=False):
  """All-to-all in one round, by the shorter way of a ring, ties clockwise."""
  n = net.num_ranks
  transfers = []
  for source in range(n):
    others = [(source + k) % n for k in range(1, n)]
    for destination in others if rotated else sorted(others):
      path = net.shortest_path(source, destination)
      if net.num_switches == 0 and len(net.shape) == 1:
        step = 1 if (destination - source) % n <= n // 2 else -1
        hops = (destination - source) * step % n
        path = tuple((source + step * k) % n for k in range(hops + 1))
      transfers.append(Transfer(source, destination, source, "copy", path))
  return Schedule("direct", "all_gather", n, n, (tuple(transfers),),
                  tuple(range(n)))


@pytest.mark.parametrize(
  ("name", "rotated", "finish_ns"),
  [
    ("ring", False, 704116),
    ("switch", False, 586930),
    ("fully connected", False, 20031),
    ("switch", True, 313496),  # the order of messages matters at a switch
    ("ring", True, 704116),
  ],
)
def test_times_equal_astra_sim_to_the_nanosecond(name, rotated, finish_ns):
  """Each of 16 ranks sends 1 MiB to every other (astra-network-analytical)."""
  net = NETS[name]
  routed = on_links(everybody_to_everybody(net, rotated), net)
  assert simulate.events(routed, 16 * MIB).finish_ns == finish_ns


# 16 bytes per ns and 64 ns: integer nanoseconds for the message sizes below.
EXACT = {"bandwidth": 16e9, "latency_s": 64e-9}
CASES = [
  (topologies.torus((3, 3), **EXACT), "multitree", "all_reduce"),
  (topologies.torus((4, 4), **EXACT), "bucket", "reduce_scatter"),
  (topologies.mesh((2, 4), **EXACT), "ring_2d", "all_reduce"),
  (topologies.bigraph(2, 4, **EXACT), "hdrm", "all_reduce"),
  (topologies.switch(8, **EXACT), "halving_doubling", "all_gather"),
  (topologies.leaf_spine(2, 2, 3, **EXACT), "double_tree", "all_reduce"),
  (topologies.fat_tree(4, **EXACT), "direct", "all_gather"),
  (topologies.dgx(2, 4), "ring", "all_reduce"),
]
each_case = pytest.mark.parametrize(
  ("net", "name", "collective"), CASES,
  ids=[f"{c[1]} on {c[0].name}" for c in CASES],
)


@each_case
def test_link_bytes_equal_those_of_the_schedule(net, name, collective):
  schedule = builders.build(name, net, collective)
  routed = on_links(schedule, net)
  # Chunks differ by at most one byte.
  size = schedule.num_chunks * 1000 + schedule.num_chunks // 2
  sizes = chunk_bytes(size, schedule.num_chunks)
  assert sizes.sum() == size
  assert set(sizes) == {1000, 1001}
  expected = collections.Counter()
  for t in itertools.chain(*schedule.rounds):
    for pair in itertools.pairwise(t.path):
      expected[pair] += int(sizes[t.chunk])
  got = routed.link_bytes(size)
  assert {
    (x.source, x.destination): b
    for x, b in zip(net.links, got.tolist(), strict=True) if b
  } == expected


@each_case
def test_timeline_is_causal_and_first_come_first_served(net, name, collective):
  """No message starts before its data arrives; links send one at a time."""
  schedule = builders.build(name, net, collective)
  routed = on_links(schedule, net)
  t = simulate.events(routed, schedule.num_chunks * 1600)
  assert np.all(t.requested_ns <= t.start_ns)
  assert np.all(t.end_ns <= t.arrival_ns)
  for link in range(len(net.links)):
    own = np.flatnonzero(routed.hop_links == link)
    own = own[np.argsort(t.start_ns[own], kind="stable")]
    assert np.all(t.end_ns[own][:-1] <= t.start_ns[own][1:])
    assert np.all(np.diff(t.requested_ns[own]) >= 0)
    # A link is never idle while a message waits for it.
    late = t.start_ns[own][1:] > t.requested_ns[own][1:]
    assert np.all((t.start_ns[own][1:] == t.end_ns[own][:-1])[late])
  # The next hop of a path is requested when the message has arrived.
  onwards = np.flatnonzero(np.diff(routed.hop_transfers) == 0)
  np.testing.assert_array_equal(
    t.requested_ns[onwards + 1], t.arrival_ns[onwards]
  )
  arrivals = t.arrival_ns[routed.first_hops[1:] - 1]
  starts = t.requested_ns[routed.first_hops[:-1]]
  for i in range(len(starts)):  # starts exactly when its chunk has arrived
    needs = (
      (routed.destinations == routed.sources[i])
      & (routed.chunks == routed.chunks[i])
      & (routed.rounds < routed.rounds[i])
    )
    assert starts[i] == arrivals[needs].max(initial=0)
  assert 0 < t.utilisation.max() <= 1
  assert bool(t.longest_queues.any()) == bool(t.waiting_ns.any())


@each_case
def test_barrier_waits_for_all_ranks(net, name, collective):
  schedule = builders.build(name, net, collective)
  routed = on_links(schedule, net)
  t = simulate.events(routed, schedule.num_chunks * 1600, barrier=True)
  ends = np.zeros(len(schedule.rounds) + 1, np.int64)
  arrivals = t.arrival_ns[routed.first_hops[1:] - 1]
  np.maximum.at(ends, routed.rounds + 1, arrivals)
  first = t.requested_ns[routed.first_hops[:-1]]
  np.testing.assert_array_equal(first, ends[routed.rounds])


@each_case
@pytest.mark.parametrize("barrier", [False, True])
def test_time_is_at_least_the_bound(net, name, collective, barrier):
  routed = on_links(builders.build(name, net, collective), net)
  for per_chunk in (16, 160, 16000):
    size = routed.num_chunks * per_chunk
    finish = simulate.events(routed, size, barrier=barrier).finish_ns
    bound = simulate.lower_bound(routed, size)
    fullest = routed.link_bytes(size) / [x.bandwidth for x in net.links]
    assert finish >= bound
    if net.links[0].bandwidth == EXACT["bandwidth"]:
      assert bound >= 1e9 * fullest.max() * (1 - 1e-12)


@pytest.mark.parametrize("n", [2, 5, 16])
def test_ring_time_equals_the_formula(n):
  """2 (n - 1) (alpha + M / (n B)) in every model, since no link is shared."""
  net = topologies.ring(n, **EXACT)
  routed = on_links(builders.build("ring", net), net)
  expected_ns = 2 * (n - 1) * (64 + 1600 // 16)
  size = n * 1600
  timeline = simulate.events(routed, size)
  assert timeline.finish_ns == expected_ns
  # n - 1 messages on each of two links per rank, in half of the rounds.
  busy = 100 * (n - 1) * (1 if n > 2 else 2) / expected_ns
  np.testing.assert_allclose(timeline.utilisation, busy)
  assert simulate.events(routed, size, barrier=True).finish_ns == expected_ns
  assert simulate.lower_bound(routed, size) == expected_ns
  assert simulate.lockstep(routed, size) == pytest.approx(expected_ns / 1e9)


def test_lockstep_shares_links_and_adds_latencies():
  """Two chunks over one uplink take twice its time, and three latencies."""
  net = topologies.leaf_spine(2, 1, 2, **EXACT)
  paths = [net.shortest_path(0, 2), net.shortest_path(1, 3)]
  rounds = (tuple(
    Transfer(path[0], path[-1], path[0], "copy", path) for path in paths
  ),)
  schedule = Schedule("two", "all_gather", 4, 4, rounds, (0, 1, 2, 3))
  routed = on_links(schedule, net, prove=False)
  assert simulate.lockstep(routed, 4 * 1600) == pytest.approx(
    2 * 100e-9 + 4 * 64e-9
  )
  # Stored and forwarded at three switches; the second message waits once.
  assert simulate.events(routed, 4 * 1600).finish_ns == 4 * (100 + 64) + 100


@settings(max_examples=30)
@given(
  seed=st.integers(0, 2**32 - 1),
  per_chunk=st.integers(1, 5000),
  shape=st.sampled_from([(5,), (2, 3), (3, 3)]),
)
def test_random_traffic_is_delivered_in_full(seed, per_chunk, shape):
  """Random gossip over unequal links is delivered and respects the bound."""
  draw = np.random.default_rng(seed)
  net = topologies.torus(shape)
  net = Topology("random", net.num_ranks, 0, tuple(
    Link(x.source, x.destination, draw.uniform(1e9, 9e9),
                    draw.uniform(0, 1e-6))
    for x in net.links
  ))
  rounds = []
  for _ in range(draw.integers(1, 4)):
    pairs = [draw.choice(net.num_ranks, 2, replace=False).tolist()
             for _ in range(draw.integers(1, 12))]
    rounds.append(tuple(
      Transfer(u, v, int(draw.integers(3)), "copy", net.shortest_path(u, v))
      for u, v in pairs
    ))
  routed = on_links(
    Schedule("gossip", "all_gather", net.num_ranks, 3, tuple(rounds)), net,
    prove=False,
  )
  size = 3 * per_chunk
  barrier = simulate.events(routed, size, barrier=True)
  free = simulate.events(routed, size)
  for timeline in (free, barrier):
    assert timeline.finish_ns >= simulate.lower_bound(routed, size)
    assert timeline.finish_ns == timeline.arrival_ns.max()
    busy = timeline.end_ns - timeline.start_ns
    rate = np.array([x.bandwidth for x in net.links])[routed.hop_links] / 1e9
    np.testing.assert_array_equal(busy, np.floor(per_chunk / rate))


@pytest.mark.parametrize("barrier", [False, True])
def test_schedule_without_transfers_takes_no_time(barrier):
  net = topologies.ring(3)
  nothing = Schedule("nothing", "broadcast", 3, 3, (), (0, 0, 0))
  routed = on_links(nothing, net, prove=False)
  timeline = simulate.events(routed, 3, barrier=barrier)
  assert timeline.finish_ns == simulate.lockstep(routed, 3) == 0
  assert simulate.lower_bound(routed, 3) == 0
  assert not timeline.utilisation.any()
  assert not timeline.longest_queues.any()


def test_times_of_a_hop_are_whole_nanoseconds():
  """A latency of n ns is n, however 1e-9 n is rounded; fractions are cut.

  A difference of less than 1e-6 ns from n is no fraction.
  """
  whole = np.arange(1, 201)
  latencies = np.concatenate([
    whole, whole + 0.7, whole - 0.5e-6, whole - 1.5e-6
  ])
  count = len(latencies)
  net = Topology("star", count + 1, 0, tuple(
    Link(*pair, 1e9, 1e-9 * latency)
    for n, latency in enumerate(latencies.tolist())
    for pair in ((0, n + 1), (n + 1, 0))
  ))
  rounds = (tuple(
    Transfer(0, n + 1, 0, "copy", (0, n + 1)) for n in range(count)
  ),)
  routed = on_links(
    Schedule("star", "broadcast", count + 1, 1, rounds), net, prove=False
  )
  times = routed.hop_ns(5)
  assert set(times.busy_ns) == {5}
  np.testing.assert_array_equal(
    times.arrival_ns[times.kinds],
    5 + np.concatenate([whole, whole, whole, whole - 1]),
  )


def test_largest_size_is_taken():
  """A byte takes a nanosecond; the clock and the sums are as large."""
  net = topologies.ring(2, bandwidth=1e9, latency_s=0.0)
  routed = on_links(_one((0, 1), ranks=2), net, prove=False)
  assert routed.link_bytes(2**62).max() == 2**62
  assert simulate.events(routed, 2**62).finish_ns == 2**62


def test_message_of_a_nanosecond_uses_its_link_all_the_time():
  net = topologies.ring(2, bandwidth=16e9, latency_s=0.0)
  routed = on_links(
    Schedule("one", "broadcast", 2, 1, ((Transfer(0, 1, 0, "copy", (0, 1)),),)),
    net, prove=False,
  )
  timeline = simulate.events(routed, 16)
  assert timeline.finish_ns == 1
  assert sorted(timeline.utilisation) == [0.0, 1.0]


def test_chain_reaches_its_lower_bound():
  """One chunk is forwarded in each round, and no message waits."""
  net = topologies.ring(5)
  rounds = tuple((Transfer(k, k + 1, 0, "copy", (k, k + 1)),)
                 for k in range(4))
  routed = on_links(Schedule("chain", "broadcast", 5, 1, rounds), net,
                    prove=False)
  size = 1_000_000
  hop_ns = np.floor(size / (net.links[0].bandwidth / 1e9))
  expected = 4 * (hop_ns + round(1e9 * net.links[0].latency_s))
  assert simulate.lower_bound(routed, size) == expected
  assert simulate.events(routed, size).finish_ns == expected


def test_trace_has_a_bar_for_every_hop():
  net = topologies.bigraph(2, 4)
  routed = on_links(builders.build("hdrm", net), net)
  timeline = simulate.events(routed, 8 * 1600)
  rows, found = trace.message_bars(timeline)
  bars = list(found)
  assert len(bars) == len(routed.hop_links)
  sent = collections.Counter()
  for bar in bars:
    sent[bar.row] += bar.details["bytes"]
  np.testing.assert_array_equal(
    [sent[row] for row in rows], routed.link_bytes(8 * 1600)
  )
  # A bar lasts while the link is busy; the message arrives one latency later.
  starts = [bar.start_s for bar in bars]
  assert starts == sorted(starts)
  np.testing.assert_allclose(
    sorted(bar.end_s - bar.start_s for bar in bars),
    np.sort(timeline.end_ns - timeline.start_ns) / 1e9, atol=1e-15,
  )
  last = max(bar.details["arrival_ns"] for bar in bars)
  assert last == timeline.finish_ns


def _one(path, chunks=1, ranks=4, destination=1):
  transfer = Transfer(0, destination, 0, "copy", path)
  return Schedule("one", "all_gather", ranks, chunks, ((transfer,),))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda net: on_links(_one((0, 1), ranks=5), net, prove=False),
     "one has 5 ranks, but topology ring 4 has only 4"),
    (lambda net: on_links(_one((0, 2)), net, prove=False),
     r"round 0: path \(0, 2\) must lead from 0 to 1"),
    (lambda net: on_links(_one(()), net, prove=False), r"path \(\) must lead"),
    (lambda net: on_links(_one((0, 2, 1)), net, prove=False),
     "ring 4 has no link from 0 to 2"),
    (lambda net: on_links(_one((0,), destination=0), net, prove=False),
     r"path \(0,\) must lead from 0 to 0"),
    # 0 to 4 would be 1 to 0, wrapped around, and 1 to -1 would be 0 to 3.
    (lambda net: on_links(_one((0, 4, 1)), net, prove=False),
     "ring 4 has no link from 0 to 4"),
    (lambda net: on_links(_one((0, 1, -1, 1)), net, prove=False),
     "ring 4 has no link from 1 to -1"),
    # 0 to 9 would be 2 to 1, wrapped around.
    (lambda net: on_links(_one((0, 9, 1)), net, prove=False),
     "ring 4 has no link from 0 to 9"),
    (lambda net: on_links(_one((0, 1), 8), net, prove=False).link_bytes(7),
     "size_bytes=7 must be an integer, at least one byte for each of 8"),
    (lambda net: _finish(net, size_bytes=float("inf")), "size_bytes=inf must"),
    (lambda net: _finish(net, size_bytes=8.5), "size_bytes=8.5 must be an int"),
    (lambda net: _finish(net, size_bytes=2**62 + 1), "must .* at most 461168"),
    (lambda _: _direct(topologies.switch(4)).link_bytes(2**62),
     "a link may carry at most"),
    (lambda _: _finish(topologies.ring(4, bandwidth=1e-5)),
     "bandwidth=1e-05 and latency_s=5e-07 from .* exceeds the 64-bit clock"),
    (lambda _: _finish(topologies.ring(4, latency_s=1e12)),
     "bandwidth=5e.10 and latency_s=1e.12 from"),
  ],
)
def test_invalid_inputs_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(topologies.ring(4))


def _direct(net):
  return on_links(builders.build("direct", net), net)


def _finish(net, size_bytes=2**20):
  """Times an all-reduce."""
  return simulate.events(on_links(builders.build("ring", net), net), size_bytes)


def test_incomplete_collective_is_refused():
  """A schedule without its last round would be faster, and is refused."""
  net = topologies.ring(4)
  whole = builders.build("ring", net)
  short = dataclasses.replace(whole, rounds=whole.rounds[:-1])
  on_links(whole, net)
  with pytest.raises(ValueError, match="after 5 rounds chunk"):
    on_links(short, net)


@pytest.mark.parametrize("size_bytes", [6 * 10**17, 10**18 + 7])
def test_large_sizes_do_not_overflow_to_negative_times(size_bytes):
  net = topologies.torus((4, 4))
  routed = on_links(builders.build("multitree", net), net)
  sent = routed.link_bytes(size_bytes)
  rounds = simulate.events(routed, size_bytes)
  assert sent.min() > 0
  # All copies of all bytes.
  assert sum(sent.tolist()) == 2 * 15 * size_bytes
  assert rounds.utilisation.min() > 0
  assert rounds.utilisation.max() <= 1
  assert simulate.lockstep(routed, size_bytes) > rounds.finish_ns / 2e9


@pytest.mark.parametrize("barrier", [False, True])
def test_pairwise_swap_takes_the_time_of_one_message(barrier):
  """Both ranks send data from before the round, and do not wait."""
  net = topologies.ring(2, **EXACT)
  swap = tuple(
    Transfer(a, 1 - a, 0, "reduce", (a, 1 - a)) for a in range(2)
  )
  routed = on_links(Schedule("swap", "all_reduce", 2, 1, (swap,)), net)
  timeline = simulate.events(routed, 1600, barrier=barrier)
  assert timeline.finish_ns == 64 + 1600 // 16
  assert timeline.requested_ns.tolist() == [0, 0]


def test_queue_length_is_the_number_of_waiting_messages():
  """One of four simultaneous messages per link is sent; three wait."""
  net = topologies.ring(3, **EXACT)
  rounds = (
    tuple(
      Transfer(a, b, 4 * a + c, "copy", (a, b))
      for a, b in net.links_by_pair for c in range(4)
    ),
  )
  owners = tuple(c // 4 for c in range(12))
  four = Schedule("four", "all_gather", 3, 12, rounds, owners)
  routed = on_links(four, net)
  timeline = simulate.events(routed, 12 * 1600)
  queues = dict(zip(net.links_by_pair, timeline.longest_queues, strict=True))
  assert queues == dict.fromkeys(net.links_by_pair, 3)
  assert timeline.waiting_ns.max() == 100 + 200 + 300
