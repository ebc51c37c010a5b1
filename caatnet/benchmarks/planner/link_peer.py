"""Process that measures its links to others, and its concurrent compute rate.

Pairs are measured in rounds. In each round every process exchanges messages
with one other (`parallel.peers.ring.bandwidth.rounds`), in both directions at
once. A message is a gather of two, which its receiver opens first; so a latency
includes the protocol of `parallel.peers`.
"""

import os
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.elastic.ring_peer import LIMIT_S, SECURITY
from parallel.peers.ring import link_collectives
from parallel.peers.ring.bandwidth import rounds
from parallel.peers.transport.links import Links
from parallel.peers.transport.listener import Listener

_TIMES = 7  # messages of a size, of which the fastest third is averaged


def measured(
  links: Links, sizes: list[int]
) -> dict[str, list[tuple[int, float]]]:
  """Measures all pairs; all members call this at the same time.

  Args:
    links: Links between all members.
    sizes: Bytes of messages.

  Returns:
    For each other member, (size, seconds) of messages from there to here.
  """
  members = links.members
  me = members.index(links.me)
  found: dict[str, list[tuple[int, float]]] = {}
  for pairs in rounds(len(members)):
    pair = next((p for p in pairs if me in p), None)
    if pair is not None:
      names = [members[i] for i in pair]
      other = names[pair[0] == me]
      found[other] = [(n, _seconds(links, names, n)) for n in sizes]
    _meet(links)  # all begin the next round together
  return found


def _meet(links: Links) -> None:
  link_collectives.gather(links, 1, b"").result(LIMIT_S)


def _seconds(links: Links, pair: list[str], size: int) -> float:
  """Returns the seconds of a message: the mean of the fastest third."""
  data, times = np.zeros(size, np.uint8), []
  for _ in range(_TIMES):
    # Synchronises the pair, so that both directions start together.
    link_collectives.gather(links, 0, b"", ranks=pair).result(LIMIT_S)
    start = time.perf_counter()
    link_collectives.gather(links, 0, data, ranks=pair).result(LIMIT_S)
    times.append(time.perf_counter() - start)
  return float(np.mean(sorted(times)[: _TIMES // 3]))


def computed(min_s: float = 0.3) -> dict[str, float]:
  """Measures float32 products and copies while all other processes do too."""
  x = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
  big = np.zeros(1 << 23, np.float32)
  out, found = np.empty_like(big), {}
  for key, work, amount in (
    ("flops", lambda: x @ x, 2.0 * 512**3),
    ("memory_bandwidth", lambda: np.copyto(out, big), 2.0 * big.nbytes),
  ):
    work()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < min_s:
      work()
      count += 1
    found[key] = count * amount / (time.perf_counter() - start)
  pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return found | {"memory_bytes": float(pages)}


class Peer:
  """Orders that a process executes."""

  def __init__(self, me: str, host: str) -> None:
    self._me, self._listener = me, Listener(me, SECURITY, (host, 0))
    self._links: Links | None = None

  def address(self) -> tuple[str, int]:
    """Returns the address on which it listens."""
    return self._listener.address

  def measure(
    self, members: dict[str, Any], sizes: list[int]
  ) -> dict[str, Any]:
    """Measures together with all others; returns "device" and "links"."""
    links = self._links = Links(
      self._me, 1, {name: tuple(a) for name, a in members.items()}, SECURITY
    ).connect(self._listener, LIMIT_S)
    _meet(links)
    device = computed()
    _meet(links)
    return {"device": device, "links": measured(links, sizes)}

  def close(self) -> None:
    """Closes the links, after all others have measured."""
    self._links.close()
