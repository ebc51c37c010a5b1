"""The study of pipeline schedules: plain data, pictures, exports."""

import re

import pytest

from caatnet.studies import registry
from caatnet.studies.pipeline import report
from caatnet.studies.pipeline import study as pipeline
from configs.pipeline import schedules
from tests import traces


def small(**changes):
  """Returns the small config with changed keys, such as link__overlap."""
  config = schedules.get_config("test").to_dict()
  for key, value in changes.items():
    section, _, name = key.rpartition("__")
    (config[section] if section else config)[name] = value
  return config


def test_timeline_is_exported(tmp_path):
  config = small()
  study = registry.find(config)
  study.export(config, tmp_path / "a.perfetto-trace")
  title, _, bars = traces.read(tmp_path / "a.perfetto-trace")
  assert title.startswith(config["pipeline"]["schedule"])
  assert all(bars[f"stage {s}"] for s in range(config["pipeline"]["stages"]))
  with pytest.raises(ValueError, match=r"--export=.*x.txt must end in .perf"):
    study.export(config, tmp_path / "x.txt")


def test_rows_equal_the_values_by_hand():
  """2 stages, 4 microbatches: bytes and seconds of the whole model."""
  rows = {
    row["schedule"]: row
    for row in pipeline.run(small(link__bandwidth="1e30", link__latency_s="0"))[
      "rows"
    ]
  }
  boundary, stored = 64 * 2**20, 2 * 2**30
  for name, row in rows.items():
    assert row["events_s"] == pytest.approx(row["closed_s"])
    assert row["without_hops_s"] == pytest.approx(row["closed_s"])
    crossings = 3 if row["chunks"] == 2 else 1
    crossings -= name.endswith("_v")  # the last stage has two successive parts
    assert row["sent_bytes"] == 2 * 4 * crossings * boundary, name
  # Of 10 ticks each stage works in 8; from its first to its last action, the
  # first stage waits in 2, the last one never.
  for name in ("gpipe", "1f1b"):
    assert rows[name]["ticks"] == 10
    assert rows[name]["bubble"] == pytest.approx(2 * 2 / 20)
    assert rows[name]["own_bubble"] == pytest.approx(2 / 18)
  assert rows["gpipe"]["stored_bytes"] == 4 * stored
  assert rows["1f1b"]["stored_bytes"] == 2 * stored
  assert rows["looped"]["stored_bytes"] == 4 * stored  # halves of 8 parts
  assert rows["1f1b"]["closed_s"] == pytest.approx(5 * 0.03)
  assert rows["zb_h1"]["lockstep_s"] == pytest.approx(13 * 0.01)


def test_pictures_have_the_milliseconds_of_their_rows():
  config = small(schedules=("gpipe", "zb_v"))
  result = registry.find(config).run(config)
  panels = report._figure(result).panels
  for panel, row in zip(panels, result["rows"], strict=True):
    milliseconds = 1000 * row["events_s"]
    shown = re.search(r"([\d,.]+) ms", panel.title)[1]
    assert float(shown.replace(",", "")) == pytest.approx(
      milliseconds, abs=0.06
    )
    ends = [
      start + length for bars in panel.marks
      for start, length in zip(bars.starts, bars.lengths, strict=True)
    ]
    assert max(ends) == pytest.approx(milliseconds)
    low, high = panel.x.limits
    assert low <= milliseconds <= high


def test_report_shows_each_number_under_its_heading():
  result = pipeline.run(small(schedules=("interleaved_1f1b",)))
  (row,) = result["rows"]
  row |= {"stored": [3, 8, 5], "inputs": [4, 7, 1], "cotangents": [2, 1, 3]}
  row |= {
    key: number for number, key in enumerate((
      "ticks", "closed_s", "without_hops_s", "events_s", "lockstep_s"
    ), 11)
  } | {"bubble": 0.25, "own_bubble": 0.125, "events_bubble": 0.5}
  result["config"]["link"] |= {"bandwidth": "ethernet_10g", "overlap": False}
  counts, times = report.report(result).tables
  assert counts.cells()[0][1:8] == [
    "2", "11", "25.0%", "12.5%", "4 to 1.5", "5.369 GB", "7, 3"
  ]
  assert "64 MiB over links of 1.25 GB/s, 5e-6 s, stages wait" in times.title
  assert times.cells()[0][1:] == ["12 s", "13 s", "14 s", "50.0%", "15 s"]


def test_schedule_that_does_not_fit_is_skipped_with_the_reason(capsys):
  config = small(pipeline__microbatches=5)
  result = pipeline.run(config)
  (skipped,) = result["skipped"]
  assert skipped["schedule"] == "interleaved_1f1b"
  assert "config.pipeline.schedule='interleaved_1f1b'" in skipped["why"]
  assert "config.pipeline.microbatches=5; use 4 or 6" in skipped["why"]
  registry.find(config).show(result)
  assert "left out: config.pipeline" in capsys.readouterr().out
  with pytest.raises(ValueError, match="use 4 or 6 microbatches"):
    pipeline.run(config | {"schedules": ("interleaved_1f1b",)})


def test_fallback_is_named(capsys):
  config = small(pipeline__chunks=1)
  result = pipeline.run(config)
  registry.find(config).show(result)
  assert "looped (is gpipe)" in capsys.readouterr().out


def test_both_halves_of_a_backward_recompute():
  """At 10 ms each, a whole backward takes 30 ms, and each half 20 ms."""
  config = small(
    schedules=("1f1b", "zb_h1"), work__recompute=True, link__bandwidth="1e30"
  )
  whole, halves = pipeline.run(config)["rows"]
  assert whole["closed_s"] == pytest.approx(5 * 0.04)
  assert halves["closed_s"] == pytest.approx(4 * 0.05 + 0.02)
  # Of the 8 backwards of chunks on the first stage, 3 are split.
  (mixed,) = pipeline.run(config | {"schedules": ("dualpipe_v",)})["rows"]
  # The whole ones repeat one forward; that stage has no bubble.
  assert mixed["without_hops_s"] == pytest.approx(
    0.005 * (8 + 5 * 3 + 3 * 2 * 2)
  )
  for row in whole, halves:
    assert row["without_hops_s"] == pytest.approx(row["closed_s"])


def test_slower_links_and_stages_cost_time():
  def seconds(**changes):
    config = small(schedules=("1f1b",), **changes)
    (row,) = pipeline.run(config)["rows"]
    return row["events_s"]

  plain = seconds()
  assert seconds(link__bandwidth="ethernet_10g") > 2 * plain
  assert seconds(link__latency_s="0.1") > plain + 0.2
  assert seconds(link__overlap=False) > plain
  assert seconds(work__factors=(1.0, 1.5)) > 1.25 * plain


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"schedules": ("1f2b",)}, "config.schedules: '1f2b' must be one of"),
    ({"pipeline__microbatches": 2**30},
     "config.pipeline.microbatches=1073741824 on .* exceed 4,194,304 ticks"),
    ({"pipeline__stages": 10_000}, "config.pipeline.stages=10000 with .* tick"),
    ({"work__factors": (1.0, 1.0, 1.0)},
     "config.work.factors=.* must be one for each of 2 stages"),
    ({"link__bandwidth": "wifi"}, "config.link.bandwidth=wifi is not a number"),
    ({"link__bandwidth": "0"}, "config.link.bandwidth=0 must be positive"),
    ({"link__latency_s": "-1"}, "config.link.latency_s=-1 must be at least 0"),
  ],
)
def test_invalid_key_is_named(changes, message):
  config = small(**changes)
  with pytest.raises(ValueError, match=message):
    registry.find(config).run(config)


def test_names_of_schedules_tell_what_was_built():
  row = {"schedule": "zb", "built": "zb", "stored": [6, 3], "chunks": 2}
  assert report._name(row) == "zb"
  assert report._name(row | {"built": "1f1b"}) == "zb (is 1f1b)"
  assert report._stored(row) == "3 to 1.5"
  assert report._stored(row | {"stored": [3, 3]}) == "1.5"


def test_colours_of_chunks_are_mixed_with_white():
  assert report._lighter("#000a64", 0) == "#000a64"
  assert report._lighter("#000000", 1) == "#a6a6a6"  # 65% of 255
  half = report._lighter("#0064ff", 0.5)
  assert half == f"#{83:02x}{150:02x}ff"
