"""Probe of links: round trips of clients, and rates at receivers."""

import time
import types

import pytest

from parallel.peers.emulation import link_probe
from tests.parallel.peers.emulation.stars import CELL, OWN

COUNT = 3  # the server and two clients


@pytest.fixture
def probes(pool):
  made = [link_probe.Probe(str(k)) for k in range(COUNT)]
  address, *others = [probe.listen("127.0.0.1") for probe in made]
  assert others == [None, None]
  list(pool.map(
    lambda k: made[k].connect(COUNT - 1, address if k else None), range(COUNT)
  ))
  yield made
  made[0]._listener.close()
  for probe in made:
    for sock in probe._sockets.values():
      sock.close()


def test_round_trips_are_of_one_client(probes, pool):
  assert set(probes[0]._sockets) == {0, 1}
  for client in range(2):
    found = list(pool.map(lambda probe, k=client: probe.ping(k), probes))
    assert found[2 - client] is None
    assert 0 < found[1 + client] < 1


@pytest.mark.parametrize("down", [True, False])
def test_rates_are_of_receivers(probes, pool, down):
  sizes = [[0, 300_000], [1, 5]]
  found = list(pool.map(lambda probe: probe.stream(sizes, down), probes))
  receivers = [set(), {0}, {1}] if down else [{0, 1}, set(), set()]
  assert [set(rates) for rates in found] == receivers
  assert all(rate > 0 for rates in found for rate in rates.values())
  one = list(pool.map(lambda probe: probe.stream(sizes[:1], down), probes))
  assert [set(rates) for rates in one] == [x - {1} for x in receivers]


def test_rate_is_of_the_second_half(monkeypatch):
  """Pieces of 1,000 bytes, on a clock that only they advance."""
  now, pieces = [0.0], iter([9.0] * 49 + [0.5] * 51)

  def recv(size):
    del size
    now[0] += next(pieces)
    return bytes(1000)

  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  rate = link_probe._measure_receive_rate(
    types.SimpleNamespace(recv=recv), 100_000
  )
  assert rate == pytest.approx(1000 / 0.5)


def test_clients_of_cells_are_also_measured_at_once(monkeypatch):
  monkeypatch.setattr(link_probe, "_STREAM_S", 0.02)
  found = link_probe.measure_links([CELL, OWN, CELL], "127.0.0.1", "", [[]] * 3)
  together = {"together_down", "together_up"}
  assert [together & row.keys() for row in found] == [together, set(), together]
  (alone,) = link_probe.measure_links([CELL], "127.0.0.1", "", [[]])
  assert not together & alone.keys()
