"""Settings, timeouts, wire constants, and limits of links and frames."""

import itertools
import logging
import math
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from parallel.elastic.exchange import Exchange
from parallel.elastic.membership import ids
from parallel.elastic.membership import messages as m
from parallel.elastic.membership import shared_state as states
from parallel.elastic.membership.coordinator import Coordinator, Phase, Rules
from parallel.elastic.membership.journal import Journal
from parallel.elastic.membership.service import Service, Timing, waits
from parallel.elastic.membership.world import Budget
from parallel.elastic.ring import link_collectives
from parallel.elastic.settings import Options, Settings
from parallel.elastic.swarm import Swarm
from parallel.elastic.timeouts import AdmissionTimeout, Finished, Halted
from parallel.elastic.transport import frames
from parallel.elastic.transport.channel import Channel
from parallel.elastic.transport.frames import FrameError, Header, Kind
from parallel.elastic.transport.handshake import Purpose, Status
from parallel.elastic.transport.links import Links
from parallel.elastic.transport.listener import Limits, Offer
from parallel.elastic.transport.transfers import (
  Agreement,
  Bytes,
  Lost,
  Traffic,
  Unreachable,
)
from tests.parallel.elastic.worlds import (
  SECURITY,
  arrays,
  listeners,
  together,
  world,
)

pytestmark = pytest.mark.quick

NEW = m.Hello(0, 0, "", None)


def test_defaults():
  """A peer alone needs no settings; all sides agree on 10 s of silence."""
  assert Settings() == Settings(
    alone_s=300, num_connections=1, checked=False, samples=0, measured=False,
    rounds=0, listen=("127.0.0.1", 0), advertise=None,
  )
  assert Options() == Options(
    num_connections=1, silence_s=10, checked=False, send_buffer=0
  )
  assert Limits() == Limits(
    connections=1024, handshakes=32, handshake_s=5, lines_per_s=5
  )
  assert Timing() == Timing(
    silence_s=10, reconnect_s=2, grace_s=10, recover_s=30, handshake_s=5
  )
  assert Rules() == (1, 0)
  assert not any(Budget())
  assert Header(Kind.DATA) == (Kind.DATA, 0, 0, 0, 0, None)
  assert m.Record() == (0, (), 0, 0, "")


@pytest.mark.parametrize(("made", "message"), [
  (lambda: Settings(alone_s=0), "alone_s=0 must be positive"),
  (lambda: Settings(alone_s=math.nan), "alone_s=nan must be positive"),
  (lambda: Settings(samples=-1), "samples=-1 must not be negative"),
  (lambda: Options(num_connections=0), "from 1 to 64"),
  (lambda: Options(num_connections=65), "num_connections=65 must be"),
  (lambda: Options(silence_s=0), "silence_s=0 must be positive"),
  *(
    (lambda name=name: Timing(**{name: 0}), f"{name}=0 must be positive")
    for name in (
      "silence_s", "reconnect_s", "grace_s", "recover_s", "handshake_s"
    )
  ),
  (lambda: ids.make(("two words", 1)), "at most 40 letters"),
  (lambda: ids.make(("h" * 64, 1)), "use its IP address instead"),
  (lambda: ids.address("a:1"), "'a:1' is not a peer id"),
  (lambda: ids.address(ids.make(("h", 0))), "is not a peer id"),
  (lambda: ids.address(ids.make(("h", 65536))), "is not a peer id"),
])
def test_values_out_of_range_are_refused(made, message):
  with pytest.raises(ValueError, match=message):
    made()


def test_values_at_the_ends_of_their_ranges_are_accepted():
  assert Settings(samples=0).num_samples(7) == 0
  assert Settings(samples=5).num_samples(7) == 5
  assert Settings(samples=lambda number: 2 * number).num_samples(7) == 14
  for count in (1, 64):
    assert Options(num_connections=count).num_connections == count
  for port in (1, 65535):
    assert ids.address(ids.make(("h", port))) == ("h", port)
  assert len(ids.make(("h" * 40, 65535))) <= 64


def test_later_ids_are_higher():
  first, second = ids.make(("z", 1)), None
  while second is None or second[:12] == first[:12]:  # until the next ms
    second = ids.make(("a", 1))
  assert first < second
  assert abs(int(first[:12], 16) - int(second[:12], 16)) < 60_000


@pytest.mark.parametrize(("least", "most_peers", "fits"), [
  (1, 1, True), (2, 2, True), (1, 1024, True), (0, 1, False), (3, 2, False),
  (1, 1025, False),
])
def test_service_needs_room_for_its_first_epoch(
  tmp_path, least, most_peers, fits
):
  def made():
    with Journal(tmp_path / "journal") as journal, Service(
      ("127.0.0.1", 0), SECURITY, journal, rules=Rules(least),
      most_peers=most_peers, say=str,
    ) as there:
      return there.address

  if fits:
    assert made()[1] > 0
    return
  with pytest.raises(ValueError, match=f"least={least} must be from 1 to most"):
    made()


def test_service_names_an_address_in_use(tmp_path):
  with (
    socket.create_server(("127.0.0.1", 0)) as other,
    Journal(tmp_path / "journal") as journal,
    pytest.raises(ValueError, match=r"cannot listen at 127.0.0.1:\d+: "),
  ):
    Service(other.getsockname(), SECURITY, journal)


def _waiting(revision, lost, text="waits"):
  return m.Waiting(revision, lost, text)


def test_peer_waits_for_a_holder_as_long_as_for_a_coordinator():
  lines = []
  patient = AdmissionTimeout(Settings(alone_s=1e6), lines.append)
  brief = AdmissionTimeout(Settings(alone_s=1e-9), lines.append)
  for timeout in (patient, brief):
    # The time starts with the first message, and again after a holder came.
    for lost in (True, False, True, False, True):
      assert timeout.update(_waiting(4, lost)) is None
  assert patient.update(_waiting(4, True)) is None
  error = brief.update(_waiting(4, True))
  assert isinstance(error, Halted)
  assert "no peer has connected that holds revision 4" in str(error)
  assert lines == ["the coordinator waits"] * 2
  patient.update(_waiting(4, True, "starts"))
  assert lines[2:] == ["the coordinator starts"]


@pytest.mark.parametrize(("rounds", "revision", "ended"), [
  (3, 2, False), (3, 3, True), (3, 4, True), (0, 0, False), (0, 9, False),
  (1, 1, True),
])
def test_peer_that_is_late_ends_after_the_last_round(rounds, revision, ended):
  timeout = AdmissionTimeout(Settings(rounds=rounds), str)
  error = timeout.update(_waiting(revision, False))
  assert isinstance(error, Finished) == ended
  assert (error is None) != ended


def test_wire_format_has_its_constants():
  """A change of a constant needs a new version in `frames.MAGIC`."""
  assert [*map(int, Kind)] == [*range(1, 10)]
  assert [*map(int, Purpose)] == [1, 2, 3]
  assert [*map(int, Status)] == [0, 1, 2, 3, 4]
  assert frames.HEADER_BYTES == 40
  assert frames.MOST_ITEMS == 1024
  assert frames.LIMITS == {
    Kind.MESSAGE: 2**18, Kind.KEEP_ALIVE: 0, Kind.OPEN: 32, Kind.ABORT: 2**10,
    Kind.DATA: 2**23, Kind.ASK: 2**8, Kind.MANIFEST: 2**26, Kind.CHUNK: 2**22,
    Kind.GONE: 0,
  }
  head = Header(Kind.ABORT, 8, 1, 2, 3, 4).pack()
  assert head[:36].hex() == (
    "454c4631" "04" "01" "0000" "0000000000000001" "00000002"
    "0000000000000003" "00000008" "00000004"
  )
  assert head[36:] == zlib.crc32(head[:36]).to_bytes(4, "big")
  assert frames.encode(m.Ready(1, 7)).hex() == (
    "0005" + b"Ready".hex() + "0000000000000001" "0000000000000007"
  )


class _Cut:
  """Socket whose first system call sends only some bytes."""

  def __init__(self, count):
    self._count, self.said = count, b""

  def sendmsg(self, parts):
    data = b"".join(map(bytes, parts))[: self._count]
    self.said += data
    return len(data)

  def sendall(self, data):
    assert len(data)
    self.said += bytes(data)


@pytest.mark.parametrize("checked", [False, True])
def test_frame_is_sent_completely_wherever_it_is_cut(checked):
  payload = np.arange(5, dtype=np.int16)
  for count in range(51):
    sock = _Cut(count)
    header = Header(Kind.DATA, tag=3)
    assert frames.send(sock, header, payload, checked=checked) == 50
    found = frames.unpack(sock.said[:40])
    assert found._replace(crc=None) == header._replace(length=10)
    assert (found.crc is not None) == checked
    assert sock.said[40:] == payload.tobytes()
    frames.check(found, sock.said[40:])


def test_large_frame_is_read_in_pieces_and_checked():
  here, other = socket.socketpair()
  data = np.random.default_rng(0).bytes(600_000)  # three pieces
  with here, other:
    sent = together([
      lambda: frames.send(here, Header(Kind.CHUNK), data, checked=True),
      lambda: frames.read(other, (Kind.GONE, Kind.CHUNK)),
    ])
    assert sent[0] == 600_040
    assert bytes(sent[1][1]) == data
    frames.send(here, Header(Kind.GONE))
    with pytest.raises(FrameError, match="kind GONE is not expected here"):
      frames.read(other, (Kind.CHUNK,))
    here.sendall(Header(Kind.OPEN, 2, crc=5).pack() + b"ab")
    with pytest.raises(FrameError, match="checksum of 2 bytes of kind OPEN"):
      frames.read(other, (Kind.OPEN,))
    here.close()
    with pytest.raises(ConnectionResetError, match="was closed"):
      frames.read(other, (Kind.OPEN,))


def test_header_of_wrong_length_or_flags_is_refused():
  good = Header(Kind.DATA, 4).pack()
  for length in (39, 41):
    with pytest.raises(FrameError, match=f"a header of {length} bytes"):
      frames.unpack(good.ljust(41, b"\0")[:length])
  longest = Header(Kind.DATA, 2**23).pack()
  assert frames.unpack(longest).length == 2**23
  with pytest.raises(FrameError, match="the limit is 8,388,608"):
    frames.unpack(Header(Kind.DATA, 2**23 + 1).pack())


def test_lost_names_the_operation_and_the_peer():
  assert str(Lost("p2", "closed", 3)) == "operation 3: peer p2: closed"
  assert str(Lost(None, "closed", 0)) == "operation 0: closed"
  assert str(Lost("p2", "closed")) == "peer p2: closed"
  assert str(Unreachable({"a": "x", "b": "y"})) == "a: x, b: y"


def test_sent_bytes_include_failed_operations_and_control():
  traffic = Traffic(Bytes(1, 2), Bytes(100, 200), Bytes(4, 8), Bytes(400, 800))
  traffic.control += 16
  assert traffic.sent_bytes == 31
  assert Traffic().sent_bytes == 0


def test_refused_connections_are_logged_up_to_a_rate(caplog):
  with (
    listeners(1, limits=Limits(lines_per_s=0.1)) as there,
    caplog.at_level(logging.WARNING),
  ):
    listener = there["p0"]
    for _ in range(5):
      listener._refuse(("host", 7), "no token")
    listener._line_time -= 100  # as after 100 s
    listener._refuse(("host", 8), "no token")
    assert listener.refused == 6
  assert [record.getMessage() for record in caplog.records] == [
    "refused host:7: no token", "refused host:8: no token (and 4 more)"
  ]


def test_newer_offer_replaces_an_older_one():
  with listeners(1) as there:
    listener = there["p0"]
    for epoch, current in ((2, 2), (1, 2), (2, 2), (3, 3)):
      offer = Offer(epoch, None, lambda *_: None)
      listener.serve(Purpose.DATA, offer)
      assert listener._offers[Purpose.DATA].epoch == current
      assert (listener._offers[Purpose.DATA] is offer) == (epoch == current)


@pytest.mark.parametrize(("options", "message"), [
  ({"order": "tree"}, "order='tree' must be one of direct, ring"),
  ({"x": np.zeros(4)}, "contiguous float32, not float64"),
  ({"x": np.zeros((4, 4), "f4").T[::2]}, "contiguous float32"),
  ({"out": np.zeros(3, "f4")}, "out must have x's shape"),
  ({"out": np.zeros(4, "f8")}, "out must have x's shape"),
  ({"out": np.zeros(8, "f4")[::2]}, "be contiguous and not overlap"),
  ({"ranks": ("p1",)}, "p0 is not among the ranks p1"),
  ({"ranks": ("p0", "p0")}, "must be different members"),
  ({"ranks": ("p0", "p9")}, "must be different members"),
  ({"block_bytes": 0}, "block_bytes=0 must be a multiple of 4"),
  ({"block_bytes": 6}, "block_bytes=6 must be a multiple of 4"),
  ({"block_bytes": 2**23 + 4}, "at most 8388608"),
])
def test_invalid_sum_is_refused(options, message):
  options = {"x": np.zeros(4, np.float32)} | options
  with (
    world(2) as links,
    pytest.raises(ValueError, match=message),
  ):
    link_collectives.all_reduce(links[0], 0, **options)


def test_output_must_not_overlap_the_input():
  x = np.ones(4, np.float32)
  out = np.empty_like(x)
  with world(1) as links:
    with pytest.raises(ValueError, match="not overlap x"):
      link_collectives.all_reduce(links[0], 0, x, out=x)
    for order in ("direct", "ring"):
      found = link_collectives.all_reduce(
        links[0], 0, x, out=out, order=order, block_bytes=2**23
      ).result(5)
      assert found is out
      assert (found == 1).all()
      assert link_collectives.sum_bytes(order, 4, 1, 0) == (0, 0)
    with pytest.raises(ValueError, match=r"3 bytes are more than most_bytes=2"):
      link_collectives.gather(links[0], 1, b"abc", most_bytes=2)
    whole = link_collectives.gather(links[0], 1, b"ab", most_bytes=2)
    assert [bytes(piece) for piece in whole.result(5)] == [b"ab"]


def test_gather_refuses_a_peer_with_more_bytes_than_agreed():
  with world(2) as links:
    mine = link_collectives.gather(links[0], 0, b"ab", most_bytes=2)
    digest = mine._agreement.digest
    assert mine._agrees(Agreement(digest, 2))
    assert not mine._agrees(Agreement(digest, 3))
    assert not mine._agrees(Agreement(bytes(32), 2))
    with pytest.raises(ValueError, match="operation 0 is already in progress"):
      link_collectives.gather(links[0], 0, b"ab")


@pytest.mark.parametrize("kind", ["direct", "ring", "gather"])
def test_peer_that_owes_any_block_is_named(kind):
  with world(3) as links:
    xs = arrays(3, 50)
    operations = [
      link_collectives.gather(a, 0, x, block_bytes=16) if kind == "gather"
      else link_collectives.all_reduce(a, 0, x, order=kind, block_bytes=16)
      for a, x in zip(links, xs, strict=True)
    ]
    for operation in operations:
      operation.result(10)
    for operation in operations:
      assert operation._late() is None
      for key in list(operation._seen):
        operation._seen.remove(key)
        assert operation._late() == key[0]
        operation._seen.add(key)
      traffic = operation._links.traffic
      assert operation._received.payload == traffic.received.payload > 0
      other = next(p for p in operation.ranks if p != operation._links.me)
      operation.ready.remove(other)
      assert operation._late() == other
      operation.ready.add(other)


def test_block_outside_an_operation_is_refused():
  with world(2) as links:
    total = link_collectives.all_reduce(
      links[0], 0, arrays(1, 20)[0], block_bytes=16
    )  # chunks of 40 bytes
    scratch = memoryview(bytearray(64))

    def place(slot, offset, length, peer="p1"):
      header = Header(Kind.DATA, length, 0, slot, offset)
      return total.place(peer, header, scratch)

    for slot, offset, length in (
      (0, 8, 16), (0, 0, 12), (0, 32, 16), (0, 48, 16), (0, 40, 0), (2, 0, 16),
      (1, 0, 20),
    ):
      with pytest.raises(FrameError, match="operation 0 has no"):
        place(slot, offset, length)
    for slot in (0, 1):
      assert len(place(slot, 0, 16)) == 16
      assert len(place(slot, 32, 8)) == 8
      with pytest.raises(FrameError, match="or has received it already"):
        place(slot, 0, 16)
    for _ in range(4):
      total.missed()


def test_memory_of_a_sum_is_reused():
  with world(1) as links:
    first = links[0].borrow(64)
    assert (first.shape, first.dtype) == ((16,), np.float32)
    links[0].give_back(first.reshape(4, 4))
    links[0].give_back(np.empty(0, np.float32))
    assert links[0].borrow(32) is not None
    again = links[0].borrow(64)
    assert np.shares_memory(again, first)
    assert again.shape == (16,)
    assert not np.shares_memory(links[0].borrow(64), first)


def test_peer_cannot_open_operations_without_end():
  with world(2) as links:
    word = Agreement(bytes(32), 4)
    links[0]._opened("p1", 0, word)
    with pytest.raises(FrameError, match="operation 0 is opened twice"):
      links[0]._opened("p1", 0, word)
    for tag in range(1, 4096):
      links[0]._opened("p1", tag, word)
    with pytest.raises(FrameError, match="4096 opened operations not started"):
      links[0]._opened("p1", 4096, word)


def test_connecting_ends_as_soon_as_a_member_refuses():
  with listeners(2) as there:
    there["p1"].serve(
      Purpose.DATA, Offer(1, frozenset({"p9"}), lambda *_: None)
    )
    members = {name: x.address for name, x in there.items()}
    links = Links("p0", 1, members, SECURITY)
    (error,) = together([lambda: links.connect(there["p0"], 3600)])
    assert isinstance(error, Unreachable)
    assert error.peers == {"p1": "p1 refuses: STRANGER"}


def test_rounds_use_different_tags():
  with world(1) as links:
    tags = [
      Exchange(links[0], m.Reduce(1, number, ("p0",)), 1.0, ())._tag
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
      there = Exchange(
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
  ({"x": np.zeros(2, np.complex64)}, "'x' is of type complex64: cannot be"),
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
  deep = {"x": states.Entry("int8", (1,) * 16, bytes(32))}
  assert states.decode(states.encode(deep), 1) == deep
  for entry in (
    states.Entry("int8", (1,) * 17, bytes(32)),
    states.Entry("bytes", (1, 1), bytes(32)),
    states.Entry("object", (1,), bytes(32)),
  ):
    with pytest.raises(FrameError):
      states.decode(states.encode({"x": entry}), 1 << 20)
  with pytest.raises(FrameError, match="a manifest of 65537 names"):
    states.decode((2**16 + 1).to_bytes(4, "big"), 1)


_RECORD = m.Record(2, ("a", "b"), 7, 1, "0a")


@pytest.mark.parametrize(("state", "text", "doing"), [
  (Coordinator(), "waits for 2 more peers: 0 of 2 there", {}),
  (Coordinator(pending=(("c", NEW),)), "waits for 1 more peer: 1 of 2 there",
   {"c": "waits to join"}),
  (Coordinator(_RECORD, pending=(("b", NEW),)),
   "waits for members to come back: a", {"a": "is waited for"}),
  (Coordinator(_RECORD, late=True),
   "waits for a peer that has revision 7: one of a, b",
   {"b": "is waited for"}),
  (Coordinator(_RECORD, Phase.FORMING, said=frozenset("a")),
   "waits for members to connect and to have revision 7: 1 of 2 there, "
   "missing b", {"a": "is prepared", "b": "connects, fetches"}),
  (Coordinator(_RECORD, Phase.OPEN, said=frozenset("b")),
   "waits for parts of round 7: 1 of 2 there, missing a",
   {"a": "computes", "b": "has its part"}),
  (Coordinator(
    _RECORD, Phase.RUNNING, contributors=("b",), said=frozenset("b")
  ), "waits for votes on round 7: 0 of 1 there, missing b",
   {"a": "computes", "b": "exchanges"}),
  (Coordinator(_RECORD, Phase.RUNNING, contributors=("a", "b"),
               votes=(("a", "0b"),)),
   "waits for votes on round 7: 1 of 2 there, missing b",
   {"a": "has voted", "b": "exchanges"}),
])
def test_status_of_a_coordinator_and_its_peers(tmp_path, state, text, doing):
  assert waits(state, Rules(least=2)) == text
  with Journal(tmp_path / "journal") as journal, Service(
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


def test_joining_peer_is_informed_of_a_wait_again_every_ten_seconds(tmp_path):
  here, other = socket.socketpair()
  lines = []
  names = tuple(f"{i:050}" for i in range(9))
  with here, other, Journal(tmp_path / "journal") as journal, Service(
    ("127.0.0.1", 0), SECURITY, journal, say=lines.append
  ) as there:
    channel = there._channels["z"] = Channel(here, frames.FROM_PEER, 10)
    there.state = Coordinator(m.Record(1, names, 3), pending=(("z", NEW),))

    def sent(now):
      there._speak(now)
      found = [
        frames.decode(x, frames.FROM_COORDINATOR) for x in channel._waiting
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
    assert lines[1].endswith(waits(there.state, there.rules))


def test_contribution_has_a_finite_weight_and_reports_a_finite_loss(tmp_path):
  def step(exchange, state, part):
    return {"x": state["x"] + exchange.mean(part)}

  with Journal(tmp_path / "journal") as journal, Service(
    ("127.0.0.1", 0), SECURITY, journal, say=str
  ) as there:
    threading.Thread(target=there.serve, daemon=True).start()
    part, state = np.ones(3, np.float32), {"x": np.zeros(3, np.float32)}
    with Swarm(
      there.address, SECURITY, state, settings=Settings(samples=5)
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
        end = time.monotonic() + 10
        while (report := there.seen()[0].report) is None or (
          report.revision < number
        ):
          assert time.monotonic() < end
          time.sleep(0.001)
        assert (report.revision, report.loss) == (number, said)
      assert swarm.checkpoint[0] == swarm.newest.number == 4
      assert len(swarm.checkpoint[1]) == 2  # with the leases
      assert swarm.digest == swarm.newest.digest
