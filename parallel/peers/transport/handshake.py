"""Handshake of connections between peers, and their cancellation.

Connections between peers have one direction: the dialing side sends data or
requests. In a handshake, both sides prove that they have the same token, which
is never sent:

  listener -> dialer: its public key and a nonce
  dialer -> listener: the request (purpose, connection, epoch, from, to), its
    public key, a nonce, and the HMAC-SHA256 of all bytes exchanged so far
  listener -> dialer: accepted or not, and the HMAC of all bytes so far

Each HMAC is followed by a second one, whose key is derived from both sides' key
pairs. It proves that a side owns the id that it uses
(`parallel.peers.transport.identity`).

The listener sends a MAC only to a dialer that has the token, and a recorded
handshake fails when it is replayed, since the nonce differs. A connection of
another epoch is refused. Only TLS, which is optional, protects the data after
the handshake. The token must have high entropy: an attacker that poses as a
listener receives a MAC, and can test guesses against it.
"""

import contextlib
import dataclasses
import enum
import hashlib
import hmac
import os
import pathlib
import re
import secrets
import socket
import ssl
import struct
import tempfile
import threading
import time
from typing import NamedTuple

from parallel.peers.membership.messages import MAX_CHARS, Id
from parallel.peers.transport.frames import read_into, to_printable
from parallel.peers.transport.identity import (
  PUBLIC_BYTES,
  Identity,
  fingerprint,
  owner_fingerprint,
  process_identity,
)

Address = tuple[str, int]
MIN_TOKEN_BYTES = 16
TOKEN_VARIABLE = "ELASTIC_TOKEN"
TOKEN_FILE = ".elastic_token"  # in the home folder
NONCE_BYTES = MAC_BYTES = 32
# Magic, public key, nonce.
OPENING = struct.Struct(f"!4s{PUBLIC_BYTES}s32s")
# Magic, purpose, connection, epoch, sender, receiver, public key, nonce.
REQUEST = struct.Struct(f"!4sBHQ84s84s{PUBLIC_BYTES}s32s")
MAGIC = b"ELH3"
HANDSHAKE_BYTES = REQUEST.size + 2 * MAC_BYTES  # bytes that the dialer sends


class Purpose(enum.IntEnum):
  """Purpose of a connection.

  DATA: frames of operations. STATE: requests for shared state. CONTROL:
  messages between a peer and its coordinator, in both directions; its epoch is
  0. CHECK: nothing; the handshake shows that the listener can be reached.
  """

  DATA = 1
  STATE = 2
  CONTROL = 3
  CHECK = 4


class Status(enum.IntEnum):
  """Response of a listener to a dialer with the right token."""

  ACCEPTED = 0
  STALE = 1  # the request's epoch is over
  EARLY = 2  # the listener has not reached the epoch yet; the dialer retries
  NOT_MEMBER = 3  # the dialer is not a member of the epoch
  FULL = 4  # too many connections


class DialRequest(NamedTuple):
  """Connection request of a dialer.

  Attributes:
    purpose: Purpose of the connection.
    connection: Number of the connection among those for this purpose.
    epoch: Number of the epoch (list of members) that the connection belongs to.
    sender: Id of the dialing peer.
    receiver: Id of the listening peer.
  """

  purpose: Purpose
  connection: int
  epoch: int
  sender: Id
  receiver: Id


class Refused(ConnectionError):
  """Error: the listener refused the connection, or has a different token."""


class EpochNotReached(Refused):
  """Error: the listener has not reached the request's epoch; `dial` retries."""


class Cancelled(ConnectionError):
  """Error: another thread has cancelled the operation."""


@dataclasses.dataclass(frozen=True)
class Security:
  """Token and TLS settings of connections.

  Attributes:
    token: Shared secret of all peers of a run; at least 16 bytes.
    server: TLS context of the listening side; None for no TLS.
    client: TLS context of the dialing side; None for no TLS.
    identity: Key pair of this process.

  Raises:
    ValueError: The token is too short.

  Example:
    >>> from parallel.peers.transport.handshake import Security
    >>> Security(b"too short")
    Traceback (most recent call last):
    ValueError: a token of 9 bytes must have at least 16: ...
    >>> Security(b"sixteen random bytes")  # the token is never printed
    Security(server=None, client=None)
  """

  token: bytes = dataclasses.field(repr=False)
  server: ssl.SSLContext | None = None
  client: ssl.SSLContext | None = None
  identity: Identity = dataclasses.field(
    default_factory=process_identity, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    if len(self.token) < MIN_TOKEN_BYTES:
      raise ValueError(
        f"a token of {len(self.token)} bytes must have at least "
        f"{MIN_TOKEN_BYTES}: python -c 'import secrets; "
        "print(secrets.token_hex(32))' makes one"
      )

  def mac(self, role: bytes, *said: bytes) -> bytes:
    """Returns the HMAC of the messages exchanged so far, with the token as key.

    Args:
      role: b"dialer" or b"listener", so that one side's MAC cannot be replayed
        as the other's.
      *said: Messages of the handshake, in order.
    """
    return hmac.digest(
      # The key of the MAC is derived from the token.
      hashlib.sha256(b"elastic" + self.token).digest(),
      b"\0".join([role, *said]), "sha256",
    )

  def check_owner(self, peer: Id, public: bytes) -> None:
    """Checks that an id is not bound to another public key.

    Raises:
      Refused: The id is bound to another key.
    """
    if owner_fingerprint(peer) not in ("", fingerprint(public)):
      raise Refused(f"{peer} is the id of another process")

  def proof(self, public: bytes, role: bytes, *said: bytes) -> bytes:
    """Returns the HMAC of the messages, with a key derived from both key pairs.

    Args:
      public: Public key of the other process.
      role: b"dialer" or b"listener", as for `mac`.
      *said: Messages of the handshake, in order.

    Raises:
      ValueError: The public key is invalid.
    """
    return hmac.digest(
      self.identity.shared(public), b"\0".join([role, *said]), "sha256"
    )


def with_tls(
  token: bytes, certificate: str, key: str, authority: str
) -> Security:
  """Returns settings for mutual TLS 1.3: both sides present a certificate.

  Args:
    token: Shared secret of all peers.
    certificate: Path of this peer's certificate.
    key: Path of this peer's private key.
    authority: Path of the CA certificate that signed all peers' certificates.
  """
  contexts = []
  for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
    context = ssl.SSLContext(protocol)
    # Both directions require a certificate (mutual TLS).
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The CA and the token identify peers; host names may change.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    contexts.append(context)
  return Security(token, *contexts)


def parse_address(key: str, text: str, least: int = 0) -> Address:
  """Parses HOST:PORT; an IPv6 address is in brackets.

  Args:
    key: Prefix of the text in the error message, such as "--listen=".
    text: The text to parse.
    least: Smallest allowed port; 0 lets the system choose one.

  Raises:
    ValueError: The text is not HOST:PORT.

  Example:
    >>> parse_address("", "[::1]:7000")
    ('::1', 7000)
  """
  match = re.fullmatch(r"(?:\[([^\]\s]+)\]|([^:\s\[\]]+)):(\d{1,5})", text)
  if not (match and least <= int(match[3]) < 1 << 16):
    raise ValueError(
      f"{key}{text} is not HOST:PORT, as in 10.0.0.1:7000 or [::1]:7000, with "
      f"a port from {least} to 65535"
    )
  return match[1] or match[2], int(match[3])


def format_address(address: Address) -> str:
  """Returns HOST:PORT in the form that `parse_address` reads.

  Example:
    >>> format_address(("::1", 7000))
    '[::1]:7000'
  """
  host, port = address
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_security(
  token: str = "", certificate: str = "", key: str = "", authority: str = ""
) -> Security:
  """Returns the settings that command-line flags describe.

  Args:
    token: Path of a file with the token. If empty, the token is the value of
      the environment variable ELASTIC_TOKEN, or else the user's token on this
      machine (`read_user_token`).
    certificate: Path as for `with_tls`; no TLS if all three paths are empty.
    key: Path as for `with_tls`.
    authority: Path as for `with_tls`.

  Raises:
    ValueError: The token is too short, or only some of the three TLS files are
      given.
  """
  secret = (
    pathlib.Path(token).read_text() if token
    else os.environ.get(TOKEN_VARIABLE) or read_user_token()
  ).strip()
  tls = certificate, key, authority
  if not any(tls):
    return Security(secret.encode())
  if not all(tls):
    raise ValueError(
      "--certificate, --key and --authority must be given together"
    )
  return with_tls(secret.encode(), *tls)


def read_user_token() -> str:
  """Returns the token of the current user's swarms on this machine.

  The token is in a file in the home folder, readable by the user only. The file
  is created on first use.
  """
  home = pathlib.Path.home()
  path = home / TOKEN_FILE
  if not path.exists():
    with tempfile.NamedTemporaryFile("w", dir=home) as new:  # of mode 600
      new.write(secrets.token_hex(32))  # 256 bits
      new.flush()
      # A link is atomic: of two processes, one creates the file.
      with contextlib.suppress(FileExistsError):
        os.link(new.name, path)
  return path.read_text()


class SocketGroup:
  """Set of sockets that any thread can close together.

  Attributes:
    closed: Event that is set when the group is closed.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._sockets: set[socket.socket] = set()
    self.closed = threading.Event()

  def add(self, sock: socket.socket) -> None:
    """Adds a socket.

    Raises:
      Cancelled: The group has been closed.
    """
    with self._lock:
      if not self.closed.is_set():
        self._sockets.add(sock)
        return
    raise Cancelled("closed")

  def end(self, sock: socket.socket) -> None:
    """Closes and removes one socket."""
    with self._lock:
      self._sockets.discard(sock)
    with contextlib.suppress(OSError):
      sock.close()

  def close(self) -> None:
    """Shuts all sockets down, which wakes the threads blocked on them."""
    with self._lock:
      self.closed.set()
      # Sockets are shut down without the lock, which `end` takes.
      sockets, self._sockets = self._sockets, set()
    for sock in sockets:
      shut(sock)


def shut(sock: socket.socket) -> None:
  """Shuts a connection down, which wakes the threads blocked on it."""
  with contextlib.suppress(OSError):
    # Not SSLSocket.shutdown, which modifies state that other threads use.
    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class HandshakeSocket:
  """Socket with one deadline for a whole handshake.

  A timeout per call would let a peer that sends single bytes hold the
  connection open.
  """

  def __init__(self, sock: socket.socket, limit_s: float) -> None:
    self.sock, self._end = sock, time.monotonic() + limit_s

  def set_timeout(self) -> None:
    """Sets the socket's timeout to the remaining time.

    Raises:
      TimeoutError: The deadline has passed.
    """
    left = self._end - time.monotonic()
    if left <= 0:
      raise TimeoutError("the handshake took too long")
    self.sock.settimeout(left)

  def recv_into(self, view: memoryview, size: int, flags: int) -> int:
    """Receives available bytes, as `socket.recv_into` does."""
    del flags
    self.set_timeout()
    return self.sock.recv_into(view, size)

  def receive(self, count: int) -> bytes:
    """Receives exactly ``count`` bytes."""
    data = bytearray(count)
    read_into(self, memoryview(data))  # type: ignore[arg-type]
    return bytes(data)

  def send(self, data: bytes) -> None:
    """Sends all bytes."""
    self.set_timeout()
    self.sock.sendall(data)


def set_socket_options(
  sock: socket.socket, unacknowledged_s: float = 0, send_buffer: int = 0
) -> None:
  """Sets socket options after a handshake: TCP_NODELAY and no timeout.

  Args:
    sock: Connected socket.
    unacknowledged_s: Seconds after which the connection breaks if sent data is
      not acknowledged (TCP_USER_TIMEOUT); 0 keeps the kernel's default of about
      15 minutes.
    send_buffer: Bytes of the kernel's send buffer; 0 keeps the default.
  """
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  if unacknowledged_s:
    sock.setsockopt(
      socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
      int(1000 * unacknowledged_s),  # ms
    )
  if send_buffer:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
  sock.settimeout(None)


def dial(
  address: Address, request: DialRequest, security: Security,
  scope: SocketGroup, limit_s: float,
) -> socket.socket:
  """Connects to a listener; retries with backoff until it responds.

  Args:
    address: (host, port) of the listener.
    request: Connection request.
    security: Token and TLS settings.
    scope: Group that the socket is added to; closing it cancels the call.
    limit_s: Time limit in seconds.

  Returns:
    A connected socket after the handshake.

  Raises:
    Refused: The listener refuses the request or has a different token.
    Cancelled: The group was closed.
    OSError: The listener did not respond within the time limit.
  """
  # The limit covers all attempts.
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
        # wrap_socket detaches the plain socket; replace it in the group.
        plain, sock = sock, security.client.wrap_socket(sock)
        scope.end(plain)
        scope.add(sock)
      answer = _run_handshake(
        HandshakeSocket(sock, end - time.monotonic()), request, security
      )
      if answer is Status.ACCEPTED:
        set_socket_options(sock)  # removes the timeout
        return sock
      if answer is not Status.EARLY:
        raise Refused(f"{request.receiver} refuses: {answer.name}")
      # It is retried below, since the listener may enter the epoch soon.
      error: OSError = EpochNotReached(
        f"{request.receiver} has not entered epoch {request.epoch}"
      )
    except OSError as caught:
      error = caught
    scope.end(sock)
    if scope.closed.is_set():
      raise Cancelled("closed") from error
    if isinstance(error, Refused) and not isinstance(error, EpochNotReached):
      raise error
    if time.monotonic() + pause > end:
      raise error
    scope.closed.wait(pause)  # returns early when closed
    pause = min(2 * pause, 0.5)  # exponential backoff


def find_local_host(
  address: Address, request: DialRequest, security: Security,
  refused_s: float = 2.0, slow_s: float = 30.0,
) -> str:
  """Returns the local address (host) of a connection to a listener.

  Args:
    address: (host, port) of the listener.
    request: Connection request.
    security: Token and TLS settings.
    refused_s: Time limit of the first attempt in seconds.
    slow_s: Time limit in seconds of a second attempt after a timeout of the
      first one, as occurs with a slow link or a busy machine.

  Raises:
    OSError: As `dial`.
  """
  try:
    sock = dial(address, request, security, SocketGroup(), refused_s)
  except TimeoutError:
    sock = dial(address, request, security, SocketGroup(), slow_s)
  with sock:
    return sock.getsockname()[0]


def reachability_error(
  me: Id, peer: Id, address: Address, security: Security, scope: SocketGroup,
  limit_s: float,
) -> str:
  """Connects to a peer's listener to check that it can be reached.

  Args:
    me: Id of the dialing peer.
    peer: Id of the listening peer.
    address: Address of the listening peer.
    security: Token and TLS settings.
    scope: Group of the connection's socket; closing it cancels the call.
    limit_s: Time limit in seconds.

  Returns:
    Reason for which the peer cannot be reached; "" if it can.
  """
  try:
    request = DialRequest(Purpose.CHECK, 0, 0, me, peer)
    scope.end(dial(address, request, security, scope, limit_s))
  except OSError as error:
    # The text has the form that messages to the coordinator require.
    return to_printable(str(error) or type(error).__name__)[:MAX_CHARS]
  return ""


def _run_handshake(
  sock: HandshakeSocket, request: DialRequest, security: Security
) -> Status:
  """Executes the dialer's side of a handshake; returns the response."""
  # First message: the listener's public key and nonce.
  opening = sock.receive(OPENING.size)
  magic, public, _ = OPENING.unpack(opening)
  if magic != MAGIC:
    raise Refused("the listener is not a peer")
  security.check_owner(request.receiver, public)
  said = REQUEST.pack(
    MAGIC, request.purpose, request.connection, request.epoch,
    request.sender.encode(), request.receiver.encode(),
    security.identity.public, os.urandom(NONCE_BYTES),
  )
  # Second message: the request, authenticated.
  try:
    proof = security.proof(public, b"dialer", opening, said)
  except ValueError as error:
    raise Refused(f"{request.receiver} sends {error}") from error
  sock.send(said + security.mac(b"dialer", opening, said) + proof)
  try:
    # Third message: status and MAC, or the end of the connection.
    answer = sock.receive(1)
  except ConnectionError as error:
    raise ConnectionResetError(
      f"{request.receiver} ended the handshake: it has another token, or too "
      "many connections"
    ) from error
  mac, proof = sock.receive(MAC_BYTES), sock.receive(MAC_BYTES)
  if not hmac.compare_digest(
    mac, security.mac(b"listener", opening, said, answer)
  ):
    raise Refused(
      f"{request.receiver} has another token; all peers must have the same one"
    )
  if not hmac.compare_digest(
    proof, security.proof(public, b"listener", opening, said, answer)
  ):
    raise Refused(f"the listener is not {request.receiver}")
  return Status(answer[0])
