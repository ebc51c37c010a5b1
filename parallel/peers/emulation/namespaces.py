"""Network namespaces with shaped links, for root.

`delayed_link` is one link with a rate (tbf) and a delay. Since the kernel often
lacks netem, a process delays the packets (`parallel.peers.emulation.wire`).
`mesh` has such a link for each pair of namespaces, with a rate for each
direction, and can drop packets of one direction.

`star` has a server and clients whose links differ, as in federated learning: a
rate for each direction, delay, jitter, losses, and radio cells (shared rates).
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import ipaddress
import itertools
import os
import subprocess
from typing import NamedTuple

import numpy as np

from parallel.peers.emulation import processes
from parallel.peers.emulation.wire import enter_namespace
from parallel.plans.hardware.client_links import Link

_DEVICE = "shaped0"
_MTU = 1500
_LONG_MTU = 9000  # fewer packets, each of which a process forwards
_ENDS = ("10.98.76.1", "10.98.76.2")
# Addresses of a star: server, hub, and network of the clients.
_SERVER, _HUB = "10.94.0.1", "10.94.0.2"
_CLIENTS = ipaddress.IPv4Address("10.95.0.0")
_MIN_RTT_S = 1e-3  # of a delayed link: forwarding itself takes time, too
_MAX_PACKET_BYTES = 1 << 16
_BURST_S = 1e-3  # burst size, in seconds of the link's rate


@contextlib.contextmanager
def delayed_link(
  mbit: int, rtt_ms: float
) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
  """Context manager that creates two namespaces with a link between them.

  Args:
    mbit: Rate in each direction, Mbit/s.
    rtt_ms: Added round-trip time, ms.

  Yields:
    Address of each namespace, and prefix of a command that runs in each.

  Raises:
    ValueError: Root, a command or a feature of the kernel is missing.
  """
  with contextlib.ExitStack() as stack:
    names = stack.enter_context(_create_namespaces(2))
    if rtt_ms:
      _wait_until_ready(stack.enter_context(
        _delay_line(_DEVICE, *names, rtt_ms / 2000)
      ))
    else:
      _call(f"ip link add {_DEVICE} netns {names[0]} type veth peer name "
            f"{_DEVICE} netns {names[1]}")
    # Ethernet packets, or jumbo frames at rates too high for the wire process.
    mtu = 1500 if mbit <= 100 else 9000
    burst_kb = max(64, mbit // 4)  # at least rate / HZ
    for name, host in zip(names, _ENDS, strict=True):
      _bring_up_device(name, host, f"mtu {mtu} txqueuelen 10000")
      # The queue holds 50 ms of packets in addition to the round trip.
      _call(f"tc -n {name} qdisc add dev {_DEVICE} root tbf rate {mbit}mbit "
            f"burst {burst_kb}kb latency {50 + rtt_ms}ms")
    yield _ENDS, [_prefix(name) for name in names]


class Mesh:
  """Namespaces with one link for each pair.

  Attributes:
    hosts: Address of each namespace.
    prefixes: For each namespace, the prefix of a command that runs in it.
  """

  def __init__(self, names: Sequence[str]) -> None:
    self.hosts = [f"10.96.0.{i + 1}" for i in range(len(names))]
    # Peers have a higher priority than other processes, which could delay them.
    self.prefixes = [["nice", "-n", "-10", *_prefix(name)] for name in names]
    self._names = names

  def drop(self, source: int, target: int, what: str) -> None:
    """Drops packets from a source to a target; what="all" drops all of them.

    what="dials" drops the first packets of connections, so the source cannot
    connect to the target. Open connections continue, and the target can still
    connect to the source.
    """
    # The flags of the TCP header, after an IP header of 20 bytes: SYN, no ACK.
    match = {"dials": "u8 0x02 0x12 at 33", "all": "u32 0 0"}[what]
    _call(f"{self._filter('add', source, target)} protocol ip u32 match "
          f"{match} flowid 1:2")

  def restore(self, source: int, target: int) -> None:
    """Undoes all calls of `drop` for this source and this target."""
    with contextlib.suppress(ValueError):  # nothing was dropped
      _call(self._filter("delete", source, target))

  def _filter(self, verb: str, source: int, target: int) -> str:
    device = _pair_device(source, target)
    name = self._names[source]
    return f"tc -n {name} filter {verb} dev {device} parent 1: prio 1"


def _pair_device(i: int, j: int) -> str:
  """Returns the name that the device of a pair has in both namespaces."""
  return f"wire{min(i, j)}x{max(i, j)}"


@contextlib.contextmanager
def mesh(rates: np.ndarray, delays_s: np.ndarray) -> Iterator[Mesh]:
  """Context manager that creates namespaces with one link for each pair.

  Args:
    rates: Bytes per second from the row's namespace to the column's,
      ``[N, N]``; the diagonal is not read.
    delays_s: One-way delay of each link in seconds, symmetric ``[N, N]``.

  Raises:
    ValueError: Root, a command or a feature of the kernel is missing.
  """
  count = len(rates)
  with contextlib.ExitStack() as stack:
    names = stack.enter_context(_create_namespaces(count))
    found = Mesh(names)
    for name, host in zip(names, found.hosts, strict=True):
      _call(f"ip -n {name} link set lo up")
      _call(f"ip -n {name} address add {host}/32 dev lo")
    pairs = list(itertools.combinations(range(count), 2))
    wires = [
      stack.enter_context(
        _delay_line(_pair_device(i, j), names[i], names[j], delays_s[i, j])
      )
      for i, j in pairs
    ]
    for (i, j), wire in zip(pairs, wires, strict=True):
      _wait_until_ready(wire)
      for a, b in ((i, j), (j, i)):
        _configure_end(
          names[a], _pair_device(i, j), found.hosts[a], found.hosts[b],
          rates[a, b],
        )
    yield found


def _configure_end(
  name: str, device: str, own: str, other: str, rate: float
) -> None:
  """Configures the address, route and rate at one end of a pair's link.

  ``name`` is the namespace, ``own`` its address, ``other`` that of the other
  end, and ``rate`` in bytes per second.
  """
  burst = max(2 * _LONG_MTU, int(rate / 250))  # at least rate / HZ
  rules = [
    f"qdisc add dev {device} root handle 1: htb default 1",
    f"class add dev {device} parent 1: classid 1:1 htb rate "
    f"{8 * rate:.0f}bit burst {burst}b cburst {burst}b",
    # Packets of this class are dropped.
    f"class add dev {device} parent 1: classid 1:2 htb rate 1mbit",
    f"qdisc add dev {device} parent 1:2 blackhole",
  ]
  _call(f"ip -n {name} link set {device} mtu {_LONG_MTU} txqueuelen 10000 up")
  _call(f"ip -n {name} route add {other}/32 dev {device} src {own}")
  _call(f"tc -n {name} -batch -", "\n".join(rules) + "\n")


class Star(NamedTuple):
  """Namespaces of a server and of its clients.

  Attributes:
    host: Address of the server.
    server: Name of the server's namespace, for `inside`.
    prefixes: For each client, the prefix of a command in its namespace.
  """

  host: str
  server: str
  prefixes: list[list[str]]


@contextlib.contextmanager
def star(links: Sequence[Link]) -> Iterator[Star]:
  """Context manager that creates a server and clients with given links.

  A third namespace, the hub, forwards packets between the clients and the
  server. Rates are limited at both ends of the link between hub and server:
  downlinks in the server's namespace, uplinks in the hub's. A radio cell is one
  class of htb, whose rate its clients share equally while all of them send.
  Queues are long and drop no packet. A link adds no delay if it has a shorter
  round trip than `_MIN_RTT_S`, no jitter and no loss.

  Args:
    links: Link of each client. Clients whose shared links have equal names are
      in one radio cell, and share its rates.

  Raises:
    ValueError: Root, a command or a feature of the kernel is missing.
  """
  hosts = [str(_CLIENTS + 1 + k) for k in range(len(links))]
  with contextlib.ExitStack() as stack:
    server, hub, *names = stack.enter_context(
      _create_namespaces(len(links) + 2)
    )
    _call(f"ip link add {_DEVICE} netns {server} type veth peer name {_DEVICE} "
          f"netns {hub}")
    # Large packets cost less processor time, but each passes without a pause.
    slowest = min(min(link.down, link.up) for link in links)
    size = min(max(_MTU, int(slowest * _BURST_S)), _MAX_PACKET_BYTES)
    options = (
      f"gso_max_segs {size // _MTU} gso_max_size {size} mtu {_MTU} "
      "txqueuelen 10000"
    )
    _bring_up_device(server, _SERVER, options)
    _bring_up_device(hub, _HUB, options)
    _call(f"ip -n {server} route add {_CLIENTS}/16 via {_HUB}")
    _set(hub, "ip_forward", "1")
    wires = {
      k: stack.enter_context(_delay_line(
        f"spoke{k}", hub, name, link.rtt_s / 2, link.jitter_s, link.loss,
        # With losses, each packet has one segment, which is lost by itself.
        int(size > _MTU and not link.loss),
      ))
      for k, (name, link) in enumerate(zip(names, links, strict=True))
      if link.rtt_s >= _MIN_RTT_S or link.jitter_s or link.loss
    }
    for k, (name, host) in enumerate(zip(names, hosts, strict=True)):
      device = f"spoke{k}"
      if k in wires:
        _wait_until_ready(wires[k])
      else:
        _call(f"ip link add {device} netns {hub} type veth peer name {device} "
              f"netns {name}")
      for end in (hub, name):
        _call(f"ip -n {end} link set {device} {options} up")
      _call(f"ip -n {hub} route add {host}/32 dev {device}")
      _call(f"ip -n {name} link set lo up")
      _call(f"ip -n {name} address add {host}/32 dev {device}")
      _call(f"ip -n {name} route add {_HUB}/32 dev {device}")
      _call(f"ip -n {name} route add default via {_HUB}")
    for name in (server, *names):
      # Every Linux kernel has Reno, whose rate has a closed form. Connections
      # do not start with values that earlier ones have measured.
      _set(name, "tcp_congestion_control", "reno")
      _set(name, "tcp_no_metrics_save", "1")
    _call(f"tc -n {server} -batch -", _rate_limit_commands(
      [link.down for link in links], links, [f"dst {host}" for host in hosts]
    ))
    _call(f"tc -n {hub} -batch -", _rate_limit_commands(
      [link.up for link in links], links, [f"src {host}" for host in hosts]
    ))
    yield Star(_SERVER, server, list(map(_prefix, names)))


def _rate_limit_commands(
  rates: Sequence[float], links: Sequence[Link], matches: Sequence[str]
) -> str:
  """Returns tc commands that limit the rates of clients in one direction.

  Args:
    rates: Bytes per second of each client's link in this direction.
    links: Link of each client. Clients whose shared links have equal names are
      in one radio cell, and share its rates.
    matches: For each client, the condition of a packet filter that selects its
      packets, such as "src ADDRESS".
  """
  lines = [f"qdisc add dev {_DEVICE} root handle 1: htb"]
  members = collections.Counter(link.name for link in links if link.shared)
  cells = {name: f"1:{1000 + i}" for i, name in enumerate(members)}
  made = set()
  for k, (rate, link) in enumerate(zip(rates, links, strict=True)):
    burst = max(2 * _MTU, int(rate * _BURST_S))
    limits = f"ceil {8 * rate:.0f}bit burst {burst}b cburst {burst}b"
    parent, share = "1:", rate
    if link.shared:
      parent, share = cells[link.name], rate / members[link.name]
      if parent not in made:
        made.add(parent)
        lines.append(f"class add dev {_DEVICE} parent 1: classid {parent} htb "
                     f"rate {8 * rate:.0f}bit {limits}")
    lines += [
      # Clients that need more than their share divide unused shares equally.
      f"class add dev {_DEVICE} parent {parent} classid 1:{k + 1} htb rate "
      f"{8 * share:.0f}bit {limits} quantum {_MTU}",
      f"filter add dev {_DEVICE} parent 1: protocol ip u32 match ip "
      f"{matches[k]}/32 flowid 1:{k + 1}",
    ]
  return "\n".join(lines) + "\n"


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
  """Context manager in which the thread's new sockets are in a namespace.

  The sockets remain in that namespace after the context.
  """
  with contextlib.ExitStack() as stack:
    # The open file identifies the thread's own namespace, to return to it.
    own = stack.enter_context(open("/proc/thread-self/ns/net"))
    enter_namespace(f"/run/netns/{name}")
    stack.callback(enter_namespace, f"/proc/self/fd/{own.fileno()}")
    yield


@contextlib.contextmanager
def _create_namespaces(count: int) -> Iterator[list[str]]:
  """Context manager that creates namespaces and deletes them at its end."""
  names = [f"shaped{os.getpid()}n{i}" for i in range(count)]
  with processes.run_at_exit('for n; do ip netns delete "$n"; done', *names):
    for name in names:
      _call(f"ip netns add {name}")
    yield names


def _delay_line(device: str, *arguments: object) -> processes.Process:
  """Starts a process of `emulation.wire`, which delays packets of a link."""
  return processes.Process(["nice", "-n", "-15", *processes.module_command(
    "parallel.peers.emulation.wire", device, *arguments
  )])


def _wait_until_ready(wire: processes.Process) -> None:
  """Waits until a process of `_delay_line` has created its devices.

  Raises:
    ValueError: The devices cannot be created.
  """
  if (found := wire.answer()) != "ready":
    raise ValueError(
      f"links cannot be delayed here: {found or 'a process has ended'}; this "
      "needs root and /dev/net/tun"
    )


def _set(name: str, key: str, value: str) -> None:
  """Sets an IPv4 kernel parameter (sysctl) of a namespace."""
  _call(f"ip netns exec {name} tee /proc/sys/net/ipv4/{key}", value)


def _prefix(name: str) -> list[str]:
  return ["ip", "netns", "exec", name]


def _bring_up_device(name: str, host: str, options: str) -> None:
  """Sets the address of a namespace's ``_DEVICE``, and brings it up."""
  _call(f"ip -n {name} address add {host}/24 dev {_DEVICE}")
  _call(f"ip -n {name} link set lo up")
  _call(f"ip -n {name} link set {_DEVICE} {options} up")


def _call(text: str, given: str = "") -> str:
  """Runs the command ``text``, ``given`` on its stdin; returns its stdout."""
  try:
    return subprocess.run(
      text.split(), check=True, capture_output=True, text=True, input=given
    ).stdout
  except FileNotFoundError as error:
    raise ValueError(
      f"links cannot be shaped here: there is no {text.split()[0]!r} (iproute2)"
    ) from error
  except subprocess.CalledProcessError as error:
    why = (error.stderr or error.stdout).strip().splitlines() or ["no reason"]
    raise ValueError(
      f"links cannot be shaped here: {text!r} says {why[-1]!r}; this needs "
      "root and a kernel with namespaces, tbf, htb and u32"
    ) from error
