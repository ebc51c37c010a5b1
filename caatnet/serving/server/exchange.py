"""HTTP/1.1 exchange of a client that reads a response as it arrives.

A general HTTP client takes several times the processor time per part of a
stream: a load generator on the machine of the server would delay what it
measures.
"""

import asyncio
from collections.abc import Callable, Mapping
import ssl
import time
import urllib.parse

import h11

# Longest head of a response in bytes, that of httpcore.
_MOST_HEAD = 100 * 1024


class Chunks:
  r"""Decoder of a body in chunks (RFC 9112, section 7.1) without trailers.

  Attributes:
    ended: Whether the last chunk has been decoded.

  Example:
    >>> chunks = Chunks()
    >>> chunks.push(b"5\r\ntoken\r\n1"), chunks.push(b"\r\ns\r\n0\r\n\r\n")
    (b'token', b's')
    >>> chunks.ended
    True
  """

  def __init__(self) -> None:
    self.ended = False
    self._rest = b""

  def push(self, data: bytes) -> bytes:
    """Returns the content of the chunks that more data completes.

    Raises:
      h11.RemoteProtocolError: The data is not in chunks.
    """
    data, at, found = self._rest + data, 0, []
    while not self.ended and (end := data.find(b"\r\n", at)) >= 0:
      try:  # without extensions of the chunk
        size = int(data[at:end].partition(b";")[0], 16)
      except ValueError:
        size = -1
      start, stop = end + 2, end + 2 + size
      if size < 0 or data[stop : stop + 2] not in (b"\r\n", b"\r", b""):
        raise h11.RemoteProtocolError("the body is not in chunks")
      if len(data) < stop + 2:
        break
      found.append(data[start:stop])
      at, self.ended = stop + 2, not size
    self._rest = data[at:]
    return b"".join(found)


class Exchange(asyncio.Protocol):
  """One request on a connection of its own, and its response.

  Attributes:
    status: Status code of the response; 0 before its head.
    last_s: Time of the last data, or of the connection (`time.perf_counter`).
    ended: Result None after the whole response; otherwise the exception.
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
      h11.CLIENT, max_incomplete_event_size=_MOST_HEAD
    )
    self._chunks: Chunks | None = None

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    self._transport, send = transport, self._connection.send
    parts = map(send, (
      self._request, h11.Data(data=self._body), h11.EndOfMessage()
    ))
    transport.write(b"".join(parts))

  def data_received(self, data: bytes) -> None:
    self.last_s = time.perf_counter()
    self._read(data)

  def eof_received(self) -> None:
    self._read(b"")  # the end of a body without a length

  def connection_lost(self, exc: Exception | None) -> None:
    if not self.ended.done():
      self.ended.set_exception(exc or ConnectionError("the connection is lost"))

  def _read(self, data: bytes) -> None:
    """Handles received data, b"" for its end."""
    if self.ended.done():
      return
    try:
      if self._chunks is None:
        self._connection.receive_data(data)
        self._read_events()
      elif not data:
        raise h11.RemoteProtocolError("the last chunk is missing")
      else:
        self._read_chunks(data)
    except h11.RemoteProtocolError as error:
      self.ended.set_exception(error)
      self._transport.close()

  def _read_events(self) -> None:
    """Handles the head of a response, and a body that is not in chunks."""
    while not isinstance(event := self._connection.next_event(), type):
      if isinstance(event, h11.Data):
        self._on_body(bytes(event.data))
      elif isinstance(event, h11.Response):
        self.status = event.status_code
        if (b"transfer-encoding", b"chunked") in event.headers:
          # h11 takes several times as long for a chunk.
          self._chunks = Chunks()
          self._read_chunks(self._connection.trailing_data[0])
          return
      elif isinstance(event, h11.EndOfMessage):
        self._end()
        return

  def _read_chunks(self, data: bytes) -> None:
    """Handles data of a body in chunks."""
    assert self._chunks is not None
    if part := self._chunks.push(data):
      self._on_body(part)
    if self._chunks.ended:
      self._end()

  def _end(self) -> None:
    """Ends the exchange after the whole response."""
    self.ended.set_result(None)
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
        lambda: Exchange(request, body, on_body), parts.hostname,
        parts.port or (443 if context else 80), ssl=context,
      )
  except TimeoutError as error:
    if not limit.expired():  # of the operating system, with a reason
      raise
    raise TimeoutError(
      f"no connection to {parts.netloc} within {timeout_s:g} s"
    ) from error
  try:
    while not exchange.ended.done():
      left = exchange.last_s + timeout_s - time.perf_counter()
      if left <= 0:
        raise TimeoutError(f"no data for {timeout_s:g} s")
      await asyncio.wait([exchange.ended], timeout=left)
    exchange.ended.result()
  finally:
    exchange.ended.cancel()
    transport.abort()
  return exchange.status
