"""Flows on leaf-spine networks: exact loads, and properties of routers."""

import collections
from fractions import Fraction
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from caatnet.studies.flows import link_loads, patterns, study
from caatnet.studies.flows.link_loads import Flow
from configs.collectives import spraying
from parallel.plans.schedules import builders, colouring
from parallel.plans.topology import builders as topologies


def shift(hosts, n):
  return [Flow(i, (i + hosts) % n, 1) for i in range(n)]


def all_to_all(hosts, n):
  return [Flow(i, j, 1) for i in range(n) for j in range(n)
          if i // hosts != j // hosts]


# (leaves, spines, hosts), traffic -> load of the fullest uplink with Ethereal
# (equal to spraying), and with ECMP and seed 0; number of pieces with Ethereal
# and with spraying; number of flows.
TABLE = [
  ((16, 16, 16), shift, "1", "4", 4096, 4096, 256),
  ((16, 16, 16), all_to_all, "240", "282", 61440, 983040, 61440),
  ((8, 6, 8), shift, "4/3", "4", 384, 384, 64),
  ((8, 6, 8), all_to_all, "224/3", "99", 5376, 21504, 3584),
  ((8, 8, 8), all_to_all, "56", "76", 3584, 28672, 3584),
]


@pytest.mark.parametrize(
  ("shape", "traffic", "even", "hashed", "ethereal", "sprayed", "count"), TABLE
)
def test_loads_equal_the_table(
  shape, traffic, even, hashed, ethereal, sprayed, count
):
  net = link_loads.fabric(topologies.leaf_spine(*shape))
  sent = traffic(shape[2], shape[0] * shape[2])
  assert len(sent) == count
  expected = {
    "ecmp": (hashed, count), "spray": (even, sprayed),
    "ethereal": (even, ethereal),
  }
  for name, (fullest, pieces) in expected.items():
    routes = link_loads.ROUTERS[name](net, sent)
    loads = link_loads.loads(net, sent, routes)
    assert link_loads.max_spine_link_load(net, loads) == Fraction(fullest)
    assert link_loads.num_sent(routes) == pieces


shapes = st.tuples(st.integers(2, 5), st.integers(1, 7), st.integers(1, 4))


def random_flows(seed, n, sizes=(1,)):
  draw = random.Random(seed)
  pairs = [draw.sample(range(n), 2) for _ in range(draw.randrange(1, 60))]
  return [Flow(u, v, draw.choice(sizes)) for u, v in pairs]


def failed(seed, shape):
  """Returns a network with failed uplinks and connected leaf pairs."""
  draw = random.Random(seed)
  net = topologies.leaf_spine(*shape)
  for _ in range(draw.randrange(3)):
    leaf = shape[0] * shape[2] + draw.randrange(shape[0])
    spine = shape[0] * shape[2] + shape[0] + draw.randrange(shape[1])
    try:
      net = net.without((leaf, spine), (spine, leaf))
      link_loads.fabric(net)
    except ValueError:
      return link_loads.fabric(topologies.leaf_spine(*shape))
  return link_loads.fabric(net)


def check_routes(net, sent, routes):
  """Checks that each flow arrives whole, over spines that it can use."""
  for flow, route in zip(sent, routes, strict=True):
    a, b = net.leaf_of[flow.source], net.leaf_of[flow.destination]
    assert bool(route) == (a != b)
    if route:
      assert sum(Fraction(p.numerator, p.denominator) for p in route) == 1
      assert {p.spine for p in route} <= set(net.live_spines[a, b])


@settings(max_examples=40)
@given(shape=shapes, seed=st.integers(0, 10**6), broken=st.booleans())
def test_routers_deliver_all_flows_and_respect_the_bound(shape, seed, broken):
  """Loses no bytes, and loads the fullest uplink at least by the bound."""
  net = failed(seed, shape) if broken else link_loads.fabric(
    topologies.leaf_spine(*shape)
  )
  sent = random_flows(seed, shape[0] * shape[2], (1, 3))
  between = sum(
    f.bytes for f in sent
    if net.leaf_of[f.source] != net.leaf_of[f.destination]
  )
  ups = {(a, s) for a in net.leaf_of for s in net.spines}
  least = link_loads.max_load_lower_bound(net, sent)
  optimum = link_loads.optimal_max_load(net, sent)
  if net.whole:
    assert optimum == pytest.approx(float(least))
  assert optimum >= least * (1 - 1e-6)
  for name, router in link_loads.ROUTERS.items():
    if name == "coordinated_split" and not net.whole:
      continue
    routes = router(net, sent)
    check_routes(net, sent, routes)
    loads = link_loads.loads(net, sent, routes)
    assert sum(x for pair, x in loads.items() if pair in ups) == between
    fullest = link_loads.max_spine_link_load(net, loads)
    assert fullest >= optimum * (1 - 1e-6)
    # The guarantee also holds for mixed sizes.
    assert fullest == least if name == "coordinated_split" else fullest >= least


@settings(max_examples=40)
@given(shape=shapes, seed=st.integers(0, 10**6), broken=st.booleans())
def test_ethereal_loads_every_link_as_spraying_does(shape, seed, broken):
  net = failed(seed, shape) if broken else link_loads.fabric(
    topologies.leaf_spine(*shape)
  )
  sent = random_flows(seed, shape[0] * shape[2], (1, 3))
  routes = link_loads.ethereal(net, sent)
  sprayed = link_loads.loads(net, sent, link_loads.spray(net, sent))
  assert link_loads.loads(net, sent, routes) == sprayed
  groups = collections.Counter(
    (f.source, net.leaf_of[f.destination], f.bytes) for f in sent
    if net.leaf_of[f.source] != net.leaf_of[f.destination]
  )
  expected = 0
  for (source, leaf, _), f in groups.items():
    s = len(net.live_spines[net.leaf_of[source], leaf])
    r = f % s
    expected += f + r * (s // math.gcd(r, s) - 1)
  assert link_loads.num_sent(routes) == expected


@settings(max_examples=60)
@given(
  left=st.integers(1, 5), right=st.integers(1, 5), colours=st.integers(1, 7),
  seed=st.integers(0, 10**6), count=st.integers(0, 80),
)
def test_colourings_are_equitable_and_even(left, right, colours, seed, count):
  """Equitable at each vertex; even shares are exact at the largest degree."""
  draw = random.Random(seed)
  edges = [(draw.randrange(left), 10 + draw.randrange(right))
           for _ in range(count)]
  degrees = collections.Counter(v for edge in edges for v in edge)
  used = collections.Counter()
  for edge, colour in zip(edges, colouring.equitable(edges, colours),
                          strict=True):
    for v in edge:
      used[v, colour] += 1
  for v, degree in degrees.items():
    counts = [used[v, c] for c in range(colours)]
    assert sum(counts) == degree
    assert max(counts) - min(counts) <= 1
  shares = collections.Counter()
  for edge, parts in zip(
    edges, colouring.split_evenly(edges, colours), strict=True
  ):
    assert sum(share for _, share in parts) == 1
    assert all(share > 0 for _, share in parts)
    for colour, share in parts:
      for v in edge:
        shares[v, colour] += share
  top = Fraction(max(degrees.values(), default=0), colours)
  assert all(x <= top for x in shares.values())
  for v, degree in degrees.items():
    if degree == top * colours:
      assert all(shares[v, c] == top for c in range(colours))


@settings(max_examples=40)
@given(
  n=st.integers(1, 5), degree=st.integers(1, 9), colours=st.integers(1, 7),
  seed=st.integers(0, 10**6),
)
def test_regular_graph_is_split_into_the_fewest_pieces(
  n, degree, colours, seed
):
  """n (colours - gcd) more pieces, the least that each vertex needs."""
  draw = random.Random(seed)
  edges = [
    edge for _ in range(degree)
    for edge in enumerate(draw.sample(range(n), n))
  ]
  pieces = sum(map(len, colouring.split_evenly(edges, colours)))
  extra = n * (colours - math.gcd(degree, colours))
  assert pieces == len(edges) + extra


def test_padding_edges_take_the_cuts():
  """Cuts the middle one of three slots; the lone edge is not cut."""
  shares = colouring.split_evenly([(0, 10)] * 3 + [(1, 11)], 2)
  assert sorted(map(len, shares)) == [1, 1, 1, 2]


@pytest.mark.parametrize(
  ("shape", "traffic", "fullest", "split", "pieces"),
  [
    ((16, 16, 16), shift, 1, "1", 256),
    ((16, 16, 16), all_to_all, 240, "240", 61440),
    ((8, 6, 8), shift, 2, "4/3", 96),
    ((8, 6, 8), all_to_all, 75, "224/3", 3616),
  ],
)
def test_coordinated_routing_needs_few_splits(
  shape, traffic, fullest, split, pieces
):
  """ceil(degree / spines) without splits; the even load with few pieces."""
  net = link_loads.fabric(topologies.leaf_spine(*shape))
  sent = traffic(shape[2], shape[0] * shape[2])
  whole = link_loads.coordinated(net, sent)
  assert link_loads.num_sent(whole) == len(sent)
  loads = link_loads.loads(net, sent, whole)
  assert link_loads.max_spine_link_load(net, loads) == fullest
  few = link_loads.coordinated_split(net, sent)
  assert link_loads.num_sent(few) == pieces
  loads = link_loads.loads(net, sent, few)
  assert link_loads.max_spine_link_load(net, loads) == Fraction(split)


def test_demands_equal_the_sends_of_a_schedule():
  net = topologies.leaf_spine(4, 2, 2)
  schedule = builders.build("halving_doubling", net)
  rounds = patterns.demands(schedule, 80)
  assert len(rounds) == 2 * 3
  assert sorted({f.bytes for r in rounds for f in r}) == [10, 20, 40]
  for sent in rounds:  # one flow from each rank and one to it
    assert sorted(f.source for f in sent) == list(range(8))
    assert sorted(f.destination for f in sent) == list(range(8))


@pytest.mark.parametrize(
  ("kind", "per_rank"),
  [
    ("all_reduce", 2 * 3 / 4), ("reduce_scatter", 3 / 4), ("all_gather", 3),
    ("all_to_all", 3 / 4), ("permute", 1), ("broadcast", 1),
  ],
)
def test_rings_of_a_program_send_the_bytes_of_the_ledger(kind, per_rank):
  """Thakur et al.: equal to `Collective.wire_bytes_ring`."""
  sent, steps = patterns.ring_demands(kind, [(0, 2, 4, 6), (1, 3, 5, 7)], 1000)
  by_rank = collections.Counter()
  for flow in sent:
    by_rank[flow.source] += steps * flow.bytes
  assert by_rank == dict.fromkeys(range(8), per_rank * 1000)


def test_step_takes_the_time_of_its_slowest_link():
  """3 bytes over one uplink of 1 byte/s; four links of latency."""
  net = link_loads.fabric(topologies.leaf_spine(
    2, 1, 3, bandwidth=2.0, uplink_bandwidth=1.0, latency_s=0.5
  ))
  sent = [Flow(0, 3, 1), Flow(1, 4, 1), Flow(2, 5, 1)]
  loads = link_loads.loads(net, sent, link_loads.spray(net, sent))
  assert link_loads.step_seconds(net, loads) == 3 + 4 * 0.5
  assert link_loads.step_seconds(net, loads, 10) == 30 + 4 * 0.5
  local = [Flow(0, 1, 4)]
  loads = link_loads.loads(net, local, link_loads.spray(net, local))
  assert link_loads.step_seconds(net, loads) == 4 / 2 + 2 * 0.5


def test_coordinated_routing_beats_spraying_after_failures():
  """Spraying loads the links of flows with fewer paths more."""
  net = topologies.leaf_spine(4, 4, 4)
  a, b, s, t = 16, 17, 20, 21
  net = link_loads.fabric(net.without((a, s), (s, a), (b, t), (t, b)))
  sent = all_to_all(4, 16)
  bound = link_loads.max_load_lower_bound(net, sent)
  fullest = {
    name: link_loads.max_spine_link_load(
      net, link_loads.loads(net, sent, link_loads.ROUTERS[name](net, sent))
    )
    for name in ("spray", "ethereal", "coordinated")
  }
  assert bound == 16
  assert link_loads.optimal_max_load(net, sent) == pytest.approx(16)
  assert fullest["coordinated"] == 16
  assert fullest["spray"] == fullest["ethereal"] > 16


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda: link_loads.fabric(topologies.ring(4)),
      r"rank 0 is joined to \[1, 3\]",
    ),
    (lambda: link_loads.fabric(topologies.bigraph(2, 4)), "both leaves"),
    (lambda: link_loads.fabric(topologies.leaf_spine(2, 1, 1).without((2, 4))),
     "not connected|no spine joins"),
    (lambda: patterns.ring_demands("scan", [(0, 1)], 8), "the kind 'scan'"),
    (lambda: patterns.demands(builders.build("ring", topologies.ring(4)), 6),
     "size_bytes=6 must be a multiple of the 4 chunks"),
    (lambda: link_loads.coordinated_split(
      link_loads.fabric(topologies.leaf_spine(2, 2, 1).without((2, 4))), []),
     "needs every uplink"),
  ],
)
def test_invalid_input_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_rerouted_flow_considers_uplink_and_downlink():
  """The uplink of its leaf to a spine may be free, the downlink may not."""
  net = topologies.leaf_spine(3, 3, 1)
  a, b, spines = 3, 4, (6, 7, 8)
  net = link_loads.fabric(net.without((a, spines[0]), (spines[0], a)))
  sent = [Flow(0, 1, 1), Flow(2, 1, 5), Flow(0, 2, 1)]
  routes = [(link_loads.SpineShare(spine),) for spine in spines]
  link_loads._avoid_failures(net, sent, routes)
  assert [route[0].spine for route in routes] == [spines[2], *spines[1:]]
  loads = link_loads.loads(net, sent, routes)
  assert loads[spines[1], b] == 5


@pytest.mark.parametrize(
  ("sent", "least"),
  [
    ([Flow(0, 4, 3), Flow(2, 5, 3)], 3),  # bytes into a leaf
    ([Flow(0, 2, 3), Flow(1, 4, 3)], 3),  # bytes out of a leaf
    ([Flow(0, 2, 3), Flow(4, 2, 1)], 2),
  ],
)
def test_bound_covers_every_set_of_links(sent, least):
  net = link_loads.fabric(topologies.leaf_spine(3, 2, 2))
  assert link_loads.max_load_lower_bound(net, sent) == least


def test_numbers_of_the_study_by_hand():
  """Two hosts on each of four leaves, which have three uplinks each."""
  found = study.run(spraying.get_config("test").to_dict() | {
    "bandwidth": "1e9", "latency_s": "1e-6", "size_bytes": (48_000,),
  })
  for row in found["patterns"]:
    fullest, least = Fraction(row["fullest_uplink"]), Fraction(row["bound"])
    assert row["over_bound"] == float(fullest) / float(least) >= 1
  rows = {
    (row["pattern"], row["router"]): row for row in found["patterns"]
  }
  # Both hosts send to another leaf, or to each of the six other hosts there.
  for pattern, flows, bound in (("shift", 8, "2/3"), ("all_to_all", 48, "4")):
    row = rows[pattern, "spray"]
    assert (row["num_flows"], row["num_sent"]) == (flows, 3 * flows)
    assert (row["fullest_uplink"], row["bound"]) == (bound, bound)
  rows = {
    (row["algorithm"], row["router"]): row for row in found["collectives"]
  }
  # Of 14 steps, each sends 6,000 bytes over a host's link, and 4 hops away.
  assert rows["ring", "spray"]["num_steps"] == 14
  assert rows["ring", "spray"]["us"] == pytest.approx(14 * (6 + 4))
  # Each host sends 7 of 8 parts, in one step.
  assert rows["all_to_all", "spray"]["num_steps"] == 1
  assert rows["all_to_all", "spray"]["us"] == pytest.approx(7 * 6 + 4)
