"""Network namespaces with a rate for each pair and direction, for root.

All namespaces are on one bridge. In each, the kernel holds what goes to every
other one to a rate of its own (htb, by the address it goes to). Nothing is
delayed; a message's latency is that of the kernel and of who reads it.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import subprocess

import numpy as np

_DEVICE = "shaped0"
_MTU, _BURST = 1500, "1600b"  # after a rest only a packet passes at once


@contextlib.contextmanager
def namespaces(
  rates: np.ndarray,
) -> Iterator[tuple[list[str], list[list[str]]]]:
  """Namespaces whose links have these rates.

  Args:
    rates: Bytes per second from each to each other one, ``[N, N]``; the
      diagonal is not read.

  Yields:
    Their addresses, and what to put before a command to run it in each.

  Raises:
    ValueError: This machine, or this user, can make no namespaces.
  """
  count = len(rates)
  names = [f"shaped{os.getpid()}n{i}" for i in range(count)]
  bridge = f"shaped{os.getpid()}b"
  hosts = [f"10.97.0.{i + 1}" for i in range(count)]
  _clear()
  try:
    for name in (bridge, *names):
      _call(f"ip netns add {name}")
    _call(f"ip -n {bridge} link add {_DEVICE} type bridge")
    _call(f"ip -n {bridge} link set {_DEVICE} up")
    for i, (name, host) in enumerate(zip(names, hosts, strict=True)):
      _call(f"ip link add {_DEVICE} netns {name} type veth peer name port{i} "
            f"netns {bridge}")
      _call(f"ip -n {bridge} link set port{i} master {_DEVICE} mtu {_MTU} up")
      _call(f"ip -n {name} address add {host}/24 dev {_DEVICE}")
      _call(f"ip -n {name} link set lo up")
      # Without this a packet is as long as 64 KB here, and passes as a whole.
      _call(f"ip -n {name} link set {_DEVICE} gso_max_segs 1 gso_max_size "
            f"{_MTU} mtu {_MTU} up")
      _call(f"tc -n {name} -batch -", _rules(rates[i], i, hosts))
    # Before others of this machine, so that these do not decide who is late.
    yield hosts, [
      ["nice", "-n", "-10", "ip", "netns", "exec", name] for name in names
    ]
  finally:
    for name in (*names, bridge):
      with contextlib.suppress(ValueError):
        _call(f"ip netns delete {name}")


def _clear() -> None:
  """Deletes what processes that were killed have left."""
  for line in _call("ip netns list").splitlines():
    found = re.match(r"shaped(\d+)(b|n\d+)\b", line)
    if found and not pathlib.Path(f"/proc/{found[1]}").exists():
      _call(f"ip netns delete {found[0]}")


def _rules(rates: np.ndarray, own: int, hosts: list[str]) -> str:
  """Returns what tc is told for one namespace."""
  lines = [f"qdisc add dev {_DEVICE} root handle 1: htb"]
  for j, host in enumerate(hosts):
    if j != own:
      lines += [
        f"class add dev {_DEVICE} parent 1: classid 1:{j + 1} htb rate "
        f"{8 * rates[j]:.0f}bit burst {_BURST} cburst {_BURST}",
        f"filter add dev {_DEVICE} parent 1: protocol ip u32 match ip dst "
        f"{host}/32 flowid 1:{j + 1}",
      ]
  return "\n".join(lines) + "\n"


def _call(text: str, told: str = "") -> str:
  """Runs a command, tells it something, and returns what it says."""
  try:
    return subprocess.run(
      text.split(), check=True, capture_output=True, text=True, input=told
    ).stdout
  except FileNotFoundError as error:
    raise ValueError(
      f"links cannot be shaped here: there is no {text.split()[0]!r} (iproute2)"
    ) from error
  except subprocess.CalledProcessError as error:
    why = (error.stderr or error.stdout).strip().splitlines() or ["no reason"]
    raise ValueError(
      f"links cannot be shaped here: {text!r} says {why[-1]!r}; it takes root "
      "and a kernel with namespaces, htb and u32"
    ) from error
