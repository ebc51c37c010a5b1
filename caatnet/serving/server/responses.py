"""Responses in OpenAI's formats for completions and chats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import json
import time
from typing import Any, NamedTuple
import uuid

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.scoring import TargetScores
from caatnet.serving.engine.device import as_dict
from caatnet.serving.requests import State
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.fields import ParsedRequest
from caatnet.serving.server.service import ChoiceEvent, WaitingChoice

_REASONS = {
  "stop_id": "stop", "stop_string": "stop", "max_tokens": "length",
  "context": "length", "interrupted": "length",
}
# Smallest log-probability in JSON, which has no infinity; the same as in vLLM.
_MIN_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"  # end of a stream in OpenAI's API
# `json.dumps` would make an encoder per call, which takes as long as an event.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def event(value: Any) -> bytes:
  """Returns a server-sent event."""
  return b"data: " + as_json(value) + b"\n\n"


def as_json(value: Any) -> bytes:
  """Returns JSON in ASCII, which can also encode unpaired surrogates.

  Raises:
    ValueError: A number is NaN or infinite.
  """
  return _ENCODER.encode(value).encode()


def failure(
  state: State, asked: ParsedRequest, error: str = "", expert: str = ""
) -> ApiError:
  """Returns the error of a sequence that failed, expired or was refused.

  Args:
    state: Final state of the sequence.
    asked: Parsed request.
    error: Reason if its expert could not be loaded, or a program could not be
      compiled.
    expert: Key of its expert; "" with one model.
  """
  if error and expert:
    return ApiError(500, error, "expert_failed", "model")
  if error:
    return ApiError(500, error, "not_compiled")
  if state is State.EXPIRED:
    return ApiError(
      504, f"no token was drawn within deadline_s={asked.deadline_s:g}",
      "deadline_exceeded", "deadline_s",
    )
  if state is State.FAILED:
    return ApiError(
      500, "the model's logits are NaN for this sequence", "not_a_number"
    )
  return ApiError(
    400, "the prompt with max_tokens does not fit into the whole cache",
    "context_length_exceeded", "max_tokens",
  )


class ScoredToken(NamedTuple):
  """Token of a response with its log-probability.

  Attributes:
    token: Token id.
    logprob: Log-probability in nats; None for the first token of a prompt.
    top: Log-probabilities of the most probable tokens at its position.
    offset: Length of the text before it, in characters.
  """

  token: int
  logprob: float | None
  top: Mapping[int, float]
  offset: int


class ResponseFormatter:
  """Formatter of a call's events as JSON in OpenAI's formats."""

  def __init__(
    self, asked: ParsedRequest, model: str, tokenizer: Tokenizer,
    prompts: Sequence[str],
  ) -> None:
    """Starts a response.

    Args:
      asked: Parsed request.
      model: Name of the model.
      tokenizer: Decodes single tokens, for log-probabilities.
      prompts: Texts of the prompts if they are to be echoed, else empty.
    """
    self.asked = asked
    self._tokenizer, self._prompts = tokenizer, prompts
    self._chat = bool(asked.messages)
    self._kind = "chat.completion" if self._chat else "text_completion"
    prefix = "chatcmpl" if self._chat else "cmpl"
    self._head = {
      "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()),
      "model": model,
    }
    self._seen: set[int] = set()
    # The start and the end of each event of a stream.
    kind = self._kind + (".chunk" if self._chat else "")
    head = _ENCODER.encode(self._head | {"object": kind})[:-1]
    self._start = f'data: {head},"choices":[{{"index":'
    self._end = "}],\"usage\":null}\n\n" if asked.include_usage else "}]}\n\n"

  def chunk(self, news: ChoiceEvent) -> bytes:
    """Returns an event of a stream as bytes; b"" if it has no content."""
    index, asked = news.choice.index, self.asked
    reason = None
    if news.state is not None:
      reason = _REASONS[news.choice.transcript.completion.reason]
    first = index not in self._seen
    # A token without text, such as a part of a character, sends no event.
    if not (news.text or reason or asked.logprobs or first):
      return b""
    self._seen.add(index)
    logprobs = None
    if asked.logprobs:
      logprobs = self._logprobs(self._scored_tokens(news.choice, [news], first))
    choice: dict[str, Any] = {}
    if self._chat:
      delta = {"role": "assistant"} if first else {}
      choice["delta"] = delta | {"content": news.text}
    else:
      choice["text"] = self._echoed(news.choice, first) + news.text
    choice |= {"logprobs": logprobs, "finish_reason": reason}
    rest = _ENCODER.encode(choice)[1:-1]
    return f"{self._start}{index},{rest}{self._end}".encode()

  def _echoed(self, choice: WaitingChoice, first: bool) -> str:
    """Returns the prompt's text if echoed before the `first` chunk, else ""."""
    return self._prompts[choice.prompt] if self._prompts and first else ""

  def last(self, choices: Sequence[WaitingChoice]) -> bytes:
    """Returns the events that end a stream."""
    if not self.asked.include_usage:
      return DONE
    kind = self._kind + (".chunk" if self._chat else "")
    body = self._head | {"object": kind, "choices": [], "usage": usage(choices)}
    return event(body) + DONE

  def whole(
    self, choices: Sequence[WaitingChoice], news: Iterable[ChoiceEvent]
  ) -> dict[str, Any]:
    """Returns the body of a response without streaming.

    All sequences must have ended; ``news`` is the list of all their events.
    """
    by_choice: dict[int, list[ChoiceEvent]] = {
      choice.index: [] for choice in choices
    }
    for item in news:
      by_choice[item.choice.index].append(item)
    found = []
    for choice in choices:
      completion = choice.transcript.completion
      text = self._echoed(choice, True) + completion.text
      logprobs = None
      if self.asked.logprobs:
        logprobs = self._logprobs(
          self._scored_tokens(choice, by_choice[choice.index], True)
        )
      said: dict[str, Any] = {"text": text}
      if self._chat:
        said = {"message": {
          "role": "assistant", "content": text, "refusal": None
        }}
      found.append({
        "index": choice.index, **said, "logprobs": logprobs,
        "finish_reason": _REASONS[completion.reason],
      })
    return self._head | {
      "object": self._kind, "choices": found, "usage": usage(choices)
    }

  def _scored_tokens(
    self, choice: WaitingChoice, news: Iterable[ChoiceEvent], first: bool
  ) -> list[ScoredToken]:
    """Returns the tokens of events; if ``first``, after those of the prompt."""
    found = []
    if first and choice.scores is not None:
      found += self._scored_prompt_tokens(
        choice.request.prompt.tolist(), choice.scores
      )
    before = len(self._echoed(choice, True))
    found += [
      ScoredToken(item.token, item.logprob, item.top, before + item.offset)
      for item in news if item.token is not None
    ]
    return found

  def _scored_prompt_tokens(
    self, prompt: Sequence[int], scores: TargetScores
  ) -> Iterator[ScoredToken]:
    """Yields the tokens of a prompt; the first has no log-probability."""
    assert scores.top is not None
    stream, offset = self._tokenizer.stream(), 0
    logprobs = [None, *scores.log_probabilities.tolist()]
    for i, (token, logprob) in enumerate(zip(prompt, logprobs, strict=True)):
      top = {}
      if i and self.asked.num_top:
        position = type(scores.top)(*(x[i - 1] for x in scores.top))
        top = as_dict(position, self.asked.num_top)
      yield ScoredToken(token, logprob, top, offset)
      offset += len(stream.push(token))

  def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """Returns tokens with their log-probabilities, in OpenAI's format."""
    if self._chat:
      return {"content": [
        self._token(item.token, item.logprob) | {"top_logprobs": [
          # The value of the drawn token is the same in both places.
          self._token(t, item.logprob if t == item.token else logprob)
          for t, logprob in item.top.items()
        ]}
        for item in scored
      ]}
    return {
      "tokens": [self._text(item.token) for item in scored],
      "token_logprobs": [_clamp_logprob(item.logprob) for item in scored],
      "top_logprobs": list(map(self._top_logprobs_by_text, scored))
      if self.asked.num_top else None,
      "text_offset": [item.offset for item in scored],
    }

  def _top_logprobs_by_text(self, item: ScoredToken) -> dict[str, float] | None:
    """Returns the most probable tokens and the token itself, by text.

    Of tokens with equal texts, such as incomplete characters, all but the first
    have their ids as keys, as in vLLM. The drawn token is first: clients find
    its value by its text, to compare it with the largest value.
    """
    if item.logprob is None:
      return None
    found: dict[str, float] = {}
    for token, logprob in ({item.token: item.logprob} | {
      t: logprob for t, logprob in item.top.items() if t != item.token
    }).items():
      text = self._text(token)
      name = f"token_id:{token}" if text in found else text
      found[name] = _clamp_logprob(logprob)
    return found

  def _token(self, token: int, logprob: float) -> dict[str, Any]:
    """Returns a token with its log-probability and bytes, as chats need it."""
    found = self._tokenizer.token_bytes(token)
    return {
      "token": self._text(token), "logprob": _clamp_logprob(logprob),
      "bytes": None if found is None else list(found),
    }

  def _text(self, token: int) -> str:
    """Returns the text of a single token; "" for special tokens."""
    return self._tokenizer.decode([token])


def _clamp_logprob(logprob: float | None) -> float | None:
  """Limits a log-probability from below, since JSON has no infinity."""
  return None if logprob is None else max(logprob, _MIN_LOGPROB)


def usage(choices: Sequence[WaitingChoice]) -> dict[str, Any]:
  """Returns token counts; a prompt with several responses counts once."""
  # First choice of each prompt: in reversed order it is stored last.
  firsts = {choice.prompt: choice.request for choice in reversed(choices)}
  read = sum(len(request.prompt) for request in firsts.values())
  drawn = sum(len(choice.transcript.tokens) for choice in choices)
  cached = sum(request.num_hits for request in firsts.values())
  return {
    "prompt_tokens": read, "completion_tokens": drawn,
    "total_tokens": read + drawn,
    "prompt_tokens_details": {"cached_tokens": cached},
  }
