"""HTTP/1.1 exchange of a client that reads a response as it arrives.

A general HTTP client needs several times as much processor time per part of a
stream, so a load generator on the server's machine would delay the responses
that it measures.
"""

import asyncio
from collections.abc import Callable, Mapping
import ssl
import time
import urllib.parse

import h11

# Longest head of a response in bytes, that of httpcore.
_MAX_HEAD = 100 * 1024


class HttpExchange(asyncio.Protocol):
  """One request on a connection of its own, and its response.

  Attributes:
    status: Status code of the response; 0 before its head.
    last_s: Time in seconds at which data last arrived; at first, that of
      construction (`time.perf_counter`).
    ended: Future that ends with the response, or with an exception.
  """

  def __init__(
    self, request: h11.Request, body: bytes, on_body: Callable[[bytes], None]
  ) -> None:
    """Prepares an exchange in the running loop.

    Args:
      request: Head of the request.
      body: Body of the request.
      on_body: Called with each part of the response's body.
    """
    self.status = 0
    self.last_s = time.perf_counter()
    self.ended: asyncio.Future[None] = (
      asyncio.get_running_loop().create_future()
    )
    self._request, self._body, self._on_body = request, body, on_body
    self._connection = h11.Connection(
      h11.CLIENT, max_incomplete_event_size=_MAX_HEAD
    )

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    self._transport, send = transport, self._connection.send
    parts = map(send, (
      self._request, h11.Data(data=self._body), h11.EndOfMessage()
    ))
    transport.write(b"".join(parts))

  def data_received(self, data: bytes) -> None:
    self.last_s = time.perf_counter()
    self._handle_data(data)

  def eof_received(self) -> None:
    self._handle_data(b"")  # the end of a body without a length

  def connection_lost(self, exc: Exception | None) -> None:
    if not self.ended.done():
      self.ended.set_exception(exc or ConnectionError("the connection is lost"))

  def _handle_data(self, data: bytes) -> None:
    """Handles received data, b"" for its end."""
    if self.ended.done():
      return
    try:
      self._connection.receive_data(data)
      while not isinstance(event := self._connection.next_event(), type):
        if isinstance(event, h11.Data):
          self._on_body(bytes(event.data))
        elif isinstance(event, h11.Response):
          self.status = event.status_code
        elif isinstance(event, h11.EndOfMessage):
          self.ended.set_result(None)
          self._transport.close()
          return
    except h11.RemoteProtocolError as error:
      self.ended.set_exception(error)
      self._transport.close()


async def post(
  url: str, body: bytes, headers: Mapping[str, str], timeout_s: float,
  on_body: Callable[[bytes], None], context: ssl.SSLContext | None,
) -> int:
  """Sends JSON without a proxy, and reads the response.

  Args:
    url: Address without a user, https:// with a TLS configuration.
    body: The JSON.
    headers: Further headers of the request.
    timeout_s: Seconds without data after which the exchange has failed.
    on_body: Called with each part of the response's body.
    context: TLS configuration; None for http.

  Returns:
    The status code.

  Raises:
    OSError: The server is unreachable, or silent for too long (TimeoutError).
    h11.RemoteProtocolError: The response is not HTTP/1.1, or was cut off.
  """
  parts = urllib.parse.urlsplit(url)
  request = h11.Request(method="POST", target=parts.path, headers=[
    ("Host", parts.netloc.rpartition("@")[2]),
    ("Content-Type", "application/json"), ("Content-Length", str(len(body))),
    ("Connection", "close"), *headers.items(),
  ])
  try:
    async with asyncio.timeout(timeout_s) as limit:
      transport, exchange = await asyncio.get_running_loop().create_connection(
        lambda: HttpExchange(request, body, on_body), parts.hostname,
        parts.port or (443 if context else 80), ssl=context,
      )
  except TimeoutError as error:
    if not limit.expired():  # the operating system's, which has a message
      raise
    raise TimeoutError(
      f"no connection to {parts.netloc} within {timeout_s:g} s"
    ) from error
  try:
    while not exchange.ended.done():
      left = exchange.last_s + timeout_s - time.perf_counter()
      if left <= 0:
        raise TimeoutError(f"the server sent nothing for {timeout_s:g} s")
      await asyncio.wait([exchange.ended], timeout=left)
    exchange.ended.result()
  finally:
    exchange.ended.cancel()
    transport.abort()
  return exchange.status
