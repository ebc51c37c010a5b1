"""Builders of collective schedules: proofs on all topologies, and step counts.

Counts marked "published simulator" are those of farabimahmud/accelerator's
trees; the others follow from the construction.
"""

import collections
import dataclasses
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from parallel.plans.schedules import multitree, pairwise, ring
from parallel.plans.schedules.builders import BUILDERS, build, parse_builder
from parallel.plans.schedules.check import check, link_loads
from parallel.plans.schedules.colouring import partial_permutations
from parallel.plans.schedules.pipeline import pack_into_rounds, pipelined
from parallel.plans.schedules.schedule import (
  COLLECTIVES,
  Schedule,
  Transfer,
  scatter_then_gather,
)
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Link, Topology

GRIDS = [
  t.ring(1), t.ring(2), t.ring(5), t.ring(8), t.torus((4, 4)), t.torus((3, 5)),
  t.torus((3, 3)), t.torus((2, 4)), t.torus((2, 2, 4)), t.mesh((3, 4)),
  t.mesh((3, 3)), t.mesh((4, 4)),
]
ONE_WAY = t.ring(4).without((1, 0), (2, 1), (3, 2), (0, 3))
OTHERS = [
  t.fully_connected(6), t.switch(5), t.leaf_spine(2, 2, 4), t.fat_tree(4),
  t.bigraph(2, 4), t.dgx(2, 4), t.torus((4, 4)).without((0, 1)),
  t.torus((4, 4)).without((5, 6), (6, 5)), t.ring(5).without((1, 0)), ONE_WAY,
]
POWERS = [x for x in GRIDS if math.log2(x.num_ranks) % 1 == 0]
ACCEPTED = dict.fromkeys(BUILDERS, GRIDS + OTHERS) | {
  "ring_2d": [x for x in GRIDS if len(x.shape) == 2],
  "bucket": GRIDS,
  "halving_doubling": [
    x for x in GRIDS + OTHERS if math.log2(x.num_ranks) % 1 == 0
  ],
  "swing": POWERS,
  "hdrm": [t.bigraph(2, 4), t.bigraph(4, 8)],
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_is_proven(name, collective):
  for topology in ACCEPTED[name]:
    schedule = build(name, topology, collective)
    assert schedule.collective == collective
    check(schedule, topology)
    if collective == "all_reduce":
      pieces = pipelined(schedule, topology, 3)
      check(pieces, topology)
      assert pieces.num_transfers == 3 * schedule.num_transfers


# (builder, topology) -> rounds of an all-reduce
ROUNDS = [
  ("ring", t.ring(8), 2 * 7),
  ("bidirectional_ring", t.torus((4, 4)), 2 * 15),
  ("ring_2d", t.torus((4, 4)), 4 * 3),
  ("bucket", t.torus((4, 4)), 4 * 3),
  ("halving_doubling", t.ring(16), 2 * 4),
  ("hdrm", t.bigraph(4, 8), 2 * 5),
  ("swing", t.torus((4, 4)), 2 * 4),
  ("direct", t.ring(7), 2),
]


@pytest.mark.parametrize(("name", "topology", "rounds"), ROUNDS)
def test_number_of_rounds(name, topology, rounds):
  assert len(build(name, topology).rounds) == rounds


@pytest.mark.parametrize("name", ["ring_2d", "bucket"])
def test_2d_rings_take_their_closed_form_time(name):
  """Time at alpha = 0, in units of M / B of a 4x4 torus: 0.75 and the bound."""
  topology = t.torus((4, 4))
  schedule = build(name, topology)
  seconds = sum(max(link_loads(r).values()) for r in schedule.rounds)
  expected = {"ring_2d": 0.75, "bucket": 2 * 15 / 64}[name]
  assert seconds / schedule.num_chunks == expected


# T of one phase: published simulator, or its greedy with the full-round rule.
STEPS = [
  *((t.torus((d, d)), steps) for d, steps in
    [(4, 5), (6, 10), (8, 17), (10, 26), (12, 37), (14, 49), (16, 64)]),
  *((t.mesh((d, d)), steps) for d, steps in [(6, 18), (8, 32), (16, 128)]),
  (t.bigraph(4, 8), 31),
  (t.switch(6), 5), (t.leaf_spine(4, 4, 4), 15),  # n - 1: the minimum
]


@pytest.mark.parametrize(("topology", "steps"), STEPS)
def test_number_of_multitree_steps(topology, steps):
  n = topology.num_ranks
  num_steps = len(multitree.grow(topology))
  assert num_steps <= steps
  if topology.num_switches == 0:
    # The bound: (n - 1) / 4 on a torus, (n - 1) / 2 at a mesh's corner.
    ports = min(len(topology.neighbours(rank)) for rank in range(n))
    assert num_steps >= math.ceil((n - 1) / ports)


def test_order_of_multitree_roots():
  assert len(multitree.grow(t.mesh((4, 4)), farthest_first=True)) <= 11


def test_link_load_of_hdrm():
  """One message per switch link and step if m <= s / 2, else 2 m / s."""
  for m, s in [(2, 4), (2, 8), (4, 8), (4, 16), (8, 8)]:
    topology = t.bigraph(m, s)
    for transfers in build("hdrm", topology, "all_gather").rounds:
      # A message is all that goes from one rank to another in a round.
      messages = {(x.source, x.destination): x.path for x in transfers}
      loads = collections.Counter(
        pair for path in messages.values() for pair in itertools.pairwise(path)
      )
      between = [
        load for pair, load in loads.items() if min(pair) >= topology.num_ranks
      ]
      assert max(between) == max(1, 2 * m // s), (m, s)
  assert sorted(pairwise.bigraph_places(4, 8)) == list(range(32))


def test_double_tree_uses_one_port_per_rank():
  for n in (2, 5, 8, 16):
    for transfers in build("double_tree", t.fully_connected(n)).rounds:
      sources = [x.source for x in transfers]
      targets = [x.destination for x in transfers]
      assert len(set(sources)) == len(set(targets)) == len(transfers)


@pytest.mark.parametrize("name", ["ring", "multitree", "optimal", "swing"])
def test_reduce_scatter_is_the_reversed_all_gather(name):
  topology = t.torus((4, 4))
  gather = build(name, topology, "all_gather")
  scatter = build(name, topology, "reduce_scatter")
  assert [
    collections.Counter((x.destination, x.source, x.chunk) for x in transfers)
    for transfers in reversed(scatter.rounds)
  ] == [
    collections.Counter((x.source, x.destination, x.chunk) for x in transfers)
    for transfers in gather.rounds
  ]


@pytest.mark.parametrize(
  ("name", "topology", "message"),
  [
    ("multitre", t.ring(4), "'multitre' must be one of ring"),
    ("swing", t.ring(6), "6 ranks, not a power of two"),
    ("swing", t.torus((2, 6)), "power of two"),
    ("halving_doubling", t.switch(6), "power of two"),
    ("bucket", t.torus((3, 3)).without((0, 1)), "not a ring, torus or mesh"),
    ("ring_2d", t.ring(4), "two dims"),
    ("hdrm", t.ring(4), "not a BiGraph"),
    ("hdrm", t.switch(4), "switch 4 is not a BiGraph"),
    ("hdrm", t.bigraph(3, 4), "hdrm: BiGraph 3x4 has 12 ranks, not a power"),
    ("swing", t.switch(4), "switch 4 is not a ring, torus or mesh"),
    ("swing", t.bigraph(2, 4), "BiGraph 2x4 is not a ring, torus or mesh"),
    ("swing", t.ring(4).without((0, 1)), "mesh without failures"),
    ("bucket", t.bigraph(2, 4), "BiGraph 2x4 is not a ring, torus or mesh"),
    ("ring_2d", t.torus((2, 2, 2)), "dims of at least 2 ranks, but has 3"),
    ("ring_2d", t.torus((1, 4)), "dims of at least 2 ranks, but has 1"),
  ],
)
def test_builder_refuses_unsupported_topologies(name, topology, message):
  with pytest.raises(ValueError, match=message):
    build(name, topology)
  with pytest.raises(ValueError, match="'gather' must be one of all_reduce"):
    build("ring", topology, "gather")


@pytest.mark.parametrize(("text", "expected"), [
  ("ring", ("ring", {})),
  ("ring,pieces=4", ("ring", {"pieces": 4})),
  ("multitree,farthest_first=True", ("multitree", {"farthest_first": True})),
  ("optimal,trees=grown,weight=None,size_bytes=64",
   ("optimal", {"trees": "grown", "weight": None, "size_bytes": 64})),
  ("optimal,tolerance=0.5,max_weight=2",
   ("optimal", {"tolerance": 0.5, "max_weight": 2})),
  ("multitre", "schedule 'multitre' must be one of ring, .*mean multitree"),
  ("ring,weight=2", "ring's option 'weight' must be one of pieces"),
  ("optimal,wieght=2", "optimal's option 'wieght' .* did you mean weight"),
  ("ring,pieces=1.5", "ring's pieces=1.5 is not allowed; allowed are int$"),
  ("ring,pieces=True", "ring's pieces=True is not allowed; allowed are int$"),
  ("multitree,farthest_first=1", "first=1 is not allowed; allowed are bool$"),
  ("optimal,trees=tall", "'tall' is not allowed; .* are 'packed', 'grown'$"),
  ("optimal,weight=2.0", "2.0 is not allowed; allowed are int, NoneType$"),
])
def test_options_in_text_have_the_types_of_the_builder(text, expected):
  if isinstance(expected, tuple):
    assert parse_builder(text) == expected
    return
  with pytest.raises(ValueError, match=expected):
    parse_builder(text)


@pytest.mark.parametrize(
  ("name", "topology", "options", "message"),
  [
    ("ring", t.ring(4), {"pieces": 0}, "pieces=0 must be at least 1"),
    ("ring", t.ring(4), {"pieces": 10**7}, "24 transfers are too many; pieces"),
    ("ring", t.ring(4), {"weight": 2}, "unexpected keyword argument 'weight'"),
    ("optimal", t.ring(1), {"wieght": 2}, "unexpected keyword .* 'wieght'"),
    ("optimal", t.ring(4), {"trees": "tall"}, "must be one of packed, grown"),
    ("optimal", t.ring(4), {"trees": "grown", "tolerance": 0.1},
     "tolerance has no effect on trees='grown'"),
    ("optimal", t.ring(4), {"size_bytes": 64},
     "size_bytes has no effect on trees='packed'"),
    ("optimal", t.ring(4), {"trees": "grown", "max_weight": 2},
     "max_weight has no effect on trees='grown'"),
    ("optimal", t.ring(4), {"link_capacity": 2},
     "link_capacity has no effect on trees='packed'"),
    ("optimal", t.ring(4), {"trees": "grown", "link_capacity": 0},
     "link_capacity=0 must be at least 1"),
    ("optimal", t.ring(4), {"trees": "grown", "weight": 0},
     "weight=0 must be at least 1"),
    ("optimal", t.ring(4), {"weight": 0}, "weight=0 must be at least 1"),
    ("multitree", t.leaf_spine(2, 2, 2, uplink_bandwidth=1e9),
     {"farthest_first": True}, "needs links of one bandwidth"),
  ],
)
def test_invalid_options_are_refused(name, topology, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, topology, **options)


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40)


@given(PAIRS)
@settings(max_examples=60)
def test_pairs_are_split_into_the_fewest_partial_permutations(pairs):
  parts = partial_permutations(pairs)
  assert collections.Counter(itertools.chain(*parts)) == (
    collections.Counter(pairs)
  )
  for part in parts:
    assert len({u for u, _ in part}) == len({v for _, v in part}) == len(part)
  sides = zip(*pairs, strict=True)
  assert len(parts) == max(
    (max(collections.Counter(side).values()) for side in sides), default=0
  )


@pytest.mark.parametrize(
  "topology",
  [t.torus((4, 4)), t.mesh((3, 4)), t.torus((3, 5)), t.torus((2, 2, 4))],
  ids=lambda x: x.name,
)
def test_ring_on_a_grid_uses_single_links(topology):
  """The grids have a Hamiltonian cycle; consecutive ranks form none."""
  assert ring.cycle(topology)[0] == 0
  for name in ("ring", "bidirectional_ring"):
    for transfers in build(name, topology).rounds:
      assert {len(x.path) for x in transfers} == {2}
      assert max(link_loads(transfers).values()) == 1


@pytest.mark.parametrize(
  ("name", "topology"),
  [("bidirectional_ring", t.ring(8)), ("ring_2d", t.torus((4, 4))),
   ("bucket", t.torus((4, 4))), ("swing", t.torus((4, 4)))],
)
def test_traffic_is_even_over_all_links(name, topology):
  """Directions and rotations of the dims have equal shares of the load."""
  for collective in ("all_gather", "all_reduce"):
    loads = collections.Counter()
    for transfers in build(name, topology, collective).rounds:
      loads.update(link_loads(transfers))
    assert len(loads) == len(topology.links)
    assert len(set(loads.values())) == 1


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_number_of_double_tree_rounds(n):
  """Pipelines n chunks through trees of depth about log2 n."""
  rounds = len(build("double_tree", t.fully_connected(n)).rounds)
  assert rounds == 2 * (n + 2 * int(math.log2(n)) - 3)


def partners(transfers, source):
  return {x.destination for x in transfers if x.source == source}


def test_swing_partners():
  """Distances 1, 1, 3 and their mirror images: De Sensi et al., 2024."""
  rounds = build("swing", t.ring(8), "reduce_scatter").rounds
  assert [partners(r, 0) for r in rounds] == [{1, 7}, {7, 1}, {3, 5}]
  assert [partners(r, 1) for r in rounds] == [{0, 2}, {2, 0}, {6, 4}]


def test_swing_uses_all_ports_of_a_torus():
  """In its first rounds, one per dim, all partners are neighbours."""
  topology = t.torus((4, 4))
  rounds = build("swing", topology, "reduce_scatter").rounds
  for transfers in rounds[:2]:
    for rank in range(16):
      assert partners(transfers, rank) == set(topology.neighbours(rank))


def test_direct_exchange_starts_with_distinct_destinations():
  """Any n successive messages have n different destinations."""
  (transfers,) = build("direct", t.switch(5), "all_gather").rounds
  for start in range(0, len(transfers), 5):
    some = transfers[start : start + 5]
    assert {x.source for x in some} == set(range(5))
    assert {x.destination for x in some} == set(range(5))


def test_pieces_are_pipelined():
  """On a chain of three links, each piece follows one round after another."""
  net = t.mesh((4,))
  chain = Schedule(
    "chain", "all_gather", 4, 4,
    tuple((Transfer(i, i + 1, 0, "copy", (i, i + 1)),) for i in range(3)),
    (0, 1, 2, 3),
  )
  for pieces in (2, 7):
    rounds = pipelined(chain, net, pieces).rounds
    assert len(rounds) == pieces + 2
    for transfers in rounds:
      assert max(link_loads(transfers).values()) == 1
  # With twice the link capacity, twice as many pieces per round.
  assert len(pipelined(chain, net, 8, 2).rounds) == 4 + 2


def test_round_of_pieces_loads_links_like_a_round_of_chunks():
  """The largest round of halving-doubling has 4 chunks on a switch link."""
  net = t.switch(8)
  whole = build("halving_doubling", net, "all_gather")
  pieces = pipelined(whole, net, 4)
  assert pieces.link_capacity == 4
  loads = [max(link_loads(x).values()) for x in pieces.rounds]
  assert max(loads) == 4
  assert sum(loads) == 4 * (1 + 2 + 4)


def test_chunk_sent_and_received_in_one_round_is_not_split():
  swap = tuple(Transfer(a, 1 - a, 0, "reduce", (a, 1 - a)) for a in range(2))
  schedule = Schedule("swap", "all_reduce", 2, 1, (swap,))
  with pytest.raises(ValueError, match="swap, round 0: rank 0 both sends and"):
    pipelined(schedule, t.ring(2), 2)


def test_sums_of_pieces_share_a_round_and_copies_do_not():
  net = t.fully_connected(5)
  whole = build("direct", net, "reduce_scatter")
  assert len(pipelined(whole, net, 3).rounds) == 3
  copies = [Transfer(rank, 2, 0, "copy", (rank, 2)) for rank in range(2)]
  assert pack_into_rounds(copies, net.link_capacities(1)) == tuple(
    (x,) for x in copies
  )


def test_value_is_sent_after_it_arrives_and_before_it_is_replaced():
  """Each link carries one transfer, and each rank has one value."""
  there, on = (Transfer(i, i + 1, 0, "copy", (i, i + 1)) for i in range(2))
  room = t.mesh((3,)).link_capacities(1)
  assert pack_into_rounds([there, on], room) == ((there,), (on,))
  assert pack_into_rounds([on, there], room) == ((on, there),)
  # the second one leaves in round 1
  late = pack_into_rounds([on, on, there], room)
  assert late == ((on,), (on, there))
  assert pack_into_rounds(
    [on, on, there], {pair: 2 for pair in room}
  )[0] == (on,)


@pytest.mark.parametrize(("halves", "claim"), [
  ((1, 3), 3), ((3, 1), 3), ((None, 1), None), ((1, None), None),
])
def test_claim_of_an_all_reduce_holds_for_both_halves(halves, claim):
  parts = (build("ring", t.ring(4), c) for c in COLLECTIVES[1:])
  both = scatter_then_gather(*(
    dataclasses.replace(x, link_capacity=c)
    for x, c in zip(parts, halves, strict=True)
  ))
  assert both.link_capacity == claim
  check(both)


@pytest.mark.parametrize(("name", "topology", "claim"), [
  ("ring", t.ring(1), 1), ("ring", t.ring(2), 1), ("ring", t.ring(5), 1),
  ("ring", t.mesh((3, 4)), 1), ("ring", t.mesh((3, 3)), None),
  ("ring", t.switch(4), None),
  # Both directions of a ring of two use the same link.
  ("bidirectional_ring", t.ring(2), 2), ("bidirectional_ring", t.ring(3), 1),
  ("ring_2d", t.torus((4, 4)), 1), ("ring_2d", t.torus((2, 2)), None),
  ("ring_2d", t.torus((3, 5)), None), ("ring_2d", t.mesh((3, 3)), None),
  # The last dim of a bucket gather sends all slices of the other dims.
  ("bucket", t.ring(5), 1), ("bucket", t.ring(2), None),
  ("bucket", t.torus((4, 4)), 4), ("bucket", t.torus((3, 3, 3)), 9),
  ("bucket", t.torus((4, 1, 4)), 4), ("bucket", t.torus((3, 5)), None),
  ("bucket", t.mesh((3, 3)), None),
  ("direct", t.ring(3), 1), ("direct", t.ring(4), None),
  ("direct", t.fully_connected(4), 1), ("multitree", t.ring(4), 1),
  ("optimal", t.ring(4), 1), ("optimal", t.ring(1), 1),
  ("halving_doubling", t.ring(4), None), ("double_tree", t.ring(4), 1),
  ("double_tree", t.ring(8), None), ("double_tree", t.switch(6), 1),
  ("double_tree", t.fully_connected(5), 1), ("double_tree", t.ring(1), 1),
])
def test_links_of_a_round_have_the_claimed_capacity(name, topology, claim):
  schedule = build(name, topology)
  assert (schedule.name, schedule.link_capacity) == (name, claim)
  check(schedule, topology)
  loads = [max(link_loads(x).values()) for x in schedule.rounds]
  if claim and topology.num_ranks > 1:
    assert max(loads) == claim


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ring_follows_the_links_of_a_one_way_ring(step, collective):
  """Also the reduce-scatter, which is a reversed all-gather."""
  links = tuple(Link(i, (i + step) % 5) for i in range(5))
  schedule = build("ring", Topology("one way", 5, 0, links), collective)
  moves = [t for moved in schedule.rounds for t in moved]
  assert {t.path for t in moves} == {(i, (i + step) % 5) for i in range(5)}
  assert len(schedule.rounds) == 4 * (1 + (collective == "all_reduce"))


def test_two_rings_on_a_one_way_link_claim_no_capacity():
  """Only one of the two cycles has a link for each of its steps."""
  net = t.ring(5).without((1, 0))
  for collective in COLLECTIVES:
    assert build("bidirectional_ring", net, collective).link_capacity is None
  assert build("bidirectional_ring", t.ring(5)).link_capacity == 1


def test_ring_on_a_one_way_ring_claims_one_chunk_per_link():
  assert {build("ring", ONE_WAY, c).link_capacity for c in COLLECTIVES} == {1}


def test_farthest_roots_are_served_first():
  """From the second turn on, these are the corners of a mesh."""
  net = t.mesh((4, 4))
  roots, _ = multitree.grow(net, farthest_first=True)[0]
  assert roots[:16] == tuple(range(16))
  assert set(roots[16:20]) == {0, 3, 12, 15}


def test_multitree_takes_the_path_with_the_fewest_links():
  """Prefers a later parent's single link to an earlier parent's two links."""
  pairs = [(rank, 3) for rank in range(3)] + [(1, 2)]
  net = Topology("mixed", 3, 1, tuple(
    Link(*pair) for a, b in pairs for pair in ((a, b), (b, a))
  ))
  steps = multitree.grow(net)
  ways = [path for roots, paths in steps
          for root, path in zip(roots, paths, strict=True) if root == 0]
  assert ways == [(0, 3, 1), (1, 2)]
