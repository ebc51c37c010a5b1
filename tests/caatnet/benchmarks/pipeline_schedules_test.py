"""Benchmark that proves pipeline schedules: it detects a wrong one."""

import dataclasses

import pytest

from caatnet.benchmarks.training import pipeline_schedules
from parallel.pipeline.builders import Size, build


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
