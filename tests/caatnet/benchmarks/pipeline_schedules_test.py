"""Benchmark that proves pipeline schedules: it detects a wrong one."""

import dataclasses

import pytest

from caatnet.benchmarks.training import pipeline_schedules
from configs.benchmark import pipeline_schedules as config_of
from parallel.pipeline.builders import BUILDERS, Size, build
from tests.caatnet.benchmarks.printed import rows_of


def test_proven_and_refused_sizes_are_counted():
  found = pipeline_schedules._proven(("interleaved_1f1b", 3, 2), most=7)
  assert found == {
    ("interleaved_1f1b", "proven"): 2,
    ("interleaved_1f1b", "refused"): 5,
    ("interleaved_1f1b", "actions"): 2 * 3 * 2 * (3 + 6),
  }


def test_deviation_from_the_closed_form_is_an_error():
  size = Size(3, 6)
  schedule = build("zb_h1", *size)
  pipeline_schedules._compare(schedule, size)
  wrong = dataclasses.replace(schedule, limits=(4, 3, 3))
  with pytest.raises(ValueError, match=r"zb_h1 .*stored \(3, 3, 3\), closed"):
    pipeline_schedules._compare(wrong, size)
  with pytest.raises(ValueError, match=r"ticks 16, closed form 14"):
    pipeline_schedules._compare(dataclasses.replace(build(
      "gpipe", *size), name="zb_h1", limits=(6, 6, 6)), size)


def test_run_proves_all_sizes_and_times_one(capsys):
  config = config_of.get_config("test")
  config.benchmark.update({
    "stages": 2, "microbatches": 3, "chunks": 1, "timed": (4, 6),
  })
  found = pipeline_schedules.run(config)
  assert found["timed"] == [4, 6]
  rows = {row["schedule"]: row for row in found["rows"]}
  assert list(rows) == list(BUILDERS)
  for row in rows.values():
    assert row["proven"] + row["refused"] == 2 * 3
    assert (row["proven"] > 0) == (row["actions"] > 0)
    assert min(row["build_s"], row["check_s"]) > 0
  # A forward and a backward of each microbatch on each stage.
  assert rows["1f1b"]["actions"] == 2 * (1 + 2) * (1 + 2 + 3)
  printed = capsys.readouterr().out
  assert "seconds for 4 stages, 6 microbatches" in printed.replace("\n", " ")
  assert rows_of(printed) == [
    [name, f"{r['proven']:,}", f"{r['refused']:,}", f"{r['actions']:,}",
     f"{r['build_s']:.3f}", f"{r['check_s']:.3f}"]
    for name, r in rows.items()
  ]
  config.benchmark.timed = (4,)
  with pytest.raises(ValueError, match=r"timed=\(4,\) must be stages and"):
    pipeline_schedules.run(config)
