"""Measured tiers: sizes of caches, ranges and medians of rates."""

import os
import time

import pytest

from parallel.memory import measured_tiers


def _cache(folder, cpu, size, shared):
  path = folder / f"cpu{cpu}/cache/index3"
  path.mkdir(parents=True)
  (path / "size").write_text(f"{size}\n")
  (path / "shared_cpu_list").write_text(f"{shared}\n")


def test_caches_are_counted_once_for_all_cpus_that_share_them(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(measured_tiers, "_CPUS", tmp_path)
  assert measured_tiers.cache_bytes() == 32 * 2**20  # unknown
  for cpu, size, shared in (
    (0, "1024K", "0-1"), (1, "1024K", "0-1"), (2, "3M", "2,10"),
    (10, "3M", "2,10"), (11, "1G", "11"), (12, "?", "12"),
  ):
    _cache(tmp_path, cpu, size, shared)
  assert measured_tiers.cache_bytes() == 2**30 + 4 * 2**20
  # The default arrays exceed any cache.
  assert max(measured_tiers.default_sizes()) > 2 * measured_tiers.cache_bytes()


def test_rates_have_the_last_value_or_the_median_and_the_range_of_all():
  values = [5.0, 1.0, 9.0, 2.0, 3.0]
  last = measured_tiers._quantity(values, "a test")
  assert (last.value, last.low, last.high) == (3.0, 1.0, 9.0)
  values = [2.0, 9.0, 1.0]
  middle = measured_tiers._median(values, "a test")
  assert (middle.value, middle.low, middle.high) == (2.0, 1.0, 9.0)


def test_rates_of_a_file_are_those_of_the_optimizer_beyond_the_cache(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(measured_tiers, "_REPEAT_S", 0.0)
  path, lines = tmp_path / "tier", []
  sizes, cache = (1 << 18, 1 << 16, 5 << 14, 1 << 17), 1 << 17
  start = time.perf_counter()
  found = measured_tiers._measure_file(path, sizes, cache, lines.append)
  passed = time.perf_counter() - start
  # Four arrays are read.
  assert [x.size_bytes for x in found.passes] == [
    4 << 16, 20 << 14, 4 << 17, 4 << 18
  ]
  for x, line in zip(found.passes, lines, strict=True):
    # A share of the time of a step; writing counts by four thirds.
    assert 0 < x.read_s < passed
    assert 0 < x.write_s < passed * 4 / 3
    assert line == (
      f"file {path}: optimizer, {x.size_bytes / 1e6:,.1f} MB: read in "
      f"{1e3 * x.read_s:.1f} ms, written in {1e3 * x.write_s:.1f} ms more"
    )
  assert (found.kind, found.path, found.duplex) == ("file", str(path), False)
  for rate, seconds in ((found.read, "read_s"), (found.write, "write_s")):
    rates = [
      x.size_bytes / getattr(x, seconds) for x in found.passes
      if x.size_bytes > 2 * cache
    ]
    assert len(rates) == 3
    assert (rate.value, rate.low, rate.high) == (
      rates[-1], min(rates), max(rates)
    )
  assert found.capacity_bytes.value > 1 << 20
  assert not path.exists()


def test_rates_of_a_node_are_those_of_arrays_beyond_the_cache(monkeypatch):
  """With one thread and with all, from the smallest array to the largest."""
  monkeypatch.setattr(measured_tiers, "_REPEAT_S", 0.0)
  sizes, cache, lines = (1 << 19, 1 << 16, 1 << 18, 1 << 17), 1 << 16, []
  found = measured_tiers._measure_node(0, sizes, cache, lines.append)
  assert (found.name, found.kind, found.node) == ("node0", "dram", 0)
  assert [x.size_bytes for x in found.passes] == [
    4 << shift for shift in (16, 17, 18, 19)
  ]
  counts = sorted({1, os.cpu_count()})
  measured = [(count, size) for count in counts for size in sorted(sizes)]
  rates = {"read": [], "write": []}
  for (count, size), line in zip(measured, lines, strict=False):
    start = f"node 0, {size / 1e6:,.1f} MB, {count} threads: "
    assert line.startswith(start)
    said = dict(x.split() for x in line.removeprefix(start)[:-5].split(", "))
    for name, some in rates.items():
      if size > 1 << 17:
        some.append(said[name])
  for name, texts in rates.items():
    rate = getattr(found, name)
    assert f"{rate.value / 1e9:.1f}" == texts[-1]
    assert f"{rate.low / 1e9:.1f}" == min(texts, key=float)
    assert f"{rate.high / 1e9:.1f}" == max(texts, key=float)
  latency, *passes = lines[len(measured) :]
  assert latency == (
    f"node 0: {1e9 * found.latency_s.value:.0f} ns per dependent load"
  )
  assert len(passes) == len(sizes)
  free = found.capacity_bytes.value
  with pytest.raises(ValueError, match=r"node 0 has .* free memory"):
    measured_tiers._measure_node(0, (int(0.4 * free),), cache, lines.append)
  with pytest.raises(ValueError, match=r"array must exceed .* twice the last"):
    measured_tiers.measure([1 << 10, 2 * measured_tiers.cache_bytes()])


def test_copies_are_in_memory_if_the_device_is_a_cpu():
  lines = []
  link = measured_tiers._device_link(1 << 16, lines.append)
  assert (link.name, link.duplex) == ("cpu", False)
  assert len(lines) == 1
  for rate in (link.read, link.write):
    assert 0 < rate.low <= rate.value <= rate.high
    assert "copies of 0 MB" in rate.source
    assert "copies in memory, since the device is a CPU" in rate.source
  assert f"{link.read.value / 1e9:.1f} GB/s there" in lines[0]


def test_new_file_needs_a_disk_with_room(tmp_path):
  path = tmp_path / "tier"
  free = measured_tiers._check_disk(path, 1000)
  stat = os.statvfs(tmp_path)
  assert free == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)
  with pytest.raises(ValueError, match=f"--file={path}: .* do not fit into"):
    measured_tiers._check_disk(path, 2 * free)
  path.touch()
  with pytest.raises(FileExistsError):
    measured_tiers._check_disk(path, 1)


@pytest.mark.parametrize(("update_s", "read_s", "is_memory", "expected"), [
  (0.28, 0.1, True, (0.16, 0.16)),  # 16 bytes of 28 are read
  (0.28, 0.1, False, (0.1, 0.18 * 16 / 12)),
  (0.3, 0.2, False, (0.2, 0.1 * 16 / 12)),
  (0.2, 0.3, False, (0.3, 0.002 * 16 / 12)),  # noise
])
def test_step_is_divided_into_reads_and_writes(
  update_s, read_s, is_memory, expected
):
  found = measured_tiers._split_step_seconds(update_s, read_s, is_memory)
  assert found == pytest.approx(expected)
