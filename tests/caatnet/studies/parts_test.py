"""Parts of studies alone: inputs, curves of service, flows and texts."""

from fractions import Fraction
import itertools
import json
import math

import numpy as np
import pytest

from caatnet.serving.requests import Request
from caatnet.studies import inputs, registry
from caatnet.studies.alignment import predictor
from caatnet.studies.datacentre.report import quantity
from caatnet.studies.flows import link_loads, patterns
from caatnet.studies.flows.link_loads import Flow, Piece
from caatnet.studies.partitions import report as partitions
from caatnet.studies.pipeline import report as pipeline
from caatnet.studies.schedule import report as schedule
from caatnet.studies.serving import fairness, measured, tails
from parallel.schedules import builders
from parallel.topology import builders as topologies

GIVEN = {"bandwidth": "", "latency_s": ""}


def test_topology_has_the_given_bandwidth_and_latency():
  net = inputs.parse_topology(
    {"bandwidth": 2e9, "latency_s": 3e-6}, "topology", "ring:4"
  )
  assert {(x.bandwidth, x.latency_s) for x in net.links} == {(2e9, 3e-6)}
  own = inputs.parse_topology(GIVEN, "topology", "ring:4").links[0]
  for key, value in (("bandwidth", 2e9), ("latency_s", 0.0)):
    net = inputs.parse_topology(GIVEN | {key: value}, "topology", "ring:4")
    assert getattr(net.links[0], key) == value
    other = {"bandwidth": "latency_s", "latency_s": "bandwidth"}[key]
    assert getattr(net.links[0], other) == getattr(own, other)
  assert inputs.parse_topology(GIVEN, "t", "ring:2").num_ranks == 2
  assert inputs.parse_topology(GIVEN, "t", "ring:1024").num_ranks == 1024


@pytest.mark.parametrize(("changes", "text", "message"), [
  ({"bandwidth": 0.0}, "ring:4", r"config\.bandwidth=0"),
  ({"latency_s": -1e-6}, "ring:4", r"config\.latency_s=-1e-06"),
  ({}, "ring", r"config\.key='ring'"), ({}, "rong:4", r"config\.key='rong:4'"),
  ({}, "ring:1025", r"config\.key='ring:1025' has 1025 ranks; must have 2 to"),
])
def test_invalid_topology_is_named(changes, text, message):
  with pytest.raises(ValueError, match=message):
    inputs.parse_topology(GIVEN | changes, "key", text)


def test_lists_must_have_known_entries():
  good = {"topologies": ["ring:4"], "size_bytes": [1], "algorithms": ["ring"],
          "routers": ["spray"]}
  inputs.check_lists(good, routers=("spray", "ecmp"))
  inputs.check_lists(good | {"algorithms": ["own", "ring"]}, ("own",),
                     routers=("spray",))
  for key in good:
    with pytest.raises(ValueError, match=rf"^config\.{key}=\(\) must have at"):
      inputs.check_lists(good | {key: []}, routers=("spray",))
  for changes, message in (
    ({"algorithms": ["own"]}, r"^config\.algorithms: .*own"),
    ({"routers": ["sprey"]}, r"config\.routers=\('sprey',\): .*spray"),
  ):
    with pytest.raises(ValueError, match=message):
      inputs.check_lists(good | changes, routers=("spray",))


def test_unknown_study_is_refused_with_the_known_ones():
  for config in ({}, {"study": "flow"}):
    with pytest.raises(ValueError, match=(
      rf"^config\.study={config.get('study')!r} must be one of alignment, "
    )):
      registry.find(config)
  assert registry.find({"study": "datacentre"}).write_page is not None


def served(number, arrival_s, scheduled_s, times, prompt=8, hits=3):
  request = Request(number, [1] * prompt, 9, arrival_s=arrival_s)
  request.num_hits, request.scheduled_s = hits, scheduled_s
  request.take(np.ones(len(times), np.int32), np.array(times))
  return request


def test_service_counts_tokens_read_once_and_drawn_twice():
  requests = [served(0, 0.0, 1.0, [2.0, 3.0]), served(1, 1.0, 2.0, [3.0])]
  times, amounts = fairness.service(requests)
  assert times.tolist() == [1, 2, 3]
  # 5 tokens are read at 1 s; 5 and a drawn one at 2 s; two are drawn at 3 s.
  assert amounts.tolist() == [5, 5 + 5 + 2, 5 + 5 + 2 + 4]
  times, waiting = fairness.in_line(requests)
  assert (times.tolist(), waiting.tolist()) == ([0, 1, 2], [1, 1, 0])
  curve = fairness.service(requests)
  assert fairness.at(curve, np.array([0.5, 1, 1.5, 3, 9])).tolist() == [
    0, 5, 5, 16, 16
  ]


def test_difference_counts_common_backlog_only():
  times = np.arange(6.0)
  first = times, np.array([0.0, 10, 10, 30, 30, 90])
  second = times, np.array([0.0, 0, 5, 5, 50, 50])
  always = times, np.ones(6)
  assert fairness.difference(first, second, always, always) == 60
  # Ahead by 0, 10, 5, 25, -20 and 40: only 1 to 3 s count, or nothing.
  part = times, np.array([0.0, 1, 1, 1, 0, 0])
  assert fairness.difference(first, second, part, always) == 20
  assert fairness.difference(first, second, always, part) == 20
  none = times, np.zeros(6)
  assert fairness.difference(first, second, none, always) == 0


def test_clients_arrive_at_their_rates_with_their_lengths():
  common = {"prompt": 100, "output": 10, "shared": 32}
  sections = {
    "a": common | {"requests": 400, "rate": 4.0, "priority": 1},
    "b": common | {"requests": 300, "rate": 0, "priority": 2, "shared": 16},
  }
  arrivals, clients = fairness.arrive(sections, seed=0)
  assert [a.number for a in arrivals] == list(range(700))
  times = [a.time_s for a in arrivals]
  assert times == sorted(times)
  of = {
    name: [a for a in arrivals if clients[a.number][0] == name]
    for name in sections
  }
  assert {clients[a.number] for a in of["b"]} == {("b", 2.0)}
  assert {a.time_s for a in of["b"]} == {0.0}
  assert of["a"][-1].time_s == pytest.approx(100, rel=0.2)
  for name, shared in (("a", 32), ("b", 16)):
    prompts = [a.prompt - shared for a in of[name]]
    outputs = [a.output for a in of[name]]
    assert (min(prompts), max(prompts)) == (
      pytest.approx(51, abs=2), pytest.approx(148, abs=2)
    )
    assert (min(outputs), max(outputs)) == (5, 14)
    blocks = [a.blocks for a in of[name]]
    assert {b[0] for b in blocks} == {list(sections).index(name)}
    unique = [block for b in blocks for block in b[1:]]
    assert len(set(unique)) == len(unique)
    assert not {0, 1} & set(unique)
    assert all(
      len(a.blocks) == 1 + -(-(a.prompt - shared) // shared)
      and a.block_size == shared for a in of[name]
    )


def test_tail_has_a_curve_and_a_text():
  found = tails.summary([np.arange(1.0, 10_002.0)], seed=3)
  assert (found["n"], found["requests"]) == (10_001, 1)
  assert found["curve"][0] == 1  # all samples exceed the least
  assert found["curve"][10] == pytest.approx(9001)  # a tenth of them
  assert found["curve"][-1] == pytest.approx(10_000)
  assert len(found["curve"]) == 41
  assert tails.text({"50": [1.2345, 1.0, 1234.5]}, "50") == (
    "1.23 (1 to 1.23e+03)"
  )
  empty = tails.summary([np.zeros(0)])
  assert (empty["n"], empty["requests"], empty["curve"]) == (0, 0, [])
  assert all(map(math.isnan, empty["99.9"]))
  assert tails.summary([np.zeros(0), np.ones(2)])["requests"] == 1


def test_intervals_of_tails_have_their_level():
  """Compares with quantiles of a binomial count, for 400 requests."""
  found = tails.summary([np.array([float(i)]) for i in range(400)])
  _, low, high = found["50"]
  spread = 1.96 * math.sqrt(400 / 4)
  assert low == pytest.approx(200 - spread, abs=7)
  assert high == pytest.approx(200 + spread, abs=7)
  again = tails.summary([np.array([float(i)]) for i in range(400)], seed=1)
  assert again["50"] != found["50"]
  assert again["curve"] == found["curve"]


def test_prompts_of_the_log_have_its_lengths():
  rows = measured.requests()[:20]
  prompts = measured.prompts(rows, "none")
  assert [len(p) for p in prompts] == [row["input_tokens"] for row in rows]
  assert {p.dtype.name for p in prompts} == {"int32"}
  drawn = np.concatenate(prompts)
  assert drawn.max() > 2.1e9
  assert len(set(drawn.tolist())) > 0.99 * len(drawn)
  published = measured.prompts(rows, "published")
  for row in measured._rows("prefixes"):
    i, like, count = (int(row[key]) for key in ("request", "like", "tokens"))
    if i < 20:
      assert np.array_equal(published[i][:count], published[like][:count])
      assert published[i][count:].tolist() == prompts[i][count:].tolist()
  assert measured.profile().num_layers == 32  # of Llama-3.1-8B


@pytest.mark.parametrize(("x", "unit", "text"), [
  (None, "W", "-"), (2.5e24, "FLOP", "2.5e+24 FLOP"), (0.25, "", "0.25"),
  (999.0, "", "999"), (1000.0, "", "1,000"), (-1234.5, "", "-1,234"),
  (9.9e9, "", "9,900,000,000"), (1e10, "", "1e+10"), (1500.0, "h", "1,500 h"),
  (0.5, "W", "0.5 W"), (1.0, "W", "1 W"), (999.0, "W", "999 W"),
  (1000.0, "W", "1 kW"), (1.5e9, "W", "1.5 GW"), (-2e6, "W", "-2 MW"),
  (3e24, "B", "3 YB"), (3e27, "B", "3000 YB"), (5e9, "$", "$5B"),
  (5e6, "$", "$5M"), (12.0, "$", "$12"),
])
def test_quantities_have_prefixes_where_their_unit_does(x, unit, text):
  assert quantity(x, unit) == text


def counted(start, num_bytes, size, shifted):
  """Counts the blocks that warps of 32 lanes of 4 bytes request."""
  found = 0
  if shifted:
    return len({byte // size for byte in range(start, start + num_bytes)})
  for first in range(start, start + num_bytes, 128):
    end = min(first + 128, start + num_bytes)
    found += len({byte // size for byte in range(first, end)})
  return found


@pytest.mark.parametrize("shifted", [False, True])
def test_lines_and_sectors_equal_those_counted_byte_by_byte(shifted):
  for size, num_bytes in itertools.product(
    (predictor.LINE_BYTES, predictor.SECTOR_BYTES), (4, 60, 128, 200, 256, 300)
  ):
    expected = [counted(s, num_bytes, size, shifted) for s in range(0, 132, 4)]
    found = predictor.blocks(
      np.arange(0, 132, 4), num_bytes, size, shifted=shifted
    )
    assert found.tolist() == expected
    mean = np.mean([
      counted(i * num_bytes % 128, num_bytes, size, shifted)
      for i in range(128)
    ])
    assert predictor.mean_blocks(num_bytes, size, shifted=shifted) == mean
  rows = np.array([0, 3, 3, 7])
  touched = predictor.touched(rows, 60, 8, shifted=shifted)
  for size, total in zip((128, 32), touched, strict=True):
    assert total == sum(counted(8 + 60 * i, 60, size, shifted) for i in rows)


def test_rows_of_no_or_partial_elements_are_refused():
  with pytest.raises(ValueError, match="row_bytes=0 must be at least 1"):
    predictor.blocks(np.zeros(1, int), 0, 128, shifted=True)
  assert predictor.blocks(np.zeros(1, int), 1, 128, shifted=True) == [1]
  with pytest.raises(ValueError, match="row_bytes=6 must be a multiple of 4"):
    predictor.mean_blocks(6, 128, shifted=True)
  assert predictor.mean_blocks(6, 128, 2, shifted=True) > 1


NET = link_loads.fabric(topologies.leaf_spine(3, 2, 4))


def test_traffic_patterns_reach_each_host_as_often():
  n = 12
  assert patterns.shift(NET, 0) == [Flow(i, (i + 4) % n, 1) for i in range(n)]
  drawn = patterns.permutation(NET, 3)
  assert all(f.source != f.destination and f.bytes == 1 for f in drawn)
  ends = [{f.source for f in drawn}, {f.destination for f in drawn}]
  assert ends[0] == ends[1]
  assert len(drawn) == len(ends[0]) > 6
  assert drawn != patterns.permutation(NET, 4)
  everything = patterns.all_to_all(NET, 0)
  assert len(everything) == len(set(everything)) == n * (n - 4)
  assert all(f.source // 4 != f.destination // 4 for f in everything)


def test_chunks_between_two_ranks_in_a_round_are_one_flow():
  made = builders.build("ring", topologies.ring(4), "all_gather")
  size = made.num_chunks * 6
  rounds = patterns.demands(made, size)
  assert len(rounds) == len(made.rounds)
  for flows, transfers in zip(rounds, made.rounds, strict=True):
    pairs = [(f.source, f.destination) for f in flows]
    assert pairs == sorted(set(pairs))
    assert sum(f.bytes for f in flows) == 6 * len(transfers)
  for wrong in (size + 1, 0):
    with pytest.raises(ValueError, match=f"size_bytes={wrong} must be a mult"):
      patterns.demands(made, wrong)


@pytest.mark.parametrize(("kind", "steps", "each", "receivers"), [
  ("all_reduce", 4, 34, 1), ("reduce_scatter", 2, 34, 1),
  ("all_gather", 2, 100, 1), ("all_to_all", 1, 34, 2), ("permute", 1, 100, 1),
  ("broadcast", 1, 100, 1),
])
def test_ring_sends_to_the_next_rank_of_its_group(kind, steps, each, receivers):
  """Rounds a third of 100 bytes up."""
  flows, found = patterns.ring_demands(kind, [[0, 2, 4], [1, 3, 5]], 100)
  assert found == steps
  assert set(flows) == {
    Flow(group[i], group[(i + k) % 3], each)
    for group in ([0, 2, 4], [1, 3, 5]) for i in range(3)
    for k in range(1, receivers + 1)
  }
  assert len(flows) == 6 * receivers


def test_ring_of_one_rank_sends_nothing():
  assert patterns.ring_demands("all_reduce", [[0]], 100) == ((), 0)
  with pytest.raises(ValueError, match="no ring algorithm for the kind 'x'"):
    patterns.ring_demands("x", [[0, 1]], 100)


def test_loads_count_links_of_hosts_and_spines():
  flows = [Flow(0, 1, 5), Flow(0, 4, 6), Flow(2, 2, 7)]
  leaf, other = NET.leaf_of[0], NET.leaf_of[4]
  first, second = NET.spines
  routes = [(), (Piece(first, 1, 3), Piece(second, 2, 3)), ()]
  assert link_loads.num_sent(routes) == 2
  found = link_loads.loads(NET, flows, routes)
  assert found == {
    (0, leaf): 11, (leaf, 1): 5, (other, 4): 6,
    (leaf, first): 2, (first, other): 2, (leaf, second): 4, (second, other): 4,
  }
  assert link_loads.fullest_uplink(NET, found) == 4
  assert link_loads.fullest_uplink(NET, {(0, leaf): Fraction(9)}) == 0
  # 6 bytes cross one of two uplinks.
  assert link_loads.least_fullest_uplink(NET, flows) == 3
  assert link_loads.least_fullest_uplink(NET, flows[:1]) == 0


def test_step_takes_the_slowest_link_and_two_or_four_latencies():
  net = link_loads.fabric(
    topologies.leaf_spine(3, 2, 4, bandwidth=10.0, latency_s=0.5)
  )
  leaf = net.leaf_of[0]
  below = {(0, leaf): Fraction(3), (leaf, 1): Fraction(5)}
  assert link_loads.step_seconds(net, below) == 5 / 10 + 2 * 0.5
  assert link_loads.step_seconds(net, below, 4) == 20 / 10 + 2 * 0.5
  above = below | {(leaf, net.spines[0]): Fraction(7)}
  assert link_loads.step_seconds(net, above) == 7 / 10 + 4 * 0.5
  assert link_loads.step_seconds(net, {}) == 0


def test_names_of_schedules_tell_what_was_built():
  row = {"schedule": "zb", "built": "zb", "stored": [6, 3], "chunks": 2}
  assert pipeline._name(row) == "zb"
  assert pipeline._name(row | {"built": "1f1b"}) == "zb (is 1f1b)"
  assert pipeline._stored(row) == "3 to 1.5"
  assert pipeline._stored(row | {"stored": [3, 3]}) == "1.5"


def test_cells_of_partitions_have_both_numbers_and_their_codecs():
  assert partitions._pair({"reuse": 2e9, "no reuse": 3.5e9}, 1e9) == (
    "2.00 / 3.50"
  )
  assert partitions._pair(
    {"reuse": {"node": 1.0}, "no reuse": {"node": 2.0}}, level="node"
  ) == "1.00 / 2.00"
  row = {
    "secondary": 8, "secondary_codec": "int8", "weight_codec": "int8",
    "gradient_codec": "none", "memory": {"total": 2.5e9, "stored": 1e9},
    "fits": True, "degrees": [8, 8, 64],
    "seconds": {"reuse": 1.0, "no reuse": 2.0},
  }
  found = partitions._in_words(row)
  assert {key: found[key] for key in (
    "degrees_text", "copy", "codecs", "total", "seconds_text", "stored"
  )} == {
    "degrees_text": "8 / 8 / 64", "copy": "8, int8", "codecs": "int8, none",
    "total": "2.50", "seconds_text": "1.00 / 2.00", "stored": 1e9,
  }
  found = partitions._in_words(row | {
    "secondary": 0, "secondary_codec": "none", "weight_codec": "none",
    "fits": False,
  })
  assert (found["copy"], found["codecs"], found["total"]) == ("", "", "2.50*")


@pytest.mark.parametrize(("net", "near"), [
  (topologies.leaf_spine(3, 2, 4), None),
  (topologies.torus((2, 3)), 1.0), (topologies.ring(5), None),
  (topologies.bigraph(2, 4), None),
])
def test_nodes_have_places_of_their_own(net, near):
  """Nodes of a grid are one apart; layers of switches have one height."""
  places = schedule._places(net, net.graph())
  assert set(places) == set(range(net.num_nodes))
  points = [tuple(np.round(p, 9)) for p in places.values()]
  assert len(set(points)) == net.num_nodes
  if near:
    columns, rows = zip(*points, strict=True)
    assert (set(columns), set(rows)) == ({0, 1, 2}, {0, -1})
  if net.num_switches and not net.shape:
    layers = {}
    for v, (_, y) in places.items():
      layers.setdefault(y, []).append(v)
    assert {y: len(nodes) for y, nodes in layers.items()} == {0: 12, 1: 3, 2: 2}
    assert sorted(places[v][0] for v in layers[2]) == pytest.approx(
      [1 / 3, 2 / 3]
    )


def test_bigraph_has_its_switches_between_their_ranks():
  places = schedule._bigraph_places(2, 4)
  assert {v: places[v] for v in range(8, 12)} == {
    8: (0.0, 1.0), 9: (1.0, 1.0), 10: (0.0, 0.0), 11: (1.0, 0.0)
  }
  assert [places[v] for v in (0, 1, 2, 4, 7)] == [
    (-0.25, 2.0), (0.25, 2.0), (0.75, 2.0), (-0.25, -1.0), (1.25, -1.0)
  ]


def test_file_of_prompts_must_be_readable(tmp_path):
  rows = [{"input_tokens": 2.0}, {"input_tokens": 1.0}]
  path = tmp_path / "prompts.jsonl"
  lines = [{"input_tok_ids": ids} for ids in ([5, 6], [7], [8, 9])]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = measured.prompts(rows, str(path))
  assert [x.tolist() for x in found] == [[5, 6], [7]]
  for text in ("{", '{"tokens": [1]}', '{"input_tok_ids": 5}'):
    path.write_text(text)
    with pytest.raises(ValueError, match="is neither published nor none"):
      measured.prompts(rows, str(path))
