"""HTTP interface: routes, authentication, limits and error responses."""

import asyncio
import collections
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import logging
import pathlib
import secrets
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference import requests as inference
from caatnet.inference.stops import Stops
from caatnet.inference.transcripts import Transcript
from caatnet.serving import requests as serving
from caatnet.serving.engine.device import SamplingState
from caatnet.serving.server import fields, responses
from caatnet.serving.server.catalog import AUTO, Catalog, Models, OpenedModel
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.fields import ParsedRequest
from caatnet.serving.server.service import Call, Service, WaitingChoice
from caatnet.serving.server.streaming import (
  CallResponse,
  JsonResponse,
  error_response,
)

_LOG = logging.getLogger(__name__)
_PAGE = pathlib.Path(__file__).with_name("page.html")
# A body that is too long is read up to this multiple of the allowed length
# before the response, since clients do not read a response while they send.
_OVERREAD_FACTOR = 16
_RETRY = {"Retry-After": "1"}
_MAX_LISTED_MODELS = 8  # maximum number of models that an error names
_Handler = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class ServerLimits:
  """Limits of a server.

  Attributes:
    context: Maximum number of positions of a sequence.
    vocab_size: Vocabulary size of the model.
    places: Maximum number of running and queued sequences.
    choices: Maximum number of choices per request.
    max_tokens: Maximum number of drawn tokens per sequence; 0 for no limit but
      the context.
    body_bytes: Maximum length of a request's body in bytes.
    read_s: Seconds within which a body must be sent.
  """

  context: int
  vocab_size: int
  places: int
  choices: int
  max_tokens: int
  body_bytes: int
  read_s: float


class Api:
  """Handlers of HTTP requests, on top of a service.

  Attributes:
    service: Engine thread and its calls.
    draining: Whether new requests are refused because of a shutdown.
  """

  def __init__(
    self, service: Service, tokenizer: Tokenizer, models: Models,
    bounds: ServerLimits, key: str = "",
  ) -> None:
    """Sets the models and the limits.

    Args:
      service: Engine thread and its calls.
      tokenizer: Tokenizer of the models.
      models: Models by name.
      bounds: Limits of the server.
      key: API key that clients must send; "" for none.
    """
    self.service, self.draining = service, False
    self._tokenizer, self._models, self._bounds = tokenizer, models, bounds
    self._key = key.encode()
    self._created = int(time.time())
    self._numbers = itertools.count()

  def app(self) -> Starlette:
    """Returns the ASGI application."""
    handlers: list[tuple[str, str, _Handler, bool]] = [
      ("/v1/completions", "POST", self._completions, True),
      ("/v1/chat/completions", "POST", self._chat, True),
      ("/tokenize", "POST", self._tokenize, True),
      ("/detokenize", "POST", self._detokenize, True),
      ("/tokenizer_info", "GET", self._tokenizer_info, True),
      ("/v1/models", "GET", self._list_models, True),
      ("/v1/models/{name:path}", "GET", self._model, True),
      ("/state", "GET", self._state, True),
      ("/metrics", "GET", self._metrics, True),
      ("/health", "GET", self._health, False),
      ("/", "GET", self._page, False),
    ]
    if isinstance(self._models, Catalog):
      handlers += [
        ("/v1/experts", "POST", self._add_expert, True),
        ("/v1/experts/{name}", "PUT", self._replace_expert, True),
        ("/v1/experts/{name}", "DELETE", self._remove_expert, True),
      ]
    return Starlette(
      routes=[
        Route(path, self._wrap_handler(handler, closed), methods=[method])
        for path, method, handler, closed in handlers
      ],
      exception_handlers={HTTPException: self._not_found},
    )

  def _wrap_handler(self, handler: _Handler, closed: bool) -> _Handler:
    """Wraps a handler: checks the key if ``closed``, turns errors into JSON."""

    async def guarded(request: Request) -> Response:
      try:
        if closed:
          self._check_key(request)
        return await handler(request)
      except ApiError as error:
        return self._error_response(error)
      except ClientDisconnect:
        return Response(status_code=400)  # the client is disconnected
      except Exception as error:
        _LOG.error(
          "%s %s: %s: %s", request.method, request.url.path,
          type(error).__name__, error,
          exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        return self._error_response(
          ApiError(500, "the server has failed", "internal")
        )

    return guarded

  def _error_response(self, error: ApiError) -> Response:
    """Returns an error as a response."""
    return error_response(error, self.service)

  async def _not_found(self, request: Request, error: Exception) -> Response:
    """Returns the response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {
      404: f"{what}: there is no such path",
      405: f"{what}: the path does not allow this method",
    }.get(error.status_code, error.detail)
    return self._error_response(
      ApiError(error.status_code, message, headers=error.headers)
    )

  def _check_key(self, request: Request) -> None:
    """Raises ApiError unless the request has the key; takes constant time."""
    if not self._key:
      return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not secrets.compare_digest(
      given.strip().encode(), self._key
    ):
      raise ApiError(
        401, "the API key is wrong or missing; send Authorization: Bearer KEY",
        "invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
      )

  async def _list_models(self, request: Request) -> Response:
    state = await self.service.state()
    cards = [self._model_card(name, state) for name in self._names()]
    return JsonResponse({"object": "list", "data": cards})

  async def _model(self, request: Request) -> Response:
    name = request.path_params["name"]
    self._check_model(name)
    return JsonResponse(self._model_card(name, await self.service.state()))

  def _model_card(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a model, with fields that OpenAI's API lacks.

    Raises:
      ApiError: The model was removed meanwhile.
    """
    try:
      details = self._models.details(name, state)
    except ValueError as error:
      raise ApiError(404, str(error), "model_not_found", "model") from error
    return {
      "id": name, "object": "model", "created": self._created,
      "owned_by": "caatnet", "max_model_len": self._bounds.context,
      "vocab_size": self._bounds.vocab_size,
    } | details

  async def _add_expert(self, request: Request) -> Response:
    """Adds an expert from a path of the server's machine."""
    self._check_changeable()
    given = fields.parse_expert(await self._body(request, named=False))
    if given.name in self._names():
      raise ApiError(
        409, f"expert {given.name!r} exists; PUT /v1/experts/{given.name} "
        "replaces it", "expert_exists", "name",
      )
    return await self._change(given.name, False, given)

  async def _replace_expert(self, request: Request) -> Response:
    """Replaces an expert; its running requests keep their revision."""
    name = request.path_params["name"]
    given = fields.parse_expert(await self._body(request, named=False))
    self._check_expert(name)
    if given.name not in ("", name):
      raise ApiError(
        400,
        f"name {given.name!r} must be {name!r}, the name in the path",
        None, "name",
      )
    return await self._change(name, True, given)

  async def _remove_expert(self, request: Request) -> Response:
    """Removes an expert; its running requests are still answered."""
    name = request.path_params["name"]
    self._check_expert(name)
    await self._run_in_thread(self._models.library.remove, name)
    self._free_retired_experts()
    return JsonResponse({"id": name, "object": "model", "deleted": True})

  async def _change(
    self, name: str, replaces: bool, given: fields.ExpertBody
  ) -> Response:
    """Adds or replaces an expert, and returns its description."""
    await self._run_in_thread(
      self._models.change, self._models.library, name, replaces, given.path,
      given.kind, given.description,
    )
    self._free_retired_experts()
    return JsonResponse(self._model_card(name, await self.service.state()))

  async def _run_in_thread(
    self, function: Callable[..., Any], *args: Any
  ) -> None:
    """Calls a function in a thread; its user errors become ApiErrors (400)."""
    try:
      await asyncio.to_thread(function, *args)
    except (ValueError, OSError) as error:
      raise ApiError(400, str(error), "invalid_expert", "path") from error

  def _check_expert(self, name: str) -> None:
    """Raises ApiError unless there is such an expert, and it can be changed."""
    self._check_changeable()
    if name == AUTO:
      raise ApiError(
        400,
        "the name auto is reserved for the router; use another name",
        None, "name",
      )
    self._check_model(name)

  def _check_changeable(self) -> None:
    """Raises ApiError unless clients have to send a key."""
    if not self._key:
      raise ApiError(
        403, "experts can be changed only if the server has a key: "
        "--api_key_file or CAATNET_API_KEY", "no_key",
      )

  def _names(self) -> tuple[str, ...]:
    """Returns the names of the models."""
    try:
      return self._models.names
    except ValueError as error:
      raise ApiError(500, str(error), "library_damaged") from error

  def _check_model(self, name: Any) -> None:
    """Raises ApiError unless `name` is one of this server's models."""
    names = self._names()
    if name in names:
      return
    listed = ", ".join(map(repr, names[:_MAX_LISTED_MODELS]))
    if len(names) > _MAX_LISTED_MODELS:
      listed += f" and {len(names) - _MAX_LISTED_MODELS} more (/v1/models)"
    if name is None:
      raise ApiError(
        400, f"model is missing; this server has {listed}", None, "model"
      )
    raise ApiError(
      404, f"there is no model {name!r}; this server has {listed}",
      "model_not_found", "model",
    )

  @property
  def status(self) -> str:
    """Status for /health: "ok", "draining" or "broken"."""
    if self.service.error is not None:
      return "broken"
    return "draining" if self.draining else "ok"

  async def _health(self, request: Request) -> Response:
    code = 200 if self.status == "ok" else 503
    body = {"status": self.status}
    if self.service.error is not None:
      body["error"] = str(self.service.error)
    return JsonResponse(body, code)

  async def _state(self, request: Request) -> Response:
    state = await self.service.state()
    own = {
      "model": self._models.title, "status": self.status,
      "open": self.service.num_open, "places": self._bounds.places,
    }
    return JsonResponse(own | state, headers={"Cache-Control": "no-store"})

  async def _metrics(self, request: Request) -> Response:
    text = self.service.metrics.text(await self.service.state())
    return Response(text, media_type="text/plain; version=0.0.4")

  async def _page(self, request: Request) -> Response:
    # The browser loads no external resources, even if content is injected.
    policy = (
      "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'; img-src data:"
    )
    return HTMLResponse(
      _PAGE.read_text(), headers={"Content-Security-Policy": policy}
    )

  async def _completions(self, request: Request) -> Response:
    body = await self._body(request)
    asked = fields.parse_completion(body, self._bounds.choices)
    prompts = await asyncio.to_thread(self._encoded, asked.prompts)
    echoed: Sequence[str] = ()
    if asked.echo:
      echoed = [
        p if isinstance(p, str) else self._tokenizer.decode(p)
        for p in asked.prompts
      ]
    return self._respond(request, body["model"], asked, prompts, echoed)

  async def _chat(self, request: Request) -> Response:
    body = await self._body(request)
    asked = fields.parse_chat(body, self._bounds.choices)
    try:
      text = await asyncio.to_thread(
        self._tokenizer.chat, asked.messages, asked.template
      )
    except ValueError as error:
      raise ApiError(400, str(error), "no_chat_template", "messages") from error
    tokens = await asyncio.to_thread(self._tokens, text)
    return self._respond(request, body["model"], asked, [tokens], ())

  async def _tokenize(self, request: Request) -> Response:
    """Returns the tokens of a text; this and the next two routes are vLLM's."""
    text, start = fields.parse_tokenize(await self._body(request, named=False))
    found = await asyncio.to_thread(self._tokens, text)
    if start:
      found = (*self._tokenizer.start_ids, *found)
    return JsonResponse({
      "tokens": found, "count": len(found),
      "max_model_len": self._bounds.context,
    })

  async def _detokenize(self, request: Request) -> Response:
    tokens = fields.parse_detokenize(await self._body(request, named=False))
    text = await asyncio.to_thread(self._tokenizer.decode, tokens)
    return JsonResponse({"prompt": text})

  async def _tokenizer_info(self, request: Request) -> Response:
    """Returns the special tokens that lm-evaluation-harness asks for."""
    special = self._tokenizer.special
    starts = bool(self._tokenizer.start_ids)
    return JsonResponse({
      "bos_token": special("bos_token") or None if starts else None,
      "eos_token": special("eos_token") or None,
    })

  async def _body(
    self, request: Request, named: bool = True
  ) -> dict[str, Any]:
    """Reads a request's JSON, and checks its size and model.

    Args:
      request: The request.
      named: Whether the body must name the model.
    """
    if {"content-length", "transfer-encoding"} <= {*request.headers}:
      # A proxy that uses the other header could see another request in the
      # body (request smuggling).
      raise ApiError(
        400, "a body must have Content-Length or Transfer-Encoding, not both",
        "ambiguous_length", headers={"Connection": "close"},
      )
    most, size, parts = self._bounds.body_bytes, 0, []
    try:
      async with asyncio.timeout(self._bounds.read_s):
        async for part in request.stream():
          size += len(part)
          if size > _OVERREAD_FACTOR * most:
            break  # give up: the client gets an error while it sends
          if size <= most:  # a body that is too long is read, not stored
            parts.append(part)
    except TimeoutError as error:
      raise ApiError(
        408, f"the body took longer than {self._bounds.read_s:g} s", "timeout",
        headers={"Connection": "close"},
      ) from error
    if size > most:
      raise ApiError(
        413, f"the body is longer than {most:,} bytes", "body_too_long",
        headers={"Connection": "close"},
      )
    try:
      body = json.loads(
        b"".join(parts), object_pairs_hook=_reject_duplicate_keys
      )
    except (ValueError, RecursionError) as error:
      raise ApiError(
        400, f"the body is not JSON: {error}", "invalid_json"
      ) from error
    if isinstance(body, dict) and (named or body.get("model") is not None):
      self._check_model(body.get("model"))
    return body

  def _encoded(
    self, prompts: Sequence[str | tuple[int, ...]]
  ) -> list[tuple[int, ...]]:
    """Returns prompts as token ids; texts begin with the start ids."""
    return [
      (*self._tokenizer.start_ids, *self._tokens(p)) if isinstance(p, str)
      else p
      for p in prompts
    ]

  def _tokens(self, text: str) -> tuple[int, ...]:
    """Returns the token ids of a text."""
    try:
      return tuple(self._tokenizer.encode(text).tolist())
    except ValueError as error:
      raise ApiError(400, str(error), None, "prompt") from error

  def _respond(
    self, request: Request, name: str, asked: ParsedRequest,
    prompts: Sequence[tuple[int, ...]], echoed: Sequence[str],
  ) -> Response:
    """Submits the sequences of a request, and returns their response.

    Args:
      request: HTTP request.
      name: Name of the model.
      asked: Its parsed body.
      prompts: Token ids of its prompts.
      echoed: Texts of the prompts if they are echoed, else empty.
    """
    self._check_capacity(len(prompts) * asked.n)
    opened = self._models.open(
      name, lambda: "\n".join(map(self._tokenizer.decode, prompts))
    )
    scored = asked.echo and asked.logprobs
    call = Call(scored, lambda: self._close_model(opened))
    try:
      self._add_choices(call, request, opened, asked, prompts)
    except ApiError:
      self._close_model(opened)
      raise
    formatter = responses.ResponseFormatter(
      asked, opened.name, self._tokenizer, echoed
    )
    self.service.submit(call)
    headers = {"X-Expert": opened.key} if opened.key else {}
    return CallResponse(self.service, call, formatter, headers)

  def _close_model(self, opened: OpenedModel) -> None:
    """Ends a request's use of a model; frees revisions no longer needed."""
    self._models.close(opened)
    if retired := self._models.retire():
      self.service.forget(retired, self._models.pinned)

  def _free_retired_experts(self) -> None:
    """Frees replaced and removed experts; updates which ones are pinned."""
    self.service.forget(self._models.retire(), self._models.pinned)

  def _add_choices(
    self, call: Call, request: Request, opened: OpenedModel,
    asked: ParsedRequest, prompts: Sequence[tuple[int, ...]],
  ) -> None:
    """Adds the sequences of a request to its call."""
    # Fair policies charge the field `user` if it is given, else the API key.
    client = asked.user or _client_id(request)
    seed = secrets.randbits(32) if asked.seed is None else asked.seed
    for i, prompt in enumerate(prompts):
      for j in range(asked.n):
        index = i * asked.n + j
        call.choices.append(
          self._choice(
            call, asked, client, opened.key, index, i, prompt, seed + index
          )
        )

  def _check_capacity(self, count: int) -> None:
    """Raises ApiError if `count` more sequences cannot be accepted now."""
    if self.service.error is not None:
      raise ApiError(500, f"the engine has stopped: {self.service.error}",
                     "broken")
    if self.draining:
      raise ApiError(
        503, "the server is shutting down", "draining",
        headers=_RETRY | {"Connection": "close"},
      )
    if self.service.num_open + count > self._bounds.places:
      raise ApiError(
        429, f"{self.service.num_open} sequences are running or queued, and "
        f"the limit is {self._bounds.places} places", "queue_full",
        headers=_RETRY,
      )

  def _choice(
    self, call: Call, asked: ParsedRequest, client: str, expert: str,
    index: int, number: int, prompt: tuple[int, ...], seed: int,
  ) -> WaitingChoice:
    """Makes one sequence of a call.

    Args:
      call: Call that waits for the sequence.
      asked: Parsed body of the HTTP request.
      client: Client charged by fair policies.
      expert: Key of the expert; "" for a server of one model.
      index: Index of the sequence in the call.
      number: Index of its prompt in the call.
      prompt: Token ids of the prompt.
      seed: Seed of its random numbers.

    Raises:
      ApiError: The prompt or ``max_tokens`` exceeds a limit.
    """
    bounds, room = self._bounds, self._bounds.context - len(prompt)
    draws = asked.max_tokens != 0
    # Without max_tokens: the server's limit, else the remaining context.
    most = asked.max_tokens or bounds.max_tokens or max(1, room)
    if not draws:
      most, room = 1, room + 1  # a token that is not drawn needs no position
    if bounds.max_tokens and most > bounds.max_tokens:
      raise ApiError(
        400, f"max_tokens={most} is more than the {bounds.max_tokens} of this "
        "server", None, "max_tokens",
      )
    stop_ids = frozenset(() if asked.ignore_eos else self._tokenizer.stop_ids)
    try:
      drawing = inference.Request(
        prompt, Stops(most, stop_ids, asked.stop), seed=seed % 2**32,
        **asked.drawing,
      )
    except ValueError as error:
      raise ApiError(400, str(error), None, "prompt") from error
    if (asked.max_tokens and asked.max_tokens > room) or room < 1:
      raise ApiError(
        400, f"the prompt has {len(prompt)} tokens, and with max_tokens="
        f"{asked.max_tokens or int(draws)} it exceeds the context of "
        f"{bounds.context}", "context_length_exceeded", "max_tokens",
      )
    try:
      drawing.check(bounds.vocab_size, len(prompt) + room)
    except ValueError as error:
      raise ApiError(400, str(error), None, "prompt") from error
    transcript = Transcript(drawing, self._tokenizer, len(prompt) + room)
    now = self.service.now()
    request = serving.Request(
      next(self._numbers), prompt, transcript.max_tokens, client=client,
      expert=expert, priority=asked.priority, arrival_s=now,
      deadline_s=now + asked.deadline_s,
      # Each choice is a separate conversation, with its own host copy.
      conversation=(client, asked.conversation, index)
      if asked.conversation else None,
      more=bool(asked.conversation),
      payload=SamplingState(drawing, asked.num_top),
    )
    choice = WaitingChoice(index, number, request, transcript, call, draws)
    request.stop = lambda token: self.service.take(choice, token)
    return choice


def _reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """Returns the name-value pairs of a JSON object as a dict.

  Raises:
    ValueError: A name is repeated.
  """
  found = dict(pairs)
  if len(found) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    raise ValueError(f"{counts.most_common(1)[0][0]!r} is repeated")
  return found


def _client_id(request: Request) -> str:
  """Returns an identifier of a client by its key; "" without a key."""
  key = request.headers.get("authorization", "")
  return hashlib.sha256(key.encode()).hexdigest()[:16] if key else ""
