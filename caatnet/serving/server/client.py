"""Load generator: sends requests at given times and records token times.

Times are measured by the client, from sending a request to reading a token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import functools
import json
import math
import time
from typing import Any
import urllib.parse

import h11
import httpx2
import numpy as np

from caatnet.serving import traces
from caatnet.serving.server import exchange

PERCENTILES = (50, 90, 95, 99, 99.9)
_EVENT_PREFIX = b"data: "
_MAX_REASON = 200  # bytes of a response in the reason of a failure
# Fields of a model's description, for `requests_of_trace`.
_MODEL_CARD_FIELDS = {"id": str, "max_model_len": int, "vocab_size": int}


@dataclasses.dataclass(frozen=True)
class TimedRequest:
  """A request with its sending time.

  Attributes:
    time_s: Sending time in seconds after the start of the load generator.
    body: Fields of /v1/completions, except for those of streaming.
    after: Index of the request whose response must have ended before this one
      is sent; -1 for none.
    think_s: Minimum number of seconds between that response and this request.
  """

  time_s: float
  body: Mapping[str, Any]
  after: int = -1
  think_s: float = 0.0


def requests_of_trace(
  arrivals: Sequence[traces.Arrival], card: Mapping[str, Any]
) -> list[TimedRequest]:
  """Returns the requests of a trace that fit into the model's context.

  A turn of a conversation is sent after the response to the previous turn. Its
  prompt begins with that turn and a synthetic response of the same length.

  Args:
    arrivals: The trace.
    card: The server's description of the model: ``id``, ``max_model_len`` and
      ``vocab_size``.

  Raises:
    ValueError: No request fits.
  """
  context, found = card["max_model_len"], list[TimedRequest]()
  turns: dict[Any, int] = {}
  for arrival in arrivals:
    if arrival.prompt + arrival.output > context:
      continue
    tokens = traces.synthetic_token_ids(arrival, card["vocab_size"])[
      : arrival.prompt
    ]
    body = {
      "model": card["id"], "prompt": tokens.tolist(),
      "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True,
    }
    if arrival.think_s is not None and arrival.conversation in turns:
      found.append(TimedRequest(
        0.0, body, turns[arrival.conversation], arrival.think_s
      ))
    else:
      found.append(TimedRequest(arrival.time_s, body))
    if arrival.conversation is not None:
      turns[arrival.conversation] = len(found) - 1
  if not found:
    raise ValueError(
      f"none of {len(arrivals)} requests fits into the server's context of "
      f"{context} tokens; use shorter requests, or a longer context"
    )
  return found


@dataclasses.dataclass
class Outcome:
  """Measured times of one request and its response.

  Attributes:
    sent_s: Sending time in seconds.
    times_s: Times in seconds at which text arrived; none for tokens without
      text.
    tokens: Number of drawn tokens.
    error: Reason of a failure; "" for success.
  """

  sent_s: float
  times_s: list[float] = dataclasses.field(default_factory=list)
  tokens: int = 0
  error: str = ""

  @property
  def ttft_s(self) -> float:
    """Seconds from sending to the first text; NaN without text."""
    return self.times_s[0] - self.sent_s if self.times_s else math.nan

  @property
  def tpot_s(self) -> float:
    """Mean seconds between tokens; NaN for fewer than two tokens."""
    if self.tokens < 2 or len(self.times_s) < 2:
      return math.nan
    return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1)


async def read_model_card(url: str, key: str) -> dict[str, Any]:
  """Returns the server's description of its model (``/v1/models``).

  Raises:
    ValueError: The server is unreachable, refuses the request, or lacks a field
      that ``launch.serve`` adds to a model's description.
  """
  try:
    async with httpx2.AsyncClient(headers=_headers(key)) as client:
      _is_secure(url)
      answer = await client.get(f"{url}/v1/models")
      answer.raise_for_status()
      found = answer.json()["data"][0]
      # other servers have no vocab_size
      for name, kind in _MODEL_CARD_FIELDS.items():
        if not isinstance(found.get(name), kind):
          raise ValueError(
            f"{name} is missing in the server's /v1/models, so it was not "
            "started with launch.serve"
          )
      return found
  except (
    httpx2.HTTPError, httpx2.InvalidURL, AttributeError, LookupError, TypeError,
    ValueError,
  ) as error:
    raise ValueError(f"--url={url}: {error or type(error).__name__}") from error


def _is_secure(url: str) -> bool:
  """Returns whether the scheme of a URL is https.

  Raises:
    ValueError: The URL contains a user, which requests would not send.
  """
  parts = urllib.parse.urlsplit(url)
  if "@" in parts.netloc:
    raise ValueError("a user and password in a URL have no effect; remove them")
  return parts.scheme == "https"


def _headers(key: str) -> dict[str, str]:
  """Returns the authorization header, or none without a key."""
  return {"Authorization": f"Bearer {key}"} if key else {}


async def send_requests(
  url: str, questions: Sequence[TimedRequest], key: str = "",
  timeout_s: float = 600.0, on_end: Callable[[], None] = lambda: None,
) -> list[Outcome]:
  """Sends requests at their times without a proxy, and streams the responses.

  Args:
    url: URL of the server.
    questions: The requests; each index in ``after`` refers to an earlier one.
    key: API key; "" for none.
    timeout_s: Seconds without data after which a response has failed.
    on_end: Called when a response has ended.

  Returns:
    The measurements of each request.

  Raises:
    ValueError: The URL contains a user.
  """
  context = httpx2.create_ssl_context() if _is_secure(url) else None
  start = time.perf_counter()
  ends = [asyncio.Event() for _ in questions]

  async def one(number: int, question: TimedRequest) -> Outcome:
    if question.after >= 0:
      await ends[question.after].wait()
      await asyncio.sleep(question.think_s)
    await asyncio.sleep(start + question.time_s - time.perf_counter())
    outcome = Outcome(time.perf_counter())
    await _stream_response(outcome, question, functools.partial(
      exchange.post, f"{url}/v1/completions", headers=_headers(key),
      timeout_s=timeout_s, context=context,
    ))
    ends[number].set()
    on_end()
    return outcome

  return list(await asyncio.gather(
    *(one(i, question) for i, question in enumerate(questions))
  ))


async def _stream_response(
  outcome: Outcome, question: TimedRequest, post: Callable[..., Awaitable[int]]
) -> None:
  """Streams one response, and writes its measurements to `outcome`."""
  body = dict(question.body) | {
    "stream": True, "stream_options": {"include_usage": True}
  }
  first = last = rest = b""

  def on_body(part: bytes) -> None:
    nonlocal first, last, rest
    if len(first) < _MAX_REASON:
      first = (first + part)[:_MAX_REASON]
    *events, rest = (rest + part).split(b"\n\n")
    now = time.perf_counter()
    for event in events:
      # An event with a choice carries text; the last event has the usage only.
      if b'"choices":[{' in event:
        outcome.times_s.append(now)
      if event != _EVENT_PREFIX + b"[DONE]":
        last = event

  try:
    status = await post(body=json.dumps(body).encode(), on_body=on_body)
    if status != 200:
      outcome.error = f"{status}: {first.decode(errors='replace')}"
      return
    outcome.tokens = json.loads(last.removeprefix(_EVENT_PREFIX))["usage"][
      "completion_tokens"
    ]
  except (
    OSError, h11.ProtocolError, ValueError, LookupError, TypeError
  ) as error:
    event = f": {last[:_MAX_REASON]!r}" if last else ""
    outcome.error = f"{type(error).__name__}: {error}{event}"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
  """Returns latency percentiles, linearly interpolated, and throughput.

  Returns:
    ``measures``: for TTFT, TBT and TPOT the seconds of each of `PERCENTILES`,
    their mean and the number of samples ``n``; ``tokens_per_second`` from the
    first request to the last token; ``sent_per_second``, the rate at which
    requests were sent; ``requests``, ``tokens``, ``errors``.

  Example:
    >>> outcome = Outcome(sent_s=0.0, times_s=[0.5, 0.75, 1.0], tokens=3)
    >>> outcome.ttft_s, outcome.tpot_s
    (0.5, 0.25)
    >>> summary([outcome])["tokens_per_second"]
    3.0
  """
  good = [outcome for outcome in outcomes if not outcome.error]
  values = {
    "TTFT": [o.ttft_s for o in good if o.times_s],
    "TBT": [gap for o in good for gap in np.diff(o.times_s)],
    "TPOT": [o.tpot_s for o in good if not math.isnan(o.tpot_s)],
  }
  ends = [o.times_s[-1] for o in good if o.times_s]
  sent = sorted(o.sent_s for o in outcomes)
  # From the first request to the last token.
  seconds = max(ends, default=math.nan) - sent[0]
  tokens = sum(o.tokens for o in good)
  return {
    "requests": len(outcomes), "tokens": tokens,
    "tokens_per_second": tokens / seconds,
    "sent_per_second": (len(sent) - 1) / (sent[-1] - sent[0])
    if sent[-1] > sent[0] else math.nan,
    "errors": [o.error for o in outcomes if o.error],
    "measures": {
      name: {
        "n": len(found), "mean": float(np.mean(found)) if found else math.nan,
        **{
          f"P{p}": float(np.percentile(found, p)) if found else math.nan
          for p in PERCENTILES
        },
      }
      for name, found in values.items()
    },
  }
