"""Exchanged values, and what a coordinator and its peers report."""

import itertools
import math
import socket
import threading
import time

import numpy as np
import pytest

from parallel.peers.exchange import RoundExchange
from parallel.peers.membership import messages as m
from parallel.peers.membership import service
from parallel.peers.membership import shared_state as states
from parallel.peers.membership.coordinator import CoordinatorState, Phase, Rules
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService, describe_wait
from parallel.peers.settings import PeerSettings
from parallel.peers.swarm import Swarm
from parallel.peers.transport import frames
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.frames import FrameError
from tests.parallel.peers.worlds import PATIENCE_S, SECURITY, together, world

pytestmark = pytest.mark.quick

NEW = m.Hello(0, 0, "", None)


def test_rounds_use_different_tags():
  with world(1) as links:
    tags = [
      RoundExchange(links[0], m.Reduce(1, number, ("p0",)), 1.0, ())._tag
      for number in range(3)
    ]
  assert [b - a for a, b in itertools.pairwise(tags)] == [2**20] * 2


@pytest.mark.parametrize(("weights", "used"), [
  ((1.0, 1.0), (1, 1)), ((3.0, 1.0), (3, 1)), ((0.0, 2.0), (0, 2)),
  ((0.0, 0.0), (1, 1)),
])
@pytest.mark.parametrize("order", ["direct", "ring"])
def test_exchange_averages_by_weight(weights, used, order):
  """Weights that are all 0 count as equal; samples are known to all."""
  xs = [np.array([1, 2], np.float32), np.array([5, -2], np.float32)]
  with world(2) as links:
    def run(i):
      there = RoundExchange(
        links[i], m.Reduce(1, 5, ("p0", "p1")), weights[i], ((i, i + 4),)
      )
      assert there.weights == used
      assert there.samples == {"p0": ((0, 4),), "p1": ((1, 5),)}
      assert (there.round, there.epoch, there.rank) == (5, 1, i)
      return there.mean(xs[i], order), there.sum(xs[i], order)

    found = together([lambda i=i: run(i) for i in range(2)])
  wanted = sum(w * x for w, x in zip(used, xs, strict=True)) / sum(used)
  for mean, total in found:
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    np.testing.assert_array_equal(total, xs[0] + xs[1])
  assert (xs[0] == [1, 2]).all()


@pytest.mark.parametrize("size", [0, 1, 2**22 - 1, 2**22, 2**22 + 1, 2**23])
def test_values_are_divided_into_chunks(size):
  (entry,) = states.manifest({"x": bytes(size)}).values()
  assert (entry.dtype, entry.shape, entry.size) == ("bytes", (size,), size)
  assert entry.num_chunks == math.ceil(size / 2**22)
  assert len(entry.hashes) == 32 * entry.num_chunks
  spans = [entry.chunk(i)[:2] for i in range(entry.num_chunks)]
  assert sum(stop - start for start, stop in spans) == size
  for (_, stop), (start, _) in itertools.pairwise(spans):
    assert (stop - start, start % 2**22) == (0, 0)


@pytest.mark.parametrize(("state", "message"), [
  ({"x": np.zeros(2, np.complex64)}, "'x' has dtype complex64, which cannot"),
  ({"x": np.zeros((4, 4)).T}, "must be contiguous"),
  ({"n" * 65536: b""}, "cannot be shared"),
])
def test_values_that_cannot_be_shared_are_refused(state, message):
  with pytest.raises(ValueError, match=message):
    states.manifest(state)


def test_manifests_are_limited():
  state = {"a": np.zeros(3, np.float32), "n" * 65535: bytes(5)}
  data = states.encode(states.manifest(state))
  assert states.decode(data, 17) == states.manifest(state)
  for wrong, limit, message in (
    (data, 16, "at least 17 bytes; the limit is 16"),
    (data + b"\0", 17, "1 trailing bytes"), (data[:-1], 17, "truncated"),
  ):
    with pytest.raises(FrameError, match=message):
      states.decode(wrong, limit)
  deep = {"x": states.ManifestEntry("int8", (1,) * 16, bytes(32))}
  assert states.decode(states.encode(deep), 1) == deep
  for entry in (
    states.ManifestEntry("int8", (1,) * 17, bytes(32)),
    states.ManifestEntry("bytes", (1, 1), bytes(32)),
    states.ManifestEntry("object", (1,), bytes(32)),
  ):
    with pytest.raises(FrameError):
      states.decode(states.encode({"x": entry}), 1 << 20)
  with pytest.raises(FrameError, match="a manifest has 65537 names"):
    states.decode((2**16 + 1).to_bytes(4, "big"), 1)


_RECORD = m.Record(2, ("a", "b"), 7, 1, "0a")


@pytest.mark.parametrize(
  ("state", "text", "doing"),
  [
    (CoordinatorState(), "waits for 2 more peers: 0 of 2 there", {}),
    (
      CoordinatorState(
        pending=tuple(
          (who, m.Hello(0, 7, digest, None)) for who, digest in ("ca", "db")
        )
      ),
      "waits for one peer more or less: two states of revision 7, or two "
      "configs, are held by equally many peers",
      {},
    ),
    (
      CoordinatorState(pending=(("c", NEW),)),
      "waits for 1 more peer: 1 of 2 there", {"c": "waits to join"}
    ),
    (
      CoordinatorState(_RECORD, pending=(("b", NEW),)),
      "waits for members to come back: a", {"a": "is waited for"}
    ),
    (
      CoordinatorState(_RECORD, late=True),
      "waits for a peer that has revision 7: one of a, b",
      {"b": "is waited for"},
    ),
    (
      CoordinatorState(_RECORD, Phase.FORMING, ready=frozenset("a")),
      "waits for members to connect and to have revision 7: 1 of 2 there, "
      "missing b",
      {"a": "is prepared", "b": "connects, fetches"},
    ),
    (
      CoordinatorState(_RECORD, Phase.OPEN, ready=frozenset("b")),
      "waits for contributions to round 7: 1 of 2 there, missing a",
      {"a": "computes", "b": "is ready"},
    ),
    (
      CoordinatorState(
        _RECORD, Phase.RUNNING, contributors=("b",), ready=frozenset("b")
      ),
      "waits for votes on round 7: 0 of 1 there, missing b",
      {"a": "computes", "b": "exchanges"},
    ),
    (
      CoordinatorState(
        _RECORD, Phase.RUNNING, contributors=("a", "b"), votes=(("a", "0b"),)
      ),
      "waits for votes on round 7: 1 of 2 there, missing b",
      {"a": "has voted", "b": "exchanges"},
    ),
  ],
)
def test_status_of_a_coordinator_and_its_peers(tmp_path, state, text, doing):
  assert describe_wait(state, Rules(least=2)) == text
  with Journal(tmp_path / "journal") as journal, CoordinatorService(
    ("127.0.0.1", 0), SECURITY, journal, say=str
  ) as there:
    there.state = state
    there._reports["a"] = m.Report(3, 4, None)
    seen = {x.peer: x for x in there.seen()}
  assert {*seen} == {*state.record.members, *(p for p, _ in state.pending)}
  assert {peer: seen[peer].what for peer in doing} == doing
  for peer, found in seen.items():
    assert found.silent_s is None
    assert (found.report is not None) == (peer == "a")


def test_lines_about_members_name_who_came_who_left_and_why():
  now = m.Record(3, ("b", "c", "d"), 7, 1, "0a")
  for before, text in ((("a", "b"), "; new: c, d; gone: a"), ("bcd", "")):
    assert service._epoch_line(tuple(before), now) == (
      f"epoch 3, revision 7: 3 members{text}"
    )
  state = CoordinatorState(m.Record(2, ("a", "b", "x")))
  for message, why in (
    (m.Vote(2, 5, "0b"), "its digest of round 5 differs from the majority's"),
    (m.Leave(), "it leaves"),
    (m.Hello(0, 0, "", None), "no connected peer holds the newest revision"),
    (m.Unreachable(2, ("x",)), "a cannot reach it"),
  ):
    assert service._drop_reason(state, "x", "a", message) == why


def test_joining_peer_is_informed_of_a_wait_again_every_ten_seconds(tmp_path):
  here, other = socket.socketpair()
  lines = []
  names = tuple(f"{i:050}" for i in range(9))
  with here, other, Journal(
    tmp_path / "journal"
  ) as journal, CoordinatorService(
    ("127.0.0.1", 0), SECURITY, journal, say=lines.append
  ) as there:
    channel = there._channels["z"] = Channel(here, frames.PEER_MESSAGES, 10)
    there.state = CoordinatorState(m.Record(1, names, 3), pending=(("z", NEW),))

    def sent(now):
      there._report_wait(now)
      found = [
        frames.decode(x, frames.COORDINATOR_MESSAGES) for x in channel._waiting
      ]
      channel._waiting.clear()
      return found

    assert sent(1000.0) == sent(1002.0) == []
    (first,) = sent(1002.1)
    assert (first.revision, first.lost, len(first.text)) == (3, False, 400)
    assert sent(1005.0) == sent(1012.0) == []
    assert sent(1012.2) == [first]
    there.state = there.state._replace(late=True)
    assert sent(1013.0) == []
    (second,) = sent(1015.1)
    assert second.lost
    assert "has revision 3" in second.text
    assert len(lines) == 2
    assert lines[1].endswith(describe_wait(there.state, there.rules))


def test_contribution_has_a_finite_weight_and_reports_a_finite_loss(tmp_path):
  def step(exchange, state, part):
    return {"x": state["x"] + exchange.mean(part)}

  with Journal(tmp_path / "journal") as journal, CoordinatorService(
    ("127.0.0.1", 0), SECURITY, journal, say=str
  ) as there:
    threading.Thread(target=there.serve, daemon=True).start()
    part, state = np.ones(3, np.float32), {"x": np.zeros(3, np.float32)}
    with Swarm(
      there.address, SECURITY, state, settings=PeerSettings(samples=5)
    ) as swarm:
      for weight in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be finite and not negative"):
          swarm.give(part, step, weight)
      assert swarm.members == (swarm.me,)
      assert (swarm.epoch, swarm.revision, swarm.counted) == (1, 0, False)
      for number, (weight, loss, said) in enumerate((
        (0.0, 0.5, 0.5), (2.0, math.nan, None), (1.0, None, None),
        (1.0, np.float32(0.25), 0.25),
      ), 1):
        assert swarm.samples == ((5 * number - 5, 5 * number),)
        found = swarm.give(part, step, weight, loss)
        assert {*found} == {"x"}
        assert (found["x"] == number).all()
        assert (swarm.revision, swarm.counted) == (number, True)
        end = time.monotonic() + PATIENCE_S
        while (report := there.seen()[0].report) is None or (
          report.revision < number
        ):
          assert time.monotonic() < end
          time.sleep(0.001)
        assert (report.revision, report.loss) == (number, said)
      assert swarm.checkpoint[0] == swarm.newest.number == 4
      assert len(swarm.checkpoint[1]) == 2  # with the leases
      assert swarm.digest == swarm.newest.digest
