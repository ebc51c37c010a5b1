"""Attacks on the transport: untrusted input is refused, members continue."""

import contextlib
import logging
import os
import random
import shutil
import socket
import time

import pytest

from parallel.peers.membership import messages as m
from parallel.peers.ring import link_collectives
from parallel.peers.transport import frames, handshake
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import (
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
)
from parallel.peers.transport.links import LinkOptions, Links
from parallel.peers.transport.listener import AcceptRule, Limits, Listener
from parallel.peers.transport.transfers import LinksLost, UnreachableError
from tests.parallel.peers.worlds import (
  FUZZED,
  ORDERS,
  PATIENCE_S,
  SECURITY,
  arrays,
  certificates,
  connected,
  listeners,
  spoilt,
  together,
  world,
)

ALL = (*frames.PEER_MESSAGES, *frames.COORDINATOR_MESSAGES, m.Record)
EXAMPLES = [
  m.Vote(3, 2, "ab" * 32), m.Vote(3, 2, None), m.Prepared(1), m.Leave(),
  m.Hello(1, 2, "", m.Vote(1, 2, "00")), m.Hello(0, 0, "", None),
  m.Unreachable(7, ("17-ab", "18-cd")), m.Ready(2**63 - 1, 0),
  m.Prepare(3, ("a", "b"), 1, 2, "ff", (), False), m.Go(1, 2, "", ("a",)),
  m.Start(1, 2, tuple(f"p{i}" for i in range(1024))), m.Record(),
  m.Report(4, 2**40, 0.25), m.Report(4, 0, None), m.Stop("as asked"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_message_round_trips_through_its_bytes(message):
  assert frames.decode(frames.encode(message), ALL) == message


def test_number_of_items_is_limited_on_both_sides(monkeypatch):
  message = m.Start(1, 2, tuple(f"p{i}" for i in range(1025)))
  with pytest.raises(FrameError, match="at most 1024 items"):
    frames.encode(message)
  with monkeypatch.context() as patched:
    patched.setattr(frames, "MAX_ITEMS", 1025)
    data = frames.encode(message)
  with pytest.raises(FrameError, match="1025 items; at most 1024 are"):
    frames.decode(data, ALL)


@pytest.mark.parametrize(
  "message",
  [m.Ready(-1, 0), m.Ready(2**63, 0), m.Ready(True, 0), m.Ready("1", 0),
   m.Vote(1, 1, "xy"), m.Vote(1, 1, "a"), m.Go(1, 1, "", ("a b",)),
   m.Go(1, 1, "", ["a"]), m.Go(1, 1, "", ("",)), m.Hello(1, 1, "", (1, 1, "")),
   m.Start(1, 2, ("p",) * 1025)],
)
def test_encode_refuses_fields_of_wrong_types(message):
  with pytest.raises(FrameError):
    frames.encode(message)


def test_messages_of_coordinator_and_host_are_refused_from_a_peer():
  for message in (m.Go(1, 1, "", ()), m.Silent("p1"), m.Halt()):
    with pytest.raises(FrameError, match="not expected here"):
      frames.decode(frames.encode(message), frames.PEER_MESSAGES)


def test_fuzzed_messages_decode_or_raise_frame_error():
  rng, wrong = random.Random(0), 0
  good = [frames.encode(x) for x in EXAMPLES if len(frames.encode(x)) < 999]
  for _ in range(FUZZED):
    data = spoilt(rng, rng.choice(good))
    try:
      found = frames.decode(data, ALL)
    except FrameError:
      wrong += 1
    else:  # a decoded message has exactly one encoding
      assert frames.decode(frames.encode(found), ALL) == found
  assert wrong > FUZZED / 2


def test_fuzzed_frames_raise_only_frame_error():
  rng = random.Random(1)
  for _ in range(FUZZED):
    kind = rng.choice(list(Kind))
    length = rng.choice((0, 1, frames.MAX_PAYLOAD_BYTES[kind], 2**32 - 1))
    head = Header(kind, length, rng.randrange(2**64), 7, 9, None).pack()
    if length <= frames.MAX_PAYLOAD_BYTES[kind]:
      assert frames.unpack(head).length == length
    else:
      with pytest.raises(FrameError, match="announces"):
        frames.unpack(head)
    wrong = spoilt(rng, head)
    if wrong != head:
      with pytest.raises(FrameError):
        frames.unpack(wrong)


def _member(there, connection, epoch=1, name="p2", limit_s=PATIENCE_S):
  """Returns a connection that is authenticated with the token."""
  return handshake.dial(
    there["p0"].address,
    DialRequest(Purpose.DATA, connection, epoch, name, "p0"),
    SECURITY, SocketGroup(), limit_s,
  )


def _garbage(sock):
  sock.sendall(os.urandom(4096))


def _huge(sock):
  frames_head = Header(Kind.DATA, 2**31 - 1).pack()
  sock.sendall(frames_head)


def _wrong_checksum(sock):
  frames.send(sock, Header(Kind.OPEN, tag=1), bytes(32), checked=True)
  head = Header(Kind.ABORT, 8, crc=1).pack()
  sock.sendall(head + bytes(8))


def _not_opened(sock):
  frames.send(sock, Header(Kind.DATA, tag=77), bytes(64))


@pytest.mark.parametrize(
  ("connection", "attack", "seen"),
  [(1, _garbage, "begins with"), (1, _huge, "announces"),
   (0, _wrong_checksum, "checksum"), (1, _not_opened, "not open here")],
)
def test_member_that_sends_invalid_data_is_named(connection, attack, seen):
  with listeners(2) as there:
    members = {n: x.address for n, x in there.items()}
    with Listener("p2", SECURITY) as third:
      members["p2"] = third.address
      links = [Links(n, 1, members, SECURITY) for n in there]
      third.serve(Purpose.DATA, AcceptRule(
        1, frozenset(there),
        lambda sock, _: [*iter(lambda: sock.recv(4096), b"")],  # reads all
      ))

      def third_peer():
        for name in there:
          for k in range(2):
            sock = handshake.dial(
              there[name].address, DialRequest(Purpose.DATA, k, 1, "p2", name),
              SECURITY, SocketGroup(), PATIENCE_S,
            )
            kept.append(sock)
            if (name, k) == ("p0", connection):
              mine.append(sock)

      kept, mine = [], []
      together([third_peer] + [
        lambda x=x: x.connect(there[x.me], PATIENCE_S) for x in links
      ])
      operations = [
        link_collectives.all_reduce(x, 5, arrays(1, 9)[0]) for x in links
      ]
      attack(mine[0])  # p0 detects it and reports it to p1
      for operation in operations:
        with pytest.raises(LinksLost, match=seen) as caught:
          operation.result(PATIENCE_S)
        assert (caught.value.peer, caught.value.tag) == ("p2", 5)
      for x in links:
        x.close()
      for sock in kept:
        sock.close()


def _refused(address, say=b""):
  """Returns True once the listener has closed the connection."""
  with contextlib.suppress(ConnectionError), socket.create_connection(
    address, 5
  ) as sock:
    if say:
      sock.sendall(say)
    while sock.recv(4096):
      pass
  return True


def test_unauthenticated_connections_are_refused_and_members_continue(caplog):
  """Covers no token, a wrong one, garbage, slow sends and 300 connections."""
  limits = Limits(handshake_s=0.5, handshakes=16, lines_per_s=5)
  xs = arrays(2, 2000)
  with caplog.at_level(logging.WARNING), listeners(2, limits=limits) as there:
    links = connected(there)
    address = there["p0"].address
    with (
      socket.create_connection(address) as sock,
      pytest.raises(ConnectionError, match="another token"),
    ):
      handshake._run_handshake(
        handshake.HandshakeSocket(sock, PATIENCE_S),
        DialRequest(Purpose.DATA, 0, 1, "p1", "p0"),
        Security(b"another token of a run"),
      )
    assert _refused(address, os.urandom(1000))
    assert _refused(address, Header(Kind.DATA, 2**31 - 1).pack() * 10)
    assert _refused(address)  # sends nothing
    with contextlib.ExitStack() as stack:
      crowd = [
        stack.enter_context(socket.create_connection(address, 5))
        for _ in range(300)
      ]
      for _ in range(5):  # sends one byte at a time
        for sock in crowd:
          with contextlib.suppress(OSError):
            sock.send(b"x")
        operations = [
          link_collectives.all_reduce(x, 1, v) for x, v in zip(links, xs,
                                                           strict=True)
        ]
        for operation in operations:
          assert operation.result(PATIENCE_S).tobytes() == ORDERS["direct"](
            xs
          ).tobytes()
      # A joining peer connects despite the crowd.
      again = connected(there, epoch=2)
      end = time.monotonic() + PATIENCE_S
      while there["p0"].refused < 300 and time.monotonic() < end:
        time.sleep(0.05)
    refused = there["p0"].refused
    for x in (*links, *again):
      x.close()
  assert refused >= 300
  lines = [r for r in caplog.records if "refused" in r.getMessage()]
  assert 1 < len(lines) < 60
  assert SECURITY.token.decode() not in caplog.text


class _Tap(socket.socket):
  """Socket that records the bytes sent through it."""

  said = b""

  def sendall(self, data, *args):
    type(self).said += bytes(data)
    return super().sendall(data, *args)


def test_replayed_handshake_is_refused(monkeypatch):
  accepted = []
  with listeners(1) as there:
    there["p0"].serve(Purpose.DATA, AcceptRule(
      1, frozenset({"p2"}), lambda sock, request: accepted.append(request)
    ))
    with monkeypatch.context() as patched:
      patched.setattr(handshake.socket, "socket", _Tap)
      member = _member(there, 0)
      # A connection that closes immediately may not be accepted.
      _wait(lambda: accepted)
      member.close()
    # The tap records both sides: the listener's nonce, the dialer's hello, and
    # the response.
    assert SECURITY.token not in _Tap.said
    dialer = _Tap.said[handshake.OPENING.size :][: handshake.HANDSHAKE_BYTES]
    assert b"p2" in dialer
    assert _refused(there["p0"].address, dialer)
    _wait(lambda: there["p0"].refused)
    assert (len(accepted), there["p0"].refused) == (1, 1)


def _wait(condition):
  end = time.monotonic() + PATIENCE_S
  while not condition() and time.monotonic() < end:
    time.sleep(0.01)


def test_connection_of_another_epoch_is_refused():
  with listeners(1) as there:
    there["p0"].serve(
      Purpose.DATA, AcceptRule(5, frozenset({"p2"}), lambda *_: None)
    )
    for epoch, name, why in ((4, "p2", "STALE"), (5, "p9", "NOT_MEMBER")):
      with pytest.raises(handshake.Refused, match=why):
        _member(there, 0, epoch, name)
    start = time.monotonic()
    with pytest.raises(handshake.Refused, match="has not entered epoch 6"):
      _member(there, 0, 6, limit_s=2)
    assert time.monotonic() - start > 1  # the epoch may still begin


def test_connections_beyond_the_limit_are_refused_until_one_ends(caplog):
  with listeners(1, limits=Limits(connections=2)) as there:
    there["p0"].serve(Purpose.DATA, AcceptRule(
      1, frozenset({"p2"}), lambda sock, _: sock.recv(1)
    ))
    first, second = _member(there, 1), _member(there, 2)
    with (
      caplog.at_level(logging.WARNING),
      pytest.raises(handshake.Refused, match="FULL"),
    ):
      _member(there, 3)
    first.close()
    end = time.monotonic() + PATIENCE_S
    while there["p0"]._accepted > 1:
      assert time.monotonic() < end
      time.sleep(0.01)
    _member(there, 3).close()
    second.close()
  assert len(caplog.records) == 1


def test_unreachable_members_are_named():
  """One member has another token, and one does not exist."""
  with listeners(1) as there, Listener(
    "p1", Security(b"another token of a run")
  ) as other:
    members = {
      "p0": there["p0"].address, "p1": other.address, "p2": ("127.0.0.1", 1),
    }
    with pytest.raises(UnreachableError, match="another token") as caught:
      Links("p0", 1, members, SECURITY).connect(there["p0"], 2)
    assert set(caught.value.peers) == {"p1", "p2"}


def test_short_token_is_refused():
  with pytest.raises(ValueError, match="at least 16"):
    Security(b"secret")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_tls_keeps_sums_and_refuses_unsigned_certificates(tmp_path):
  security, stranger = certificates(tmp_path)
  xs = arrays(3, 50_001)
  with listeners(3, security) as there:
    links = connected(there, LinkOptions(num_connections=2), security=security)
    operations = [
      link_collectives.all_reduce(x, 0, v, order="ring")
      for x, v in zip(links, xs, strict=True)
    ]
    for operation in operations:
      found = operation.result(PATIENCE_S)
      assert found.tobytes() == ORDERS["ring"](xs).tobytes()
    for wrong in (stranger, SECURITY):
      with pytest.raises(OSError):
        handshake.dial(
          there["p0"].address, DialRequest(Purpose.DATA, 0, 1, "p1", "p0"),
          wrong, SocketGroup(), 0.3,
        )
    for x in links:
      x.close()


def test_closed_world_ends_at_once():
  with world(2) as links:
    operation = link_collectives.all_reduce(links[0], 0, arrays(1, 99)[0])
    links[0].close()
    with pytest.raises(LinksLost, match="closed"):
      operation.result(PATIENCE_S)
