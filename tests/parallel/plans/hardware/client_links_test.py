"""Records of links: values, sources, files and errors."""

import dataclasses
import json
import pathlib
import re
import statistics

import pytest

from parallel.plans.hardware import client_links as links
from parallel.plans.hardware.client_links import LINKS

RESULTS = pathlib.Path(__file__).parents[4] / "results"
RECORD = dataclasses.asdict(LINKS["5g-40mhz"]) | {"name": "mine"}


def test_records_are_complete_and_slower_than_ethernet():
  fastest = LINKS["ethernet"]
  for name, link in LINKS.items():
    assert link.name == name
    assert 0 < link.up <= fastest.up
    assert 0 < link.down <= fastest.down
    assert 0 < link.rtt_s < 0.1
    assert link.jitter_s < link.rtt_s / 2  # delays stay positive
    assert len(link.source) > 30, name
    # No source gives a jitter or a spread.
    if link.jitter_s or link.spread:
      assert "assumed" in link.source, name


def test_records_are_in_the_middle_of_the_ranges_of_their_sources():
  checked = 0
  for link in LINKS.values():
    for low, high, unit in re.findall(
      r"\((\d+) to (\d+)\s+(ms|Mbit/s down)\)", link.source
    ):
      found = 1e3 * link.rtt_s if unit == "ms" else 8e-6 * link.down
      assert found == pytest.approx((int(low) + int(high)) / 2), link.name
      checked += 1
  assert checked == 5


def test_records_are_those_of_the_recorded_rounds():
  rows = json.loads((RESULTS / "federated_rounds.json").read_text())["rows"]
  assert {row["interface"] for row in rows} == {"ethernet", "wifi", "5g-40mhz"}
  for row in rows:
    expected = links.assign_links((row["interface"],), row["clients"])
    recorded = row["links"]["clients"]
    for link, found in zip(expected, recorded, strict=True):
      assert found | dataclasses.asdict(link) == found


def test_one_name_is_for_all_clients_and_a_cell_has_one_rate():
  assert links.assign_links(("5g-40mhz",), 3) == (LINKS["5g-40mhz"],) * 3
  names = ("ethernet", "5g-bad")
  assert links.assign_links(names, 2) == tuple(LINKS[name] for name in names)


def test_rates_of_clients_have_the_spread_of_the_record():
  record = LINKS["wifi"]
  found = links.assign_links(("wifi",), 64)
  rates = [link.up / record.up for link in found]
  assert rates == sorted(rates)
  assert statistics.fmean(rates) == pytest.approx(1)
  assert statistics.stdev(rates) == pytest.approx(record.spread, rel=0.05)
  assert [link.down / record.down for link in found] == pytest.approx(rates)
  # Only clients of the same record are counted; a single one has its rate.
  assert links.assign_links(("wifi", "ethernet"), 2)[0].up == record.up


def test_rates_of_any_spread_are_positive(tmp_path):
  path = tmp_path / "wide.json"
  path.write_text(json.dumps(RECORD | {"shared": False, "spread": 3.0}))
  found = links.assign_links((str(path),), 8)
  assert found[0].up == pytest.approx(0.1 * RECORD["up"])
  assert found[0].up < found[-1].up


def test_file_has_the_fields_of_a_link(tmp_path):
  path = tmp_path / "mine.json"
  path.write_text(json.dumps(RECORD))
  assert links.link(str(path)) == links.Link(**RECORD)


@pytest.mark.parametrize(("change", "message"), [
  ({"up": 0.0}, r"mine\.json: up=0 must be positive"),
  ({"down": -1.0}, r"mine\.json: down=-1 must be positive"),
  ({"loss": 1.0}, r"mine\.json: loss=1 must be below 1"),
  ({"rtt_s": -0.1}, r"mine\.json: rtt_s=-0\.1 must be at least 0"),
  ({"spread": 0.1}, r"mine\.json: spread=0\.1 must be 0 for a shared link"),
])
def test_invalid_file_is_one_line(tmp_path, change, message):
  path = tmp_path / "mine.json"
  path.write_text(json.dumps(RECORD | change))
  with pytest.raises(ValueError, match=message) as raised:
    links.assign_links((str(path),), 4)
  assert "\n" not in str(raised.value)


def test_unknown_name_suggests_the_nearest_and_counts_must_match():
  with pytest.raises(ValueError, match=r"links='5g-40mz'.* mean 5g-40mhz\?$"):
    links.assign_links(("5g-40mz",), 4)
  with pytest.raises(ValueError, match=r"one name, or one for each of 4 cli"):
    links.assign_links(("wifi", "wifi"), 4)
