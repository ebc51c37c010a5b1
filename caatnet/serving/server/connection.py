"""HTTP/1.1 connections of uvicorn, with timeouts and half-closed clients.

A client may close its sending direction after a complete request and still wait
for the response (RFC 9112, section 9.6): the end of its data is not a
disconnect. A client that has closed the whole connection sends the same
segment, and only answers further data by a reset. Before the response begins,
the server therefore sends such a client an interim response, 100 (Continue),
which clients without an expectation discard (RFC 9110, section 15.2.1). If the
answer is a reset, the server cancels the request. HTTP/1.0 has no interim
responses, so requests of its clients are never cancelled in this way.
"""

import asyncio
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.responses import as_json

# Seconds from the end of a client's data to the interim response, so that a
# quick response comes without it; then, seconds between checks for a reset.
_PROBE_S = 0.1


class Connection(H11Protocol):
  """Connection of a client, with timeouts for reading and writing."""

  def __init__(
    self, *args: Any, read_s: float, write_s: float, **kwargs: Any
  ) -> None:
    """Makes a connection of uvicorn's server.

    Args:
      *args: Arguments of uvicorn.
      read_s: Seconds within which a client must send the head of a request.
      write_s: Seconds within which a client must read sent data.
      **kwargs: Arguments of uvicorn.
    """
    super().__init__(*args, **kwargs)
    self._read_s, self._write_s = read_s, write_s
    self._reading: asyncio.TimerHandle | None = None
    self._writing: asyncio.TimerHandle | None = None
    self._probing: asyncio.TimerHandle | None = None
    self._probed = self._refused = False

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._reading = self.loop.call_later(self._read_s, transport.close)

  def connection_lost(self, exc: Exception | None) -> None:
    for timer in (self._reading, self._writing, self._probing):
      if timer is not None:
        timer.cancel()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if self._refused:
      return
    super().data_received(data)
    if self._refused:
      return
    if self.conn.their_state is not h11.IDLE:  # the head is complete
      if self._reading is not None:
        self._reading.cancel()
        self._reading = None
    elif self._reading is None:  # the head of another request has begun
      self._reading = self.loop.call_later(self._read_s, self.transport.close)

  def send_400_response(self, msg: str) -> None:
    """Sends the error of a malformed request as JSON, then closes."""
    if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
      self.transport.close()  # the response has begun
      return
    if self.cycle is not None:  # its body is malformed
      self.cycle.disconnected = True
      self.cycle.message_event.set()
    problem = sys.exception()  # handled by the caller
    hint = getattr(problem, "error_status_hint", 400)
    error = ApiError(
      hint if hint == 431 else 400, f"the request is not HTTP/1.1: {problem}",
      "invalid_http",
    )
    body = as_json(error.body)
    for event in (
      h11.Response(status_code=error.status, headers=[
        (b"content-type", b"application/json"), (b"connection", b"close"),
        (b"content-length", str(len(body)).encode()),
      ]),
      h11.Data(data=body), h11.EndOfMessage(),
    ):
      self.transport.write(self.conn.send(event))
    # Data that is not read would reset the connection, and the client might
    # lose the response (RFC 9112, section 9.6): it is read until the client
    # closes.
    self._refused = True
    self.transport.write_eof()
    if self._reading is None:
      self._reading = self.loop.call_later(self._read_s, self.transport.close)

  def eof_received(self) -> bool:
    """Returns whether the connection stays open for a response."""
    cycle = self.cycle
    if (
      self._refused or cycle is None or cycle.response_complete
      or cycle.more_body
    ):
      return False  # no request, or only a part of one
    cycle.keep_alive = False
    self._probing = self.loop.call_later(_PROBE_S, self._probe)
    return True

  def _probe(self) -> None:
    """Sends an interim response; closes the connection after a reset."""
    if self.transport.is_closing():
      return
    if not self.cycle.response_started and not self._probed:
      self._probed = True
      if self.cycle.scope["http_version"] != "1.0":
        interim = h11.InformationalResponse(
          status_code=100, headers=[], reason=b"Continue"
        )
        self.transport.write(self.conn.send(interim))
    # asyncio does not watch a connection whose receiving direction has ended.
    connection = self.transport.get_extra_info("socket")
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
      self.transport.abort()
    else:
      self._probing = self.loop.call_later(_PROBE_S, self._probe)

  def pause_writing(self) -> None:
    super().pause_writing()
    self._writing = self.loop.call_later(self._write_s, self.transport.abort)

  def resume_writing(self) -> None:
    super().resume_writing()
    if self._writing is not None:
      self._writing.cancel()
      self._writing = None
