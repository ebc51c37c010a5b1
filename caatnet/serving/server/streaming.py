"""HTTP responses that are sent while the engine draws tokens.

A client that disconnects cancels its sequences, with and without streaming.
An error before the first token sets the response's status, also in a stream.
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from caatnet.serving.requests import State
from caatnet.serving.server import responses
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.service import Call, ChoiceEvent, Service

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class JsonResponse(Response):
  """JSON response."""

  media_type = "application/json"

  def render(self, content: Any) -> bytes:
    return responses.as_json(content)


def error_response(error: ApiError, service: Service) -> Response:
  """Returns an error as a response, and counts it in the metrics."""
  service.metrics.answered(error.status)
  return JsonResponse(error.body, error.status, headers=error.headers)


class CallResponse(Response):
  """Response that sends events as they arrive and watches for a disconnect."""

  def __init__(
    self, service: Service, call: Call, formatter: responses.ResponseFormatter,
    headers: Mapping[str, str] = _NO_HEADERS,
  ) -> None:
    """Takes a call that was submitted to the service.

    Args:
      service: Engine thread and its calls.
      call: The call.
      formatter: Formats its events.
      headers: Further headers of a successful response.
    """
    self._service, self._call, self._formatter = service, call, formatter
    self._more = headers

  async def __call__(
    self, scope: Scope, receive: Receive, send: Send
  ) -> None:
    listening = asyncio.create_task(self._listen(receive))
    try:
      if self._formatter.asked.stream:
        await self._stream(scope, receive, send)
      else:
        await self._send_full_response(scope, receive, send)
    finally:
      listening.cancel()
      self._service.close(self._call)

  async def _listen(self, receive: Receive) -> None:
    """Waits for the client to disconnect."""
    while (await receive())["type"] != "http.disconnect":
      pass
    self._call.leave()

  async def _next(self) -> Sequence[ChoiceEvent]:
    """Waits for events; returns none if the client has disconnected.

    Raises:
      ApiError: The engine has failed, or a sequence has ended without tokens.
    """
    found = await self._call.next()
    for news in found:
      if news.token is None and news.state is not State.FINISHED:
        assert news.state is not None
        raise responses.failure(
          news.state, self._formatter.asked, news.error,
          news.choice.request.expert,
        )
    return found

  async def _send_full_response(
    self, scope: Scope, receive: Receive, send: Send
  ) -> None:
    """Sends one JSON body after all sequences have ended."""
    news: list[ChoiceEvent] = []
    choices = self._call.choices
    try:
      while self._call.num_open:
        found = await self._next()
        if not found and self._call.gone:
          return
        news += found
    except ApiError as error:
      await error_response(error, self._service)(scope, receive, send)
      return
    self._service.metrics.answered(200)
    body = self._formatter.whole(choices, news)
    await JsonResponse(body, headers=self._more)(scope, receive, send)

  async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends server-sent events."""
    try:
      found = await self._next()
    except ApiError as error:
      await error_response(error, self._service)(scope, receive, send)
      return
    self._service.metrics.answered(200)
    await send({
      "type": "http.response.start", "status": 200,
      "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        *((k.encode(), v.encode()) for k, v in self._more.items()),
      ],
    })
    last = b""
    with contextlib.suppress(OSError):
      while not self._call.gone:
        parts = b"".join(map(self._formatter.chunk, found))
        if not self._call.num_open:
          last = self._formatter.last(self._call.choices)
          await _send(send, parts + last, more=False)
          return
        # Tokens without text produce no events (see `chunk`).
        if parts:
          await _send(send, parts, more=True)
        try:
          found = await self._next()
        except ApiError as error:
          await _send(send, responses.event(error.body), more=False)
          return


async def _send(send: Send, body: bytes, more: bool) -> None:
  """Sends a part of the body."""
  await send({"type": "http.response.body", "body": body, "more_body": more})
