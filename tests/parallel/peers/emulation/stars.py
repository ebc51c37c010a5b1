"""Links of a server and three clients, and processes at their ends."""

import contextlib
import dataclasses

from parallel.peers.emulation import processes, relay
from parallel.plans.hardware.client_links import Link

OWN = Link("own", 2e6, 1e6, 0.01, 0.0, 0.0, 0.0, False, "the tests")
CELL = dataclasses.replace(OWN, name="cell", down=1e6, shared=True, rtt_s=0.0)


@contextlib.contextmanager
def probe(links, star=None):
  """Peers at the ends of a star's links, or of a relay's; 0 is the server."""
  prefixes, host = [[]] * (len(links) + 1), "127.0.0.1"
  if star is not None:
    host = star.host
    prefixes = [["ip", "netns", "exec", star.server], *star.prefixes]
  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(processes.Peers(
      "parallel.peers.emulation.link_probe:Probe",
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


def check_links(peers):
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
