"""Files of memory tiers: what is read is what was written, or one error."""

import json

import pytest

from parallel.plans.hardware import tiers
from parallel.plans.hardware.tiers import HOSTS


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_equals_the_one_read_from_its_file(name, tmp_path):
  path = tmp_path / "tiers.json"
  path.write_text(tiers.to_json(HOSTS[name]))
  assert (
    tiers.resolve_host(str(path)) == tiers.resolve_host(name) == HOSTS[name]
  )


def _set(*place):
  """Returns a function that sets the value at a place of a file's object."""

  def change(found):
    *outer, last = place[:-1]
    for part in outer:
      found = found[part]
    found[last] = place[-1]

  return change


RATE = {"value": 0.0, "low": 0.0, "high": 0.0, "source": "a test"}
PASS = {"size_bytes": 1e6, "read_s": 1.0, "write_s": 1.0}
SLOW = dict.fromkeys(("value", "low", "high"), 1e-300) | {"source": "a test"}


@pytest.mark.parametrize(("change", "message"), [
  (_set("tiers", 0, "read", RATE), "tiers[0].read: low=0 must be positive"),
  (_set("tiers", 0, "read", "value", -1.0), "read.value=-1.0 must be greater"),
  (_set("tiers", 1, "write", "low", 1e12), "must lie between low=1e+12"),
  (_set("tiers", 1, "name", "dram"), "'dram' of a tier or link occurs"),
  (_set("device_link", "name", "cxl0"), "'cxl0' of a tier or link occurs"),
  (_set("tiers", 1, "name", "device"), "and be none of device, device memory"),
  (_set("tiers", 1, "name", "a, read"), "must have no comma"),
  (_set("tiers", 1, "read", SLOW), "tiers[1].read: rates must lie in [1, "),
  (_set("tiers", 1, "link", "bus"), "tiers[1].link='bus' must be left out"),
  (_set("tiers", 1, "kind", "tape"), "must be 'dram', 'cxl' or 'file'"),
  (_set("tiers", 1, "node", 0), "'dram' and 'cxl0' both have node=0"),
  (lambda found: [
    tier.update(kind="file", path=f"/x/{i * '../x/'}{i}", node=None)
    for i, tier in enumerate(found["tiers"])
  ],
   "'dram' and 'cxl0' both have files in the folder /x"),
  (_set("tiers", 1, "kind", "file"), "a path if its kind is file, and no"),
  (_set("tiers", 0, "passes", [PASS, PASS]), "passes must have ascending size"),
  (_set("tiers", 1, "passes", [PASS]), "and must be empty if duplex=true"),
  (_set("tiers", []), "tiers has 0 entries; it must have 1 to 64"),
  (_set("device_link", "write", RATE), "device_link.write: low=0 must be"),
  (lambda found: found["tiers"][0].pop("write"), "tiers[0].write is missing"),
])
def test_a_wrong_file_is_one_line_that_names_the_place(
  change, message, tmp_path
):
  found = json.loads(tiers.to_json(HOSTS["two-cxl"]))
  change(found)
  path = tmp_path / "tiers.json"
  path.write_text(json.dumps(found))
  with pytest.raises(ValueError) as error:
    tiers.read(path)
  text = str(error.value)
  assert message in text
  assert str(path) in text
  assert "\n" not in text


def test_an_unknown_name_suggests_the_nearest():
  with pytest.raises(ValueError, match="did you mean two-cxl"):
    tiers.resolve_host("two-cxxl")


def test_a_measured_pass_is_interpolated_between_sizes():
  """Below the smallest size its seconds, beyond the largest at its rate."""
  passes = tuple(
    tiers.OptimizerPass(size_bytes=size, read_s=read, write_s=write)
    for size, read, write in ((8e3, 0.1, 0.2), (24e3, 0.3, 0.8))
  )
  tier = HOSTS["two-cxl"].tiers[0].model_copy(update={"passes": passes})
  assert tier.pass_s(16e3, 12e3) == pytest.approx(0.2 + 0.35)
  assert tier.pass_s(4e3, 0.0) == pytest.approx(0.1)
  assert tier.pass_s(160e3, 120e3) == pytest.approx(0.3 * 160 / 24 + 0.8 * 5)
  # Half of the rate of reads: twice their time; a fifth of that of writes.
  slow = tier.at(tier.read.value / 2, tier.write.value / 5)
  assert slow.pass_s(16e3, 12e3) == pytest.approx(0.4 + 5 * 0.35)
  assert slow.read.value / slow.write.value == pytest.approx(5 / 2)


def test_reads_and_writes_of_a_host_have_their_own_rates():
  """The link sends 9 and 3 GB/s, the tiers read 8 and 1 and write 2 and 4."""
  def at(made, read, write):
    return made.model_copy(update={
      key: made.read.model_copy(update={"value": 1e9 * rate})
      for key, rate in (("read", read), ("write", write))
    })

  host = HOSTS["one-cxl"]
  host = host.model_copy(update={
    "device_link": at(host.device_link, 9, 3),
    "tiers": (at(host.tiers[0], 8, 2), at(host.tiers[1], 1, 4)),
  })
  assert (host.to_device, host.from_device) == (8e9, 3e9)
  wide = host.model_copy(update={"device_link": at(host.device_link, 7, 9)})
  assert (wide.to_device, wide.from_device) == (7e9, 4e9)


def test_a_rate_of_a_shared_link_is_checked():
  found = json.loads(tiers.to_json(HOSTS["two-cxl"]))
  link = found["device_link"] | {"name": "switch"}
  found["links"] = [link | {"name": "other"}, link | {"write": SLOW}]
  with pytest.raises(ValueError, match=r"^links\[1\]\.write: rates must lie"):
    tiers.parse(json.dumps(found))
  found["links"] = [link]
  found["tiers"][2]["link"] = "switch"
  assert tiers.parse(json.dumps(found)).tiers[2].link == "switch"
