"""Namespaces: rates, delays and losses of their links, and their end."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from parallel.peers.emulation import namespaces, processes
from parallel.plans.hardware.client_links import LINKS
from tests import unavailable
from tests.parallel.peers.emulation.stars import CELL, OWN, check_links, probe

ROOT = pathlib.Path(__file__).parents[4]
_HZ = 250  # ticks of common kernels per second


def _namespaces():
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  ).stdout
  return re.findall(r"shaped\d+n\d+", listed)


def _own():
  return [n for n in _namespaces() if n.startswith(f"shaped{os.getpid()}n")]


def _meet_and_fail(make):
  with make() as (hosts, prefixes):
    assert len(_own()) >= len(hosts)
    with processes.Peers(
      "parallel.peers.ring.measured_links:Peer",
      list(enumerate(hosts)), prefixes,
    ) as peers:
      addresses = peers.do("address").found
      assert [host for host, _ in addresses] == list(hosts)
      members = {str(i): address for i, address in enumerate(addresses)}
      peers.do("measure", lambda _: {"members": members, "sizes": [1, 2]})
    raise ZeroDivisionError


@pytest.mark.parametrize("rtt_ms", [0, 10])
def test_namespaces_are_removed_after_an_error(root, rtt_ms):
  with pytest.raises(ZeroDivisionError):
    _meet_and_fail(lambda: namespaces.delayed_link(100, rtt_ms))
  assert not _own()


def test_partially_made_namespaces_are_removed(root, monkeypatch, tmp_path):
  (tmp_path / "ip").symlink_to(shutil.which("ip"))  # without tc
  monkeypatch.setenv("PATH", str(tmp_path))
  with (
    pytest.raises(ValueError, match="cannot be shaped here: there is no 'tc'"),
    namespaces.delayed_link(100, 0),
  ):
    pass
  assert not _own()


def test_namespaces_of_a_killed_process_are_removed(root):
  with subprocess.Popen(
    [sys.executable, "-c", "import time\n"
     "from parallel.peers.emulation import namespaces\n"
     "with namespaces.delayed_link(100, 0):\n"
     "  print('made', flush=True)\n"
     "  time.sleep(100)\n"],
    cwd=ROOT, text=True, stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline()
    left = f"shaped{other.pid}n0"
    assert left in _namespaces()
    other.kill()
  end = time.monotonic() + 10
  while left in _namespaces() and time.monotonic() < end:
    time.sleep(0.05)
  assert left not in _namespaces()


@pytest.mark.parametrize(("mbit", "rtt_ms", "mtu", "burst_kb", "latency_ms"), [
  (100, 0, 1500, 64, 50), (101, 0, 9000, 64, 50), (100, 10, 1500, 64, 60),
  (1000, 0, 9000, 250, 50),
])
def test_long_link_has_packets_and_queues_for_its_rate(
  root, mbit, rtt_ms, mtu, burst_kb, latency_ms
):
  """Bursts of a tick of the kernel, and 50 ms more than the round trip."""
  with namespaces.delayed_link(mbit, rtt_ms) as (hosts, prefixes):
    for prefix, host in zip(prefixes, hosts, strict=True):
      def said(*command, prefix=prefix):
        return subprocess.run(
          [*prefix, *command, "dev", "shaped0"], capture_output=True, text=True,
          check=True,
        ).stdout

      assert f" mtu {mtu} " in said("ip", "link", "show")
      assert f"inet {host}/24" in said("ip", "address", "show")
      queue = said("tc", "qdisc", "show")
      assert re.search(
        rf"tbf .*rate {mbit}Mbit burst {burst_kb}Kb lat {latency_ms}ms",
        queue.replace("1Gbit", "1000Mbit").replace(".0ms", "ms"),
      ), queue


def test_star_has_the_rates_and_delays_of_its_links(root):
  links = [OWN, CELL, CELL]
  with namespaces.star(links) as star:
    assert len(star.prefixes) == 3
    with probe(links, star) as peers:
      check_links(peers)
    with namespaces.inside(star.server):
      inner = socket.create_server((star.host, 0))
    with inner, pytest.raises(OSError, match="assign"):
      socket.create_server((star.host, 0))
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  ).stdout
  assert f"shaped{os.getpid()}n" not in listed


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
  found = _classes(namespaces._rate_limit_commands(
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
  text = namespaces._rate_limit_commands(
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


def test_links_that_cannot_be_delayed_are_one_line():
  with (
    processes.Process(processes.module_command(
      "parallel.peers.emulation.wire", "wire", "no_such", "no_such", 0
    )) as wire,
    pytest.raises(ValueError, match=r"delayed here: .*no_such.* /dev/net/tun"),
  ):
    namespaces._wait_until_ready(wire)


# Fixtures and tests of a mesh come last: its namespaces remain until the end.
@pytest.fixture(scope="module")
def rates():
  """Bytes per second, different in each direction; one link is slow."""
  found = 1e6 * np.arange(20, 29).reshape(3, 3)
  found[2, 1] = 1e6
  return found


@pytest.fixture(scope="module")
def delays_s():
  return np.array([[0, 0.01, 0.02], [0.01, 0, 0.03], [0.02, 0.03, 0]])


@pytest.fixture(scope="module")
def mesh(rates, delays_s):
  """Skips the tests if this user cannot shape links."""
  with contextlib.ExitStack() as stack:
    with unavailable.skips():
      made = stack.enter_context(namespaces.mesh(rates, delays_s))
    yield made


def test_links_have_the_delay_of_their_pair(mesh, delays_s):
  with processes.Peers(
    "parallel.peers.emulation.link_probe:Probe",
    [[k] for k in range(3)], mesh.prefixes,
  ) as peers:
    address = peers.do("listen", lambda _: {"host": mesh.hosts[0]}).found[0]
    peers.do("connect", lambda me: {"num": 2} | (
      {"address": address} if me else {}
    ))
    for k in range(2):
      found = peers.do("ping", lambda _, k=k: {"client": k}).found[k + 1]
      assert found >= 2 * delays_s[0, k + 1]


def test_links_have_the_rate_of_their_direction(mesh, rates):
  """A link may send at once what its rate lets pass in a tick of the kernel.

  A slow one may send two packets.
  """
  for i, j in itertools.permutations(range(3), 2):
    listed = subprocess.run(
      [
        "tc", "-n", mesh._names[i], "class", "show", "dev",
        namespaces._pair_device(i, j),
      ],
      check=True,
      capture_output=True,
      text=True,
    ).stdout
    pattern = r"1:1 .* rate (\d+)Mbit ceil (\d+)Mbit burst (\d+)b"
    rate, ceil, burst = map(int, re.search(pattern, listed).groups())
    assert rate == ceil == 8 * rates[i, j] / 1e6
    least = max(2 * 9000, rates[i, j] / _HZ)
    assert least <= burst < 1.05 * least


def test_links_have_large_packets_and_long_queues(mesh):
  listed = subprocess.run(
    ["ip", "-n", mesh._names[0], "link", "show", namespaces._pair_device(0, 1)],
    check=True, capture_output=True, text=True,
  ).stdout
  assert " mtu 9000 " in listed
  assert " qlen 10000" in listed


@contextlib.contextmanager
def _listening(mesh, node):
  """Accepts connections at a node, and yields their address."""
  with namespaces.inside(mesh._names[node]):
    server = socket.create_server((mesh.hosts[node], 0))

  def accept():
    with contextlib.suppress(OSError):
      while True:
        server.accept()[0].close()

  thread = threading.Thread(target=accept)
  thread.start()
  try:
    yield server.getsockname()
  finally:
    server.shutdown(socket.SHUT_RDWR)
    thread.join()
    server.close()


def _connects(mesh, node, address, limit_s=30.0):
  with namespaces.inside(mesh._names[node]):
    sock = socket.socket()
  with sock:
    sock.settimeout(limit_s)
    try:
      sock.connect(address)
    except TimeoutError:
      return False
    return True


@pytest.mark.parametrize("what", ["dials", "all"])
def test_dropped_packets_are_of_one_direction_until_they_are_restored(
  mesh, what
):
  with _listening(mesh, 0) as first, _listening(mesh, 1) as second:
    mesh.drop(0, 1, what)
    assert not _connects(mesh, 0, second, 0.5)
    # "all" includes the replies to the other direction.
    limit_s = 30.0 if what == "dials" else 0.5
    assert _connects(mesh, 1, first, limit_s) == (what == "dials")
    assert _connects(mesh, 2, first)
    assert _connects(mesh, 2, second)
    mesh.restore(0, 1)
    assert _connects(mesh, 0, second)
    assert _connects(mesh, 1, first)
    mesh.restore(0, 1)  # nothing is dropped
