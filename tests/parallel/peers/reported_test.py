"""Regression tests for defects reported in other elastic training systems.

Each test names the issues or pull requests that it covers, of pytorch/torchft,
learning-at-home/hivemind, adap/flower, openfl, pytorch/torchtitan,
PrimeIntellect-ai/prime-diloco (OpenDiLoCo's successor) and
PrimeIntellect-ai/pccl. Defects of outer loops (torchft#230, #233: the signs of
an outer gradient and of a mixture) are tested in tests/parallel/outer.
"""

import contextlib
import itertools
import random
import socket
import threading
import time

import numpy as np
import pytest

from caatnet.benchmarks.elastic import churn_peer
from parallel.peers.membership import coordinator, ids
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import CoordinatorState, Phase, Rules
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import (
  CoordinatorService,
  Timing,
  describe_wait,
)
from parallel.peers.ring import link_collectives
from parallel.peers.settings import PeerSettings
from parallel.peers.swarm import Swarm
from parallel.peers.transport import frames
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.frames import Header, Kind
from parallel.peers.transport.links import LinkOptions
from parallel.peers.transport.transfers import LinksLost
from tests.parallel.peers.worlds import (
  PATIENCE_S,
  SECURITY,
  arrays,
  together,
  world,
)

NEW = m.Hello(0, 0, "", None)


class _Run:
  """Coordinator driven by messages; `told` maps each peer to its last reply."""

  def __init__(self, rules):
    self.rules, self.state, self.told = rules, CoordinatorState(), []

  def __call__(self, sender, message):
    self.state, effects = coordinator.step(
      self.state, sender, message, self.rules
    )
    self.told = [x for x in effects if isinstance(x, m.Send)]
    self.armed = [x.message for x in effects if isinstance(x, m.Arm)]
    return self

  @property
  def epoch(self):
    return self.state.record.epoch

  def opened(self, *peers):
    """Admits peers to an epoch, up to the request for their parts."""
    for peer in peers:
      self(peer, NEW)
    for peer in self.state.record.members:
      self(peer, m.Prepared(self.epoch))
    assert self.state.phase is Phase.OPEN
    return self

  def ready(self, *peers):
    for peer in peers:
      self(peer, m.Ready(self.epoch, self.state.record.revision))
    return self


def _step(exchange, state, part):
  return {**state, "x": state["x"] + exchange.mean(part)}


def _serving(folder, **timing):
  there = CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(folder / "journal"),
    timing=Timing(**timing), rules=Rules(least=2), say=lambda line: None,
  )
  threading.Thread(target=there.serve, daemon=True).start()
  return there


def test_member_that_only_keeps_its_connection_is_dropped(tmp_path):
  """Covers torchft#63: dead members stayed in the quorum."""
  there = CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    rules=Rules(least=2), say=lambda line: None,
  )
  alive, dead = (ids.make(("127.0.0.1", 1)) for _ in range(2))
  pairs = {peer: socket.socketpair() for peer in (alive, dead)}
  for peer, (sock, _) in pairs.items():
    there._take(Channel(sock, frames.PEER_MESSAGES, 10), peer, NEW)
    there._admission.remove(peer)
    there._step(peer, NEW)
  now = time.monotonic() + 30
  there._channels[alive].last_received = now - 1
  there._check_timeouts(now)
  assert there.state.record.members == (alive,)
  there.close()
  for sock in itertools.chain(*pairs.values()):
    sock.close()


@pytest.mark.parametrize("seed", range(5))
def test_epoch_has_one_list_of_members(seed):
  """Covers torchft PR 70, hivemind#624, #351: two groups, each incomplete."""
  rng, lists = random.Random(seed), {}
  run = _Run(Rules(least=2))
  peers = [f"p{i}" for i in range(6)]
  for _ in range(400):
    peer = rng.choice(peers)
    rng.choice((
      lambda p=peer: run(p, NEW), lambda p=peer: run(None, m.Silent(p)),
      lambda p=peer: run(p, m.Prepared(run.epoch)),
      lambda p=peer: run.ready(p),
      lambda p=peer: run(p, m.Unreachable(run.epoch, ("p0",))),
    ))()
    for sent in run.told:
      if isinstance(sent.message, m.Prepare):
        known = lists.setdefault(sent.message.epoch, sent.message.members)
        assert known == sent.message.members
        assert sent.to in known
  assert len(lists) > 20
  assert [*lists] == sorted(lists)


def test_peers_that_join_simultaneously_share_one_epoch():
  """Covers hivemind#351, #519: each peer found another group."""
  for order in itertools.permutations("abc"):
    run = _Run(Rules(least=3)).opened(*order)
    assert run.state.record.members == ("a", "b", "c")
    assert run.epoch == 1


def test_slow_member_is_waited_for_and_joining_peers_wait_too():
  """Covers torchft PR 70, Flower#3234: no limit suits steps of 40 minutes."""
  run = _Run(Rules(least=2)).opened("a", "b").ready("a")
  run("c", NEW)
  assert (run.armed, run.state.phase, run.epoch) == ([], Phase.OPEN, 1)
  run.ready("b")
  assert run.state.record.members == ("a", "b", "c")


def test_round_without_stragglers_has_at_least_the_quorum():
  """Covers torchft PR 71: a minority of the members continued alone."""
  run = _Run(Rules(least=4, quorum=3)).opened(*"abcd").ready("a", "b")
  assert run.armed == []
  run(None, m.Grace(1, 0))
  assert run.state.phase is Phase.OPEN
  run.ready("c")
  assert run.state.phase is Phase.RUNNING
  assert run.state.contributors == ("a", "b", "c")
  assert run.state.record.members == tuple("abcd")  # the straggler stays


def test_stragglers_are_cut_off_after_a_member_died():
  """Covers OpenFL#981: the cut-off was ignored after a failure."""
  run = _Run(Rules(least=3, quorum=1)).opened(*"abc").ready("a")
  (before,) = run.armed
  run(None, m.Silent("b"))
  for peer in ("a", "c"):
    run(peer, m.Prepared(run.epoch))
  run(None, before)  # the timer of the previous epoch has no effect
  assert run.state.phase is Phase.OPEN
  run.ready("a")
  (again,) = run.armed
  run(None, again)
  assert run.state.phase is Phase.RUNNING
  assert run.state.contributors == ("a",)


def test_failed_attempt_starts_a_new_epoch():
  """Covers torchft PR 183: a failed commit kept the quorum's id."""
  run = _Run(Rules(least=2)).opened("a", "b").ready("a", "b")
  run("a", m.Vote(1, 0, "aa"))
  run("b", m.Vote(1, 0, None))
  assert (run.epoch, run.state.record.members) == (2, ("a", "b"))
  run("b", m.Vote(1, 0, "aa"))  # after the epoch has ended
  assert run.state.record.revision == 0


def test_log_names_the_awaited_event_and_the_missing_peers(tmp_path):
  """Covers torchft#163, #329, Flower#4147: servers waited without a reason."""
  run, rules = _Run(Rules(least=2)), Rules(least=2)
  assert describe_wait(
    run.state, rules
  ) == "waits for 2 more peers: 0 of 2 there"
  run.opened("a", "b").ready("a")
  said = describe_wait(run.state, rules)
  assert said == "waits for contributions to round 0: 1 of 2 there, missing b"
  lines = []
  there = CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    rules=rules, say=lines.append,
  )
  for second in range(10):
    there._report_wait(1000.0 + second)
  (line,) = lines  # logged once, not repeatedly
  assert "2 more peers" in line
  there.close()


def test_only_holders_are_asked_for_the_state():
  """Covers hivemind PR 217: peers that accept no requests were asked."""
  run = _Run(Rules(least=2)).opened("a", "b").ready("a", "b")
  for peer in ("a", "b"):
    run(peer, m.Vote(1, 0, "aa"))
  run("c", NEW).ready("a", "b")
  assert {x.to for x in run.told} == {"a", "b", "c"}
  assert {x.message.holders for x in run.told} == {("a", "b")}


def test_joining_peer_with_a_higher_revision_is_not_the_donor():
  """Covers hivemind PR 154: any peer could claim the newest state."""
  run = _Run(Rules(least=2)).opened("a", "b")
  (said,) = run("z", m.Hello(0, 10**6, "ff", None)).told
  assert said.to == "z"
  assert "discard 1000000 rounds" in said.message.text
  run.ready("a", "b")
  assert {x.to for x in run.told} == {"a", "b"}
  assert run.state.record.revision == 0


def _talking(silence_s):
  """Returns a running channel, the other end of its socket, and its events."""
  here, other = socket.socketpair()
  channel, taken = Channel(here, frames.PEER_MESSAGES, silence_s, True), []

  def run():
    with here, pytest.raises(OSError):
      channel.run(taken.append)

  threading.Thread(target=run, daemon=True).start()
  return channel, other, taken


def test_idle_peer_sends_signs_of_life():
  """Covers torchft#35, Flower#775: idle connections were considered dead."""
  channel, other, _ = _talking(2)
  other.settimeout(PATIENCE_S)
  start = time.monotonic()
  while time.monotonic() - start < 2.5:  # longer than the allowed silence
    assert frames.read_header(other).kind is Kind.KEEP_ALIVE
    other.sendall(Header(Kind.KEEP_ALIVE).pack())
  assert not channel._ended.is_set()
  other.close()


def test_signs_of_life_are_rate_limited():
  """Covers Flower#4300: "too many pings"."""
  channel, other, taken = _talking(60)
  other.sendall(Header(Kind.KEEP_ALIVE).pack() * 5000)
  data = frames.encode(m.Leave())
  frames.send(other, Header(Kind.MESSAGE), data, checked=True)
  end = time.monotonic() + PATIENCE_S
  while not taken:
    assert time.monotonic() < end
    time.sleep(0.01)
  assert (taken, channel.reason) == ([m.Leave()], "")
  other.close()


def test_half_open_connection_ends():
  """Covers torchft#164: messages arrive, but no reply comes back."""
  channel, other, _ = _talking(0.2)
  other.setblocking(False)
  end = time.monotonic() + PATIENCE_S
  while not channel._ended.wait(0.02):  # the other end keeps reading
    assert time.monotonic() < end
    with contextlib.suppress(BlockingIOError):
      other.recv(1 << 16)
  other.close()


def test_part_may_take_longer_than_the_silence_limit(tmp_path):
  """Covers Flower#3234, torchft PR 70: one time limit for all rounds."""
  there = _serving(tmp_path, silence_s=1.5)

  def train(pause_s):
    with Swarm(
      there.address, SECURITY, {"x": np.zeros(3, np.float32)}
    ) as swarm:
      time.sleep(pause_s)
      swarm.give(np.ones(3, np.float32), _step)
      return swarm.counted

  assert together([lambda: train(0), lambda: train(2.5)]) == [True, True]
  there.close()


def test_dead_peer_is_detected_without_a_time_limit():
  """Covers torchft#164, #196: only a collective's time limit detected it."""
  with world(3, LinkOptions(silence_s=600)) as links:
    xs = arrays(3, 1000)
    operations = [
      link_collectives.all_reduce(links[i], 1, xs[i]) for i in range(2)
    ]
    links[2]._scope.close()  # the kernel does this when a process dies
    for operation in operations:
      with pytest.raises(LinksLost):
        operation.result(PATIENCE_S)


def test_connection_without_progress_ends_a_sum():
  """Covers torchft#164, #196: TCP alone waits for a quarter of an hour."""
  with world(2, LinkOptions(silence_s=1)) as links:
    churn_peer.drop_received_packets(links[1]._inward["p0", 1])
    operations = [
      link_collectives.all_reduce(x, 1, arrays(1, 10_000)[0]) for x in links
    ]
    for operation in operations:
      with pytest.raises(LinksLost) as caught:
        operation.result(PATIENCE_S)
      assert "has not ended" not in caught.value.reason


def test_sum_that_a_peer_never_begins_ends_and_names_it():
  """Covers pccl#13: a synchronous reduce hung."""
  with world(2) as links:
    operation = link_collectives.all_reduce(links[0], 1, arrays(1, 10)[0])
    with pytest.raises(LinksLost) as caught:
      operation.result(0.05)
    assert caught.value.peer == "p1"


def test_fragments_may_be_reduced_in_any_order():
  """Covers torchft#206: different orders on two peers caused a deadlock."""
  xs = arrays(2, 5000)

  def reduced(x, i):
    tags = range(8) if i else reversed(range(8))
    operations = [link_collectives.all_reduce(x, tag, xs[i]) for tag in tags]
    return [operation.result(PATIENCE_S).tobytes() for operation in operations]

  with world(2) as links:
    found = together([lambda i=i: reduced(links[i], i) for i in range(2)])
  assert found[0] == found[1] == 8 * [(xs[0] + xs[1]).tobytes()]


def _lived(address, start, rounds, revision=0, change=_step):
  with Swarm(
    address, SECURITY, start, revision=revision,
    settings=PeerSettings(samples=2)
  ) as swarm:
    before = swarm.digest
    for _ in range(rounds):
      swarm.give(np.ones(3, np.float32), change)
    return before, swarm.digest, swarm.checkpoint


def test_peers_with_unequal_states_adopt_one_and_step_alike(tmp_path):
  """Covers prime-diloco#13, torchtitan#4598: unequal replicas, wrong step."""
  there = _serving(tmp_path)

  def stepped(exchange, state, part):
    return {"x": state["x"] + exchange.mean(part), "step": state["step"] + 1}

  def lived(i):
    start = {"x": np.full(3, i, np.float32), "step": np.asarray(100 * i)}
    return _lived(there.address, start, 3, change=stepped)

  found = together([lambda i=i: lived(i) for i in range(2)])
  there.close()
  (before,) = {before for before, _, _ in found}
  (_,) = {after for _, after, _ in found}
  step = int(found[0][2][1]["step"])
  assert step in (3, 103)
  assert before != found[0][1]


def test_checkpoint_has_the_whole_shared_state(tmp_path):
  """Covers torchft#238, prime-diloco#113: the outer state was missing."""
  start = {
    "x": np.zeros(3, np.float32), "momentum": np.ones(3, np.float32),
    "step": np.asarray(7),
  }
  kept, last = (0, start), None
  for run in range(2):
    (tmp_path / str(run)).mkdir()
    there = CoordinatorService(
      ("127.0.0.1", 0), SECURITY, Journal(tmp_path / str(run) / "journal"),
      say=lambda line: None,
    )
    threading.Thread(target=there.serve, daemon=True).start()
    before, after, kept = _lived(there.address, kept[1], 2, kept[0])
    assert last in (None, before)
    last = after
    there.close()
  assert (kept[0], {*kept[1]} >= {*start}) == (4, True)


def test_shared_state_cannot_be_written_in_place(tmp_path):
  """Covers torchft#233: an in-place update changed data still in use."""
  there = CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    say=lambda line: None,
  )
  threading.Thread(target=there.serve, daemon=True).start()

  def in_place(exchange, state, part):
    state["x"] += exchange.mean(part)
    return state

  with Swarm(
    there.address, SECURITY, {"x": np.zeros(3, np.float32)}
  ) as swarm:
    with pytest.raises(ValueError, match="read-only"):
      swarm.give(np.ones(3, np.float32), in_place)
    assert (swarm.state["x"] == 0).all()
  there.close()
