"""Connections between peers: who may make one, and how it is ended.

A connection goes one way in its use: who dials sends, or asks. Before anything
else both sides prove that they have the same token, which is never sent:

  listener -> dialer: a nonce
  dialer -> listener: what it wants (purpose, lane, epoch, from, to), a nonce,
    and the HMAC-SHA256 of all that was said
  listener -> dialer: accepted or not, and the HMAC of all that was said

So nobody learns a MAC of the listener who has not the token, and a handshake
that is recorded and sent again fails at the nonce. A connection of another
epoch is refused. What follows the handshake is protected from others on the
way by TLS only, which is an option. A token must not be guessable: whoever can
pose as a listener sees a MAC, at which guesses can be tried.
"""

from collections.abc import Callable
import collections
import contextlib
import dataclasses
import enum
import hashlib
import hmac
import logging
import os
import socket
import ssl
import struct
import threading
import time
from typing import Any, NamedTuple

from parallel.elastic.frames import read_into
from parallel.elastic.messages import Id

LOG = logging.getLogger(__name__)
Address = tuple[str, int]
LEAST_TOKEN_BYTES = 16
_NONCE_BYTES = _MAC_BYTES = 32
_OPENING = struct.Struct("!4s32s")
_REQUEST = struct.Struct("!4sBHQ64s64s32s")
_MAGIC = b"ELH1"
HANDSHAKE_BYTES = _REQUEST.size + _MAC_BYTES  # of a dialer


class Purpose(enum.IntEnum):
  """What a connection is for.

  LANE: frames of operations. STATE: requests for shared state.
  """

  LANE = 1
  STATE = 2


class Status(enum.IntEnum):
  """A listener's answer to somebody who has the token."""

  ACCEPTED = 0
  STALE = 1  # of an epoch that is over
  EARLY = 2  # of an epoch that the listener has not heard of
  STRANGER = 3  # no member of it
  FULL = 4  # too many connections


class Request(NamedTuple):
  """What a dialer wants.

  Attributes:
    purpose: What the connection is for.
    lane: Its number among those of this purpose.
    epoch: In which epoch.
    sender: Who dials.
    receiver: Who is dialled.
  """

  purpose: Purpose
  lane: int
  epoch: int
  sender: Id
  receiver: Id


class Refused(ConnectionError):
  """A listener said no, or has another token."""


class Cancelled(ConnectionError):
  """Another thread has ended this."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a listener bears.

  Attributes:
    connections: Accepted connections at once.
    handshakes: Handshakes under way; one more ends the oldest of them.
    handshake_s: Seconds that one may take.
    lines_per_s: Lines of the log for refused connections.
  """

  connections: int = 1024
  handshakes: int = 32
  handshake_s: float = 5.0
  lines_per_s: float = 5.0


@dataclasses.dataclass(frozen=True)
class Security:
  """What connections are protected by.

  Attributes:
    token: What all peers of a run know, and nobody else.
    server: The TLS context of the side that listens; None for no TLS.
    client: The TLS context of the side that dials; None for no TLS.
  """

  token: bytes = dataclasses.field(repr=False)
  server: ssl.SSLContext | None = None
  client: ssl.SSLContext | None = None

  def __post_init__(self) -> None:
    if len(self.token) < LEAST_TOKEN_BYTES:
      raise ValueError(
        f"a token of {len(self.token)} bytes must have at least "
        f"{LEAST_TOKEN_BYTES}: python -c 'import secrets; "
        "print(secrets.token_hex(32))' makes one"
      )

  def mac(self, role: bytes, *said: bytes) -> bytes:
    """Returns the MAC of what one side says, for everything said so far."""
    return hmac.digest(
      hashlib.sha256(b"elastic" + self.token).digest(),
      b"\0".join([role, *said]), "sha256",
    )


def with_tls(
  token: bytes, certificate: str, key: str, authority: str
) -> Security:
  """Returns connections whose both sides have a certificate.

  Args:
    token: What all peers know.
    certificate: The file of this peer's certificate.
    key: The file of its key.
    authority: The file of the certificate that has signed all peers'.
  """
  contexts = []
  for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers are known by the authority and the token, not by a host's name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    contexts.append(context)
  return Security(token, *contexts)


class Scope:
  """Sockets that are ended together, at once, from any thread."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._sockets: set[socket.socket] = set()
    self.closed = threading.Event()

  def add(self, sock: socket.socket) -> None:
    """Takes a socket in.

    Raises:
      Cancelled: The scope has been closed.
    """
    with self._lock:
      if not self.closed.is_set():
        self._sockets.add(sock)
        return
    raise Cancelled("closed")

  def end(self, sock: socket.socket) -> None:
    """Ends one socket of it."""
    with self._lock:
      self._sockets.discard(sock)
    with contextlib.suppress(OSError):
      sock.close()

  def close(self) -> None:
    """Wakes every thread that waits for one of the sockets."""
    with self._lock:
      self.closed.set()
      sockets, self._sockets = self._sockets, set()
    for sock in sockets:
      shut(sock)


def shut(sock: socket.socket) -> None:
  """Ends a connection, so that whoever waits for it wakes."""
  with contextlib.suppress(OSError):
    # The base class's: that of TLS would touch what another thread uses.
    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Patient:
  """Reads from a socket until a moment, not for a time for each piece."""

  def __init__(self, sock: socket.socket, limit_s: float) -> None:
    self.sock, self._end = sock, time.monotonic() + limit_s

  def rest(self) -> None:
    """Gives the socket the time that is left."""
    left = self._end - time.monotonic()
    if left <= 0:
      raise TimeoutError("the handshake took too long")
    self.sock.settimeout(left)

  def recv_into(self, view: memoryview) -> int:
    """Reads once."""
    self.rest()
    return self.sock.recv_into(view)

  def take(self, count: int) -> bytes:
    """Reads so many bytes."""
    data = bytearray(count)
    read_into(self, memoryview(data))  # type: ignore[arg-type]
    return bytes(data)

  def say(self, data: bytes) -> None:
    """Sends bytes."""
    self.rest()
    self.sock.sendall(data)


def prepared(sock: socket.socket) -> None:
  """Sets what every connection has: no delay, and no time limit."""
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  sock.settimeout(None)


def dial(
  address: Address, request: Request, security: Security, scope: Scope,
  limit_s: float,
) -> socket.socket:
  """Connects to a listener, and tries again while it is not there yet.

  Args:
    address: Its host and port.
    request: What the connection is for.
    security: What it is protected by.
    scope: What ends it, now or later.
    limit_s: Seconds after which this gives up.

  Raises:
    Refused: The listener refuses, or has not the same token.
    Cancelled: The scope was closed.
    OSError: Nobody answers within the limit.
  """
  end, pause = time.monotonic() + limit_s, 0.02
  while True:
    sock = socket.socket(
      socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    )
    try:
      scope.add(sock)
      left = end - time.monotonic()
      if left <= 0:
        raise TimeoutError(f"{address} did not answer within {limit_s:g} s")
      sock.settimeout(left)
      sock.connect(address)
      if security.client is not None:
        plain, sock = sock, security.client.wrap_socket(sock)
        scope.end(plain)
        scope.add(sock)
      answer = _ask(_Patient(sock, end - time.monotonic()), request, security)
      if answer is Status.ACCEPTED:
        prepared(sock)
        return sock
      if answer is not Status.EARLY:
        raise Refused(f"{request.receiver} refuses: {answer.name}")
      error: OSError = Refused(
        f"{request.receiver} has not heard of epoch {request.epoch}"
      )
    except OSError as caught:
      error = caught
    scope.end(sock)
    if scope.closed.is_set():
      raise Cancelled("closed") from error
    if isinstance(error, Refused) and "epoch" not in str(error):
      raise error
    if time.monotonic() + pause > end:
      raise error
    scope.closed.wait(pause)
    pause = min(2 * pause, 0.5)


def _ask(
  talk: _Patient, request: Request, security: Security
) -> Status:
  """Says what a dialer wants; returns the listener's answer."""
  opening = talk.take(_OPENING.size)
  if _OPENING.unpack(opening)[0] != _MAGIC:
    raise Refused("what answers is no peer")
  said = _REQUEST.pack(
    _MAGIC, request.purpose, request.lane, request.epoch,
    request.sender.encode(), request.receiver.encode(),
    os.urandom(_NONCE_BYTES),
  )
  talk.say(said + security.mac(b"dialer", opening, said))
  try:
    answer = talk.take(1)
  except ConnectionError as error:
    raise ConnectionResetError(
      f"{request.receiver} ended the handshake: it has another token, or too "
      "many connections"
    ) from error
  mac = talk.take(_MAC_BYTES)
  if not hmac.compare_digest(
    mac, security.mac(b"listener", opening, said, answer)
  ):
    raise Refused(f"{request.receiver} has another token")
  return Status(answer[0])


class Offer(NamedTuple):
  """Who may connect for a purpose.

  Attributes:
    epoch: In which epoch.
    peers: Who.
    handle: Uses an accepted connection, and returns when it is over.
  """

  epoch: int
  peers: frozenset[Id]
  handle: Callable[[socket.socket, Request], None]


class Listener:
  """Accepts connections, each in a thread of its own.

  Attributes:
    address: Where it listens.
    refused: How many connections it has refused.
  """

  def __init__(
    self, me: Id, security: Security, address: Address = ("127.0.0.1", 0),
    limits: Limits = Limits(),  # noqa: B008
  ) -> None:
    self._me, self._security, self._limits = me, security, limits
    self._offers: dict[Purpose, Offer] = {}
    self._scope = Scope()
    self._lock = threading.Lock()
    self._underway: collections.OrderedDict[socket.socket, None] = (
      collections.OrderedDict()
    )
    self._accepted = 0
    self._lines, self._line_time, self._silent = 0.0, 0.0, 0
    self.refused = 0
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    self._server = socket.create_server(address, family=family, backlog=512)
    self.address: Address = self._server.getsockname()[:2]
    self._thread = threading.Thread(target=self._accept, daemon=True)
    self._thread.start()

  def serve(self, purpose: Purpose, offer: Offer) -> None:
    """Takes connections for a purpose, of one epoch only."""
    with self._lock:
      self._offers[purpose] = offer

  def close(self) -> None:
    """Ends it, and all connections that it has accepted."""
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
    while not self._scope.closed.is_set():
      try:
        sock, address = self._server.accept()
      except OSError:
        if self._scope.closed.is_set():
          return
        time.sleep(0.01)  # no file descriptors left: others will end
        continue
      with self._lock:
        self._underway[sock] = None
        old = None
        if len(self._underway) > self._limits.handshakes:
          old = self._underway.popitem(last=False)[0]
      if old is not None:
        shut(old)
      threading.Thread(
        target=self._meet, args=(sock, address), daemon=True
      ).start()

  def _meet(self, raw: socket.socket, address: Any) -> None:
    """A connection's whole life."""
    sock, accepted = raw, False
    try:
      self._scope.add(sock)
      sock.settimeout(self._limits.handshake_s)
      if self._security.server is not None:
        sock = self._security.server.wrap_socket(raw, server_side=True)
        self._scope.end(raw)
        self._scope.add(sock)
      handle, request, reason = self._judge(sock)
      with self._lock:
        self._underway.pop(raw, None)
      if handle is None:
        self._refuse(address, reason)
        return
      accepted = True
      prepared(sock)
      handle(sock, request)
    except (OSError, ValueError) as error:
      if not accepted and not self._scope.closed.is_set():
        self._refuse(address, str(error) or type(error).__name__)
    finally:
      with self._lock:
        self._underway.pop(raw, None)
        self._accepted -= accepted
      self._scope.end(sock)

  def _judge(self, sock: socket.socket) -> tuple[Any, Request, str]:
    """Meets a dialer.

    Returns:
      What handles it (None if it is refused), its request, and why not.
    """
    talk = _Patient(sock, self._limits.handshake_s)
    opening = _OPENING.pack(_MAGIC, os.urandom(_NONCE_BYTES))
    talk.say(opening)
    said = talk.take(_REQUEST.size)
    mac = talk.take(_MAC_BYTES)
    if not hmac.compare_digest(
      mac, self._security.mac(b"dialer", opening, said)
    ):
      raise Refused("no or wrong token")
    magic, purpose, lane, epoch, sender, receiver, _ = _REQUEST.unpack(said)
    request = Request(
      Purpose(purpose), lane, epoch, sender.rstrip(b"\0").decode(),
      receiver.rstrip(b"\0").decode(),
    )
    if magic != _MAGIC:
      raise Refused("another version")
    with self._lock:
      offer = self._offers.get(request.purpose)
      status = self._status(offer, request)
      self._accepted += status is Status.ACCEPTED
    answer = bytes([status])
    try:
      talk.say(answer + self._security.mac(b"listener", opening, said, answer))
    except OSError:
      with self._lock:
        self._accepted -= status is Status.ACCEPTED
      raise
    if status is Status.ACCEPTED and offer is not None:
      return offer.handle, request, ""
    return None, request, (
      f"{status.name}: {request.sender}, {request.purpose.name}, epoch "
      f"{request.epoch}"
    )

  def _status(self, offer: Offer | None, request: Request) -> Status:
    if offer is None or request.epoch > offer.epoch:
      return Status.EARLY
    if request.epoch < offer.epoch:
      return Status.STALE
    if request.sender not in offer.peers or request.receiver != self._me:
      return Status.STRANGER
    if self._accepted >= self._limits.connections:
      return Status.FULL
    return Status.ACCEPTED

  def _refuse(self, address: Any, reason: str) -> None:
    """Writes a line, or counts it if there have been too many."""
    with self._lock:
      self.refused += 1
      now, rate = time.monotonic(), self._limits.lines_per_s
      self._lines = max(0.0, self._lines - (now - self._line_time) * rate)
      self._line_time = now
      if self._lines >= rate:
        self._silent += 1
        return
      self._lines += 1
      more, self._silent = self._silent, 0
    LOG.warning(
      "refused %s:%s: %s%s", *address[:2], reason,
      f" (and {more} more)" if more else "",
    )
