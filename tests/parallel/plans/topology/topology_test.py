"""Topologies: links match the definitions, and invalid input is refused."""

import dataclasses
import json
import math

import networkx
import numpy as np
import pytest

from parallel.plans.topology import builders as t
from parallel.plans.topology import files, graph, text
from parallel.plans.topology.graph import MAX_LINKS, Link, Topology

# topology -> (ranks, switches, directed links, ranks' diameter in links)
COUNTS = [
  (t.ring(5), 5, 0, 10, 2),
  (t.ring(2), 2, 0, 2, 1),
  (t.torus((4, 4)), 16, 0, 64, 4),
  (t.torus((2, 3, 4)), 24, 0, 24 * 5, 4),
  (t.mesh((3, 4)), 12, 0, 2 * (3 * 3 + 2 * 4), 5),
  (t.mesh((7,)), 7, 0, 12, 6),
  (t.fully_connected(4), 4, 0, 12, 1),
  (t.switch(4), 4, 1, 8, 2),
  (t.leaf_spine(4, 2, 3), 12, 6, 2 * (12 + 8), 4),
  (t.fat_tree(4), 16, 20, 2 * 48, 6),
  (t.bigraph(4, 8), 32, 8, 2 * (32 + 16), 4),
  (t.dgx(2, 4), 8, 6, 2 * 16, 4),
]


@pytest.mark.parametrize(
  ("topology", "ranks", "switches", "links", "diameter"), COUNTS,
  ids=lambda x: x.name.replace(" ", "_") if isinstance(x, Topology) else None,
)
def test_builders_match_their_definitions(
  topology, ranks, switches, links, diameter
):
  assert (topology.num_ranks, topology.num_switches) == (ranks, switches)
  assert len(topology.links) == len(topology.links_by_pair) == links
  paths = [
    topology.shortest_path(u, v) for u in range(ranks) for v in range(ranks)
  ]
  graph = topology.graph()
  for path in paths:
    assert networkx.is_path(graph, path)
    assert len(path) - 1 == networkx.shortest_path_length(
      graph, path[0], path[-1]
    )
  assert max(len(path) for path in paths) - 1 == diameter


def test_equal_paths_are_spread_by_destination():
  """Paths between two leaves use as many spines as there are destinations."""
  topology = t.leaf_spine(2, 4, 4)
  spines = {topology.shortest_path(0, there)[2] for there in range(4, 8)}
  assert len(spines) == 4


def test_path_along_one_link_needs_no_search():
  """A search for each of 512 ranks would pass 512 times all 261,632 links."""
  topology = t.fully_connected(8)
  for link in topology.links:
    pair = link.source, link.destination
    assert topology.shortest_path(*pair) == pair
  assert not topology._hops_to  # distances that were searched


def test_graph_round_trips_through_networkx_and_a_file(tmp_path):
  topology = t.dgx(2, 4)
  again = files.from_networkx(topology.graph(), name=topology.name)
  assert set(again.links) == set(topology.links)
  assert dataclasses.replace(again, links=topology.links) == topology
  path = tmp_path / "graph.json"
  path.write_text(json.dumps({
    "num_ranks": 2,
    "num_switches": 1,
    "links": [
      {"source": 0, "destination": 2, "bandwidth": 2e9, "latency_s": 0,
       "both_ways": True},
      {"source": 1, "destination": 2, "both_ways": True},
    ],
  }))
  read = t.build("file", path=path)
  both = Link(0, 2, 2e9, 0.0), Link(2, 0, 2e9, 0.0)
  assert read == Topology("graph", 2, 1, (*both, Link(1, 2), Link(2, 1)))
  path.write_text(json.dumps(GOOD | {"name": "pair"}))
  assert files.from_file(path) == Topology(
    "pair", 2, 0, (Link(0, 1), Link(1, 0))
  )
  default = files.from_file(path, bandwidth=7.0, latency_s=0.5)
  assert default.links == (Link(0, 1, 7.0, 0.5), Link(1, 0, 7.0, 0.5))


GOOD = {"num_ranks": 2, "links": [{"source": 0, "destination": 1,
                                   "both_ways": True}]}


@pytest.mark.parametrize("kind", t.BUILDERS)
def test_every_builder_has_a_text_form(kind, tmp_path):
  path = tmp_path / "graph.json"
  path.write_text(json.dumps(GOOD))
  sizes = {"fat_tree": "4", "file": path, "leaf_spine": "2x3x4"}
  sizes |= dict.fromkeys(("torus", "mesh", "bigraph", "dgx"), "2x4")
  net = text.parse(f"{kind}:{sizes.get(kind, 5)}", latency_s=1e-6)
  assert {x.latency_s for x in net.links} == {1e-6}


N = 10**12


@pytest.mark.parametrize(("size", "links"), [
  ("ring:N", 2 * N),
  ("switch:N", 2 * N),
  ("fully_connected:N", N * (N - 1)),
  ("torus:NxN", 4 * N**2),
  ("leaf_spine:2xNx3", 2 * (2 * 3 + 2 * N)),  # leaves, spines, ranks per leaf
  ("leaf_spine:2x3xN", 2 * (2 * N + 2 * 3)),
  ("fat_tree:N", 3 * N**3 // 2),
  ("bigraph:NxN", 2 * (N * N + (N // 2) ** 2)),
  ("dgx:NxN", 4 * N**2),
])
def test_oversized_topology_is_refused_before_it_is_built(size, links):
  with pytest.raises(
    ValueError, match=rf"has {links} links; at most {MAX_LINKS}"
  ):
    text.parse(size.replace("N", str(N)))


@pytest.mark.parametrize(("name", "ranks", "built"), [
  ("ring", 6, t.ring(6)), ("torus", 12, t.torus((3, 4))),
  ("mesh", 16, t.mesh((4, 4))), ("mesh", 7, t.mesh((1, 7))),
  ("bigraph", 12, t.bigraph(3, 4)), ("switch", 5, t.switch(5)),
  ("fully_connected", 4, t.fully_connected(4)),
])
def test_number_of_ranks_gives_the_most_square_topology(name, ranks, built):
  found = t.of_size(name, ranks)
  assert found == built
  assert found.num_ranks == ranks


def bandwidths(net):
  return {x.bandwidth for x in net.links}


def test_text_sets_the_links_of_a_topology(tmp_path):
  """Defaults are the builder's links; given values replace them."""
  own = t.dgx(2, 8)
  assert bandwidths(own) == {450e9, 50e9}
  assert text.parse("dgx:2x8") == own
  faster = text.parse("dgx:2x8,bandwidth=nvlink_5", bandwidth=1e9)
  assert bandwidths(faster) == {900e9, 50e9}
  assert bandwidths(text.parse("dgx:2x8", bandwidth="1e9")) == {1e9, 50e9}
  slower = text.parse("dgx:2x8,network_bandwidth=infiniband_hdr")
  assert bandwidths(slower) == {450e9, 25e9}
  assert text.parse("ring:3,latency_s=wide_area_10g").links[0].latency_s > 0.02
  tapered = text.parse("leaf_spine:4x2x8,oversubscription=4", bandwidth=1e9)
  up = {x.bandwidth for x in tapered.links if min(x.source, x.destination) > 31}
  assert up == {1e9}  # 8 hosts' bytes per second over 2 x 4
  failed = text.parse("torus:3x3,failed=0-1+2>5")
  assert failed == t.torus((3, 3)).without((0, 1), (1, 0), (2, 5))
  path = tmp_path / "a,b.json"
  path.write_text(json.dumps(GOOD))
  net = text.parse(f"file:{path},bandwidth=3e9", bandwidth=7.0, latency_s=0)
  assert {(x.bandwidth, x.latency_s) for x in net.links} == {(3e9, 0.0)}
  entry = GOOD["links"][0] | {"bandwidth": 2.0}
  path.write_text(json.dumps(GOOD | {"links": [entry]}))
  assert bandwidths(text.parse(f"file:{path}")) == {2.0}
  with pytest.raises(ValueError, match=r"bandwidth=7 has no effect, since"):
    text.parse(f"file:{path}", bandwidth=7.0)
  assert text.parse("ring:3,failed=0-1").name == "ring 3 without 2 links"


def test_graph_keeps_its_node_numbers_or_warns(recwarn):
  graph = networkx.Graph()
  graph.add_edge(2, 0, bandwidth=2e9)
  graph.add_edge(0, 1)
  kept = files.from_networkx(graph)
  assert kept.links_by_pair[2, 0].bandwidth == 2e9
  assert not kept.labels
  named = files.from_networkx(networkx.path_graph(["a", "b", "c"]))
  assert named.labels == ("a", "b", "c")
  assert named.without().reversed().labels == named.labels
  assert not recwarn
  graph.nodes[0]["switch"] = True
  with pytest.warns(UserWarning, match="node 2 is rank 0"):
    moved = files.from_networkx(graph)
  assert moved.labels == (2, 1, 0)
  assert moved.links_by_pair[0, 2].bandwidth == 2e9


def test_edges_without_an_attribute_have_the_given_one():
  """Each direction of a directed graph is a link of its own."""
  graph = networkx.DiGraph([(0, 1, {"bandwidth": 5.0}),
                            (1, 0, {"latency_s": 0.25}), (1, 2), (2, 1)])
  net = files.from_networkx(graph, name="mine", bandwidth=7.0, latency_s=0.5)
  assert net == Topology("mine", 3, 0, (
    Link(0, 1, 5.0, 0.5), Link(1, 0, 7.0, 0.25), Link(1, 2, 7.0, 0.5),
    Link(2, 1, 7.0, 0.5),
  ))


@pytest.mark.parametrize(
  ("edge", "node", "message"),
  [
    ({"bandwith": 1e9}, {}, "edge 0 to 1: .*'bandwith'.*you mean bandwidth"),
    ({"bandwidth": "fast"}, {}, "edge 0 to 1: bandwidth='fast' must be a numb"),
    ({"latency_s": None}, {}, "edge 0 to 1: latency_s=None must be a number"),
    ({}, {"swich": True}, "node 0: the attribute 'swich' must be one of"),
  ],
)
def test_graph_attributes_are_checked(edge, node, message):
  graph = networkx.Graph()
  graph.add_edge(0, 1, **edge)
  graph.add_node(0, **node)
  with pytest.raises(ValueError, match=message):
    files.from_networkx(graph)


@pytest.mark.parametrize("net", [
  t.ring(6), t.torus((3, 4)), t.fully_connected(4), t.switch(4),
  t.leaf_spine(2, 2, 3), t.fat_tree(2), t.bigraph(2, 4), t.dgx(2, 3),
], ids=lambda net: net.name)
def test_number_of_links_and_nodes_may_equal_their_limit(net, monkeypatch):
  """The name of a topology and its size are those of its text form."""
  kind, _, size = net.name.lower().rpartition(" ")
  kind = kind.replace("-", "_").replace(" ", "_")
  monkeypatch.setattr(t, "MAX_LINKS", len(net.links))
  monkeypatch.setattr(graph, "MAX_LINKS", len(net.links))
  monkeypatch.setattr(graph, "MAX_NODES", net.num_nodes)
  assert text.parse(f"{kind}:{size}") == net
  monkeypatch.setattr(graph, "MAX_NODES", net.num_nodes - 1)
  with pytest.raises(ValueError, match=(
    f"{net.name} has {net.num_nodes} nodes and {len(net.links)} links; at most "
    f"{net.num_nodes - 1} and {len(net.links)} are allowed"
  )):
    text.parse(f"{kind}:{size}")
  monkeypatch.setattr(graph, "MAX_NODES", net.num_nodes)
  monkeypatch.setattr(graph, "MAX_LINKS", len(net.links) - 1)
  with pytest.raises(ValueError, match=f"and {len(net.links) - 1} are allowed"):
    text.parse(f"{kind}:{size}")
  monkeypatch.setattr(t, "MAX_LINKS", len(net.links) - 1)
  with pytest.raises(ValueError, match=(
    f"{net.name} has {len(net.links)} links; at most {len(net.links) - 1} are"
  )):
    text.parse(f"{kind}:{size}")


def test_links_have_the_given_bandwidth_and_latency():
  """A tenth of a byte per second and no latency are valid."""
  given = {"bandwidth": 0.1, "latency_s": 0.0}
  for net in (
    t.ring(4, **given), t.torus((2, 3), **given), t.mesh((2, 3), **given),
    t.fully_connected(3, **given), t.switch(3, **given),
    t.leaf_spine(2, 2, 2, **given), t.fat_tree(2, **given),
    t.bigraph(2, 2, **given), t.dgx(1, 3, **given),
  ):
    assert {(x.bandwidth, x.latency_s) for x in net.links} == {(0.1, 0.0)}
  up = t.leaf_spine(2, 2, 4, bandwidth=6.0, uplink_bandwidth=2.0)
  for link in up.links:
    to_spine = max(link.source, link.destination) >= 10
    assert link.bandwidth == (2.0 if to_spine else 6.0)
  rails = t.dgx(2, 3, bandwidth=6.0, network_bandwidth=2.0)
  for link in rails.links:
    through_rail = max(link.source, link.destination) >= 8
    assert link.bandwidth == (2.0 if through_rail else 6.0)


def test_single_node_needs_no_rails():
  assert (t.dgx(1, 4).num_switches, len(t.dgx(1, 4).links)) == (1, 8)
  assert t.dgx(2).num_ranks == 16


def test_ranks_are_numbered_in_row_major_order():
  grid = np.arange(24).reshape(2, 3, 4)
  expected = {
    (int(a), int(b)) for dim in range(3) for step in (-1, 1)
    for a, b in zip(grid.ravel(), np.roll(grid, step, dim).ravel(), strict=True)
  }
  assert set(t.torus((2, 3, 4)).links_by_pair) == expected
  # A mesh has the links between neighbouring places.
  expected = {
    (a, b) for a, b in expected if sum(
      abs(i - j) for i, j in zip(
        np.argwhere(grid == a)[0], np.argwhere(grid == b)[0], strict=True
      )
    ) == 1
  }
  assert set(t.mesh((2, 3, 4)).links_by_pair) == expected


@pytest.mark.parametrize(("key", "value", "expected"), [
  ("bandwidth", 1e9, 1e9), ("bandwidth", "1e9", 1e9),
  ("uplink_bandwidth", "nvlink_4", 450e9), ("latency_s", 0, 0.0),
])
def test_quantities_are_numbers_or_kinds_of_links(key, value, expected):
  assert text.parse_quantity(key, value) == expected


def test_switch_without_links_has_no_path():
  net = Topology("spare", 2, 1, (Link(0, 1), Link(1, 0)))
  assert (net.hops(0, 1), net.hops(0, 2)) == (1, -1)
  with pytest.raises(ValueError, match="spare: no path from 0 to 2"):
    net.shortest_path(0, 2)


def test_failed_links_are_removed():
  torus = t.torus((3, 3))
  failed = torus.without((0, 1), (1, 0))
  assert set(torus.links) - set(failed.links) == {Link(0, 1), Link(1, 0)}
  assert len(failed.shortest_path(0, 1)) == 3
  assert failed.reversed().reversed() == failed


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: t.mesh((2, 2)).without((0, 1), (0, 2)),
     "no path from rank 0 to ranks 1, 2, 3$"),
    (lambda: t.mesh((2,)).without((1, 0)), "no path to rank 0 from rank 1$"),
    (lambda: Topology("x", 9, 0, ()),
     "no path from rank 0 to ranks 1, 2, 3, 4, 5, 6, 7, 8$"),
    (lambda: Topology("x", 10, 0, ()), r"ranks 1, 2, 3, 4, 5, 6, 7, 8 \.\.\.$"),
    (lambda: Topology("x", 0, 0, ()), "num_ranks=0 must be at least 1"),
    (lambda: Topology("x", 1, -1, ()), "num_switches=-1 at least 0"),
    (lambda: t.ring(3).without((0, 5)), "no link from 0 to 5"),
    (lambda: t.ring(4, bandwidth=0.0), "bandwidth must be positive"),
    (lambda: t.ring(4, bandwidth=math.inf), "bandwidth must be positive"),
    (lambda: t.ring(4, bandwidth=math.nan), "bandwidth must be positive"),
    (lambda: t.ring(4, latency_s=-1e-9), "latency_s must be at least 0"),
    (lambda: t.ring(4, latency_s=math.inf), "latency_s must be at least 0"),
    (lambda: t.torus((0, 2)), "torus 0x2: every dim must be at least 1"),
    (lambda: t.mesh(()), "mesh : every dim must be at least 1"),
    *((lambda ports=ports: t.fat_tree(ports),
       f"ports={ports} must be even, at least 2") for ports in (-2, 0, 1, 3)),
    *((lambda n=n: t.bigraph(2, n), f"switches={n} must be even, at least 2")
      for n in (-2, 0, 1, 3)),
    (lambda: Topology("x", 2, 0, (Link(0, 2),)),
     r"names node 2; nodes are 0 to 1$"),
    (lambda: Topology("x", 2, 0, (Link(-1, 0),)), "names node -1"),
    (lambda: Topology("x", 2, 0, (Link(0, 0),)), "a node to itself"),
    (lambda: Topology("x", 2, 0, (Link(0, 1),) * 2), "two links"),
    (lambda: t.build("hypercube"), "'hypercube' must be one of ring"),
    (lambda: t.build("ring", ranks=3), "ranks"),
    (lambda: text.parse("ring:4x4"), "topology 'ring': ring.. takes 1"),
    (lambda: text.parse("file:nowhere.json"), "nowhere.json: No such file"),
    (lambda: text.parse("torus"), "'torus' is not NAME:SIZExSIZE"),
    (lambda: text.parse("trous:4x4"), "one of ring, .*; did you mean torus"),
    (lambda: text.parse("dgx:2x8,network_bandwith=1e9"),
     "dgx's option 'network_bandwith' .* did you mean network_bandwidth"),
    (lambda: text.parse("ring:4,uplink_bandwidth=1e9"),
     "ring's option 'uplink_bandwidth' must be one of bandwidth, latency_s"),
    (lambda: text.parse("ring:4,bandwidth=nvlink4"), "did you mean nvlink_4"),
    (lambda: text.parse("ring:4,latency_s=fast"), "latency_s=fast is not a nu"),
    (lambda: text.parse("ring:4,latency_s=nvlink_4"), "no published latency"),
    (lambda: text.parse("ring:4,bandwidth=True"), "is not a number"),
    (lambda: text.parse("ring:4,failed=0-1,failed=1-2"), "failed twice"),
    (lambda: text.parse("ring:4,failed=0"), "failed=0: '0' is not NODE-NODE"),
    (lambda: text.parse("ring:4,failed=0-2"), "no link from 0 to 2"),
    (lambda: text.parse("ring:4,failed=0-1+1-2"), "not connected"),
    (lambda: text.parse("leaf_spine:2x2x2,oversubscription=0"),
     "oversubscription=0 must be positive"),
    (lambda: t.leaf_spine(2, 2, 2, uplink_bandwidth=1.0, oversubscription=2.0),
     "cannot both be given"),
    (lambda: t.leaf_spine(2, 2, 2, uplink_bandwidth=0.0), "must be positive"),
    (lambda: t.of_size("dragonfly", 4), "must be one of ring, torus"),
    (lambda: t.of_size("fat_tree", 4), "'fat_tree' must be one of ring, torus"),
    (lambda: t.of_size("bigraph", 9), "switches=3 must be even"),
    (lambda: text.parse("ring:4,latency_s=fast"),
     "latency_s=fast is not a number, and the kind of link 'fast'"),
    (lambda: text.parse(f"ring:4,bandwidth={10**400}"), "is too large"),
    (lambda: text.parse("ring:4,failed=0-1+x"), "'x' is not NODE-NODE"),
    (lambda: t.of_size("torus", 0), "num_ranks=0 must be at least 1"),
  ],
)
def test_invalid_topologies_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize(
  ("written", "message"),
  [
    ("[" * 100_000, "is not JSON: recursion limit"),
    ('<system version="1"/>', "and links, and NCCL's XML is not read"),
    (json.dumps(GOOD | {"num_ranks": 10**9}), "has 1000000000 nodes"),
    (json.dumps(GOOD | {"links": [
      {"source": 0, "destination": 1, "bandwidth": 10**400}
    ]}), r"links\[0\].bandwidth=.* must be a finite number"),
    (json.dumps({"links": []}), "json: num_ranks is missing; keys"),
    ("{}", r"num_ranks is missing; .* \(1 more errors\)$"),
    (json.dumps(GOOD | {"links": [{"source": 0}]}),
     r"links\[0\].destination is missing"),
    (json.dumps(GOOD | {"num_ranks": 3}), "not connected"),
  ],
)
def test_malformed_file_is_refused_with_its_name(tmp_path, written, message):
  path = tmp_path / "graph.json"
  path.write_text(written)
  with pytest.raises(ValueError, match=message) as error:
    files.from_file(path)
  assert str(path) in str(error.value)


def test_rails_connect_equal_device_numbers():
  """GPU i of every node is connected to rail switch i and to its node's."""
  topology = t.dgx(3, 4)
  for rank in range(12):
    assert topology.neighbours(rank) == (12 + rank // 4, 15 + rank % 4)


def test_directions_of_unequal_bandwidth_are_not_symmetric():
  links = (Link(0, 1, 2e9), Link(1, 0, 1e9))
  assert not Topology("x", 2, 0, links).symmetric
  assert not t.ring(3).without((0, 1)).symmetric
  assert Topology("x", 2, 0, (links[0], Link(1, 0, 2e9, 1.0))).symmetric


def test_link_capacity_is_the_rounded_down_bandwidth_ratio():
  """Tolerates rounding errors just below an integer."""
  speeds = (1.0, 1.9, 3 * 0.1 / 0.1, 7.5)
  net = Topology("chain", 5, 0, tuple(
    Link(*pair, 0.1 * speed) for i, speed in enumerate(speeds)
    for pair in ((i, i + 1), (i + 1, i))
  ))
  assert list(net.relative_bandwidths.values()) == [1, 1, 1, 1, 3, 3, 7, 7]
  assert list(net.link_capacities(2).values()) == [2, 2, 3, 3, 6, 6, 15, 15]
  assert list(net.link_capacities(0.5).values()) == [0, 0, 0, 0, 1, 1, 3, 3]
  assert not net.even
  assert t.ring(4).even
