"""The wire format, frames, links and operations of the transport."""

import contextlib
import logging
import socket
import time
import zlib

import numpy as np
import pytest

from parallel.peers.membership import messages as m
from parallel.peers.ring import link_collectives
from parallel.peers.settings import LinkOptions
from parallel.peers.transport import frames, handshake
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import (
  DialRequest,
  Purpose,
  Refused,
  SocketGroup,
  Status,
  dial,
  find_local_host,
)
from parallel.peers.transport.links import Links
from parallel.peers.transport.listener import AcceptRule, Limits
from parallel.peers.transport.transfers import (
  ByteCounts,
  LinksLost,
  OperationSpec,
  Traffic,
  UnreachableError,
)
from tests.parallel.peers.worlds import (
  PATIENCE_S,
  SECURITY,
  Relay,
  arrays,
  listeners,
  together,
  until,
  world,
)

pytestmark = pytest.mark.quick


def test_wire_format_has_its_constants():
  """A change of a constant needs a new version in `frames.MAGIC`."""
  assert [*map(int, Kind)] == [*range(1, 10)]
  assert [*map(int, Purpose)] == [1, 2, 3, 4]
  assert [*map(int, Status)] == [0, 1, 2, 3, 4]
  assert frames.HEADER_BYTES == 40
  assert frames.MAX_ITEMS == 1024
  assert frames.MAX_PAYLOAD_BYTES == {
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


def test_options_of_a_connection_are_those_of_its_socket():
  chosen = LinkOptions(num_connections=2, silence_s=7, send_buffer=1 << 15)
  with world(2, chosen) as links:
    (_, control), *data = links[0]._outward
    assert control.gettimeout() == 7
    assert len(data) == 2
    for _, sock in data:
      assert sock.gettimeout() is None
      assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
      unacknowledged = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
      assert sock.getsockopt(*unacknowledged) == 7000
      # The kernel doubles the size, for its own use.
      assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 1 << 16


def test_error_of_a_check_fits_a_message_for_any_text(monkeypatch):
  def failing(*_):
    raise OSError("\u00e9" * 1000)

  monkeypatch.setattr(handshake, "dial", failing)
  text = handshake.reachability_error(
    "p0", "p1", ("h", 1), SECURITY, SocketGroup(), 1
  )
  assert text == "?" * m.MAX_CHARS
  message = m.Checked("p1", text)
  assert frames.decode(frames.encode(message), [m.Checked]) == message
  with pytest.raises(FrameError, match="is not a valid text"):
    frames.encode(m.Checked("p1", text + "?"))


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
    with pytest.raises(FrameError, match="checksum of the OPEN frame of 2"):
      frames.read(other, (Kind.OPEN,))
    here.close()
    with pytest.raises(ConnectionResetError, match="was closed"):
      frames.read(other, (Kind.OPEN,))


def test_header_of_wrong_length_or_flags_is_refused():
  good = Header(Kind.DATA, 4).pack()
  for length in (39, 41):
    with pytest.raises(FrameError, match=f"a header has {length} bytes"):
      frames.unpack(good.ljust(41, b"\0")[:length])
  longest = Header(Kind.DATA, 2**23).pack()
  assert frames.unpack(longest).length == 2**23
  with pytest.raises(FrameError, match="the limit is 8,388,608"):
    frames.unpack(Header(Kind.DATA, 2**23 + 1).pack())


def test_lost_names_the_operation_and_the_peer():
  assert str(LinksLost("p2", "closed", 3)) == "operation 3: peer p2: closed"
  assert str(LinksLost(None, "closed", 0)) == "operation 0: closed"
  assert str(LinksLost("p2", "closed")) == "peer p2: closed"
  assert str(UnreachableError({"a": "x", "b": "y"})) == "a: x, b: y"


def test_sent_bytes_include_failed_operations_and_control():
  traffic = Traffic(
    ByteCounts(1, 2), ByteCounts(100, 200), ByteCounts(4, 8),
    ByteCounts(400, 800)
  )
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


class _Slow(Relay):
  """Relay that delivers a listener's data late."""

  def _forward(self, source, target):
    if target.getsockname()[:2] == self.address:
      time.sleep(0.2)
    super()._forward(source, target)


def test_first_connection_may_take_longer_than_a_refusal():
  """A machine is busy, or a link has a long delay."""
  with listeners(1) as there, contextlib.closing(
    _Slow(there["p0"].address, 1e9)
  ) as relay, contextlib.closing(Relay(there["p0"].address, 1e9)) as closed:
    there["p0"].serve(Purpose.CHECK, AcceptRule(0, None, lambda *_: None))
    request = DialRequest(Purpose.CHECK, 0, 0, "p1", "p0")
    assert find_local_host(
      relay.address, request, SECURITY, refused_s=0.05, slow_s=PATIENCE_S
    ) == "127.0.0.1"
    with pytest.raises(TimeoutError):
      find_local_host(relay.address, request, SECURITY, 0.02, 0.05)
    closed.close()
    # Waits no longer than for a refusal.
    with pytest.raises(ConnectionRefusedError):
      find_local_host(closed.address, request, SECURITY, 0.05, 1e9)


def test_only_an_early_dial_is_retried():
  """Whatever the receiver's id is."""
  with listeners(1) as there:
    listener, asked = there["p0"], []
    status = listener._status

    def seen(offer, request):
      asked.append(status(offer, request))
      if len(asked) == 3:  # the listener enters the epoch
        listener._offers[Purpose.DATA] = AcceptRule(1, None, lambda *_: None)
      return asked[-1]

    listener._status = seen
    for receiver in ("p0", "epoch"):
      request = DialRequest(Purpose.DATA, 0, 1, "me", receiver)
      if receiver == "p0":
        dial(listener.address, request, SECURITY, SocketGroup(), 20).close()
        assert asked == [Status.EARLY] * 3 + [Status.ACCEPTED]
      else:
        with pytest.raises(Refused, match="NOT_MEMBER"):
          dial(listener.address, request, SECURITY, SocketGroup(), 20)
        assert asked[4:] == [Status.NOT_MEMBER]


def test_newer_offer_replaces_an_older_one():
  with listeners(1) as there:
    listener = there["p0"]
    for epoch, current in ((2, 2), (1, 2), (2, 2), (3, 3)):
      offer = AcceptRule(epoch, None, lambda *_: None)
      listener.serve(Purpose.DATA, offer)
      assert listener._offers[Purpose.DATA].epoch == current
      assert (listener._offers[Purpose.DATA] is offer) == (epoch == current)


@pytest.mark.parametrize(("options", "message"), [
  ({"order": "tree"}, "order='tree' must be one of direct, ring"),
  ({"x": np.zeros(4)}, "x has dtype float64; it must be contiguous"),
  ({"x": np.zeros((4, 4), "f4").T[::2]}, "contiguous and float32"),
  ({"out": np.zeros(3, "f4")}, "out must have x's shape"),
  ({"out": np.zeros(4, "f8")}, "out must have x's shape"),
  ({"out": np.zeros(8, "f4")[::2]}, "be contiguous and not overlap"),
  ({"ranks": ("p1",)}, "p0 must be one of the ranks of the operation: p1"),
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
      ).result(PATIENCE_S)
      assert found is out
      assert (found == 1).all()
      assert link_collectives.sum_sent_bytes(order, 4, 1, 0) == (0, 0)
    with pytest.raises(ValueError, match=r"3 bytes; at most max_bytes=2"):
      link_collectives.gather(links[0], 1, b"abc", max_bytes=2)
    whole = link_collectives.gather(links[0], 1, b"ab", max_bytes=2)
    assert [bytes(piece) for piece in whole.result(PATIENCE_S)] == [b"ab"]


def test_gather_refuses_a_peer_with_more_bytes_than_agreed():
  with world(2) as links:
    mine = link_collectives.gather(links[0], 0, b"ab", max_bytes=2)
    digest = mine._agreement.digest
    assert mine._agrees(OperationSpec(digest, 2))
    assert not mine._agrees(OperationSpec(digest, 3))
    assert not mine._agrees(OperationSpec(bytes(32), 2))
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
      operation.result(PATIENCE_S)
    for operation in operations:
      assert operation._blocking_peer() is None
      for key in list(operation._seen):
        operation._seen.remove(key)
        assert operation._blocking_peer() == key[0]
        operation._seen.add(key)
      traffic = operation._links.traffic
      assert operation._received.payload == traffic.received.payload > 0
      other = next(p for p in operation.ranks if p != operation._links.me)
      operation.ready.remove(other)
      assert operation._blocking_peer() == other
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
      with pytest.raises(FrameError, match="operation 0 expects no"):
        place(slot, offset, length)
    for slot in (0, 1):
      assert len(place(slot, 0, 16)) == 16
      assert len(place(slot, 32, 8)) == 8
      with pytest.raises(FrameError, match="or has received it already"):
        place(slot, 0, 16)
    for _ in range(4):
      total.missed()


def test_peers_may_open_different_numbers_of_connections():
  xs = arrays(2, 1000)
  with listeners(2) as there:
    members = {name: x.address for name, x in there.items()}
    links = [
      Links(name, 1, members, SECURITY, LinkOptions(num_connections=count))
      for name, count in zip(there, (1, 3), strict=True)
    ]
    together([lambda x=x: x.connect(there[x.me], PATIENCE_S) for x in links])
    until(lambda: [len(x._inward) for x in links] == [4, 2])
    found = together([
      lambda x=x, y=y: link_collectives.all_reduce(x, 0, y).result(PATIENCE_S)
      for x, y in zip(links, xs, strict=True)
    ])
    for x in links:
      x.close()
  for total in found:
    np.testing.assert_array_equal(total, xs[0] + xs[1])


def test_two_different_other_operations_are_not_counted_together(monkeypatch):
  """Two of four peers call the same sum: no other call is as frequent."""
  # On a busy machine, the others may need longer to end themselves.
  monkeypatch.setattr(
    "parallel.peers.transport.links._ODD_FIRST_S", PATIENCE_S
  )
  xs = arrays(4, 9)
  calls = [
    lambda i: link_collectives.all_reduce(links[i], 0, xs[i]),
    lambda i: link_collectives.all_reduce(links[i], 0, xs[i]),
    lambda i: link_collectives.all_reduce(links[i], 0, xs[i], block_bytes=64),
    lambda i: link_collectives.gather(links[i], 0, xs[i]),
  ]

  def ended(i):
    with pytest.raises(LinksLost):
      calls[i](i).result(PATIENCE_S)
    return links[i].error.peer

  with world(4) as links:
    peers = [x.me for x in links]
    found = together([lambda i=i: ended(i) for i in range(4)])
  # Each of the others ends itself, or sees first that the other one has ended.
  assert {*found} <= {*peers[2:]}


def test_reason_of_another_peer_is_printable():
  with world(2) as links:
    operation = link_collectives.all_reduce(links[1], 0, arrays(1, 9)[0])
    links[0].close("\x1b[2J\u00e9")
    with pytest.raises(LinksLost) as caught:
      operation.result(PATIENCE_S)
  assert (caught.value.peer, caught.value.reason) == ("p0", "?[2J?")


def test_memory_of_a_sum_is_reused():
  with world(1) as links:
    first = links[0].borrow_buffer(64)
    assert (first.shape, first.dtype) == ((16,), np.float32)
    links[0].return_buffer(first.reshape(4, 4))
    links[0].return_buffer(np.empty(0, np.float32))
    assert links[0].borrow_buffer(32) is not None
    again = links[0].borrow_buffer(64)
    assert np.shares_memory(again, first)
    assert again.shape == (16,)
    assert not np.shares_memory(links[0].borrow_buffer(64), first)


def test_peer_cannot_open_operations_without_end():
  with world(2) as links:
    word = OperationSpec(bytes(32), 4)
    links[0]._opened("p1", 0, word)
    with pytest.raises(FrameError, match="operation 0 was opened twice"):
      links[0]._opened("p1", 0, word)
    for tag in range(1, 4096):
      links[0]._opened("p1", tag, word)
    with pytest.raises(FrameError, match="opened 4096 operations that are not"):
      links[0]._opened("p1", 4096, word)


def test_member_is_absent_until_all_of_its_connections_are_there():
  with listeners(2) as there:
    there["p1"].serve(
      Purpose.DATA, AcceptRule(1, None, lambda sock, _: sock.recv(1))
    )
    members = {name: x.address for name, x in there.items()}
    links = Links("p0", 1, members, SECURITY, LinkOptions(num_connections=2))

    def dialled(connection):
      request = DialRequest(Purpose.DATA, connection, 1, "p1", "p0")
      return dial(members["p0"], request, SECURITY, SocketGroup(), PATIENCE_S)

    error, *sockets = together([
      lambda: links.connect(there["p0"], 2.0), lambda: dialled(0),
      lambda: dialled(1),
    ])
    for sock in sockets:
      sock.close()
    assert isinstance(error, UnreachableError)
    assert (error.peers, error.absent) == ({}, ("p1",))


def test_connecting_ends_as_soon_as_a_member_refuses():
  with listeners(2) as there:
    there["p1"].serve(
      Purpose.DATA, AcceptRule(1, frozenset({"p9"}), lambda *_: None)
    )
    members = {name: x.address for name, x in there.items()}
    links = Links("p0", 1, members, SECURITY)
    (error,) = together([lambda: links.connect(there["p0"], 3600)])
    assert isinstance(error, UnreachableError)
    assert error.peers == {"p1": "p1 refuses: NOT_MEMBER"}


@pytest.mark.parametrize("text", [
  "7000", ":7000", "::1:7000", "[::1]", "[::1:7000", "localhost:0",
  "localhost:65536", "localhost:-1", "a b:7000",
])
def test_text_that_is_no_address_is_refused(text):
  with pytest.raises(ValueError) as error:
    handshake.parse_address("--elastic=", text, 1)
  assert str(error.value).startswith(f"--elastic={text} is not HOST:PORT,")
  assert str(error.value).endswith("with a port from 1 to 65535")
