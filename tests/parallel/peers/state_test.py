"""Shared state: fetches, verification of holders, and leases of samples."""

import random
import socket
import struct
import threading

import numpy as np
import pytest

from parallel.peers.membership import leases
from parallel.peers.membership import messages as m
from parallel.peers.membership import peer as protocol
from parallel.peers.membership import shared_state as states
from parallel.peers.membership.fetch import Fetch, StateServer, Unavailable
from parallel.peers.transport import frames
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import Cancelled, Purpose
from parallel.peers.transport.listener import AcceptRule
from tests.parallel.peers.worlds import SECURITY, listeners

CHUNK = states.CHUNK_BYTES
MEMBERS = ("p0", "p1", "p2", "p3")


def example(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "weights": rng.normal(size=(3, CHUNK // 4 + 7)).astype(np.float32),
    "step": np.asarray(seed), "none": np.zeros((0, 4), np.float16),
    "leases": b"abc" * seed, "empty": b"",
  }


def serve(listener, state, wrap=lambda server: server._serve):
  server = StateServer()
  server.publish(state, states.manifest(state))
  listener.serve(
    Purpose.STATE, AcceptRule(3, frozenset(MEMBERS), wrap(server))
  )
  return server


def fetch(there, holders, wanted, have=None, **options):
  have = have or {}
  return Fetch(
    "p3", 3, states.digest(states.manifest(wanted)),
    {h: there[h].address for h in holders}, SECURITY,
    have=(have, states.manifest(have)), **options,
  )


def same(a, b):
  return {*a} == {*b} and all(
    type(a[k]) is type(b[k]) and (
      a[k] == b[k] if isinstance(a[k], bytes)
      else a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k])
    )
    for k in a
  )


def test_joining_peer_fetches_all_and_others_only_the_difference():
  wanted = example(5)
  with listeners(3) as there:
    servers = [serve(there[p], wanted) for p in ("p0", "p1", "p2")]
    got, entries = fetch(there, ("p0", "p1", "p2"), wanted).result()
    assert same(got, wanted)
    assert entries == states.manifest(wanted)
    assert sum(s.sent_bytes for s in servers) == sum(
      e.size for e in entries.values()
    )
    have = {**wanted, "weights": wanted["weights"].copy(), "more": b"x"}
    have["weights"].reshape(-1)[CHUNK // 4] += 1  # in the second chunk
    before = sum(s.sent_bytes for s in servers)
    part = fetch(there, ("p0", "p1"), wanted, have)
    assert same(part.result()[0], wanted)
    assert sum(s.sent_bytes for s in servers) - before == CHUNK
    assert part.received_bytes == CHUNK
    alike = fetch(there, ("p2",), wanted, wanted)
    alike.result()
    assert alike.received_bytes == 0


def test_connections_of_an_epoch_do_not_count_in_the_next_one():
  state = protocol.PeerState(
    "a", 3, "d", protocol.Phase.OPEN, epoch=1, connected=True,
    part=protocol.Progress.THERE,
  )
  prepare = m.Prepare(2, ("a", "b"), 3, 1, "d", ("a",), False)
  for _ in range(2):  # a repeated message connects again
    state, effects = protocol.step(state, prepare)
    assert m.Connect(2, ("a", "b")) in effects
    assert protocol.Send(None, m.Prepared(2)) not in effects
  state, effects = protocol.step(state, m.Connected(2))
  assert protocol.Send(None, m.Prepared(2)) in effects


def test_interrupted_fetch_resumes_with_the_missing_chunks():
  """A holder serves one chunk; the next fetch is from another holder."""
  wanted = example(5)

  def stopping(server):
    def answer(sock, request):
      _dying(server)(sock, request)
      while sock.recv(4096):
        pass

    return answer

  with listeners(2) as there:
    serve(there["p0"], wanted, stopping)
    first = fetch(there, ("p0",), wanted, limit_s=0.5)
    assert first.partial_state is None
    with pytest.raises(Unavailable):
      first.result()
    assert first.received_bytes > 0
    server = serve(there["p1"], wanted)
    _, entries = first.partial_state
    second = Fetch(
      "p3", 3, states.digest(entries), {"p1": there["p1"].address}, SECURITY,
      have=first.partial_state,
    )
    assert same(second.result()[0], wanted)
    size = sum(entry.size for entry in entries.values())
    # Uninitialised memory may contain the right bytes by accident.
    assert server.sent_bytes <= size - first.received_bytes


def test_holder_answers_what_it_has_and_refuses_invalid_requests():
  state = {"x": bytes(CHUNK + 3), "none": b""}
  server = StateServer(limit=1)
  digest = server.publish(state, states.manifest(state))
  here, other = socket.socketpair()
  asking = struct.Struct("!BH")

  def asked(what, name, slot=0, wanted=digest):
    raw = name.encode()
    payload = asking.pack(what, len(raw)) + raw + bytes.fromhex(wanted)
    server._answer(here, Header(Kind.ASK, tag=9, slot=slot), payload)
    return frames.read(other, (Kind.MANIFEST, Kind.CHUNK, Kind.GONE))

  with here, other:
    header, data = asked(0, "")
    assert (header.kind, header.tag) == (Kind.MANIFEST, 9)
    assert states.decode(bytes(data), CHUNK + 3) == states.manifest(state)
    header, data = asked(1, "x", 1)
    assert (header.kind, header.tag, header.slot) == (Kind.CHUNK, 9, 1)
    assert (bytes(data), server.sent_bytes) == (bytes(3), 3)
    for what in (0, 1):
      header, _ = asked(what, "x", wanted="00" * 32)
      assert (header.kind, header.tag) == (Kind.GONE, 9)
    for name, slot in (("x", 2), ("none", 0), ("y", 0)):
      with pytest.raises(FrameError, match="a chunk that does not exist"):
        asked(1, name, slot)
    header, _ = asked(0, "", wanted="")  # the shortest request
    assert header.kind is Kind.GONE
    with pytest.raises(FrameError, match="request for a chunk is too short"):
      server._answer(here, Header(Kind.ASK), b"\0\0")
    assert server.sent_bytes == 3
    # One connection is served at a time.
    assert server._slots.acquire(blocking=False)
    server._serve(here, None)
    assert frames.read_header(other).kind is Kind.GONE
    server._slots.release()


def test_digest_depends_on_names_shapes_dtypes_and_values():
  a = states.manifest(example(5))
  assert states.decode(states.encode(a), 1 << 30) == a
  digests = {states.digest(a)}
  for name in example():
    other = example(5)
    other[name + "."] = other.pop(name)  # another name
    digests.add(states.digest(states.manifest(other)))
  other = example(5)
  other["weights"] = other["weights"].reshape(-1)  # another shape
  digests.add(states.digest(states.manifest(other)))
  other["weights"] = other["weights"].view(np.int32)  # another type
  digests.add(states.digest(states.manifest(other)))
  assert len(digests) == 1 + len(example()) + 2


def _lying(server):
  def answer(sock, request):
    del request
    while True:
      header, payload = frames.read(sock, (Kind.ASK,))
      what, _ = struct.unpack_from("!BH", payload)
      if not what:
        server._answer(sock, header, bytes(payload))
        continue
      name = payload[3 : 3 + payload[2]].decode()
      start, stop, _ = server._held[1][name].chunk(header.slot)
      frames.send(
        sock, Header(Kind.CHUNK, slot=header.slot), bytes(stop - start)
      )

  return answer


def _dying(server):
  def answer(sock, request):
    del request
    for _ in range(2):  # the manifest, and one chunk
      header, payload = frames.read(sock, (Kind.ASK,))
      server._answer(sock, header, bytes(payload))

  return answer


def _stalling(server):
  del server

  def answer(sock, request):
    del request
    frames.read(sock, (Kind.ASK,))
    frames.read(sock, (Kind.ASK,))

  return answer


def _other(server):
  other = example(6)
  server.publish(other, states.manifest(other))
  return server._serve


@pytest.mark.parametrize("wrong", [_lying, _dying, _stalling, _other])
def test_holder_with_wrong_content_is_dropped_and_named(wrong):
  wanted = example(5)
  with listeners(2) as there:
    serve(there["p0"], wanted, wrong)
    # Nothing that it sends alone is applied.
    alone = fetch(there, ("p0",), wanted, limit_s=0.5)
    with pytest.raises(Unavailable, match="p0"):
      alone.result()
    serve(there["p1"], wanted)
    both = fetch(there, ("p0", "p1"), wanted, limit_s=0.5)
    assert same(both.result()[0], wanted)
    assert set(both.dropped) <= {"p0"}


def _forging(server):
  """Serves the manifest of another content for the requested digest."""
  other = example(6)
  wanted = server._held[3]
  server.publish(other, states.manifest(other))
  server._held = (*server._held[:3], wanted)
  return server._serve


def test_manifest_of_another_content_is_refused():
  wanted = example(5)
  with listeners(2) as there:
    serve(there["p0"], wanted, _forging)
    with pytest.raises(Unavailable, match="another digest"):
      fetch(there, ("p0",), wanted, limit_s=0.5).result()
    serve(there["p1"], wanted)
    assert same(fetch(there, ("p0", "p1"), wanted).result()[0], wanted)


def test_fetch_is_cancelled_at_once():
  wanted = example(5)
  with listeners(1) as there:
    serve(there["p0"], wanted, _stalling)
    job = fetch(there, ("p0",), wanted, limit_s=60)
    threading.Timer(0.1, job.cancel).start()
    with pytest.raises(Cancelled):
      job.result()


def test_fuzzed_manifests_raise_only_frame_error():
  good = states.encode(states.manifest(example(2)))
  rng = random.Random(0)
  for _ in range(2000):
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
      data[rng.randrange(len(data))] = rng.randrange(256)
    data = bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
    try:
      found = states.decode(data, 1 << 26)
      assert sum(e.size for e in found.values()) <= 1 << 26
    except FrameError:
      pass


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_is_counted_exactly_once(seed):
  """Members join and leave, rounds fail, parts are late or discarded."""
  rng = random.Random(seed)
  count, now, epoch, young = 3, leases.SampleLeases(), 1, 4
  members = [f"p{i:03}" for i in range(young)]
  parts: dict = {}  # peer -> (round of its leases, spans)
  used: set[int] = set()
  for _ in range(60):
    for peer in members:
      if peer not in parts and rng.random() < 0.9:
        drawn = leases.next_samples(now, epoch, tuple(members), peer, count)
        assert sum(b - a for a, b in drawn) == count
        parts[peer] = now.round, drawn
    event = rng.random()
    if event < 0.35:  # a round fails, a member fails, or a peer joins
      epoch += 1
      if rng.random() < 0.5 and len(members) > 1:
        parts.pop(gone := rng.choice(members), None)
        members.remove(gone)
      if rng.random() < 0.5:
        members.append(f"p{young:03}")
        young += 1
    elif there := [p for p in members if p in parts]:
      some = there if event < 0.7 else rng.sample(there, -(-len(there) // 2))
      spans = {p: parts.pop(p)[1] for p in some}
      numbers = [n for s in spans.values() for a, b in s for n in range(a, b)]
      assert used.isdisjoint(numbers)
      assert len(set(numbers)) == count * len(some)
      used |= set(numbers)
      now = leases.leases_after_commit(now, epoch, members, spans, count)
      assert leases.decode(leases.encode(now)) == now
      assert leases.count_used_samples(now) == len(used)
      parts = {
        p: part
        for p, part in parts.items() if leases.are_samples_valid(now, part, p)
      }
    granted = [
      n for s in (now.free, *(s for _, s in now.held))
      for a, b in s for n in range(a, b)
    ]
    assert used.isdisjoint(granted)
    assert len(set(granted)) == len(granted)
    assert used | {*granted} == {*range(now.end)}


def test_samples_of_a_contributor_that_has_left_are_used():
  now = leases.leases_after_commit(
    leases.SampleLeases(), 1, ("a", "b"), {"a": ((0, 4),), "b": ((4, 8),)}, 4
  )
  mine = dict(now.held)["a"]
  left = leases.leases_after_commit(now, 2, ("b",), {"a": mine}, 4)
  assert left.free == ()
  assert leases.count_used_samples(left) == 12


def test_joining_peers_after_a_checkpoint_draw_distinct_samples():
  """The new run's epochs start at 1; the checkpoint is of a later epoch."""
  now, members = leases.SampleLeases(40, epoch=20, round=9), ("a", "b")
  drawn = [
    leases.next_samples(now, epoch, members, me, 4)[0]
    for epoch in range(1, 40) for me in members
  ]
  numbers = [n for start, stop in drawn for n in range(start, stop)]
  assert len(set(numbers)) == len(numbers)
  assert min(numbers) == 40


def test_slow_joining_peer_draws_again_only_once():
  now, members = leases.SampleLeases(), ("a", "b")
  drawn = now.round, leases.next_samples(now, 1, members, "b", 4)
  for tries in range(3):
    assert leases.are_samples_valid(now, drawn, "b") or tries == 1
    drawn = now.round, leases.next_samples(now, 1, members, "b", 4)
    fast = leases.next_samples(now, 1, members, "a", 4)
    now = leases.leases_after_commit(now, 1, members, {"a": fast}, 4)


def test_invalid_leases_are_refused():
  now = leases.leases_after_commit(
    leases.SampleLeases(), 1, ("a", "b"), {"a": ((0, 4),), "b": ((4, 8),)}, 4
  )
  assert dict(now.held) == {"a": ((8, 12),), "b": ((12, 16),)}
  with pytest.raises(ValueError, match="but"):
    leases.leases_after_commit(now, 1, ("a", "b"), {"a": ((12, 16),)}, 4)
  with pytest.raises(ValueError, match="below 16"):
    leases.leases_after_commit(now, 2, ("a", "b", "c"), {"c": ((0, 4),)}, 4)
  with pytest.raises(ValueError, match="reported twice"):
    leases.leases_after_commit(
      now, 2, ("c", "d"), {"c": ((16, 20),), "d": ((18, 22),)}, 4
    )
