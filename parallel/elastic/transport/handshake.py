"""Connections between peers: who may make one, and how it is ended.

A connection between peers goes one way: who dials sends, or asks. Before
anything else both sides prove that they have the same token, which is never
sent:

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

import contextlib
import dataclasses
import enum
import hashlib
import hmac
import os
import pathlib
import secrets
import socket
import ssl
import struct
import tempfile
import threading
import time
from typing import NamedTuple

from parallel.elastic.membership.messages import Id
from parallel.elastic.transport.frames import read_into

Address = tuple[str, int]
LEAST_TOKEN_BYTES = 16
TOKEN_VARIABLE = "ELASTIC_TOKEN"
OWN_TOKEN = ".elastic_token"  # in the home folder
NONCE_BYTES = MAC_BYTES = 32
OPENING = struct.Struct("!4s32s")
REQUEST = struct.Struct("!4sBHQ64s64s32s")
MAGIC = b"ELH1"
HANDSHAKE_BYTES = REQUEST.size + MAC_BYTES  # that a dialer sends


class Purpose(enum.IntEnum):
  """What a connection is for.

  LANE: frames of operations. STATE: requests for shared state. CONTROL: what
  a peer and its coordinator say; it goes both ways, and is of epoch 0.
  """

  LANE = 1
  STATE = 2
  CONTROL = 3


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


def from_files(
  token: str = "", certificate: str = "", key: str = "", authority: str = ""
) -> Security:
  """Returns what a command line says about connections.

  Args:
    token: The file of the token. If it is empty, the token is in the
      environment's variable; else it is this user's own on this machine
      (`own_token`).
    certificate: As for `with_tls`; no TLS if all three are empty.
    key: As for `with_tls`.
    authority: As for `with_tls`.

  Raises:
    ValueError: The token is too short, or not all three files of TLS are
      given.
  """
  secret = (
    pathlib.Path(token).read_text() if token
    else os.environ.get(TOKEN_VARIABLE) or own_token()
  ).strip()
  tls = certificate, key, authority
  if not any(tls):
    return Security(secret.encode())
  if not all(tls):
    raise ValueError("--certificate, --key and --authority go together")
  return with_tls(secret.encode(), *tls)


def own_token() -> str:
  """Returns the token of a user's swarms on one machine.

  It is in a file of the home folder that nobody else reads, which is made if
  there is none.
  """
  home = pathlib.Path.home()
  path = home / OWN_TOKEN
  if not path.exists():
    with tempfile.NamedTemporaryFile("w", dir=home) as new:  # of mode 600
      new.write(secrets.token_hex(32))
      new.flush()
      with contextlib.suppress(FileExistsError):  # another process was first
        os.link(new.name, path)
  return path.read_text()


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


class Patient:
  """Reads from a socket until a moment, not for a time for each piece."""

  def __init__(self, sock: socket.socket, limit_s: float) -> None:
    self.sock, self._end = sock, time.monotonic() + limit_s

  def rest(self) -> None:
    """Gives the socket the time that is left."""
    left = self._end - time.monotonic()
    if left <= 0:
      raise TimeoutError("the handshake took too long")
    self.sock.settimeout(left)

  def recv_into(self, view: memoryview, size: int, flags: int) -> int:
    """Reads once."""
    del flags
    self.rest()
    return self.sock.recv_into(view, size)

  def take(self, count: int) -> bytes:
    """Reads so many bytes."""
    data = bytearray(count)
    read_into(self, memoryview(data))  # type: ignore[arg-type]
    return bytes(data)

  def say(self, data: bytes) -> None:
    """Sends bytes."""
    self.rest()
    self.sock.sendall(data)


def prepared(
  sock: socket.socket, unheard_s: float = 0, send_buffer: int = 0
) -> None:
  """Sets what every connection has: no delay, and no time limit.

  Args:
    sock: The connection.
    unheard_s: Seconds after which it breaks if what is sent is not
      acknowledged, as on a half-open one; 0 leaves it to the kernel, which
      takes a quarter of an hour.
    send_buffer: Bytes of the kernel's send buffer; 0 lets the kernel choose.
  """
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  if unheard_s:
    sock.setsockopt(
      socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unheard_s)
    )
  if send_buffer:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
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
      answer = _ask(Patient(sock, end - time.monotonic()), request, security)
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
  talk: Patient, request: Request, security: Security
) -> Status:
  """Says what a dialer wants; returns the listener's answer."""
  opening = talk.take(OPENING.size)
  if OPENING.unpack(opening)[0] != MAGIC:
    raise Refused("what answers is no peer")
  said = REQUEST.pack(
    MAGIC, request.purpose, request.lane, request.epoch,
    request.sender.encode(), request.receiver.encode(),
    os.urandom(NONCE_BYTES),
  )
  talk.say(said + security.mac(b"dialer", opening, said))
  try:
    answer = talk.take(1)
  except ConnectionError as error:
    raise ConnectionResetError(
      f"{request.receiver} ended the handshake: it has another token, or too "
      "many connections"
    ) from error
  mac = talk.take(MAC_BYTES)
  if not hmac.compare_digest(
    mac, security.mac(b"listener", opening, said, answer)
  ):
    raise Refused(f"{request.receiver} has another token")
  return Status(answer[0])
