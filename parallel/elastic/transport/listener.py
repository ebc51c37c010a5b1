"""A peer's listener: bears what strangers do, and lets members in.

How a connection proves itself is in `parallel.elastic.transport.handshake`.
Handshakes have a time limit as a whole, so bytes that drip in do not hold one
open; if too many are under way, the oldest one is ended, since an honest one
takes milliseconds. Each refused connection is one line of the log, up to a
rate.
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

from parallel.elastic.membership.messages import Id
from parallel.elastic.transport.handshake import (
  MAC_BYTES,
  MAGIC,
  NONCE_BYTES,
  OPENING,
  REQUEST,
  Address,
  Patient,
  Purpose,
  Refused,
  Request,
  Scope,
  Security,
  Status,
  prepared,
  shut,
)

LOG = logging.getLogger(__name__)


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


class Offer(NamedTuple):
  """Who may connect for a purpose.

  Attributes:
    epoch: In which epoch.
    peers: Who; None for all who have the token.
    handle: Uses an accepted connection, and returns when it is over.
  """

  epoch: int
  peers: frozenset[Id] | None
  handle: Callable[[socket.socket, Request], None]


class Listener:
  """Accepts connections, each in a thread of its own.

  Attributes:
    me: Whom dialers must want.
    address: Where it listens.
    refused: How many connections it has refused.
  """

  def __init__(
    self, me: Id, security: Security, address: Address = ("127.0.0.1", 0),
    limits: Limits = Limits(),
  ) -> None:
    self.me, self._security, self._limits = me, security, limits
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
    """Takes connections for a purpose, of one epoch only.

    An offer of an earlier epoch than the present one is late, and ignored.
    """
    with self._lock:
      before = self._offers.get(purpose)
      if before is None or before.epoch <= offer.epoch:
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
        if reason:  # else it comes again
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
    talk = Patient(sock, self._limits.handshake_s)
    opening = OPENING.pack(MAGIC, os.urandom(NONCE_BYTES))
    talk.say(opening)
    said = talk.take(REQUEST.size)
    mac = talk.take(MAC_BYTES)
    if not hmac.compare_digest(
      mac, self._security.mac(b"dialer", opening, said)
    ):
      raise Refused("no or wrong token")
    magic, purpose, lane, epoch, sender, receiver, _ = REQUEST.unpack(said)
    request = Request(
      Purpose(purpose), lane, epoch, sender.rstrip(b"\0").decode(),
      receiver.rstrip(b"\0").decode(),
    )
    if magic != MAGIC:
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
    return None, request, "" if status is Status.EARLY else (
      f"{status.name}: {request.sender}, {request.purpose.name}, epoch "
      f"{request.epoch}"
    )

  def _status(self, offer: Offer | None, request: Request) -> Status:
    if offer is None or request.epoch > offer.epoch:
      return Status.EARLY
    if request.epoch < offer.epoch:
      return Status.STALE
    known = offer.peers is None or request.sender in offer.peers
    if not known or request.receiver != self.me:
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
