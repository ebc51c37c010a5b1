"""HTTP server: uvicorn with timeouts for clients and a graceful shutdown.

The first SIGTERM or Ctrl-C lets running requests finish for a limited time and
refuses new ones. The second signal ends the process at once.

A client may close its sending direction after a complete request and still wait
for the response (RFC 9112, section 9.6): the end of its data is not a
disconnect. A client that has closed the whole connection sends the same
segment, and only answers further data by a reset. Before the response begins,
the server therefore sends such a client an interim response, 100 (Continue),
which clients without an expectation discard (RFC 9110, section 15.2.1): a
request is cancelled when the connection is reset. HTTP/1.0 has no interim
responses, so that its clients are always answered.
"""

import asyncio
from collections.abc import Callable
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from caatnet.serving.server.api import Api
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.responses import as_json

# Connections that the kernel queues while the loop is busy.
_BACKLOG = 2048
# Seconds from the end of a client's data to the interim response, so that a
# quick response comes without one, and from then on between checks for a reset.
_PROBE_S = 0.1


def bound(host: str, port: int) -> socket.socket:
  """Returns a listening socket.

  Raises:
    ValueError: The host does not exist, or the port is not available.
  """
  try:
    family, kind, *_, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
  except OSError as error:
    raise ValueError(f"--host={host}: {error.strerror}") from error
  found = socket.socket(family, kind)
  found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    found.bind(address)
    # Without `listen` another socket could bind the same port. Clients that
    # connect before the model is ready wait in the backlog.
    found.listen(_BACKLOG)
  except OSError as error:
    found.close()
    raise ValueError(
      f"--port={port} of --host={host}: {error.strerror}; --port=0 selects a "
      "free port"
    ) from error
  return found


class Server(uvicorn.Server):
  """Serves an `Api` until a signal arrives.

  Attributes:
    api: The HTTP interface.
    exit_code: Exit code of the process: 0, or 1 if the engine has failed or
      requests were cut off.
  """

  def __init__(
    self, api: Api, read_s: float, write_s: float, drain_s: float,
    say: Callable[[str], None],
  ) -> None:
    """Makes a server that is not running yet.

    Args:
      api: The HTTP interface.
      read_s: Seconds within which a client must send the head of a request.
      write_s: Seconds within which a client must read sent data.
      drain_s: Seconds that running requests have after a signal.
      say: Prints a line.
    """
    super().__init__(uvicorn.Config(
      api.app(), http=_timed(read_s, write_s), ws="none", lifespan="off",
      log_level="error", access_log=False, backlog=_BACKLOG,
      server_header=False,
    ))
    self.exit_code = 0
    self.api, self._drain_s, self._say = api, drain_s, say

  def serve_on(self, listener: socket.socket) -> int:
    """Serves until a signal arrives and running requests have ended.

    Returns:
      The exit code: 0, or 1 if the engine has failed or requests were cut off.
    """
    asyncio.run(self._serve_service(listener))
    return self.exit_code

  async def _serve_service(self, listener: socket.socket) -> None:
    """Runs the engine's thread while uvicorn serves."""
    self._loop = asyncio.get_running_loop()
    self.api.service.start()
    try:
      await self.serve(sockets=[listener])
    finally:
      self.api.service.stop()

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Starts the shutdown at the first signal; exits at the second."""
    if self.api.draining:
      print("terminated by a second signal", file=sys.stderr)
      os._exit(128 + sig)
    self.api.draining = True
    self._say(
      f"{signal.Signals(sig).name}: no new requests are accepted; running ones "
      f"have {self._drain_s:g} s. A second signal ends the process at once."
    )
    self._loop.call_soon_threadsafe(
      lambda: setattr(self, "_draining", asyncio.create_task(self._drain()))
    )

  async def _drain(self) -> None:
    """Waits for running calls, then stops the server."""
    service = self.api.service
    end = self._loop.time() + self._drain_s
    # Polled: the drain ends within 20 ms after the last call.
    while service.calls and self._loop.time() < end:
      await asyncio.sleep(0.02)
    if service.calls:
      self._say(f"{service.num_open} sequences were cut off")
      service.fail(ApiError(503, "the server has shut down", "draining"))
    if service.calls or service.error is not None:
      self.exit_code = 1
    self.should_exit = True


def _timed(read_s: float, write_s: float) -> type[asyncio.Protocol]:
  """Returns a protocol that closes connections to slow clients."""

  class Timed(H11Protocol):
    """HTTP/1.1 with timeouts and half-closed connections.

    The timeouts are for the head of a request and for each write.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
      super().__init__(*args, **kwargs)
      self._reading: asyncio.TimerHandle | None = None
      self._writing: asyncio.TimerHandle | None = None
      self._probing: asyncio.TimerHandle | None = None
      self._probed = self._refused = False

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      self._reading = self.loop.call_later(read_s, transport.close)

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
        self._reading = self.loop.call_later(read_s, self.transport.close)

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
        self._reading = self.loop.call_later(read_s, self.transport.close)

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
          interim = h11.InformationalResponse(status_code=100, headers=[])
          self.transport.write(self.conn.send(interim))
      # asyncio does not watch a connection whose receiving direction has ended.
      connection = self.transport.get_extra_info("socket")
      if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        self.transport.abort()
      else:
        self._probing = self.loop.call_later(_PROBE_S, self._probe)

    def pause_writing(self) -> None:
      super().pause_writing()
      self._writing = self.loop.call_later(write_s, self.transport.abort)

    def resume_writing(self) -> None:
      super().resume_writing()
      if self._writing is not None:
        self._writing.cancel()
        self._writing = None

  return Timed
