"""Coordination service and peers that violate the protocol."""

import contextlib
import itertools
import random
import shutil
import socket
import threading
import time

import numpy as np
import pytest

from parallel.peers.agent import PeerHalted, PeerSettings
from parallel.peers.membership import coordinator, ids, service
from parallel.peers.membership import messages as m
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService, Timing
from parallel.peers.swarm import Swarm
from parallel.peers.transport import frames, handshake
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import DialRequest, Purpose, SocketGroup
from parallel.peers.transport.listener import AcceptRule, Listener
from tests.parallel.peers.worlds import (
  PATIENCE_S,
  SECURITY,
  Relay,
  certificates,
  together,
  until,
)

pytestmark = pytest.mark.quick


def _free_port():
  with socket.create_server(("127.0.0.1", 0)) as free:
    return free.getsockname()[1]


def _serving(
  folder, lines, security=SECURITY, silence_s=60, grace_s=10.0, **options
):
  """Runs a service in a thread."""
  there = CoordinatorService(
    ("127.0.0.1", 0), security, Journal(folder / "journal"),
    timing=Timing(silence_s, reconnect_s=0.5, grace_s=grace_s),
    say=lines.append, **options,
  )
  threading.Thread(target=there.serve, daemon=True).start()
  return there


def _dialled(there, security=SECURITY, me=None):
  me = me or ids.make(("127.0.0.1", 1))
  request = DialRequest(Purpose.CONTROL, 0, 0, me, service.COORDINATOR_ID)
  return handshake.dial(
    there.address, request, security, SocketGroup(), PATIENCE_S
  )


def _closed(sock):
  sock.settimeout(PATIENCE_S)
  with sock, contextlib.suppress(ConnectionError):
    while sock.recv(1 << 16):
      pass
  return True


def _step(exchange, state, part):
  return {"x": state["x"] + exchange.mean(part)}


def _halts_soon(swarm):
  """Shortens the wait for a coordinator of a peer that has joined."""
  swarm._agent._settings = PeerSettings(alone_s=0.5)


def _one_round(there, security=SECURITY):
  """Runs a single peer for one round; returns its state."""
  start = {"x": np.zeros(3, np.float32)}
  with Swarm(there.address, security, start) as swarm:
    found = swarm.give(np.ones(3, np.float32), _step)
    assert swarm.counted
    return found["x"]


def test_unauthenticated_and_invalid_input_is_closed_and_peers_continue(
  tmp_path
):
  lines = []
  there = _serving(tmp_path, lines, silence_s=1)
  big = Header(Kind.MESSAGE)._replace(length=1 << 17).pack()
  data = [
    b"GET / HTTP/1.1\r\n\r\n" + bytes(60),
    Header(Kind.DATA, length=4).pack() + b"abcd",
    Header(Kind.MESSAGE, length=3, crc=0).pack() + b"abc",
    big.replace(b"ELF1", b"ELF2"),
  ]
  for nonsense in data:
    sock = _dialled(there)
    sock.sendall(nonsense)
    assert _closed(sock)
  sock = _dialled(there, me="no-address")
  assert _closed(sock)
  # A peer that only sends Hello delays no other, and is dropped when silent.
  start = {"x": np.zeros(3, np.float32)}
  with Swarm(there.address, SECURITY, start) as swarm:
    quiet = _dialled(there)
    hello = frames.encode(m.Hello(0, 0, "", None))
    frames.send(quiet, Header(Kind.MESSAGE), hello, checked=True)
    until(lambda: any(x.what == "is checked" for x in there.seen()))
    swarm.give(np.ones(3, np.float32), _step)
    assert swarm.counted
    assert swarm.epoch == 1
    assert _closed(quiet)
  assert any("silent for 1 s" in line for line in lines)
  there.close()


def test_waiting_peer_that_the_next_one_cannot_reach_is_dropped(tmp_path):
  """The first peer is alone, so that no other one can check it."""
  lines, ends = [], []
  there = _serving(tmp_path, lines, rules=coordinator.Rules(least=3))
  sockets = contextlib.ExitStack()  # a channel does not close its socket

  def waits(peer):
    return any(x.peer == peer and x.what == "waits to join"
               for x in there.seen())

  def join(unreachable=()):
    """Connects a peer that answers checks, and waits for its admission."""
    me = ids.make(("127.0.0.1", 1))
    sock = sockets.enter_context(_dialled(there, me=me))
    channel = Channel(sock, frames.COORDINATOR_MESSAGES, PATIENCE_S)

    def answer(message):
      if isinstance(message, m.Check):
        for peer in message.peers:
          error = "refused" if peer in unreachable else ""
          channel.send(m.Checked(peer, error))

    def listen():
      with contextlib.suppress(OSError):  # the end of the connection
        channel.run(answer)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    ends.append((channel, thread))
    channel.send(m.Hello(0, 0, "00", None))
    until(lambda: waits(me))
    return me

  first = join()
  second = join(unreachable=[first])
  dropped = f"{first} dropped: {second} cannot reach it"
  assert any(line.endswith(dropped) for line in lines)
  assert not waits(first)
  third = join(unreachable=[first])  # the coordinator still runs
  assert waits(second)
  assert third != second
  for channel, thread in ends:
    channel.close("the test ends")
    thread.join(PATIENCE_S)
  sockets.close()
  there.close()


def test_peers_beyond_the_limit_are_refused(tmp_path):
  lines = []
  there = _serving(tmp_path, lines, silence_s=10, max_peers=1)
  start = {"x": np.zeros(3, np.float32)}
  with Swarm(there.address, SECURITY, start) as swarm:
    said = []
    more = Swarm(there.address, SECURITY, start, say=said.append)
    me = more.me
    until(lambda: said and lines)
    more._agent.leave()
    assert "has no room: max_peers=1 peers are connected" in said[0]
    swarm.give(np.ones(3, np.float32), _step)
    assert swarm.members == (swarm.me,)
  assert [x for x in lines if me in x] == [x for x in lines if "refused" in x]
  assert any(me in line for line in lines)
  there.close()


def test_coordinator_continues_when_all_peers_are_silent_at_once(tmp_path):
  """Only the first peer has the newest revision; without it all would halt."""
  there = CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    rules=coordinator.Rules(least=2), say=lambda line: None,
  )
  a, b = (ids.make(("127.0.0.1", 1)) for _ in range(2))
  there._step(a, m.Hello(0, 1, "aa", None))
  there._step(b, m.Hello(0, 0, "00", None))
  assert there.state.record.members == tuple(sorted((a, b)))
  there._check_timeouts(time.monotonic() + 99)
  there._step(a, m.Hello(1, 1, "aa", None))
  assert there.state.record.members == (a,)
  there.close()


def test_suspension_of_the_coordinator_is_no_silence_of_its_peers(
  tmp_path, monkeypatch
):
  """The clock jumps between two ticks; in short steps, it is silence."""
  lines, jumped_s, real = [], [0.0], time.monotonic
  there = _serving(tmp_path, lines, silence_s=60)
  with _dialled(there) as sock:
    hello = frames.encode(m.Hello(0, 0, "", None))
    frames.send(sock, Header(Kind.MESSAGE), hello, checked=True)
    until(lambda: there.state.record.members)
    monkeypatch.setattr(time, "monotonic", lambda: real() + jumped_s[0])

    def dropped_after(jump_s):
      jumped_s[0] += jump_s
      time.sleep(0.5)  # several ticks
      return any("silent for 60 s" in line for line in lines)

    assert not any(map(dropped_after, (54, 10, 99, 20)))
    assert any(map(dropped_after, [20] * 20))
  there.close()


def test_peer_that_does_not_read_is_disconnected():
  here, other = socket.socketpair()
  channel = Channel(here, frames.PEER_MESSAGES, 30)
  ended = []

  def run():
    with pytest.raises(OSError):
      channel.run(lambda _: None)
    ended.append(channel.reason)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  peers = tuple(ids.make(("127.0.0.1", i + 1)) for i in range(900))
  long = m.Prepare(1, peers, 0, 0, "", (), False)
  for _ in range(10_000):
    channel.send(long)
    if channel.reason:
      break
  thread.join(PATIENCE_S)
  assert ended == ["does not read its messages"]
  here.close()
  other.close()


def test_channel_holds_as_many_messages_as_its_limit():
  here, other = socket.socketpair()
  with here, other:
    channel = Channel(here, frames.PEER_MESSAGES, 30, max_waiting=3)
    for _ in range(3):
      channel.send(m.Leave())
    assert not channel.reason
    channel.send(m.Leave())
    assert channel.reason == "does not read its messages"


def test_frame_over_the_limit_is_refused_before_its_body():
  here, other = socket.socketpair()
  other.sendall(Header(Kind.MESSAGE, length=1 << 31).pack())
  with (
    here, other,
    pytest.raises(FrameError, match="announces 2,147,483,648 bytes"),
  ):
    Channel(here, frames.PEER_MESSAGES, 30).run(lambda _: None)


@pytest.mark.parametrize("seed", range(20))
def test_coordinator_keeps_its_invariants_under_random_messages(seed):
  rng = random.Random(seed)
  peers = ["a", "b", "c"]
  rules = coordinator.Rules(2, quorum=rng.choice((0, 1)))
  state, _ = coordinator.initial_state(m.Record())
  held = dict.fromkeys(["x", *peers], 0)  # revision of each peer's last Hello
  for _ in range(1000):
    epoch = max(0, state.record.epoch - rng.choice((0, 0, 0, 1)))
    number = max(0, state.record.revision - rng.choice((0, 0, 0, 1)))
    digest = rng.choice(("00", "01"))
    vote = m.Vote(epoch, number, rng.choice((None, digest, digest)))
    message = rng.choice((
      m.Hello(epoch, number, digest, rng.choice((None, vote))),
      m.Hello(0, rng.choice((0, 5, 1000)), digest, None),
      m.Prepared(epoch), m.Unreachable(epoch, (rng.choice(["x", *peers]),)),
      m.Ready(epoch, number), m.Ready(epoch, number), vote, vote, m.Leave(),
    ))
    before, sender = state.record, rng.choice(["x", *peers])
    state, effects = coordinator.step(state, sender, message, rules)
    sent = [x for x in effects if isinstance(x, m.Send)]
    # A peer is stopped instead of losing rounds that it has.
    stops = any(isinstance(x.message, m.Stop) and x.to == sender for x in sent)
    if isinstance(message, m.Hello):
      ahead = bool(before.epoch) and message.revision > before.revision
      assert stops == ahead
      held[sender] = held[sender] if ahead else message.revision
    for said in sent:
      if isinstance(said.message, m.Prepare):
        assert said.message.revision >= held[said.to]
    kinds = [type(effect) for effect in effects]
    if state.record != before:  # journaled before any peer receives it
      written = kinds.index(m.Record)
      assert effects[written] == state.record
      assert m.Send not in kinds[:written]
      assert state.record.epoch >= before.epoch
      if before.epoch:
        assert state.record.revision - before.revision in (0, 1)


class _Member:
  """Run of a peer in a thread; `revisions` has all that it held, in order."""

  def __init__(self, there, revision, ended):
    self._ended, self.error, self.revisions = ended, None, [revision]
    state = {
      "x": np.zeros(3, np.float32), "run": str(revision).encode(),
    }
    self.swarm = Swarm(there.address, SECURITY, state, revision=revision)
    self.thread = threading.Thread(target=self._train, daemon=True)
    self.thread.start()

  def _train(self):
    try:
      with self.swarm:
        self.revisions.append(self.swarm.revision)
        while not self._ended(self.swarm):
          self.swarm.give(
            np.ones(3, np.float32),
            lambda exchange, state, part: {**state, "x": state["x"] + 1},
          )
          self.revisions.append(self.swarm.revision)
    except PeerHalted as error:
      self.error = error


RUNS = (0, 1000, 2000)  # rounds of three runs


@pytest.mark.parametrize("order", list(itertools.permutations(RUNS)))
def test_runs_that_join_in_any_order_lose_no_round_without_a_line(
  tmp_path, order
):
  """First one after the other, then all at the start of a new group."""
  lines, ended = [], threading.Event()
  there = _serving(tmp_path, lines, silence_s=60)
  members = []
  for revision in order:
    members.append(_Member(there, revision, lambda _: ended.is_set()))
    until(lambda: len(members[-1].revisions) > 2 or members[-1].error)
  ended.set()
  for member in members:
    member.thread.join(PATIENCE_S)
  there.close()
  first, *later = members
  assert first.error is None
  for member, revision in zip(later, order[1:], strict=True):
    if revision < order[0]:
      assert member.swarm.state["run"] == str(order[0]).encode()
      assert member.error is None
      continue
    assert f"at round {revision}, and that of" in str(member.error)
    assert "--least=N" in str(member.error)
    assert any(f"{member.swarm.me} stopped" in line for line in lines)
    assert member.swarm.state["run"] == str(revision).encode()
  for member in members:
    assert member.revisions == sorted(member.revisions)
  (tmp_path / "journal").unlink()
  there = _serving(
    tmp_path, lines, silence_s=60, rules=coordinator.Rules(least=3)
  )
  members = []
  for revision in order:
    members.append(_Member(there, revision, lambda x: x.revision >= 2003))
    until(lambda: there.state.pending or there.state.record.epoch)
  for member in members:
    member.thread.join(PATIENCE_S)
    assert member.revisions[1] == 2000
    (revision, state), digest = member.swarm.checkpoint, member.swarm.digest
    assert (revision, state["run"]) == (2003, b"2000")
    assert (state["x"] == 3).all()
    assert digest == members[0].swarm.digest
  there.close()


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_tls_keeps_rounds_and_refuses_unsigned_certificates(tmp_path):
  security, stranger = certificates(tmp_path)
  there = _serving(tmp_path, [], security)
  assert (_one_round(there, security) == 1).all()
  for wrong in (stranger, SECURITY):
    request = DialRequest(
      Purpose.CONTROL, 0, 0, ids.make(("127.0.0.1", 1)), service.COORDINATOR_ID
    )
    with pytest.raises(OSError):
      handshake.dial(there.address, request, wrong, SocketGroup(), 0.3)
  there.close()


def _around(exchange, state, part):
  return {
    "x": state["x"] + exchange.sum(part, "ring"),
    "ring": " ".join(exchange.algorithm(part.nbytes)[1]).encode(),
  }


@pytest.mark.parametrize("alike", [True, False])
def test_ring_follows_measured_links_if_all_peers_measure(tmp_path, alike):
  there = _serving(
    tmp_path, [], silence_s=10, rules=coordinator.Rules(least=3)
  )

  def train(i):
    settings = PeerSettings(measured=alike or i == 0)
    start = {"x": np.zeros(50_000, np.float32), "ring": b""}
    with Swarm(there.address, SECURITY, start, settings=settings) as swarm:
      state = swarm.give(np.ones(50_000, np.float32), _around)
      return swarm.me, state

  found = together([lambda i=i: train(i) for i in range(3)])
  there.close()
  if not alike:
    odd, *rest = found
    assert type(odd) is ValueError
    assert "; measured=False at " in str(odd)
    assert all((state["x"] == 2).all() for _, state in rest)
    return
  members = sorted(me for me, _ in found)
  (ring,) = {state["ring"].decode() for _, state in found}
  assert sorted(ring.split()) == members
  assert ring.startswith(members[0])
  assert all((state["x"] == 3).all() for _, state in found)


def _grow(exchange, state, part):
  exchange.gather(part)
  return {"x": state["x"] + 1}


def test_peer_whose_fetch_is_slower_than_rounds_is_waited_for(
  tmp_path
):
  """A missed round: a fetch takes one second, a round a tenth of a second."""
  there = _serving(
    tmp_path, [], grace_s=0.3,
    rules=coordinator.Rules(least=2, quorum=1),
  )
  ended = threading.Event()

  def joined(**options):
    start = {"x": np.zeros(500_000, np.float32)}
    return Swarm(there.address, SECURITY, start, **options)

  def quick(relay):
    listen = "127.0.0.1", _free_port()
    relay.target = listen
    settings = PeerSettings(listen=listen, advertise=relay.address)
    with joined(settings=settings) as swarm:
      while not ended.wait(0.1):
        swarm.give(b"", _grow)

  def slow():
    counts = []
    with joined() as swarm:
      time.sleep(1.5)  # rounds are committed in the meantime
      try:
        while sum(counts) < 2:
          swarm.give(b"", _grow)
          counts.append(swarm.counted)
      finally:
        ended.set()
    return counts

  relay = Relay(None, 2e6)
  _, counts = together([lambda: quick(relay), slow])
  relay.close()
  there.close()
  assert counts[-1]


def test_peer_leaves_after_consecutive_fetches_that_are_overtaken():
  start, revision = {"x": np.zeros(3, np.float32)}, itertools.count(1)
  swarm = Swarm(("127.0.0.1", _free_port()), SECURITY, start)
  agent, (here, other) = swarm._agent, socket.socketpair()
  channel = agent._channel = Channel(here, frames.COORDINATOR_MESSAGES, 60)

  def left(count):
    """Starts fetches, each of which ends the one before it."""
    for _ in range(count):
      task = m.Fetch(next(revision), "00", ())
      agent._start_fetch(task)
      agent.peer = agent.peer._replace(fetching=(task.revision, "00"))
    said = [frames.decode(x, frames.PEER_MESSAGES) for x in channel._waiting]
    return m.Leave() in said

  with here, other:
    assert not left(3)
    agent._process_event(m.Fetched(*agent.peer.fetching), agent.newest)
    assert not left(3)
    assert left(1)
    agent._channel = None
    agent.leave()


def test_uncommitted_result_is_not_applied(tmp_path):
  """The coordinator ends between a peer's sum and its commit."""
  there = _serving(tmp_path, [])
  start = {"x": np.zeros(3, np.float32)}

  def last(exchange, state, part):
    there.close()
    return _step(exchange, state, part)

  with Swarm(there.address, SECURITY, start) as swarm:
    _halts_soon(swarm)
    with pytest.raises(PeerHalted):
      swarm.give(np.ones(3, np.float32), last)
    assert swarm.revision == 0
    assert (swarm.state["x"] == 0).all()


def test_peer_without_a_coordinator_halts_with_its_whole_state(tmp_path):
  there = _serving(tmp_path, [])
  start = {"x": np.zeros(3, np.float32)}
  with Swarm(there.address, SECURITY, start) as swarm:
    _halts_soon(swarm)
    swarm.give(np.ones(3, np.float32), _step)
    there.close()
    part = np.full(3, 2, np.float32)
    with pytest.raises(PeerHalted, match="no coordinator"):
      swarm.give(part, _step)
    revision, state = swarm.checkpoint
    assert revision == 1
    assert (state["x"] == 1).all()
    assert (part == 2).all()


@pytest.mark.parametrize(
  "kind", [KeyError, FileNotFoundError, ConnectionRefusedError, SystemExit]
)
def test_exception_of_the_user_function_is_raised(tmp_path, kind):
  def failing(exchange, state, part):
    raise kind("nothing")

  there = _serving(tmp_path, [])
  with Swarm(
    there.address, SECURITY, {"x": np.zeros(3, np.float32)}
  ) as swarm:
    with pytest.raises(kind, match="nothing"):
      swarm.give(None, failing)
    assert swarm.revision == 0
  there.close()


@pytest.mark.parametrize(("peers", "call", "text"), [
  (3, lambda x, part: x.sum(np.tile(part, 2)),
   "a sum of 24 bytes at {0}; a sum of 12 bytes at {1}, {2}, but all"),
  (2, lambda x, part: x.sum(part[:2]), "a sum of 8 bytes at {0}"),
  (3, lambda x, part: x.gather(part), ") at {1}, {2}, but all"),
  (3, lambda x, part: (x.sum(part), x.sum(part)),
   "a sum of 12 bytes at {0}; no further operation at {1}, {2}, but all"),
  (3, lambda x, part: None, "no further operation at {0}; another operation ("),
  (2, lambda x, part: None, "no further operation at {0}; another operation ("),
])
def test_peer_that_calls_another_operation_ends_and_others_say_so(
  tmp_path, peers, call, text
):
  """Without a majority all peers end; no epoch is tried again and again."""
  there = _serving(tmp_path, [], rules=coordinator.Rules(least=peers))
  said = [[] for _ in range(peers)]
  swarms = [
    Swarm(there.address, SECURITY, {"x": np.zeros(3, np.float32)}, say=x.append)
    for x in said
  ]

  def odd(exchange, state, part):
    call(exchange, part)
    return state

  def train(i):
    with swarms[i]:
      return swarms[i].give(np.ones(3, np.float32), _step if i else odd)

  found = together([lambda i=i: train(i) for i in range(peers)])
  there.close()
  ids_ = [x.me for x in swarms]
  assert type(found[0]) is ValueError
  assert text.format(ids_[0], *sorted(ids_[1:])) in str(found[0])
  for state, lines in zip(found[1:], said[1:], strict=True):
    if peers == 2:
      assert type(state) is ValueError  # sums are named by who calls them
      assert f" at {ids_[0]}" in str(state)
      continue
    assert (state["x"] == 1).all()
    assert any(f" at {ids_[0]}; " in x for x in lines)
  assert there.state.record.epoch < 8


def test_fetch_without_holders_reports_each_error_once():
  said = []
  swarm = Swarm(
    ("127.0.0.1", _free_port()), SECURITY, {"x": b""}, say=said.append
  )
  agent, fetches = swarm._agent, set()
  agent._start_fetch(m.Fetch(1, "00", ()))
  until(lambda: fetches.add(agent._fetch) or len(fetches) > 3)
  agent.leave()
  (line,) = said
  assert line.startswith("revision 1 is fetched again: no holder of the state")


def test_coordinator_of_another_version_is_no_coordinator():
  """An unknown message after each connection is not tried again for ever."""
  def speak(sock, request):
    frames.send(sock, Header(Kind.MESSAGE), b"nothing", checked=True)

  said = []
  with Listener(service.COORDINATOR_ID, SECURITY) as there:
    there.serve(Purpose.CONTROL, AcceptRule(0, None, speak))
    swarm = Swarm(
      there.address, SECURITY, {"x": b""}, say=said.append,
      settings=PeerSettings(alone_s=2.2),  # longer than the longest pause
    )
    (error,) = together([swarm.__enter__])
  assert isinstance(error, PeerHalted)
  assert "it sent an invalid message: a message is truncated" in str(error)
  assert any("invalid message" in line for line in said)


def test_live_group_continues_with_an_empty_journal(tmp_path):
  lines, port = [], _free_port()

  def started(name):
    there = CoordinatorService(
      ("127.0.0.1", port), SECURITY, Journal(tmp_path / name),
      rules=coordinator.Rules(least=2), say=lines.append,
    )
    threading.Thread(target=there.serve, daemon=True).start()
    return there

  there, ended = started("one"), threading.Event()
  members = [_Member(there, 0, lambda _: ended.is_set()) for _ in range(2)]
  until(lambda: all(x.swarm.revision > 3 for x in members))
  there.close()
  before = max(x.swarm.revision for x in members)
  there = started("two")
  until(lambda: there.state.record.revision > before + 3)
  assert there.state.record.epoch > 1
  ended.set()
  for x in members:
    x.thread.join(PATIENCE_S)
    assert x.revisions == sorted(x.revisions)
    assert x.error is None
  there.close()


def test_swarm_resumes_from_a_checkpoint(tmp_path):
  settings = PeerSettings(samples=3)
  kept = 0, {"x": np.zeros(2, np.float32)}
  drawn = []
  for run in range(2):
    (tmp_path / str(run)).mkdir()
    there = _serving(tmp_path / str(run), [])
    with Swarm(
      there.address, SECURITY, kept[1], revision=kept[0], settings=settings
    ) as swarm:
      for _ in range(2):
        drawn += swarm.samples
        swarm.give(np.ones(2, np.float32), _step)
      kept = swarm.checkpoint
    there.close()
  assert kept[0] == 4
  assert (kept[1]["x"] == 4).all()
  # A peer reuses its id: leases of the previous run are returned.
  numbers = [n for start, stop in drawn for n in range(start, stop)]
  assert len(set(numbers)) == len(numbers) == 12
