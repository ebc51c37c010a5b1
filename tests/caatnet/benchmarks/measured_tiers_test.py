"""Measured tiers: sizes of caches, ranges and medians of rates."""

from caatnet.benchmarks.memory import measured_tiers


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


def test_rates_have_the_last_value_or_the_median_and_the_range_of_all():
  values = [5.0, 1.0, 9.0, 2.0, 3.0]
  last = measured_tiers._quantity(values, "a test")
  assert (last.value, last.low, last.high) == (3.0, 1.0, 9.0)
  values = [2.0, 9.0, 1.0]
  middle = measured_tiers._median(values, "a test")
  assert (middle.value, middle.low, middle.high) == (2.0, 1.0, 9.0)
