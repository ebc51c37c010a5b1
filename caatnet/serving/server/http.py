"""HTTP server: uvicorn with timeouts for clients and a graceful shutdown.

The first SIGTERM or Ctrl-C lets running requests finish for a limited time and
refuses new ones. The second signal ends the process at once.
"""

import asyncio
from collections.abc import Callable
import functools
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from caatnet.serving.server.api import Api
from caatnet.serving.server.connection import Connection
from caatnet.serving.server.errors import ApiError

# Connections that the kernel queues while the loop is busy.
_BACKLOG = 2048


def bind_listener(host: str, port: int) -> socket.socket:
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


class HttpServer(uvicorn.Server):
  """Uvicorn server of an `Api`, which runs until a signal arrives.

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
      api.app(),
      http=functools.partial(Connection, read_s=read_s, write_s=write_s),
      ws="none", lifespan="off", log_level="error", access_log=False,
      backlog=_BACKLOG, server_header=False,
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
