"""Emulated links and processors: stars of namespaces, relays and quotas."""

import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from caatnet.benchmarks.federated import emulation, link_probe
from caatnet.benchmarks.harness import (
  cgroups,
  cpu_limits,
  namespaces,
  processes,
  relay,
  wire,
)
from caatnet.config.federated import Federation
from caatnet.federated.links import LINKS, Link
from caatnet.federated.service import Service
from caatnet.schema.federated import Federated
from parallel.plans.network import fluid
from tests.caatnet.benchmarks import unavailable
from tests.caatnet.federated import numeric, process

LIMIT_S = 10.0
OWN = Link("own", 2e6, 1e6, 0.01, 0.0, 0.0, 0.0, False, "the tests")
CELL = dataclasses.replace(OWN, name="cell", down=1e6, shared=True, rtt_s=0.0)


@pytest.fixture
def root():
  """Skips the test if this user cannot shape links."""
  try:
    with namespaces.star([OWN]):
      pass
  except ValueError as error:
    unavailable.skip(error)


@pytest.fixture
def quotas():
  """Skips the test if this user cannot limit processor time."""
  try:
    with cpu_limits.limited(0.9, 1):
      pass
  except ValueError as error:
    unavailable.skip(error)


def _federation(links, clients, quota=0.0):
  section = Federated(clients=clients, cpu_quota=quota)
  return Federation({}, None, section, None, None, None, None, None, links)


@contextlib.contextmanager
def _probe(links, star=None):
  """Peers at the ends of a star's links, or of a relay's; 0 is the server."""
  prefixes, host = [[]] * (len(links) + 1), "127.0.0.1"
  if star is not None:
    host = star.host
    prefixes = [["ip", "netns", "exec", star.server], *star.prefixes]
  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(processes.Peers(
      "caatnet.benchmarks.federated.link_probe:Probe",
      [[k] for k in range(len(links) + 1)], prefixes,
    ))
    address = tuple(peers.do("listen", lambda _: {"host": host}).found[0])
    addresses = [address] * len(links)
    if star is None:
      addresses = stack.enter_context(relay.Relay(address, links)).addresses
    peers.do("connect", lambda me: {"num": len(links)} | (
      {"address": addresses[me - 1]} if me else {}
    ))
    yield peers


def _check_links(peers):
  """Links are never faster than they are shaped; a busy machine slows them."""
  trips = [peers.do("ping", lambda _, k=k: {"client": k}).found
           for k in range(3)]
  assert trips[0][1] >= 0.0099
  assert trips[0][2] is None

  def seconds(sizes, down):
    return peers.do("stream", lambda _: {"sizes": sizes, "down": down}).seconds

  assert seconds([[0, 400_000]], True) > 0.18
  assert seconds([[0, 200_000]], False) > 0.18
  # The clients of the cell share its rates.
  for down in (True, False):
    assert seconds([[1, 100_000], [2, 100_000]], down) > 0.18


def test_star_has_the_rates_and_delays_of_its_links(root):
  links = [OWN, CELL, CELL]
  with namespaces.star(links) as star:
    assert len(star.prefixes) == 3
    with _probe(links, star) as peers:
      _check_links(peers)
    with namespaces.inside(star.server):
      inner = socket.create_server((star.host, 0))
    with inner, pytest.raises(OSError, match="assign"):
      socket.create_server((star.host, 0))
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  ).stdout
  assert f"shaped{os.getpid()}n" not in listed


def test_relay_has_the_rates_and_delays_of_its_links():
  links = [OWN, dataclasses.replace(CELL, jitter_s=1e-4), CELL]
  with _probe(links) as peers:
    _check_links(peers)


def _classes(text):
  found = {}
  for parent, name, rate, ceil in re.findall(
    r"class add dev \S+ parent (\S+) classid (\S+) htb rate (\d+)bit ceil "
    r"(\d+)bit", text,
  ):
    found[name] = parent, int(rate), int(ceil)
  return found


def test_clients_of_a_cell_have_equal_guaranteed_parts_of_its_rate():
  links = [CELL, OWN, CELL, LINKS["5g-bad"], CELL]
  found = _classes(namespaces._shares(
    [link.down for link in links], links, [f"dst 10.0.0.{k}" for k in range(5)]
  ))
  cell = found.pop("1:1000")
  assert cell == ("1:", 8_000_000, 8_000_000)
  bad = found.pop("1:1001")
  assert bad == ("1:", 15_600_000, 15_600_000)
  assert found == {
    **dict.fromkeys(
      ("1:1", "1:3", "1:5"), ("1:1000", 2_666_667, 8_000_000)
    ),
    "1:2": ("1:", 16_000_000, 16_000_000), "1:4": ("1:1001", *bad[1:]),
  }


def test_bursts_are_a_millisecond_or_two_packets():
  text = namespaces._shares(
    [5e6, 1e6, 3.5e6], [OWN] * 3, [f"dst 10.0.0.{k}" for k in range(3)]
  )
  assert re.findall(r" burst (\d+)b cburst (\d+)b", text) == [
    ("5000", "5000"), ("3000", "3000"), ("3500", "3500")
  ]


@pytest.mark.parametrize(("up", "size"), [
  (1e6, 1500), (4e7, 40_000), (1e9, 65_536)
])
def test_packets_of_a_star_pass_within_a_millisecond(root, up, size):
  """Bytes of a packet on the slowest link, from one MTU to the largest."""
  fast = dataclasses.replace(OWN, down=2e9, up=2e9, rtt_s=0.0)
  with namespaces.star([fast, dataclasses.replace(fast, up=up)]) as star:
    said = subprocess.run(
      ["ip", "-d", "-n", star.server, "link", "show", "shaped0"],
      capture_output=True, text=True, check=True,
    ).stdout
    found = subprocess.run(
      [*star.prefixes[1], "cat", "/proc/sys/net/ipv4/tcp_congestion_control"],
      capture_output=True, text=True, check=True,
    ).stdout
  assert f"gso_max_size {size} gso_max_segs {size // 1500} " in said
  assert " mtu 1500 " in said
  assert " qlen 10000" in said
  assert found == "reno\n"


def test_delays_have_their_mean_deviation_and_losses():
  delays = wire.Delays(0.02, 0.002, 0.25, "seed")
  times = 0.021 * np.arange(4000)
  found = [delays.due(t) for t in times]
  kept = np.array([d - t for d, t in zip(found, times, strict=True) if d])
  assert len(kept) == pytest.approx(3000, rel=0.03)
  assert kept.mean() == pytest.approx(0.02, rel=0.01)
  assert kept.std() == pytest.approx(0.002, rel=0.05)
  # The delay of one packet is that of the next few.
  delays = wire.Delays(0.02, 0.002)
  assert len({round(delays.due(t) - t, 9) for t in np.arange(19) / 1e3}) == 1
  # No delay is negative.
  delays = wire.Delays(0.001, 0.1)
  assert min(delays.due(t) - t for t in times) == pytest.approx(0, abs=1e-9)


def test_packets_arrive_in_order_despite_jitter():
  near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  sink, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  with near, source, sink, far:
    source.setblocking(False)
    way = wire._Way(
      source.fileno(), sink.fileno(), wire.Delays(0.001, 0.01, 0.2, "seed")
    )
    for number in range(100):
      near.send(bytes([number]))
      way.receive()
      way.send()
    while way.send() < wire._IDLE_S:
      pass
    far.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
      while True:
        found.append(far.recv(8)[0])
  assert found == sorted(found)
  assert 60 < len(found) < 100


def test_relay_passes_all_bytes_and_both_ends():
  data = np.random.default_rng(0).bytes(300_000)
  fast = dataclasses.replace(OWN, down=1e8, up=1e8)
  with socket.create_server(("127.0.0.1", 0)) as server:
    target = server.getsockname()
    with relay.Relay(target, [fast, fast]) as made:
      near = socket.create_connection(made.addresses[1], LIMIT_S)
      far, _ = server.accept()
      far.settimeout(LIMIT_S)
      with near, far:
        sender = threading.Thread(target=lambda: (
          near.sendall(data), near.shutdown(socket.SHUT_WR)
        ))
        sender.start()
        found = b""
        while piece := far.recv(1 << 16):
          found += piece
        sender.join()
        assert found == data
        far.sendall(b"back")  # the other direction is still open
        assert near.recv(8) == b"back"
        # Small messages do not wait for more; 0 for both that listen.
        assert sorted(
          bool(x.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
          for x in made._sockets
        ) == [False, False, True, True]
      near = socket.create_connection(made.addresses[0], LIMIT_S)
      far, _ = server.accept()
      far.settimeout(LIMIT_S)
    # The relay ends its connections and listens no more.
    with near, far:
      assert near.recv(8) == far.recv(8) == b""
    with pytest.raises(ConnectionError):
      socket.create_connection(made.addresses[0])
  with (
    relay.Relay(target, [fast]) as made,  # the server has ended
    socket.create_connection(made.addresses[0], LIMIT_S) as near,
  ):
    assert near.recv(8) == b""


def test_losses_limit_each_connection_of_a_relay():
  """Two clients of a fast cell receive at the rate of a lossy flow each."""
  lossy = dataclasses.replace(OWN, down=1e8, loss=0.01, shared=True)
  wanted_s = 0.3
  size = int(wanted_s * fluid.loss_limit(lossy.rtt_s, lossy.loss))
  with (
    socket.create_server(("127.0.0.1", 0)) as server,
    relay.Relay(server.getsockname(), [lossy, lossy]) as made,
    contextlib.ExitStack() as stack,
  ):
    nears = [
      stack.enter_context(socket.create_connection(address, LIMIT_S))
      for address in made.addresses
    ]
    start = time.monotonic()
    for _ in nears:
      far, _ = server.accept()
      stack.enter_context(far)
      threading.Thread(
        target=far.sendall, args=(bytes(size),), daemon=True
      ).start()
    for near in nears:
      left = size
      while left:
        left -= len(near.recv(left))
    assert 0.9 * wanted_s < time.monotonic() - start < 1.8 * wanted_s


def test_quota_is_of_a_short_period_unless_the_kernel_needs_a_longer_one():
  """A quota of less than 1 ms is refused by the kernel."""
  found = [
    cpu_limits._in_us(quota) for quota in (1.0, 0.2, 0.05, 0.04996, 0.03)
  ]
  assert found == [
    (20_000, 20_000), (20_000, 4000), (20_000, 1000), (100_000, 4996),
    (100_000, 3000),
  ]


def test_quota_limits_each_client(quotas):
  with cpu_limits.limited(0.2, 2) as groups:
    for group in groups:
      assert 0 < group.measured <= 0.25
    done = subprocess.run(
      [*groups[1].prefix, sys.executable, "-S", "-c", "print('text')", "x y"],
      capture_output=True, text=True, check=True,
    )
    assert done.stdout == "text\n"
    folder = groups[0].prefix[-1].rpartition("/")[0]
    assert os.path.exists(folder)
  assert not os.path.exists(folder)


def test_quota_without_effect_is_an_error(monkeypatch, tmp_path):
  """Other file systems accept the files of a control group."""
  monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
  federation = _federation((), 1, quota=0.01)  # less than a busy machine gives
  with pytest.raises(
    ValueError, match=r"config\.federated\.cpu_quota=0\.01 cannot be set here"
  ), emulation.emulated(federation):
    pass
  (tmp_path / "cpu").mkdir()
  with pytest.raises(
    ValueError, match=r"config\.federated\.cpu_quota=0\.01 has no effect here"
  ), emulation.emulated(federation):
    pass
  assert not list((tmp_path / "cpu").iterdir())


def test_groups_are_removed_also_with_their_files(monkeypatch, tmp_path):
  monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
  (tmp_path / "cpu").mkdir()
  with cgroups.group("cpu") as folder:
    (folder / "cpu.cfs_quota_us").touch()  # an ordinary file system
  assert not folder.exists()


def test_links_that_cannot_be_delayed_are_one_line():
  with (
    processes.Process(processes.module(
      "caatnet.benchmarks.harness.wire", "wire", "no_such", "no_such", 0
    )) as wire,
    pytest.raises(ValueError, match=r"delayed here: .*no_such.* /dev/net/tun"),
  ):
    namespaces._joined(wire)


def _run(folder, network, clients=2):
  """Two rounds of numpy clients."""
  with Service(
    process.rules(clients=clients, per_round=clients, rounds=2),
    numeric.Plain(), process.PARAMS, process.decode, folder,
    say=lambda line: None,
  ) as service:
    with network.listening():
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
  with emulation.emulated(_federation(
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
  assert (tmp_path / emulation.RECORD).exists()


def test_clients_of_cells_are_also_measured_at_once(monkeypatch):
  monkeypatch.setattr(link_probe, "_STREAM_S", 0.02)
  found = link_probe.measured([CELL, OWN, CELL], "127.0.0.1", "", [[]] * 3)
  together = {"together_down", "together_up"}
  assert [together & row.keys() for row in found] == [together, set(), together]
  (alone,) = link_probe.measured([CELL], "127.0.0.1", "", [[]])
  assert not together & alone.keys()


def test_nothing_is_emulated_or_printed_by_default(tmp_path):
  with emulation.emulated(_federation((), 2), "127.0.0.1") as network:
    assert network.parts() == []
    assert len(_run(tmp_path, network)) == 4
  assert not (tmp_path / emulation.RECORD).exists()


def test_server_of_other_machines_emulates_nothing():
  emulation.check_none(_federation((), 2))
  section = Federated(links=("wifi",))
  federation = dataclasses.replace(_federation((), 4), section=section)
  with pytest.raises(ValueError, match=r"links=\('wifi',\).*--role=all only"):
    emulation.check_none(federation)
  with pytest.raises(ValueError, match=r"cpu_quota=0\.5 are emulated"):
    emulation.check_none(_federation((), 2, 0.5))


@pytest.mark.parametrize(("rate", "size"), [
  (1e3, 256), (1e6, 2000), (1e9, 1 << 16)
])
def test_bucket_passes_pieces_of_its_rate(rate, size):
  """Two milliseconds, but no tiny nor huge pieces."""
  assert relay.Bucket(rate).piece == size
