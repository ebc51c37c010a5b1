"""Attacks on a training swarm: each logs one line, and rounds continue.

Tables hold the input of unauthenticated clients and of members with the token.
"""

import contextlib
import dataclasses
import logging
import os
import random
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from parallel.peers.agent import PeerSettings
from parallel.peers.membership import ids, reachability, service
from parallel.peers.membership import messages as m
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService, Timing
from parallel.peers.swarm import Swarm
from parallel.peers.transport import frames, handshake
from parallel.peers.transport.frames import Header, Kind
from parallel.peers.transport.handshake import (
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
)
from parallel.peers.transport.identity import Identity, fingerprint
from parallel.peers.transport.listener import AcceptRule, Limits, Listener
from tests.parallel.peers.worlds import (
  FUZZED,
  PATIENCE_S,
  SECURITY,
  Relay,
  spoilt,
  together,
)

CROWD = 1000


def _start():
  return {"x": np.zeros(300_000, np.float32), "same": np.arange(5)}


def _step(exchange, state, part):
  return {**state, "x": state["x"] + exchange.mean(part)}


class _Member:
  """Peer in threads of this process that contributes until `end`."""

  def __init__(self, there, combine=_step, **settings):
    self.said = []
    self.swarm = Swarm(
      there.address, SECURITY, _start(),
      settings=PeerSettings(alone_s=PATIENCE_S, **settings),
      say=self.said.append,
    )
    self._combine, self._ending = combine, threading.Event()
    self.error = None
    self._thread = threading.Thread(target=self._train, daemon=True)
    self._thread.start()

  def _train(self):
    try:
      with self.swarm:
        while not self._ending.wait(0.02):
          self.swarm.give(np.ones(300_000, np.float32), self._combine)
    except Exception as error:
      self.error = error

  def end(self):
    self._ending.set()
    self._thread.join(PATIENCE_S)


class _Trained:
  """Coordinator and two members, with the log lines of all of them."""

  def __init__(self, folder, caplog, handshake_s):
    self._said, self._caplog = [], caplog
    self.there = CoordinatorService(
      ("127.0.0.1", 0), SECURITY, Journal(folder / "journal"),
      timing=Timing(
        silence_s=60, reconnect_s=0.5, handshake_s=handshake_s, check_s=0.5
      ),
      say=self._said.append,
    )
    threading.Thread(target=self.there.serve, daemon=True).start()
    self.members = [_Member(self.there), _Member(self.there)]
    self.until(lambda: self.revision > 1 and len(self.record.members) == 2)

  @property
  def record(self):
    return self.there.state.record

  @property
  def revision(self):
    return self.record.revision

  def lines(self, text):
    logged = [record.getMessage() for record in self._caplog.records]
    return [x for x in [*logged, *self._said] if text in x]

  def until(self, condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
      assert time.monotonic() < end, (
        self._said, [x.error for x in self.members]
      )
      time.sleep(0.005)

  def go_on(self, count=2):
    wanted = self.revision + count
    self.until(lambda: self.revision >= wanted)

  def end(self):
    for member in self.members:
      member.end()
    self.there.close()


@pytest.fixture
def trained(request, tmp_path, caplog):
  # Short where a test waits for its end; others may be slow on this machine.
  row = getattr(request.node, "callspec", None)
  waits = row is not None and row.params.get("name") in ("nothing", "drips")
  with caplog.at_level(logging.WARNING):
    trained = _Trained(tmp_path, caplog, 0.5 if waits else PATIENCE_S)
    try:
      yield trained
    finally:
      trained.end()


def _drips(sock):
  for _ in range(40):  # each byte arrives well within the limit
    sock.sendall(b"x")
    time.sleep(0.05)


def _asks(sock, request, security):
  """Runs the dialer's side of a handshake, once."""
  handshake._run_handshake(
    handshake.HandshakeSocket(sock, PATIENCE_S), request, security
  )


def _guesses(sock):
  request = DialRequest(Purpose.DATA, 0, 1, "a", "b")
  _asks(sock, request, Security(b"another token of a run"))


# Name: input of an unauthenticated client, and pattern of the logged line.
STRANGERS = {
  "nothing": (lambda sock: None, "too long|timed out"),
  "drips": (_drips, "too long|timed out"),
  "garbage": (lambda sock: sock.sendall(os.urandom(4096)), "token"),
  "http": (lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 99), "token"),
  "2 GB": (
    lambda sock: sock.sendall(Header(Kind.DATA, 2**31).pack() * 99), "token"
  ),
  "another token": (_guesses, "token"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_unauthenticated_client_costs_one_line_and_rounds_continue(
  trained, name
):
  attack, why = STRANGERS[name]
  peer = ids.address(trained.members[0].swarm.me)
  # A peer allows longer handshakes than this coordinator does.
  targets = [trained.there.address] + [peer] * ("too long" not in why)
  for address in targets:
    with socket.create_connection(address) as sock:
      port = sock.getsockname()[1]
      with contextlib.suppress(OSError):
        attack(sock)
      trained.until(lambda p=port: trained.lines(f":{p}: "))
      (line,) = trained.lines(f":{port}: ")
      assert any(word in line for word in why.split("|"))
  trained.go_on()
  (line,) = trained.lines("epoch 2")  # no member was dropped


def test_thousand_connections_at_once_do_not_delay_rounds(trained):
  trained.go_on()
  wide, start = [], time.monotonic()
  with contextlib.ExitStack() as stack:
    for address in (
      trained.there.address, ids.address(trained.members[0].swarm.me)
    ):
      for _ in range(CROWD // 2):
        sock = stack.enter_context(socket.create_connection(address, 60))
        sock.setblocking(False)
        wide.append(sock)
    trained.go_on()
    # Half-open handshakes are limited in number, and so are their threads.
    assert len(trained.there._listener._underway) <= Limits().handshakes
    assert threading.active_count() < CROWD / 4
    newcomer = _Member(trained.there)
    trained.members.append(newcomer)
    trained.until(lambda: len(trained.record.members) == 3)
    trained.go_on()
    assert not [member.error for member in trained.members if member.error]
  # At most five lines a second of each listener; most are only counted.
  most = CROWD / 10 + 2 * 5 * (time.monotonic() - start)
  assert len(trained.lines("refused")) < most


def _dialled(address, purpose, epoch, me="", receiver=None):
  me = me or ids.make(("127.0.0.1", 1))
  request = DialRequest(
    purpose, 0, epoch, me, receiver or service.COORDINATOR_ID
  )
  return handshake.dial(
    address, request, SECURITY, SocketGroup(), PATIENCE_S
  ), me


def _hello(sock):
  data = frames.encode(m.Hello(0, 0, "", None))
  frames.send(sock, Header(Kind.MESSAGE), data, checked=True)


def _huge(sock):
  sock.sendall(Header(Kind.MESSAGE, 2**31).pack())


def _nonsense(sock):
  sock.sendall(os.urandom(400))


def _wrong_kind(sock):
  frames.send(sock, Header(Kind.DATA, tag=3), bytes(64))


@pytest.mark.parametrize("said_hello", [False, True], ids=["new", "peer"])
@pytest.mark.parametrize(
  ("attack", "why"),
  [(_huge, "announces 2,147,483,648 bytes"), (_nonsense, "begins with"),
   (_wrong_kind, "is not expected here")],
)
def test_invalid_message_of_a_member_is_one_line(
  trained, said_hello, attack, why
):
  sock, me = _dialled(trained.there.address, Purpose.CONTROL, 0)
  with sock:
    if said_hello:
      _hello(sock)
    attack(sock)
    trained.until(lambda: trained.lines(why))
    (line,) = trained.lines(why)
    assert me in line
  trained.go_on()


def test_fuzzed_conversations_end_and_rounds_continue(trained):
  rng, epoch = random.Random(2), trained.record.epoch
  said = [frames.encode(x) for x in (
    m.Prepared(1), m.Leave(), m.Unreachable(7, ("17-ab", "18-cd")),
    m.Ready(2**63 - 1, 0), m.Vote(3, 2, "ab" * 32), m.Report(1, 2, 0.5),
  )]
  for number in range(FUZZED // 50):
    data = rng.choice(said)
    wrong = spoilt(rng, data) if number % 2 else data
    frame = Header(
      Kind.MESSAGE, len(wrong), crc=zlib.crc32(wrong)
    ).pack() + wrong
    sock, _ = _dialled(trained.there.address, Purpose.CONTROL, 0)
    with sock, contextlib.suppress(OSError):
      sock.sendall(frame if number % 2 else spoilt(rng, frame))
  trained.go_on()
  assert trained.record.epoch == epoch
  assert not [member.error for member in trained.members if member.error]


def test_replayed_epoch_is_one_line(trained):
  """A member of an earlier epoch dials a peer and votes again."""
  first, second = trained.record.members
  epoch = trained.record.epoch
  with pytest.raises(handshake.Refused, match="STALE"):
    _dialled(
      ids.address(first), Purpose.DATA, epoch - 1, me=second, receiver=first
    )
  trained.until(lambda: trained.lines("STALE"))
  (line,) = trained.lines("STALE")
  assert f"{second}, DATA, epoch {epoch - 1}" in line
  sock, me = _dialled(trained.there.address, Purpose.CONTROL, 0)
  with sock:
    for message in (
      m.Ready(epoch - 1, 0), m.Vote(epoch - 1, 0, "ab" * 32),
      m.Vote(epoch, trained.revision, "ab" * 32), m.Prepared(epoch),
    ):
      data = frames.encode(message)
      frames.send(sock, Header(Kind.MESSAGE), data, checked=True)
    trained.go_on()
  assert trained.record.epoch == epoch
  assert me not in trained.record.members


def test_peer_that_others_cannot_reach_is_one_line_and_rounds_continue(
  trained, monkeypatch
):
  """Until they can: then it is admitted."""
  for name in ("_FIRST_PAUSE_S", "_MAX_PAUSE_S"):
    monkeypatch.setattr(reachability, name, 0.1)
  with socket.create_server(("127.0.0.1", 0)) as free:
    closed = free.getsockname()[:2]
  epoch, members = trained.record.epoch, trained.record.members
  newcomer = _Member(trained.there, advertise=closed)
  trained.members.append(newcomer)
  me = newcomer.swarm.me
  trained.until(lambda: newcomer.said)
  (line,) = trained.lines("not admitted")
  first, second = members
  assert f"{me} not admitted: {first}, {second}, coordinator cannot" in line
  (line,) = newcomer.said
  assert "does not admit this peer at {}:{}: ".format(*closed) in line
  trained.go_on()
  time.sleep(1)  # longer than the pause before the next check, which fails
  trained.go_on()
  assert (trained.record.epoch, trained.record.members) == (epoch, members)
  assert (len(newcomer.said), len(trained.lines("not admitted"))) == (1, 1)
  relay = Relay(newcomer.swarm._agent._listener.address, 1e9, closed[1])
  trained.until(lambda: me in trained.record.members)
  trained.go_on(3)
  relay.close()


def test_peer_with_wrong_digest_is_dropped_and_readmitted(
  trained
):
  lies = [True]

  def lying(exchange, state, part):
    made = _step(exchange, state, part)
    if lies and state["x"][0] > 0:
      lies.pop()
      made["same"] = made["same"] + 1
    return made

  liar = _Member(trained.there, lying)
  trained.members.append(liar)
  trained.until(lambda: trained.lines("dropped"))
  (line,) = trained.lines("dropped")
  assert liar.swarm.me in line
  assert "its digest of round" in line
  trained.until(lambda: len(trained.record.members) == 3)
  trained.go_on(3)
  assert (liar.swarm.state["same"] == np.arange(5)).all()
  assert not [member.error for member in trained.members if member.error]


def test_holder_with_corrupted_state_is_dropped_and_repaired(trained):
  """Joining peers take nothing from a member with a corrupted memory."""
  trained.members.append(_Member(trained.there))
  trained.until(lambda: len(trained.record.members) == 3)
  trained.go_on(1)
  bad = trained.members[0].swarm
  same = bad.state["same"]
  same.setflags(write=True)
  same[0] += 1
  newcomer = _Member(trained.there)
  trained.members.append(newcomer)
  trained.until(lambda: newcomer.swarm.revision > 1)
  # The corrupted member votes for its digest, is dropped, and fetches again.
  trained.until(lambda: trained.lines("its digest of round"))
  trained.until(lambda: len(trained.record.members) == 4)
  trained.go_on(3)
  (line,) = trained.lines("its digest of round")
  assert bad.me in line
  for member in trained.members:
    assert (member.swarm.state["same"] == np.arange(5)).all()
    assert member.error is None


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_members_with_corrupted_state_repairs_it(trained, which):
  """The vote is a tie: the digest that both had agreed on decides."""
  bad = trained.members[which].swarm
  same = bad.state["same"]
  same.setflags(write=True)
  same[0] += 1
  while (bad.state["same"] != np.arange(5)).any():
    trained.go_on(1)
  trained.go_on()
  for member in trained.members:
    assert (member.swarm.state["same"] == np.arange(5)).all()
    assert member.error is None
  assert not trained.lines("dropped")


def test_two_members_that_never_agree_end_with_one_line(trained):
  def lying(exchange, state, part):
    made = _step(exchange, state, part)
    return {**made, "same": made["same"] + exchange.rank}

  for member in trained.members:
    member._combine = lying
  trained.until(lambda: all(member.error for member in trained.members))
  for member in trained.members:
    assert "has two results without a majority" in str(member.error)
    assert len(trained.lines(f"{member.swarm.me} stopped")) == 1
    assert (member.swarm.state["same"] == np.arange(5)).all()


IMPOSTOR = dataclasses.replace(SECURITY, identity=Identity())


def _forged(public):
  """Returns an identity with the public key of another process."""
  forged = Identity()
  forged.public, forged.fingerprint = public, fingerprint(public)
  return forged


@pytest.mark.parametrize("public", [
  bytes(32), (1).to_bytes(32, "little"), b"short",
], ids=["zero", "one", "short"])
def test_public_key_whose_secret_anybody_knows_is_refused(public):
  with pytest.raises(ValueError, match="an invalid public key"):
    Identity().shared(public)


@pytest.mark.parametrize("forged", [False, True], ids=["own key", "copied key"])
def test_member_with_the_token_cannot_use_the_id_of_another(trained, forged):
  """Covers its connections to the coordinator and to other members."""
  security = IMPOSTOR
  if forged:
    identity = _forged(SECURITY.identity.public)
    security = dataclasses.replace(SECURITY, identity=identity)
  epoch, (first, second) = trained.record.epoch, trained.record.members
  why = f"{second} has not proved its identity" if forged else (
    f"{second} is the id of another process"
  )
  for number, (address, request) in enumerate([
    (trained.there.address,
     DialRequest(Purpose.CONTROL, 0, 0, second, service.COORDINATOR_ID)),
    (ids.address(first), DialRequest(Purpose.DATA, 1, epoch, second, first)),
    (ids.address(first), DialRequest(Purpose.STATE, 0, epoch, second, first)),
  ], 1):
    with (
      socket.create_connection(address) as sock,
      pytest.raises(ConnectionError, match="ended the handshake"),
    ):
      _asks(sock, request, security)
    trained.until(lambda n=number: len(trained.lines(why)) >= n)
  trained.go_on()
  assert trained.record.epoch == epoch
  assert not trained.lines("dropped")


def test_listener_with_the_token_cannot_use_the_id_of_another():
  with Listener("a", IMPOSTOR) as there:
    there.serve(Purpose.DATA, AcceptRule(1, None, lambda *_: None))
    victim = ids.make(there.address)
    there.me = victim
    with pytest.raises(handshake.Refused, match="the id of another process"):
      handshake.dial(
        there.address, DialRequest(Purpose.DATA, 0, 1, "b", victim), SECURITY,
        SocketGroup(), PATIENCE_S,
      )


def test_listener_with_a_copied_public_key_is_refused():
  here, other = socket.socketpair()
  opening = handshake.OPENING.pack(
    handshake.MAGIC, SECURITY.identity.public, bytes(32)
  )

  def listen():
    other.sendall(opening)
    said = other.recv(handshake.HANDSHAKE_BYTES, socket.MSG_WAITALL)
    said, answer = said[: handshake.REQUEST.size], bytes(1)
    mac = SECURITY.mac(b"listener", opening, said, answer)
    other.sendall(answer + mac + bytes(32))

  def ask():
    request = DialRequest(Purpose.DATA, 0, 1, "b", ids.make(("127.0.0.1", 1)))
    with pytest.raises(handshake.Refused, match="the listener is not"):
      _asks(here, request, IMPOSTOR)

  with here, other:
    assert together([listen, ask]) == [None, None]


def test_user_has_one_token_per_machine(tmp_path, monkeypatch):
  """Stores it readable by its owner only; a given token has precedence."""
  monkeypatch.delenv(handshake.TOKEN_VARIABLE, raising=False)
  tokens = []
  for home in ("a", "a", "b"):
    (tmp_path / home).mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    tokens.append(handshake.read_security("", "", "", "").token)
  assert tokens[0] == tokens[1] != tokens[2]
  kept = tmp_path / "a" / handshake.TOKEN_FILE
  assert kept.stat().st_mode & 0o077 == 0
  assert [path.name for path in kept.parent.iterdir()] == [kept.name]
  monkeypatch.setenv(handshake.TOKEN_VARIABLE, "x" * 32)
  assert handshake.read_security("", "", "", "").token == b"x" * 32
  given = tmp_path / "token"
  given.write_text("y" * 32)
  assert handshake.read_security(str(given), "", "", "").token == b"y" * 32
