"""Predicted steps that fetch features: their bounds, by hand."""

import pytest

from caatnet.benchmarks.graphs.graphs_predictor import Host, predict

# 1 GB of rows; 10 GB/s gathered, 100 GB/s of memory, 25 GB/s of link.
HOST = {"gather": 10e9, "memory": 100e9, "link": 25e9}


def test_parts_are_sequential_or_overlap():
  step = predict(Host(**HOST), 1e9, 0.05)
  assert step.conventional_s == pytest.approx(0.1 + 0.04 + 0.05)
  assert step.zero_copy_s == pytest.approx(0.04 + 0.05)
  assert step.overlapped_s == pytest.approx(0.05)
  assert step.faster == pytest.approx(0.19 / 0.09)
  assert step.faster_overlapped == pytest.approx(0.19 / 0.05)


def test_devices_share_cores_and_memory_but_no_link():
  step = predict(Host(**HOST, devices=8), 1e9, 0.0)
  assert step.conventional_s == pytest.approx(0.8 + 0.04)
  assert step.zero_copy_s == pytest.approx(0.08)  # 8 GB of memory, one pass
  # Three passes over a slow memory take longer than the cores.
  slow = Host(**HOST | {"memory": 20e9}, devices=1)
  assert predict(slow, 1e9, 0.0).conventional_s == pytest.approx(0.15 + 0.04)


def test_unused_parts_of_cache_lines_are_transferred():
  step = predict(Host(**HOST), 1e9, 0.0, lines=1.28)
  assert step.zero_copy_s == pytest.approx(1.28 * 0.04)
  assert step.conventional_s == pytest.approx(0.14)


@pytest.mark.parametrize("key", ["gather", "memory", "link"])
def test_rates_must_be_positive(key):
  with pytest.raises(ValueError, match=f"{key}=0 must be positive"):
    Host(**HOST | {key: 0})
