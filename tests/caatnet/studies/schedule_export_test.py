"""Defaults of a single schedule, its warning, and exports within limits."""

import json
import re
from xml.etree import ElementTree

import pytest

from caatnet.studies import registry
from configs.collectives import multitree as collectives_config
from configs.collectives import schedule as config_file

# Two rings of four ranks and a link between them; a ring of rates 1 and 7; a
# dragonfly of three groups of two routers with a rank each.
RINGS = [*((i, (i + 1) % 4, 1) for i in range(4)), (0, 4, 1),
         *((4 + i, 4 + (i + 1) % 4, 1) for i in range(4))]
UNEVEN = [(i, (i + 1) % 8, 1 + i % 2 * 6) for i in range(8)]
DRAGONFLY = [*((i, 6 + i, 1) for i in range(6)), (6, 7, 1), (8, 9, 1),
             (10, 11, 1), (6, 9, 1), (8, 11, 1), (10, 7, 1)]
TOPOLOGIES = {
  "rings": (8, RINGS), "uneven": (8, UNEVEN), "dragonfly": (6, DRAGONFLY),
}
NAMES = ("rings", "uneven", "dragonfly", "ring:8", "torus:2x3", "mesh:2x3",
         "switch:4", "leaf_spine:2x2x3", "fat_tree:2", "bigraph:2x4", "dgx:2x2")
KIB = 2**10


def config_of(folder, topology, config=None, **changes):
  """Returns a config; names of TOPOLOGIES become files."""
  if topology in TOPOLOGIES:
    num_ranks, links = TOPOLOGIES[topology]
    nodes = 1 + max(max(pair) for *pair, _ in links)
    path = folder / f"{topology}.json"
    path.write_text(json.dumps({
      "num_ranks": num_ranks, "num_switches": nodes - num_ranks, "links": [
        {"source": a, "destination": b, "bandwidth": rate * 50e9,
         "latency_s": 1e-6, "both_ways": True} for a, b, rate in links
      ],
    }))
    topology = f"file:{path}"
  config = config or config_file.get_config("test")
  key = "topology" if "topology" in config else "topologies"
  given = topology if key == "topology" else (topology,)
  return config.to_dict() | {key: given} | changes


def run(config):
  return registry.find(config).run(config)


@pytest.mark.parametrize("name", NAMES)
def test_default_is_no_slower_than_multitree_and_can_be_exported(
  name, tmp_path, capsys
):
  """Packed trees in whole chunks, the former default, are slower on most."""
  multitree, optimal = (
    config_of(
      tmp_path, name, algorithm=algorithm, alternatives=(),
      size_bytes=192 * KIB,
    ) for algorithm in ("multitree", "optimal")
  )
  us = run(optimal)["events_us"]
  assert us <= run(multitree)["events_us"]
  assert run(optimal)["bound_us"] <= 1.001 * us
  # If the fastest exceeds the limits, a line names what is exported.
  path = tmp_path / "m.xml"
  registry.find(optimal).export(optimal, path)
  blocks = ElementTree.fromstring(path.read_text()).iter("tb")
  assert max(map(len, blocks)) <= 64
  imported_us = run(optimal | {"msccl": str(path)})["events_us"]
  if line := capsys.readouterr().err:
    exported, as_read_us = re.match(
      r"exports (\S+) \(([\d.]+) us as read .* more than the 64 ", line
    ).groups()
    assert imported_us == pytest.approx(float(as_read_us), abs=0.051)
    us = run(optimal | {"algorithm": exported})["events_us"]
  # A file has no paths, and no order of the transfers of a round.
  several_ways = name in ("dragonfly", "leaf_spine:2x2x3", "dgx:2x2")
  assert imported_us == pytest.approx(us, 0.03 if several_ways else 1e-9)


def test_texts_of_schedules_have_the_stated_times(tmp_path):
  slow_config = config_of(
    tmp_path, "rings", algorithm="ring", pieces=1, size_bytes=64 * KIB
  )
  slow = run(slow_config)
  again = slow_config | {"algorithm": slow["built"], "alternatives": ()}
  assert run(again)["events_us"] == slow["events_us"]
  best = run(slow_config | {"algorithm": slow["faster"]["algorithm"]})
  assert best["events_us"] == pytest.approx(slow["faster"]["us"])
  assert best["events_us"] < slow["events_us"]
  assert best["faster"] is None
  assert run(slow_config | {"alternatives": ("hdrm",)})["faster"] is None
  for result, warns in ((slow, True), (best, False)):
    parts = registry.find(again).report(result).parts
    warnings = [x for x in parts if str(x).startswith("warning")]
    assert len(warnings) == warns
    assert all(slow["faster"]["algorithm"] in text for text in warnings)
  of_file = slow | {"config": slow_config | {"msccl": "a.xml"}}
  less = slow["faster"]["us"] / slow["events_us"] - 1
  assert -0.9 < less < -0.1
  warning = registry.find(again).report(of_file).parts[2]
  assert warning.endswith(
    f" us, {less:.0%}: --config.msccl= "
    f"--config.algorithm={slow['faster']['algorithm']}"
  )


def test_export_falls_back_or_names_what_fits(tmp_path, capsys):
  config = config_of(
    tmp_path, "ring:4", algorithm="ring,pieces=64", size_bytes=1024 * KIB
  )
  export, path = registry.find(config).export, tmp_path / "m.xml"
  export(config, path)
  assert re.match(
    r"exports ring,pieces=\d \(.* us as .*\), since ring,pieces=64 .* 192 ",
    capsys.readouterr().err,
  )
  path.unlink()
  config["algorithm"] = "optimal,weight=48"  # more than 64 steps as a whole
  for alternatives, hint in (
    (("direct",), r"; --config.algorithm=direct,pieces=\d+ fits \(.* us\)"),
    ((), ""),
  ):
    with pytest.raises(ValueError, match=(
      rf"168 steps .* in any number of pieces{hint}; --config.export.runtime="
      r"msccl takes optimal,weight=48,pieces=1$"
    )):
      export(config | {"alternatives": alternatives}, path)
  assert not path.exists()


def test_recommended_schedule_is_exported(tmp_path, capsys):
  config = config_of(
    tmp_path, "torus:2x3", collectives_config.get_config("test"),
    size_bytes=(64 * KIB,), algorithms=("ring", "multitree", "optimal"),
  )
  study, path = registry.find(config), tmp_path / "m.xml"
  (recommended,) = run(config)["recommended"]
  study.export(config, path)
  assert not capsys.readouterr().err.strip()
  found = run(config_of(
    tmp_path, "torus:2x3", msccl=str(path), alternatives=(),
    size_bytes=64 * KIB,
  ))
  assert found["events_us"] == recommended["events_us"]
  study.export(config, tmp_path / "m.perfetto-trace")
  assert (tmp_path / "m.perfetto-trace").exists()
  study.export(config | {"pieces": 64}, path)
  assert "exceeds a limit" in capsys.readouterr().err
  with pytest.raises(ValueError, match=r"config.size_bytes=\(1, 2\) must have"):
    study.export(config | {"size_bytes": (1, 2)}, path)
