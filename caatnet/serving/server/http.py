"""The server of HTTP: uvicorn's, with limits of time and an end in good order.

The first SIGTERM or Ctrl-C lets what runs finish, for some time; what comes
meanwhile is refused. The second one ends the process at once.
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

# Connections that the kernel keeps while the loop is busy.
_BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
  """Returns a socket that nobody else listens on.

  Raises:
    ValueError: There is no such host, or the port cannot be had.
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
    # Bound only, another socket could be, too; clients that come before the
    # model is ready wait in this queue.
    found.listen(_BACKLOG)
  except OSError as error:
    found.close()
    raise ValueError(
      f"--port={port} of --host={host}: {error.strerror}; --port=0 takes any "
      "that is free"
    ) from error
  return found


class Server(uvicorn.Server):
  """Serves an `Api` until a signal comes.

  Attributes:
    api: What it serves.
    exit_code: That of the process: 0, or 1 if something was cut off.
  """

  def __init__(
    self, api: Api, read_s: float, write_s: float, drain_s: float,
    say: Callable[[str], None],
  ) -> None:
    """Makes a server that does not run yet.

    Args:
      api: What it serves.
      read_s: Seconds in which a client must send a request's head.
      write_s: Seconds in which it must read what has been sent.
      drain_s: Seconds for which requests may go on after a signal.
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
    """Serves until a signal comes and what runs has ended.

    Returns:
      The exit code: 0, or 1 if the engine has failed or requests were cut off.
    """
    asyncio.run(self._serve_service(listener))
    return self.exit_code

  async def _serve_service(self, listener: socket.socket) -> None:
    self._loop = asyncio.get_running_loop()
    self.api.service.start()
    try:
      await self.serve(sockets=[listener])
    finally:
      self.api.service.stop()

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """Begins to end, at the first signal; ends, at the second."""
    if self.api.draining:
      print("ended at once by a second signal", file=sys.stderr)
      os._exit(128 + sig)
    self.api.draining = True
    self._say(
      f"{signal.Signals(sig).name}: no new requests; those that run have "
      f"{self._drain_s:g} s. Another signal ends at once."
    )
    self._loop.call_soon_threadsafe(
      lambda: setattr(self, "_draining", asyncio.create_task(self._drain()))
    )

  async def _drain(self) -> None:
    service = self.api.service
    end = self._loop.time() + self._drain_s
    while service.calls and self._loop.time() < end:
      await asyncio.sleep(0.02)
    if service.calls:
      self._say(f"{service.num_open} sequences were cut off")
      service.fail(ApiError(503, "the server has ended", "draining"))
    if service.calls or service.error is not None:
      self.exit_code = 1
    self.should_exit = True


def _timed(read_s: float, write_s: float) -> type[asyncio.Protocol]:
  """Returns a protocol that closes connections to clients who are too slow."""

  class Timed(H11Protocol):
    """HTTP/1.1 with a time for a request's head, and one for each write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
      super().__init__(*args, **kwargs)
      self._reading: asyncio.TimerHandle | None = None
      self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      self._reading = self.loop.call_later(read_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
      for timer in (self._reading, self._writing):
        if timer is not None:
          timer.cancel()
      super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self.conn.their_state is not h11.IDLE:  # the head is there
        if self._reading is not None:
          self._reading.cancel()
          self._reading = None
      elif self._reading is None:  # a further head has begun
        self._reading = self.loop.call_later(read_s, self.transport.close)

    def pause_writing(self) -> None:
      super().pause_writing()
      self._writing = self.loop.call_later(write_s, self.transport.abort)

    def resume_writing(self) -> None:
      super().resume_writing()
      if self._writing is not None:
        self._writing.cancel()
        self._writing = None

  return Timed
