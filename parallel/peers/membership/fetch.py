"""Transfer of the shared state: a server at each holder and a parallel fetch.

The fetching peer dials each holder (`Purpose.STATE`). A request names a digest
and asks for its manifest or for one chunk; the response is the requested data,
or GONE if the holder now has another revision. One thread per holder takes
chunks from a common queue and keeps `_MAX_IN_FLIGHT` requests in flight, so a
slow holder serves fewer chunks. A holder that times out, disconnects or sends
data with a wrong hash is dropped, and its chunks return to the queue. A fetch
returns only data that has been verified completely.
"""

import collections
from collections.abc import Mapping
import hashlib
import logging
import socket
import struct
import threading
from typing import Any

from parallel.peers.membership import shared_state as states
from parallel.peers.membership.messages import Digest, Id
from parallel.peers.membership.shared_state import ManifestEntry, State
from parallel.peers.transport import frames
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import (
  Address,
  Cancelled,
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
  dial,
)
from parallel.peers.transport.listener import AcceptRule, Listener

LOG = logging.getLogger(__name__)
# A request begins with 0 (for the manifest) or 1 (for a chunk) and the length
# of an array's name; the name and the digest follow.
_ASK = struct.Struct("!BH")
_MANIFEST, _CHUNK = 0, 1
# requests in flight per holder: hides a round trip per chunk
_MAX_IN_FLIGHT = 4
_MAX_BYTES = 1 << 40  # size of the largest accepted state
_NOTHING: tuple[State, states.Manifest] = {}, {}


class Unavailable(ConnectionError):
  """Error: all holders of the fetched state were dropped.

  Attributes:
    peers: Dropped holders and, for each, the error that was observed.
  """

  def __init__(self, peers: Mapping[Id, str]) -> None:
    self.peers = dict(peers)
    super().__init__(
      "no holder of the state is left: "
      + ", ".join(f"{k}: {v}" for k, v in self.peers.items())
    )


class StateServer:
  """Server of a peer's state.

  Requests read the published arrays without a copy, so the arrays must not be
  modified until `publish` has replaced them.

  Attributes:
    sent_bytes: Bytes of chunks sent so far.
  """

  def __init__(self, limit: int = 16, silence_s: float = 30.0) -> None:
    """Creates a server without a state.

    Args:
      limit: Number of connections served concurrently.
      silence_s: Seconds without a request after which a connection is closed.
    """
    self._slots = threading.BoundedSemaphore(limit)
    self._silence_s = silence_s
    # (state, manifest, encoded manifest, digest).
    self._held: tuple[State, states.Manifest, bytes, str] = ({}, {}, b"", "")
    self.sent_bytes = 0

  def publish(self, state: State, entries: states.Manifest) -> Digest:
    """Replaces the served state; returns its digest.

    Args:
      state: name -> array or bytes.
      entries: Manifest of the state.

    Raises:
      ValueError: The encoded manifest exceeds the limit of a frame.
    """
    data = states.encode(entries)
    if len(data) > frames.MAX_PAYLOAD_BYTES[Kind.MANIFEST]:
      raise ValueError(
        f"the manifest has {len(data):,} bytes, which is too long"
      )
    name = hashlib.sha256(data).hexdigest()
    self._held = dict(state), entries, data, name
    return name

  def offer(self, listener: Listener, epoch: int, peers: Any) -> None:
    """Accepts requests from the members of an epoch, and of no earlier epoch.

    Args:
      listener: Listener of the peer.
      epoch: Number of the epoch.
      peers: Ids of the members.
    """
    listener.serve(
      Purpose.STATE, AcceptRule(epoch, frozenset(peers), self._serve)
    )

  def _serve(self, sock: socket.socket, request: DialRequest) -> None:
    """Serves the requests of one connection."""
    del request
    # On this response, the fetching peer drops this holder and uses others.
    if not self._slots.acquire(blocking=False):
      frames.send(sock, Header(Kind.GONE))
      return
    try:
      sock.settimeout(self._silence_s)
      while True:
        # Ends with an error when the peer disconnects or the timeout expires.
        header, payload = frames.read(sock, (Kind.ASK,))
        self._answer(sock, header, bytes(payload))
    finally:
      self._slots.release()

  def _answer(self, sock: socket.socket, ask: Header, payload: bytes) -> None:
    # The tuple is read once, since `publish` replaces it in another thread.
    held, entries, data, digest = self._held
    if len(payload) < _ASK.size:
      raise FrameError("the request for a chunk is too short")
    # Untrusted: kind of request, length of the name.
    what, length = _ASK.unpack_from(payload)
    name = payload[_ASK.size : _ASK.size + length].decode(errors="replace")
    wanted = payload[_ASK.size + length :].hex()
    if wanted != digest:
      frames.send(sock, Header(Kind.GONE, tag=ask.tag))
    elif what == _MANIFEST:
      frames.send(sock, Header(Kind.MANIFEST, tag=ask.tag), data)
    elif name in entries and ask.slot < entries[name].num_chunks:
      # The slot of a request is the number of the chunk.
      start, stop, _ = entries[name].chunk(ask.slot)
      chunk = states.buffer(held[name])[start:stop]
      self.sent_bytes += len(chunk)
      frames.send(sock, Header(Kind.CHUNK, tag=ask.tag, slot=ask.slot), chunk)
    else:
      raise FrameError("the request is for a chunk that does not exist")


class Fetch:
  """Download of a state from several holders; `result` executes it.

  Attributes:
    dropped: Dropped holders and, for each, the error that was observed.
    received_bytes: Bytes of verified chunks received so far.
  """

  def __init__(
    self, me: Id, epoch: int, digest: Digest, holders: Mapping[Id, Address],
    security: Security, *,
    have: tuple[State, states.Manifest] = _NOTHING, limit_s: float = 10.0,
  ) -> None:
    """Prepares a download.

    Args:
      me: Id of this peer.
      epoch: Number of the epoch (list of members) of this peer and the holders.
      digest: Digest of the state.
      holders: id -> address of each holder.
      security: Token and TLS settings of connections.
      have: Local state and its manifest. Chunks with equal hashes are copied
        instead of downloaded. Their hashes are computed again, since the state
        may be corrupt, or incomplete (`partial_state` of another fetch).
      limit_s: Seconds within which a holder must respond to a request.
    """
    self._digest, self._holders = digest, dict(holders)
    self._me, self._epoch, self._security = me, epoch, security
    (self._have, self._ours), self._limit_s = have, limit_s
    self._scope = SocketGroup()
    # Guards the queue, the counters and `dropped`.
    self._lock = threading.Condition()
    self._entries: dict[str, ManifestEntry] | None = None
    # Queue of (array, chunk) pairs that are not requested yet.
    self._missing: collections.deque[tuple[str, int]] = collections.deque()
    self._left = 0  # chunks that are not verified yet: queued or requested
    self._views: dict[str, memoryview] = {}  # bytes of each array
    self.dropped: dict[Id, str] = {}
    self.received_bytes = 0

  def cancel(self) -> None:
    """Ends the download, so that `result` raises `Cancelled`; thread-safe."""
    self._scope.close()
    with self._lock:
      self._lock.notify_all()

  @property
  def partial_state(self) -> tuple[State, states.Manifest] | None:
    """Arrays received so far and their manifest, for `have` of another fetch.

    None before the manifest has been received.
    """
    with self._lock:
      return None if self._entries is None else (self._arrays, self._entries)

  def result(self) -> tuple[dict[str, Any], dict[str, ManifestEntry]]:
    """Downloads the chunks that ``have`` lacks; returns (state, manifest).

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
    # All threads have ended without a complete state.
    if self._entries is None or self._left:
      if self._scope.closed.is_set():
        raise Cancelled("the fetch was cancelled")
      raise Unavailable(self.dropped)
    self._scope.close()
    return {
      # Bytes values were received into arrays of uint8.
      name: self._arrays[name].tobytes() if entry.dtype == "bytes"
      else self._arrays[name]
      for name, entry in self._entries.items()
    }, self._entries

  def _ask_holder(self, peer: Id, address: Address) -> None:
    """Requests chunks from one holder until all are verified or it fails."""
    # Chunks requested from this holder and not received yet, in order.
    asked: collections.deque[tuple[str, int]] = collections.deque()
    sock: socket.socket | None = None
    try:
      request = DialRequest(Purpose.STATE, 0, self._epoch, self._me, peer)
      sock = dial(address, request, self._security, self._scope, self._limit_s)
      sock.settimeout(self._limit_s)
      self._fetch_manifest(sock)
      while self._wait_for_chunk(asked):
        # Keep several requests in flight while waiting for a response.
        while len(asked) < _MAX_IN_FLIGHT and self._request_chunk(sock, asked):
          pass
        self._take(sock, asked)
    except (OSError, ValueError, MemoryError) as error:
      with self._lock:
        self.dropped[peer] = str(error) or type(error).__name__
      if isinstance(error, FrameError):
        LOG.warning("the state of %s is rejected: %s", peer, error)
    finally:
      if sock is not None:
        self._scope.end(sock)
      # Chunks without a response return to the queue, for other holders.
      with self._lock:
        self._missing.extend(asked)
        self._lock.notify_all()

  def _request(self, sock: socket.socket, what: int, name: str,
               index: int) -> None:
    raw = name.encode()
    # The digest lets a holder with another revision respond GONE.
    payload = _ASK.pack(what, len(raw)) + raw + bytes.fromhex(self._digest)
    frames.send(sock, Header(Kind.ASK, slot=index), payload)

  def _fetch_manifest(self, sock: socket.socket) -> None:
    """Downloads the manifest, unless another holder has sent it already."""
    with self._lock:
      if self._entries is not None:
        return
    self._request(sock, _MANIFEST, "", 0)
    header, data = frames.read(sock, (Kind.MANIFEST, Kind.GONE))
    if header.kind is Kind.GONE:
      raise ConnectionError(
        "the peer has another revision, or too many connections"
      )
    # The digest was committed, so a manifest that matches it is correct.
    if hashlib.sha256(data).hexdigest() != self._digest:
      raise FrameError(
        "the peer sends a manifest with another digest than requested"
      )
    entries = states.decode(bytes(data), _MAX_BYTES)
    with self._lock:
      if self._entries is not None:  # another thread was first
        return
      # The size was checked in `decode`, before this allocation.
      self._arrays = states.allocate_arrays(entries)
      missing = states.differing_chunks(self._ours, entries)
      wanted = {*missing}
      self._views = {k: states.buffer(v) for k, v in self._arrays.items()}
      for name, entry in entries.items():
        for i in range(entry.num_chunks):
          if (name, i) not in wanted:
            start, stop, digest = entry.chunk(i)
            own = states.buffer(self._have[name])[start:stop]
            copy = self._views[name][start:stop]
            copy[:] = own  # the copy is hashed, since the source may change
            if hashlib.sha256(copy).digest() != digest:
              missing.append((name, i))
      self._missing.extend(missing)
      self._left, self._entries = len(missing), entries
      self._lock.notify_all()

  def _wait_for_chunk(self, asked: collections.deque) -> bool:
    """Waits until this thread has work; returns False if the fetch has ended.

    Chunks that other holders are asked for may return to the queue, so a thread
    without work waits until all chunks are verified.
    """
    with self._lock:
      self._lock.wait_for(
        lambda: asked or self._missing or not self._left
        or self._scope.closed.is_set()
      )
      return not self._scope.closed.is_set() and self._left > 0

  def _request_chunk(
    self, sock: socket.socket, asked: collections.deque
  ) -> bool:
    """Requests the next chunk of the queue; returns False if it is empty.

    The chunk is appended to ``asked``, the requests without a response.
    """
    with self._lock:
      if not self._missing:
        return False
      asked.append(self._missing.popleft())
    self._request(sock, _CHUNK, *asked[-1])
    return True

  def _take(self, sock: socket.socket, asked: collections.deque) -> None:
    """Receives and verifies the chunk of the oldest request in ``asked``."""
    if not asked:  # another thread has taken the last chunk of the queue
      return
    name, index = asked[0]
    start, stop, wanted = self._entries[name].chunk(index)  # bytes, hash
    header = frames.read_header(sock)
    if header.kind is Kind.GONE:
      raise ConnectionError("the peer now has another revision")
    if (header.kind, header.slot, header.length) != (
      Kind.CHUNK, index, stop - start
    ):
      raise FrameError(
        f"the peer responds with {header.kind.name} to the request for chunk "
        f"{index}"
      )
    view = self._views[name][start:stop]
    # It is received into the array: an invalid chunk is overwritten later.
    frames.read_into(sock, view)
    if hashlib.sha256(view).digest() != wanted:
      raise FrameError(
        f"the peer sends chunk {index} of {name} with another hash than in the "
        "manifest"
      )
    with self._lock:
      asked.popleft()
      self._left -= 1
      self.received_bytes += stop - start
      self._lock.notify_all()
