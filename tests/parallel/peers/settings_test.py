"""Settings and their ranges, and what a service and its peers wait for."""

import math
import socket

import pytest

from parallel.peers.membership import ids
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import Rules
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService, Timing
from parallel.peers.membership.world import FaultBudget
from parallel.peers.settings import LinkOptions, PeerSettings
from parallel.peers.timeouts import AdmissionTimeout, PeerHalted, RunFinished
from parallel.peers.transport.frames import Header, Kind
from parallel.peers.transport.listener import Limits
from tests.parallel.peers.worlds import SECURITY

pytestmark = pytest.mark.quick


def test_defaults():
  """A peer alone needs no settings; all sides agree on 10 s of silence."""
  assert PeerSettings() == PeerSettings(
    alone_s=300, num_connections=1, checked=False, samples=0, measured=False,
    rounds=0, listen=("127.0.0.1", 0), advertise=None,
  )
  assert LinkOptions() == LinkOptions(
    num_connections=1, silence_s=10, checked=False, send_buffer=0
  )
  assert Limits() == Limits(
    connections=1024, handshakes=32, handshake_s=5, lines_per_s=5
  )
  assert Timing() == Timing(
    silence_s=10, reconnect_s=2, grace_s=10, recover_s=30, handshake_s=5,
    check_s=5,
  )
  assert Rules() == (1, 0)
  assert not any(FaultBudget())
  assert Header(Kind.DATA) == (Kind.DATA, 0, 0, 0, 0, None)
  assert m.Record() == (0, (), 0, 0, "")


@pytest.mark.parametrize(("made", "message"), [
  (lambda: PeerSettings(alone_s=0), "alone_s=0 must be positive"),
  (lambda: PeerSettings(alone_s=math.nan), "alone_s=nan must be positive"),
  (lambda: PeerSettings(samples=-1), "samples=-1 must not be negative"),
  *(
    (lambda port=port: PeerSettings(advertise=("h", port)),
     "must have a port from 1 to 65535")
    for port in (0, 65536)
  ),
  (lambda: LinkOptions(num_connections=0), "from 1 to 64"),
  (lambda: LinkOptions(num_connections=65), "num_connections=65 must be"),
  (lambda: LinkOptions(silence_s=0), "silence_s=0 must be positive"),
  *(
    (lambda name=name: Timing(**{name: 0}), f"{name}=0 must be positive")
    for name in (
      "silence_s", "reconnect_s", "grace_s", "recover_s", "handshake_s",
      "check_s",
    )
  ),
  (lambda: ids.make(("two words", 1)), "at most 40 characters"),
  (lambda: ids.make(("h" * 64, 1)), "use its IP address instead"),
  (lambda: ids.address("a:1"), "'a:1' is not a peer id"),
  (lambda: ids.address(ids.make(("h", 0))), "is not a peer id"),
  (lambda: ids.address(ids.make(("h", 65536))), "is not a peer id"),
])
def test_values_out_of_range_are_refused(made, message):
  with pytest.raises(ValueError, match=message):
    made()


def test_values_at_the_ends_of_their_ranges_are_accepted():
  assert PeerSettings(samples=0).num_samples(7) == 0
  assert PeerSettings(samples=5).num_samples(7) == 5
  assert PeerSettings(samples=lambda number: 2 * number).num_samples(7) == 14
  for count in (1, 64):
    assert LinkOptions(num_connections=count).num_connections == count
  for port in (1, 65535):
    assert ids.address(ids.make(("h", port))) == ("h", port)
    assert PeerSettings(advertise=("h", port)).advertise == ("h", port)
  assert len(ids.make(("h" * 40, 65535))) <= 84


def test_later_ids_are_higher():
  first, second = ids.make(("z", 1)), None
  while second is None or second[:12] == first[:12]:  # until the next ms
    second = ids.make(("a", 1))
  assert first < second
  assert abs(int(first[:12], 16) - int(second[:12], 16)) < 60_000


@pytest.mark.parametrize(("least", "max_peers", "fits"), [
  (1, 1, True), (2, 2, True), (1, 1024, True), (0, 1, False), (3, 2, False),
  (1, 1025, False),
])
def test_service_needs_room_for_its_first_epoch(
  tmp_path, least, max_peers, fits
):
  def made():
    with Journal(tmp_path / "journal") as journal, CoordinatorService(
      ("127.0.0.1", 0), SECURITY, journal, rules=Rules(least),
      max_peers=max_peers, say=str,
    ) as there:
      return there.address

  if fits:
    assert made()[1] > 0
    return
  with pytest.raises(ValueError, match=f"least={least} must be from 1 to max"):
    made()


def test_service_names_an_address_in_use(tmp_path):
  with (
    socket.create_server(("127.0.0.1", 0)) as other,
    Journal(tmp_path / "journal") as journal,
    pytest.raises(ValueError, match=r"cannot listen at 127.0.0.1:\d+: "),
  ):
    CoordinatorService(other.getsockname(), SECURITY, journal)


def _waiting(revision, lost, text="waits"):
  return m.Waiting(revision, lost, text)


def test_peer_waits_for_a_holder_as_long_as_for_a_coordinator():
  lines = []
  patient = AdmissionTimeout(PeerSettings(alone_s=1e6), lines.append)
  brief = AdmissionTimeout(PeerSettings(alone_s=1e-9), lines.append)
  for timeout in (patient, brief):
    # The time starts with the first message, and again after a holder came.
    for lost in (True, False, True, False, True):
      assert timeout.update(_waiting(4, lost)) is None
  assert patient.update(_waiting(4, True)) is None
  error = brief.update(_waiting(4, True))
  assert isinstance(error, PeerHalted)
  assert "no peer has connected that holds revision 4" in str(error)
  assert lines == ["the coordinator waits"] * 2
  patient.update(_waiting(4, True, "starts"))
  assert lines[2:] == ["the coordinator starts"]


@pytest.mark.parametrize(("rounds", "revision", "ended"), [
  (3, 2, False), (3, 3, True), (3, 4, True), (0, 0, False), (0, 9, False),
  (1, 1, True),
])
def test_peer_that_is_late_ends_after_the_last_round(rounds, revision, ended):
  timeout = AdmissionTimeout(PeerSettings(rounds=rounds), str)
  error = timeout.update(_waiting(revision, False))
  assert isinstance(error, RunFinished) == ended
  assert (error is None) != ended
