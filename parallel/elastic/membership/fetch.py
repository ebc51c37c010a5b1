"""Getting shared state from those who have it, and giving it to others.

Whoever asks dials each holder (`Purpose.STATE`). A request is either for the
manifest of a digest, or for a chunk of it; the answer is that, or GONE when the
holder has another revision by now. A thread per holder takes chunks from one
list, so a slow holder sends fewer, and keeps some requests under way. A holder
that is silent, dies, or sends what has another hash is dropped, and its chunks
are asked of the others. Nothing is returned unless all of it was verified.
"""

import collections
from collections.abc import Mapping
import hashlib
import logging
import socket
import struct
import threading
from typing import Any

from parallel.elastic.membership import shared_state as states
from parallel.elastic.membership.messages import Digest, Id
from parallel.elastic.membership.shared_state import Entry, State
from parallel.elastic.transport import frames
from parallel.elastic.transport.frames import FrameError, Header, Kind
from parallel.elastic.transport.handshake import (
  Address,
  Cancelled,
  Purpose,
  Request,
  Scope,
  Security,
  dial,
)
from parallel.elastic.transport.listener import Listener, Offer

LOG = logging.getLogger(__name__)
_ASK = struct.Struct("!BH")  # 0: the manifest, 1: a chunk; bytes of a name
_MANIFEST, _CHUNK = 0, 1
_DEPTH = 4  # requests under way to a holder
_MOST_BYTES = 1 << 40  # of a state
_NOTHING: tuple[State, states.Manifest] = {}, {}


class Unavailable(ConnectionError):
  """No holder is left that gives the revision.

  Attributes:
    peers: Holders that were dropped, with what was seen.
  """

  def __init__(self, peers: Mapping[Id, str]) -> None:
    self.peers = dict(peers)
    super().__init__(
      "no holder of the state is left: "
      + ", ".join(f"{k}: {v}" for k, v in self.peers.items())
    )


class Server:
  """Gives a peer's state to others.

  What is published is read while others ask for it: its arrays must not be
  written before `publish` has been called with others.
  """

  def __init__(self, limit: int = 16, silence_s: float = 30.0) -> None:
    """Makes a server that has nothing yet.

    Args:
      limit: Connections that are served at once.
      silence_s: Seconds without a request that end a connection.
    """
    self._slots = threading.BoundedSemaphore(limit)
    self._silence_s = silence_s
    self._held: tuple[State, states.Manifest, bytes, str] = ({}, {}, b"", "")
    self.sent_bytes = 0

  def publish(self, state: State, entries: states.Manifest) -> Digest:
    """Gives this state from now on; returns its digest."""
    data = states.encode(entries)
    if len(data) > frames.LIMITS[Kind.MANIFEST]:
      raise ValueError(f"a manifest of {len(data):,} bytes is too long")
    name = hashlib.sha256(data).hexdigest()
    self._held = dict(state), entries, data, name
    return name

  def offer(self, listener: Listener, epoch: int, peers: Any) -> None:
    """Takes requests of an epoch's members."""
    listener.serve(
      Purpose.STATE, Offer(epoch, frozenset(peers), self._serve)
    )

  def _serve(self, sock: socket.socket, request: Request) -> None:
    """Answers one connection's requests."""
    del request
    if not self._slots.acquire(blocking=False):
      frames.send(sock, Header(Kind.GONE))
      return
    try:
      sock.settimeout(self._silence_s)
      while True:
        header, payload = frames.read(sock, (Kind.ASK,))
        self._answer(sock, header, bytes(payload))
    finally:
      self._slots.release()

  def _answer(self, sock: socket.socket, ask: Header, payload: bytes) -> None:
    held, entries, data, digest = self._held
    if len(payload) < _ASK.size:
      raise FrameError("a request is too short")
    what, length = _ASK.unpack_from(payload)
    name = payload[_ASK.size : _ASK.size + length].decode(errors="replace")
    wanted = payload[_ASK.size + length :].hex()
    if wanted != digest:
      frames.send(sock, Header(Kind.GONE, tag=ask.tag))
    elif what == _MANIFEST:
      frames.send(sock, Header(Kind.MANIFEST, tag=ask.tag), data)
    elif name in entries and ask.slot < entries[name].num_chunks:
      start, stop, _ = entries[name].chunk(ask.slot)
      chunk = states.buffer(held[name])[start:stop]
      self.sent_bytes += len(chunk)
      frames.send(sock, Header(Kind.CHUNK, tag=ask.tag, slot=ask.slot), chunk)
    else:
      raise FrameError("a request for a chunk that is not there")


class Fetch:
  """A state that is being fetched; `result` does it.

  Attributes:
    dropped: Holders that are asked no more, with what was seen.
    received_bytes: Bytes of chunks that have arrived.
  """

  def __init__(
    self, me: Id, epoch: int, digest: Digest, holders: Mapping[Id, Address],
    security: Security, *,
    have: tuple[State, states.Manifest] = _NOTHING, limit_s: float = 10.0,
  ) -> None:
    """Says what is to be fetched.

    Args:
      me: This peer.
      epoch: The epoch that it and the holders are in.
      digest: Of the state.
      holders: Who has it, and where they listen.
      security: What connections are protected by.
      have: State of this peer and its manifest. Its chunks are used where
        they are alike; their hashes are made again, since memory may have gone
        bad, or have been got only in part (`partial`).
      limit_s: Seconds in which a holder must answer a request.
    """
    self._digest, self._holders = digest, dict(holders)
    self._me, self._epoch, self._security = me, epoch, security
    (self._have, self._ours), self._limit_s = have, limit_s
    self._scope = Scope()
    self._lock = threading.Condition()
    self._entries: dict[str, Entry] | None = None
    self._missing: collections.deque[tuple[str, int]] = collections.deque()
    self._left = 0  # chunks that are not verified yet
    self._views: dict[str, memoryview] = {}
    self.dropped: dict[Id, str] = {}
    self.received_bytes = 0

  def cancel(self) -> None:
    """Ends it from another thread; `result` raises `Cancelled`."""
    self._scope.close()
    with self._lock:
      self._lock.notify_all()

  @property
  def partial(self) -> tuple[State, states.Manifest] | None:
    """What another fetch may begin with; None if nothing has come yet."""
    with self._lock:
      return None if self._entries is None else (self._arrays, self._entries)

  def result(self) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Fetches what differs; returns the state and its manifest.

    Raises:
      Unavailable: All holders were dropped.
      Cancelled: `cancel` was called.
    """
    threads = [
      threading.Thread(target=self._ask_holder, args=item, daemon=True)
      for item in self._holders.items()
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if self._entries is None or self._left:
      if self._scope.closed.is_set():
        raise Cancelled("the fetch was cancelled")
      raise Unavailable(self.dropped)
    self._scope.close()
    return {
      name: self._arrays[name].tobytes() if entry.dtype == "bytes"
      else self._arrays[name]
      for name, entry in self._entries.items()
    }, self._entries

  def _ask_holder(self, peer: Id, address: Address) -> None:
    """Asks one holder until all is there, or it is dropped."""
    asked: collections.deque[tuple[str, int]] = collections.deque()
    try:
      request = Request(Purpose.STATE, 0, self._epoch, self._me, peer)
      sock = dial(address, request, self._security, self._scope, self._limit_s)
      sock.settimeout(self._limit_s)
      self._learn(sock)
      while self._next(asked):
        while len(asked) < _DEPTH and self._more(sock, asked):
          pass
        self._take(sock, asked)
    except (OSError, ValueError) as error:
      with self._lock:
        self.dropped[peer] = str(error) or type(error).__name__
      if isinstance(error, FrameError):
        LOG.warning("the state of %s is not taken: %s", peer, error)
    finally:
      with self._lock:
        self._missing.extend(asked)
        self._lock.notify_all()

  def _request(self, sock: socket.socket, what: int, name: str,
               index: int) -> None:
    raw = name.encode()
    payload = _ASK.pack(what, len(raw)) + raw + bytes.fromhex(self._digest)
    frames.send(sock, Header(Kind.ASK, slot=index), payload)

  def _learn(self, sock: socket.socket) -> None:
    """Gets the manifest, from the first holder that gives the right one."""
    with self._lock:
      if self._entries is not None:
        return
    self._request(sock, _MANIFEST, "", 0)
    header, data = frames.read(sock, (Kind.MANIFEST, Kind.GONE))
    if header.kind is Kind.GONE:
      raise ConnectionError("has another revision, or too many ask")
    if hashlib.sha256(data).hexdigest() != self._digest:
      raise FrameError("sends a manifest with another digest")
    entries = states.decode(bytes(data), _MOST_BYTES)
    with self._lock:
      if self._entries is not None:
        return
      self._arrays = states.empty(entries)
      missing = states.differing(self._ours, entries)
      wanted = {*missing}
      self._views = {k: states.buffer(v) for k, v in self._arrays.items()}
      for name, entry in entries.items():
        for i in range(entry.num_chunks):
          if (name, i) not in wanted:
            start, stop, digest = entry.chunk(i)
            own = states.buffer(self._have[name])[start:stop]
            copy = self._views[name][start:stop]
            copy[:] = own
            if hashlib.sha256(copy).digest() != digest:
              missing.append((name, i))
      self._missing.extend(missing)
      self._left, self._entries = len(missing), entries
      self._lock.notify_all()

  def _next(self, asked: collections.deque) -> bool:
    """Waits for a chunk to ask for; returns whether there is one."""
    with self._lock:
      self._lock.wait_for(
        lambda: asked or self._missing or not self._left
        or self._scope.closed.is_set()
      )
      return not self._scope.closed.is_set() and self._left > 0

  def _more(self, sock: socket.socket, asked: collections.deque) -> bool:
    """Asks for one more chunk, if there is one."""
    with self._lock:
      if not self._missing:
        return False
      asked.append(self._missing.popleft())
    self._request(sock, _CHUNK, *asked[-1])
    return True

  def _take(self, sock: socket.socket, asked: collections.deque) -> None:
    """Receives the chunk that was asked for first, and verifies it."""
    if not asked:  # another holder took it meanwhile
      return
    name, index = asked[0]
    start, stop, wanted = self._entries[name].chunk(index)
    header = frames.read_header(sock)
    if header.kind is Kind.GONE:
      raise ConnectionError("has another revision by now")
    if (header.kind, header.slot, header.length) != (
      Kind.CHUNK, index, stop - start
    ):
      raise FrameError(f"answers with {header.kind.name} to chunk {index}")
    view = self._views[name][start:stop]
    frames.read_into(sock, view)
    if hashlib.sha256(view).digest() != wanted:
      raise FrameError(f"sends chunk {index} of {name} with another hash")
    with self._lock:
      asked.popleft()
      self._left -= 1
      self.received_bytes += stop - start
      self._lock.notify_all()
