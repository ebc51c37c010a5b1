"""Studies of collectives and flows: plain data, tables, pictures, exports."""

import functools
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from caatnet.studies import registry
from caatnet.studies.collectives import report
from caatnet.studies.collectives import study as collectives
from caatnet.studies.flows import link_loads, patterns
from caatnet.studies.flows import study as flow_study
from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules import bounds, builders, check
from parallel.plans.schedules.msccl import importer
from parallel.plans.topology import builders as topologies
from tests import traces

ROOT = pathlib.Path(__file__).parents[3]


def small(name, **changes):
  module = importlib.import_module(f"configs.collectives.{name}")
  return module.get_config("test").to_dict() | changes


@functools.cache
def result_of(name):
  """Returns the study's result, which no test may modify."""
  config = small(name)
  return registry.find(config).run(config)


def test_algorithms_do_not_beat_the_bound_and_some_do_not_run():
  result = result_of("multitree")
  for row in result["rows"]:
    assert row["lockstep_us"] > row["bound_us"]
    assert row["events_us"] > row["bound_us"]
  assert {(r["topology"], r["algorithm"]) for r in result["skipped"]} == {
    ("torus 2x2", "hdrm"), ("BiGraph 2x4", "ring_2d"),
    ("BiGraph 2x4", "bucket"), ("BiGraph 2x4", "swing"),
  }
  barrier = collectives.run(small("multitree", barrier=True))
  assert sum(r["events_us"] for r in barrier["rows"]) > (
    sum(r["events_us"] for r in result["rows"])
  )


@pytest.mark.parametrize(
  ("net", "share"),
  [
    (topologies.torus((4, 4)), 15 / 32),
    (topologies.mesh((4, 4)), 30 / 48),
    (topologies.bigraph(2, 4), 7 / 4),
    (topologies.ring(5).without((1, 0)), 1),  # and not 8 / 9: rank 1's link
  ],
)
def test_injection_bound_of_rank_links(net, share):
  """2 (n - 1) buffers over all rank links, or 1 over the links of one rank.

  On a mesh, an all-reduce in pieces beats 2 (n - 1) / n over the links of a
  corner, an invalid bound of an earlier version.
  """
  assert bounds.injection_bound(net, 2**20) == pytest.approx(
    share * 2**20 / 50e9
  )


@pytest.mark.parametrize(("topology", "algorithm", "barrier", "expected"), [
  # Six steps of 10 us and one link; 3/2 of the buffer leave over two links.
  ("ring:4", "ring", False, (66, 66, 30)),
  # Six steps over a switch, which waits for whole messages in events only.
  ("switch:4", "ring", False, (132, 72, 60)),
  ("switch:4", "ring", True, (132, 72, 60)),
  # One step each way: all links send one chunk, in one round.
  ("fully_connected:4", "direct", False, (22, 22, 20)),
])
def test_numbers_of_an_all_reduce_by_hand(
  topology, algorithm, barrier, expected
):
  """A buffer of 40 us on a link, and 1 us of latency."""
  found = collectives.run(small(
    "multitree", topologies=(topology,), algorithms=(algorithm,), pieces=1,
    size_bytes=(40_000,), bandwidth="1e9", latency_s="1e-6", barrier=barrier,
  ))
  (row,) = found["rows"]
  assert row["events_chunks"] == row["lockstep_chunks"] == row["num_ranks"]
  names = ("events_us", "lockstep_us", "bound_us")
  assert [row[name] for name in names] == pytest.approx(expected)


def test_exported_schedules_can_be_imported(tmp_path):
  config = small("schedule")
  study = registry.find(config)
  study.export(config, tmp_path / "x" / "m.xml")
  text = (tmp_path / "x" / "m.xml").read_text()
  check.check(importer.import_xml(text))
  again = small("schedule", msccl=str(tmp_path / "x" / "m.xml"))
  for key in ("events_us", "barrier_us", "lockstep_us", "num_transfers"):
    assert study.run(again)[key] == study.run(config)[key]
  # Valid programs are timed; programs that are not an all-reduce are refused.
  for wrong, message in (
    (text.replace('"rrc"', '"r"', 1), "would lose the summands"),
    (text.replace('"rrc"', '"nop"', 1), "does not signal"),
    ('<algo coll="allreduce" ngpus="4" nchunksperloop="4"/>', "ngpus=4"),
    ("not a file", "the text is not XML"),
  ):
    (tmp_path / "wrong.xml").write_text(wrong)
    with pytest.raises(ValueError, match=rf"config.msccl=.*: .*{message}"):
      study.run(small("schedule", msccl=str(tmp_path / "wrong.xml")))
  with pytest.raises(ValueError, match=r"config.msccl=nowhere: No such file"):
    study.run(small("schedule", msccl="nowhere"))
  wrong = config | {"export": config["export"] | {"runtime": "gpu"}}
  with pytest.raises(ValueError, match=r"config.export.runtime='gpu' must be"):
    study.export(wrong, tmp_path / "gpu.xml")
  study.export(config, tmp_path / "m.perfetto-trace")
  title, rows, bars = traces.read(tmp_path / "m.perfetto-trace")
  assert " on " in title
  assert all(bars[row] for row in rows)
  with pytest.raises(ValueError, match=r"must end in .xml"):
    study.export(config, tmp_path / "m.txt")


def test_collectives_of_a_program_are_timed_on_their_ring(tmp_path):
  """Two leaves of two hosts; axis b crosses leaves, axis a does not."""
  entry = {"kind": "all_reduce", "phase": "forward", "bytes": 800, "count": 3,
           "where": ""}
  compiled = {"base": {
    "mesh": {"b": 2, "a": 2},
    "collectives": [{**entry, "axes": ["a"]}, {**entry, "axes": ["b"]}],
  }}
  path = tmp_path / "compiled.json"
  path.write_text(json.dumps(compiled))
  config = small(
    "spraying", topologies=("leaf_spine:2x1x2",), program=str(path),
    failed_uplinks=(), routers=("spray",), bandwidth="1e9", latency_s="1e-6",
  )
  inside, across = flow_study.run(config)["program"]
  # 3 x 2 steps of 400 bytes at 1 byte/ns; two hosts share the one uplink.
  assert inside["us"]["spray"] == pytest.approx(6 * (0.4 + 2 * 1))
  assert across["us"]["spray"] == pytest.approx(6 * (0.8 + 4 * 1))
  path.write_text('{"base": 3}')
  with pytest.raises(ValueError, match=r"not the output of `launch\.compile"):
    flow_study.run(config)


def test_times_scale_with_sizes_and_count_steps():
  config = small("spraying", size_bytes=(2**20, 2**21), latency_s="0")
  rows = flow_study.run(config)["collectives"]
  cells = {(r["algorithm"], r["size_bytes"], r["router"]): r for r in rows}
  for (name, size, router), row in cells.items():
    if size == 2**20:
      assert cells[name, 2**21, router]["us"] == pytest.approx(2 * row["us"])
  steps = {r["algorithm"]: r["num_steps"] for r in rows}
  assert steps == {"ring": 14, "halving_doubling": 6, "all_to_all": 1}


def test_patterns_have_their_sources_and_destinations():
  net = link_loads.fabric(topologies.leaf_spine(3, 2, 2))
  for name, sources in (("shift", 6), ("permutation", 6)):
    sent = patterns.PATTERNS[name](net, 1)
    assert len({f.source for f in sent}) == len(sent) <= sources
    assert len({f.destination for f in sent}) == len(sent)
  assert len(patterns.all_to_all(net, 0)) == 6 * 4


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [
    ("multitree", {"topologies": ("torus",)},
     "config.topologies='torus': .* is"),
    ("multitree", {"topologies": ("donut:4x4",)}, "one of ring, torus"),
    ("multitree", {"topologies": ("fat_tree:3",)}, "ports=3 must be even"),
    ("multitree", {"algorithms": ("rnig",)}, "'rnig' must be one of ring"),
    ("multitree", {"size_bytes": (1,)}, "config.size_bytes=1 must be"),
    ("multitree", {"bandwidth": "0"}, "config.bandwidth=0 must be"),
    ("multitree", {"latency_s": "nvlink_4"}, "config.latency_s=nvlink_4 has"),
    ("multitree", {"latency_s": "-1"}, "config.latency_s=-1 must be at least"),
    ("multitree", {"bandwidth": "fast"}, "config.bandwidth=fast is not a"),
    ("multitree", {"topologies": ("ring:10000",)}, "must have 2 to 1024"),
    ("multitree", {"bandwidth": "1e-5"},
     "config.bandwidth=1e-05 and config.latency_s"),
    ("multitree", {"topologies": ("dgx:2x8,bandwith=1",)},
     "config.topologies='dgx:.*did you mean bandwidth"),
    ("multitree", {"algorithms": ("optimal,wieght=2",)},
     "config.algorithms: optimal's option 'wieght' .* did you mean weight"),
    ("multitree", {"algorithms": ("optimal,tolerance=x",)},
     "optimal's tolerance='x' is not allowed; allowed are float"),
    ("multitree", {"algorithms": ("optimal,weight=True",)},
     "optimal's weight=True is not allowed; allowed are int"),
    ("multitree", {"algorithms": ("ring,order=1",)},
     "ring's option 'order' must be"),
    ("schedule", {"bandwidth": "1e-5"},
     "config.bandwidth=1e-05 and config.latency_s"),
    ("schedule", {"latency_s": "1e12"},
     "config.bandwidth=5e.10 and config.latency_s="),
    ("schedule", {"topology": "ring:1"}, "config.topology='ring:1' has 1 rank"),
    ("schedule", {"topology": "ring:1000000000000"}, "at most 1048576 are"),
    ("schedule", {"alternatives": ("rnig",)},
     "config.alternatives: .*'rnig' must be one of ring"),
    ("schedule", {"pieces": 2**30}, r"^config.pieces=\d+ of 24 transfers are"),
    ("schedule", {"algorithm": "hdrm"}, "config.algorithm='hdrm'"),
    ("schedule", {"collective": "scan"},
     "config.collective='scan'.* must be one of all_reduce"),
    ("spraying", {"routers": ("dice",)}, "config.routers=.*'dice' must be"),
    ("spraying", {"patterns": ("ring",)}, "config.patterns=.*'ring' must be"),
    ("spraying", {"algorithms": ("swing",)}, "config.algorithms: swing"),
    ("spraying", {"topologies": ("ring:4",)}, "ring 4 is not leaf-spine"),
    ("spraying", {"size_bytes": (12,)}, "config.size_bytes=12 must be"),
    ("spraying", {"failed_uplinks": ((9, 0),)}, r"\(9, 0\) must have a leaf"),
    ("spraying", {"failed_uplinks": ((0, 0), (0, 1), (0, 2))},
     "config.failed_uplinks: .*"),
  ],
)
def test_invalid_key_is_named(name, changes, message):
  config = small(name, **changes)
  with pytest.raises(ValueError, match=message):
    registry.find(config).run(config)


@pytest.mark.parametrize(
  ("args", "code", "message"),
  [
    (["schedule.py:test", "--json", "--export={tmp}/m.xml"], 0, '"links"'),
    (["spraying.py:test", "--export={tmp}/m.xml"], 2, "nothing to export"),
    (["multitree.py:huge"], 2, "the sizes are test, small, large"),
  ],
)
def test_command_line_exits_with_its_code_and_message(
  args, code, message, tmp_path
):
  args = [a.replace("{tmp}", str(tmp_path)) for a in args]
  args[0] = f"--config=configs/collectives/{args[0]}"
  result = subprocess.run(
    [sys.executable, "-m", "launch.simulate", *args],
    cwd=ROOT, capture_output=True, text=True, check=False,
  )
  assert result.returncode == code, result.stderr
  assert message in result.stdout + result.stderr
  assert (tmp_path / "m.xml").exists() == (code == 0)


def test_speedup_is_the_time_of_others_over_ours():
  rows = [
    {"topology": net, "size_bytes": size, "algorithm": name,
     "events_us": us, "lockstep_us": 2 * us}
    for net, size, times in (("a", 1, (2, 6, 2, 2)), ("a", 2, (2, 24, 18, 1)))
    for name, us in zip(
      ("multitree", "ring", "swing", "optimal"), times, strict=True
    )
  ]
  found = collectives._speedups(rows)
  for model in ("events_us", "lockstep_us"):
    assert found[model]["over ring"] == pytest.approx(
      {"mean": 6.0, "least": 3.0, "most": 12.0, "wins": 2, "cells": 2}
    )
    assert found[model]["over the best other"] == pytest.approx(
      {"mean": 3.0, "least": 1.0, "most": 9.0, "wins": 2, "cells": 2}
    )
    # "optimal" may equal MultiTree's trees, so it does not count as another.
    assert found[model]["over optimal"] == pytest.approx(
      {"mean": 0.5**0.5, "least": 0.5, "most": 1.0, "wins": 1, "cells": 2}
    )


def test_report_has_speed_ups_over_the_ring_and_shares_of_the_bound():
  rows = [
    {"topology": "net", "num_ranks": 4, "algorithm": name, "num_rounds": rounds,
     "size_bytes": 1024 * n, "events_us": us[n], "lockstep_us": 2 * us[n] + 1,
     "bound_us": 3.5 * n, "built": f"{name},pieces={n}"}
    for name, rounds, us in (
      ("swing", 4, {2: 16, 1: 10}), ("ring", 6, {2: 24, 1: 8}),
    ) for n in us
  ]
  best = collectives._recommended(rows)
  made = report.report({
    "rows": rows, "barrier": True, "recommended": best, "skipped": [],
    "speedups": collectives._speedups(rows),
  })
  times, chosen = made.tables[:2]
  assert "4 ranks: us by events with barriers, " in times.title
  assert "lockstep us of 2 KiB\nand its bound's share (7.0 us: " in times.title
  assert times.headings == [
    "algorithm", "rounds", "1 KiB", "2 KiB", "lockstep", "bound"
  ]
  assert times.cells() == [
    ["swing", "4", "10.0 0.80x", "16.0 1.50x", "33.0", "21%"],
    ["ring", "6", "8.0 1.00x", "24.0 1.00x", "49.0", "14%"],
  ]
  assert chosen.cells() == [
    ["net", "2 KiB", "16.0", "swing,pieces=2"],
    ["net", "1 KiB", "8.0", "ring,pieces=1"],
  ]
  rates = {
    (mark.label, x): y for mark in made.figure().panels[0].marks
    for x, y in zip(mark.x, mark.y, strict=True)
  }
  assert rates["ring", 2] == pytest.approx(2048 / 24 / 1e3)
  assert rates["bound of the ranks' links", 1] == pytest.approx(1.024 / 3.5)


def test_topology_has_its_own_links_unless_the_config_sets_them():
  """Links inside a DGX are 9 times as fast as links between nodes."""
  def microseconds(**changes):
    config = small("schedule", topology="dgx:1x4", latency_s="0", **changes)
    return registry.find(config).run(config)["lockstep_us"]

  assert microseconds(bandwidth="50e9") == pytest.approx(
    9 * microseconds()
  )
  assert microseconds(bandwidth="infiniband_ndr") == microseconds(
    bandwidth="50e9"
  )
  assert microseconds(algorithm="multitree,farthest_first=True") > 0


def test_bound_events_and_barrier_times_are_ordered():
  """With unequal links, a barrier waits longer."""
  config = small("schedule", topology="dgx:2x4", algorithm="double_tree")
  result = registry.find(config).run(config)
  assert result["lower_bound_us"] <= result["events_us"]
  assert result["events_us"] < result["barrier_us"]
  busiest, *others = result["links"]
  assert all(busiest["utilisation"] >= x["utilisation"] for x in others)


def test_overlapping_phases_beat_the_sum_of_both_phases():
  """A corner of a mesh sends while it receives: 15 / 16 is no bound."""
  net, size = topologies.mesh((4, 4)), 2**26
  schedule = builders.build("optimal", net, trees="grown", weight=4, pieces=4)
  check.check(schedule, net)
  layout = on_links(schedule, net)
  for seconds in (
    simulate.lockstep(layout, size),
    simulate.events(layout, size).finish_ns / 1e9,
  ):
    assert bounds.injection_bound(net, size) < seconds
    assert seconds < 15 / 16 * size / 50e9
