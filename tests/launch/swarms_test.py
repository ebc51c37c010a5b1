"""Flags of scripts that join a swarm."""

import threading
import time

from absl.testing import flagsaver
import pytest

from launch import options, swarms
from parallel.elastic.membership.journal import Journal
from parallel.elastic.membership.service import Service
from parallel.elastic.transport import handshake
from tests.parallel.elastic.worlds import PATIENCE_S, SECURITY, Relay

SLOW_S = 0.2


class Slow(Relay):
  """Relay that delivers the coordinator's data late."""

  def _forward(self, source, target):
    if target.getsockname()[:2] == self.address:
      time.sleep(SLOW_S)
    super()._forward(source, target)


@pytest.fixture
def flags(monkeypatch):
  monkeypatch.setenv("ELASTIC_TOKEN", SECURITY.token.decode())
  if not options.FLAGS.is_parsed():
    options.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver():
    yield swarms.FLAGS


def test_coordinator_with_a_slow_handshake_is_found(
  flags, monkeypatch, tmp_path
):
  """A machine is busy, or a link has a long delay."""
  monkeypatch.setattr(swarms, "_REFUSED_S", SLOW_S / 4)
  monkeypatch.setattr(swarms, "_SLOW_S", float(PATIENCE_S))
  there = Service(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    say=lambda _: None,
  )
  thread = threading.Thread(target=there.serve, daemon=True)
  thread.start()
  relay = Slow(there.address, 1e9)
  flags.elastic = "{}:{}".format(*relay.address)
  found = swarms.place()
  assert found.coordinator == relay.address
  assert found.security.token == SECURITY.token
  assert found.listen == ("127.0.0.1", 0)
  relay.close()
  there.close()
  thread.join(PATIENCE_S)


def test_refused_connection_is_reported_after_the_short_limit(flags, monkeypatch):
  monkeypatch.setattr(swarms, "_REFUSED_S", 0.05)
  monkeypatch.setattr(swarms, "_SLOW_S", 0.1)
  limits = []
  dial = handshake.dial
  monkeypatch.setattr(
    handshake, "dial", lambda *args: limits.append(args[-1]) or dial(*args)
  )
  flags.elastic = "127.0.0.1:1"
  with pytest.raises(ValueError, match="no coordinator there accepts"):
    swarms.place()
  assert limits == [0.05]
