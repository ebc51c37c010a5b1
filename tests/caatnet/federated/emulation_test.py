"""Federated rounds over emulated links and on limited processors."""

import dataclasses
import sys

import pytest

from caatnet.config.federated import Federation
from caatnet.federated import emulation
from caatnet.federated.service import Service
from caatnet.schema.federated import Federated
from parallel.peers.emulation import (
  cpu_limits,
  link_probe,
)
from parallel.plans.hardware.client_links import Link
from tests.caatnet.federated import numeric, process


def _federation(links, clients, quota=0.0):
  section = Federated(clients=clients, cpu_quota=quota)
  return Federation({}, None, section, None, None, None, None, None, links)


def test_quota_without_effect_is_an_error(monkeypatch, tmp_path):
  """Other file systems accept the files of a control group."""
  monkeypatch.setattr(cpu_limits, "_ROOT", tmp_path)
  federation = _federation((), 1, quota=0.01)  # less than a busy machine gives
  with pytest.raises(
    ValueError, match=r"config\.federated\.cpu_quota=0\.01 cannot be set here"
  ), emulation.start_emulation(federation):
    pass
  (tmp_path / "cpu").mkdir()
  with pytest.raises(
    ValueError, match=r"config\.federated\.cpu_quota=0\.01 has no effect here"
  ), emulation.start_emulation(federation):
    pass
  assert not list((tmp_path / "cpu").iterdir())


def _run(folder, network, clients=2):
  """Two rounds of numpy clients."""
  with Service(
    process.rules(clients=clients, per_round=clients, rounds=2),
    numeric.Plain(), process.PARAMS, process.decode, folder,
    say=lambda line: None,
  ) as service:
    with network.listening_context():
      service.listen((network.host, 0), process.SECURITY)
    network.serve(service, [
      sys.executable, "-m", "tests.caatnet.federated.process", "linked"
    ])
  return service.rows


LINK = Link("slow", 8e6, 4e6, 0.02, 0.0, 0.0, 0.0, False, "the tests")


@pytest.mark.parametrize("is_root", [True, False])
def test_rounds_take_the_time_of_their_links(
  request, monkeypatch, tmp_path, is_root
):
  if is_root:
    request.getfixturevalue("root")
    request.getfixturevalue("quotas")
  else:
    monkeypatch.setenv("PATH", str(tmp_path))  # without ip
  monkeypatch.setattr(link_probe, "_STREAM_S", 0.02)
  with emulation.start_emulation(_federation(
    (LINK, LINK), 2, 0.9 * is_root
  )) as network:
    assert "\n" not in network.means
    assert network.means.startswith(
      "links by network namespaces" if is_root else "links by a relay"
    )
    means, table = network.parts()
    assert means == network.means
    assert [row["link"] for row in table.rows] == ["slow"] * 2
    for key, shaped in (
      ("down, Mbit/s", "64, "), ("up, Mbit/s", "32, "),
      ("round trip, ms", "20.0, "), ("quota", "0.90, " if is_root else ""),
    ):
      assert table.rows[0][key].startswith(shaped)
    rows = _run(tmp_path, network)
  size = process.PARAMS.nbytes
  assert len(rows) == 4
  for row in rows:
    assert row["t_d"] > 0.95 * size / LINK.down
    assert row["t_u"] > 0.95 * size / LINK.up
  assert (tmp_path / emulation.LINKS_FILE).exists()


def test_values_are_shaped_then_alone_then_together():
  row = {
    "client": 3, "name": "cell", "down": 1e6, "measured_down": 2e6,
    "together_down": 0.5e6, "up": 3e6, "measured_up": 4e6, "rtt_s": 0.02,
    "measured_rtt_s": 0.021, "jitter_s": 0.003, "loss": 0.0125, "quota": 0.5,
    "measured_quota": 0.75,
  }
  means, table = emulation.build_report_parts("by hand", [row, {"client": 4}])
  assert means == "by hand"
  assert table.cells() == [
    ["3", "cell", "8, 16, 4", "24, 32", "20.0, 21.0", "3.0", "1.25%",
     "0.50, 0.75"], ["4", "-", *[""] * 6],
  ]


def test_nothing_is_emulated_or_printed_by_default(tmp_path):
  with emulation.start_emulation(_federation((), 2), "127.0.0.1") as network:
    assert network.parts() == []
    assert len(_run(tmp_path, network)) == 4
  assert not (tmp_path / emulation.LINKS_FILE).exists()


def test_server_of_other_machines_emulates_nothing():
  emulation.check_not_emulated(_federation((), 2))
  section = Federated(links=("wifi",))
  federation = dataclasses.replace(_federation((), 4), section=section)
  with pytest.raises(ValueError, match=r"links=\('wifi',\).*--role=all only"):
    emulation.check_not_emulated(federation)
  with pytest.raises(ValueError, match=r"cpu_quota=0\.5 are emulated"):
    emulation.check_not_emulated(_federation((), 2, 0.5))
