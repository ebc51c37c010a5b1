"""Mesh of namespaces: delays and rates of its links, and dropped packets."""

import contextlib
import itertools
import re
import socket
import subprocess
import threading

import numpy as np
import pytest

from caatnet.benchmarks.harness import namespaces, processes
from tests.caatnet.benchmarks import unavailable

_HZ = 250  # ticks of common kernels per second


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
    try:
      yield stack.enter_context(namespaces.mesh(rates, delays_s))
    except ValueError as error:
      unavailable.skip(error)


def test_links_have_the_delay_of_their_pair(mesh, delays_s):
  with processes.Peers(
    "caatnet.benchmarks.federated.link_probe:Probe",
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
      ["tc", "-n", mesh._names[i], "class", "show", "dev",
       namespaces._wire(i, j)], check=True, capture_output=True, text=True,
    ).stdout
    pattern = r"1:1 .* rate (\d+)Mbit ceil (\d+)Mbit burst (\d+)b"
    rate, ceil, burst = map(int, re.search(pattern, listed).groups())
    assert rate == ceil == 8 * rates[i, j] / 1e6
    least = max(2 * 9000, rates[i, j] / _HZ)
    assert least <= burst < 1.05 * least


def test_rates_of_a_namespace_are_those_to_the_others():
  text = namespaces._rules(1e6 * np.arange(1, 4), 1, ["a", "b", "c"])
  assert re.findall(r"classid (\S+) htb rate (\d+)bit", text) == [
    ("1:1", "8000000"), ("1:3", "24000000")
  ]
  assert re.findall(r"ip dst (\S+)/32 flowid (\S+)", text) == [
    ("a", "1:1"), ("c", "1:3")
  ]


def test_links_have_large_packets_and_long_queues(mesh):
  listed = subprocess.run(
    ["ip", "-n", mesh._names[0], "link", "show", namespaces._wire(0, 1)],
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
