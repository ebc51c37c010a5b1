"""Listener of a peer: authenticates connections, with limits against abuse.

`parallel.peers.transport.handshake` describes the handshake. A handshake has
one deadline for all its bytes, so a dialer that sends slowly cannot hold a
connection open. If too many handshakes are in progress, the oldest one is
ended: a regular handshake takes milliseconds. Refused connections are logged,
up to a maximum rate.
"""

import collections
from collections.abc import Callable
import dataclasses
import hmac
import logging
import os
import socket
import threading
import time
from typing import Any, NamedTuple

from parallel.peers.membership.messages import Id
from parallel.peers.transport.handshake import (
  MAC_BYTES,
  MAGIC,
  NONCE_BYTES,
  OPENING,
  REQUEST,
  Address,
  DialRequest,
  HandshakeSocket,
  Purpose,
  Refused,
  Security,
  SocketGroup,
  Status,
  set_socket_options,
  shut,
)

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a listener.

  Attributes:
    connections: Maximum number of concurrent accepted connections.
    handshakes: Maximum number of concurrent handshakes; a further one ends the
      oldest one.
    handshake_s: Time limit of a handshake in seconds.
    lines_per_s: Maximum rate of log lines for refused connections.
  """

  connections: int = 1024
  handshakes: int = 32
  handshake_s: float = 5.0
  lines_per_s: float = 5.0


class AcceptRule(NamedTuple):
  """Conditions under which connections for a purpose are accepted.

  Attributes:
    epoch: Number of the epoch (list of members) whose dialers are accepted.
    peers: Accepted dialers; None for all that have the token.
    handle: Function that serves an accepted connection; the connection is
      closed when it returns.
  """

  epoch: int
  peers: frozenset[Id] | None
  handle: Callable[[socket.socket, DialRequest], None]


class Listener:
  """Accepts connections and serves each in its own thread.

  Attributes:
    me: Id of the listening peer, which requests of dialers must name.
    address: (host, port) at which this listener listens.
    refused: Number of refused connections.
  """

  def __init__(
    self, me: Id, security: Security, address: Address = ("127.0.0.1", 0),
    limits: Limits = Limits(),
  ) -> None:
    self.me, self._security, self._limits = me, security, limits
    self._offers: dict[Purpose, AcceptRule] = {}
    self._scope = SocketGroup()
    self._lock = threading.Lock()
    # Sockets in a handshake, oldest first.
    self._underway: collections.OrderedDict[socket.socket, None] = (
      collections.OrderedDict()
    )
    self._accepted = 0
    # Leaky bucket of log lines, its last update, number of suppressed lines.
    self._lines, self._line_time, self._silent = 0.0, 0.0, 0
    self.refused = 0
    # Numeric IPv6 addresses contain colons.
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    self._server = socket.create_server(address, family=family, backlog=512)
    self.address: Address = self._server.getsockname()[:2]
    self._thread = threading.Thread(target=self._accept, daemon=True)
    self._thread.start()

  def serve(self, purpose: Purpose, offer: AcceptRule) -> None:
    """Accepts connections for a purpose, of one epoch only.

    Args:
      purpose: Purpose of the connections.
      offer: Conditions, which replace those of an earlier epoch. They are
        ignored if conditions of a later epoch are in use.
    """
    with self._lock:
      before = self._offers.get(purpose)
      # Threads of different epochs may call this in any order.
      if before is None or before.epoch <= offer.epoch:
        self._offers[purpose] = offer

  def close(self) -> None:
    """Stops listening and closes all accepted connections."""
    self._scope.closed.set()
    shut(self._server)
    self._server.close()
    self._thread.join()
    self._scope.close()

  def __enter__(self) -> "Listener":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _accept(self) -> None:
    """Accepts connections until the listener is closed; runs in a thread."""
    while not self._scope.closed.is_set():
      try:
        sock, address = self._server.accept()
      except OSError:
        if self._scope.closed.is_set():
          return
        time.sleep(0.01)  # out of file descriptors: wait for others to end
        continue
      with self._lock:
        self._underway[sock] = None
        old = None
        if len(self._underway) > self._limits.handshakes:
          old = self._underway.popitem(last=False)[0]  # the oldest handshake
      if old is not None:
        shut(old)
      threading.Thread(
        target=self._meet, args=(sock, address), daemon=True
      ).start()

  def _meet(self, raw: socket.socket, address: Any) -> None:
    """Runs a connection from its handshake to its end, in its own thread."""
    sock, accepted = raw, False
    try:
      self._scope.add(sock)
      # This limits the TLS handshake; `HandshakeSocket` limits the rest.
      sock.settimeout(self._limits.handshake_s)
      if self._security.server is not None:
        sock = self._security.server.wrap_socket(raw, server_side=True)
        self._scope.end(raw)
        self._scope.add(sock)
      # It raises an error if the dialer is not authenticated.
      handle, request, reason = self._run_handshake(sock)
      with self._lock:
        self._underway.pop(raw, None)
      if handle is None:
        if reason:  # "" for EARLY, after which the dialer retries
          self._refuse(address, reason)
        return
      accepted = True
      set_socket_options(sock)
      # Runs until the connection ends.
      handle(sock, request)
    except (OSError, ValueError) as error:
      if not accepted and not self._scope.closed.is_set():
        self._refuse(address, str(error) or type(error).__name__)
    finally:
      with self._lock:
        self._underway.pop(raw, None)
        self._accepted -= accepted
      self._scope.end(sock)

  def _run_handshake(self, sock: socket.socket) -> tuple[Any, DialRequest, str]:
    """Executes the listener's side of a handshake.

    Returns:
      (handler or None if refused, request, reason of the refusal).
    """
    connection = HandshakeSocket(sock, self._limits.handshake_s)
    security = self._security
    opening = OPENING.pack(
      MAGIC, security.identity.public, os.urandom(NONCE_BYTES)
    )
    # The listener first sends a new nonce, which makes replays fail.
    connection.send(opening)
    said = connection.receive(REQUEST.size)
    mac = connection.receive(MAC_BYTES)
    proof = connection.receive(MAC_BYTES)
    # The request is authenticated before it is parsed.
    if not hmac.compare_digest(
      mac, security.mac(b"dialer", opening, said)
    ):
      raise Refused("the peer has no token, or a wrong one")
    magic, purpose, number, epoch, sender, receiver, public, _ = (
      REQUEST.unpack(said)
    )
    request = DialRequest(
      Purpose(purpose), number, epoch, sender.rstrip(b"\0").decode(),
      receiver.rstrip(b"\0").decode(),
    )
    security.check_owner(request.sender, public)
    if not hmac.compare_digest(
      proof, security.proof(public, b"dialer", opening, said)
    ):
      raise Refused(f"{request.sender} has not proved its identity")
    if magic != MAGIC:
      raise Refused("the peer has another version of the protocol")
    with self._lock:
      offer = self._offers.get(request.purpose)
      status = self._status(offer, request)
      self._accepted += status is Status.ACCEPTED  # reserved under the lock
    # The MAC also covers the status, which therefore cannot be altered.
    answer = bytes([status])
    try:
      connection.send(
        answer + security.mac(b"listener", opening, said, answer)
        + security.proof(public, b"listener", opening, said, answer)
      )
    except OSError:
      with self._lock:
        self._accepted -= status is Status.ACCEPTED  # undo
      raise
    if status is Status.ACCEPTED and offer is not None:
      return offer.handle, request, ""
    return None, request, "" if status is Status.EARLY else (
      f"{status.name}: {request.sender}, {request.purpose.name}, epoch "
      f"{request.epoch}"
    )

  def _status(self, offer: AcceptRule | None, request: DialRequest) -> Status:
    """Returns the response to a request whose sender is authenticated.

    ``offer`` are the conditions of the request's purpose; None for none.
    """
    if offer is None or request.epoch > offer.epoch:
      return Status.EARLY
    if request.epoch < offer.epoch:
      return Status.STALE
    known = offer.peers is None or request.sender in offer.peers
    if not known or request.receiver != self.me:
      return Status.NOT_MEMBER
    if self._accepted >= self._limits.connections:
      return Status.FULL
    return Status.ACCEPTED

  def _refuse(self, address: Any, reason: str) -> None:
    """Logs a refused connection, or only counts it above the maximum rate."""
    with self._lock:
      self.refused += 1
      now, rate = time.monotonic(), self._limits.lines_per_s
      # Leaky bucket: it empties at `rate` lines per second.
      self._lines = max(0.0, self._lines - (now - self._line_time) * rate)
      self._line_time = now
      if self._lines >= rate:
        self._silent += 1
        return
      self._lines += 1
      # Number of lines that were suppressed since the last one.
      more, self._silent = self._silent, 0
    LOG.warning(
      "refused %s:%s: %s%s", *address[:2], reason,
      f" (and {more} more)" if more else "",
    )
