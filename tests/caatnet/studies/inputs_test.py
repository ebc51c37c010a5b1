"""Keys that several studies read: topologies and lists."""

import pytest

from caatnet.studies import inputs

GIVEN = {"bandwidth": "", "latency_s": ""}


def test_topology_has_the_given_bandwidth_and_latency():
  net = inputs.parse_topology(
    {"bandwidth": 2e9, "latency_s": 3e-6}, "topology", "ring:4"
  )
  assert {(x.bandwidth, x.latency_s) for x in net.links} == {(2e9, 3e-6)}
  own = inputs.parse_topology(GIVEN, "topology", "ring:4").links[0]
  for key, value in (("bandwidth", 2e9), ("latency_s", 0.0)):
    net = inputs.parse_topology(GIVEN | {key: value}, "topology", "ring:4")
    assert getattr(net.links[0], key) == value
    other = {"bandwidth": "latency_s", "latency_s": "bandwidth"}[key]
    assert getattr(net.links[0], other) == getattr(own, other)
  assert inputs.parse_topology(GIVEN, "t", "ring:2").num_ranks == 2
  assert inputs.parse_topology(GIVEN, "t", "ring:1024").num_ranks == 1024


@pytest.mark.parametrize(("changes", "text", "message"), [
  ({"bandwidth": 0.0}, "ring:4", r"config\.bandwidth=0"),
  ({"latency_s": -1e-6}, "ring:4", r"config\.latency_s=-1e-06"),
  ({}, "ring", r"config\.key='ring'"), ({}, "rong:4", r"config\.key='rong:4'"),
  ({}, "ring:1025", r"config\.key='ring:1025' has 1025 ranks; it must have 2"),
])
def test_invalid_topology_is_named(changes, text, message):
  with pytest.raises(ValueError, match=message):
    inputs.parse_topology(GIVEN | changes, "key", text)


def test_lists_must_have_known_entries():
  good = {"algorithms": ["ring"], "routers": ["spray"]}
  inputs.check_lists(good, routers=("spray", "ecmp"))
  inputs.check_lists(good | {"algorithms": ["own", "ring"]}, ("own",),
                     routers=("spray",))
  for changes, message in (
    ({"algorithms": ["own"]}, r"^config\.algorithms: .*own"),
    ({"routers": ["sprey"]}, r"config\.routers=\('sprey',\): .*spray"),
  ):
    with pytest.raises(ValueError, match=message):
      inputs.check_lists(good | changes, routers=("spray",))
