"""Reads what a client asks for; nothing that it asks for is ignored.

The fields are those of OpenAI's /v1/completions and /v1/chat/completions. One
that this server does not have is refused, unless its value says what happens
anyway. Fields of our own: ``top_k``, ``min_p``, ``ignore_eos``; ``priority``,
lower is served earlier; ``conversation``, a name that the turns of a
conversation have in common; ``deadline_s``, the seconds after which a first
token is of no use any more.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from caatnet.serving.server.errors import ApiError, wrong

_MOST_STOPS = 16
_LONGEST_STOP = 256  # characters
_LONGEST_NAME = 256  # characters of a user's or a conversation's name
_LONGEST_DEADLINE_S = 86400.0

# Fields that this server does not have, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
}
_NEUTRAL_COMPLETION = _NEUTRAL | {"suffix": ("",)}
_NEUTRAL_CHAT = _NEUTRAL | {
  "audio": (), "function_call": ("none",), "functions": ([],),
  "metadata": ({},), "modalities": (["text"],),
  "parallel_tool_calls": (True, False), "prediction": (),
  "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
  "service_tier": ("auto", "default"), "store": (False,),
  "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",),
  "web_search_options": (),
}


@dataclasses.dataclass(frozen=True)
class Asked:
  """What a client asks for.

  Attributes:
    prompts: Texts or lists of tokens; of a chat none.
    messages: The messages of a chat; of a completion none.
    n: How many answers to each prompt.
    stream: Whether to send tokens as they come.
    include_usage: Whether a stream ends with what it took.
    echo: Whether answers begin with their prompts.
    logprobs: Whether to return the log-probabilities of tokens.
    best: Whether to name the most probable token at each place, too.
    max_tokens: Tokens of an answer at most; None for as many as there is room.
    stop: Strings that end an answer.
    ignore_eos: Whether the model's own ends are none.
    temperature, top_p, top_k, min_p: As in `caatnet.inference.requests`.
    seed: Of the first answer, the next has one more; None for any.
    user: Who asks; "" if that is not said.
    priority: Lower is served earlier.
    conversation: Of which conversation it is a turn; "" for none.
    deadline_s: In how many seconds the first token must have come.
  """

  prompts: tuple[str | tuple[int, ...], ...]
  messages: tuple[dict[str, str], ...]
  n: int
  stream: bool
  include_usage: bool
  echo: bool
  logprobs: bool
  best: bool
  max_tokens: int | None
  stop: tuple[str, ...]
  ignore_eos: bool
  temperature: float
  top_p: float
  top_k: int
  min_p: float
  seed: int | None
  user: str
  priority: float
  conversation: str
  deadline_s: float


class _Fields:
  """A JSON object that is read field by field; null is as good as nothing."""

  def __init__(self, body: Any) -> None:
    if not isinstance(body, dict):
      raise ApiError(400, "the body is no JSON object", "invalid_json")
    self._left = dict(body)

  def take(self, name: str) -> Any:
    """Returns a field's value; None if it is not there."""
    return self._left.pop(name, None)

  def flag(self, name: str) -> bool:
    value = self.take(name)
    if value is not None and not isinstance(value, bool):
      raise wrong(name, f"{name}={value!r} must be true or false")
    return bool(value)

  def number(
    self, name: str, default: Any, low: float, high: float, whole: bool = False
  ) -> Any:
    value = self.take(name)
    if value is None:
      return default
    kind = int if whole else (int, float)
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
      what = "an integer" if whole else "a number"
      raise wrong(name, f"{name}={value!r} must be {what} in [{low}, {high}]")
    return value

  def text(self, name: str) -> str:
    value = self.take(name)
    if value is None:
      return ""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
      raise wrong(
        name, f"{name} must be a text of at most {_LONGEST_NAME} characters"
      )
    return value

  def refuse(self, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuses what is left, but for values that change nothing."""
    for name, value in self._left.items():
      if name not in neutral:
        raise wrong(
          name, f"{name} is no field that this server knows", "unknown_field"
        )
      if value is not None and value not in neutral[name]:
        raise wrong(
          name, f"{name}={value!r} is not supported by this server; leave it "
          "out", "unsupported_field",
        )


def completion(body: Any, most_choices: int) -> Asked:
  """Reads the body of /v1/completions.

  Args:
    body: The parsed JSON.
    most_choices: How many answers may be asked for at once.

  Raises:
    ApiError: Something is wrong with it, with status 400.
  """
  fields = _Fields(body)
  prompts = _prompts(fields.take("prompt"))
  temperature = fields.number("temperature", 1.0, 0, 1e9)
  logprobs = fields.number("logprobs", None, 0, 5, whole=True)
  _check_best("logprobs", logprobs or 0, temperature)
  n = fields.number("n", 1, 1, most_choices, whole=True)
  best_of = fields.number("best_of", n, 1, most_choices, whole=True)
  if best_of != n:
    raise wrong("best_of", f"best_of={best_of} must be n={n}, or left out")
  if len(prompts) * n > most_choices:
    raise wrong(
      "prompt", f"{len(prompts)} prompts with n={n} are more than "
      f"{most_choices} answers"
    )
  echo = fields.flag("echo")
  if echo and logprobs is not None:
    raise wrong(
      "echo", "echo=true with logprobs is not supported: the tokens of prompts "
      "have no log-probabilities here"
    )
  asked = _asked(
    fields, prompts=prompts, messages=(), n=n, echo=echo,
    logprobs=logprobs is not None, best=bool(logprobs),
    max_tokens=fields.number("max_tokens", 16, 1, 2**31 - 1, whole=True),
    temperature=temperature,
  )
  fields.refuse(_NEUTRAL_COMPLETION)
  return asked


def chat(body: Any, most_choices: int) -> Asked:
  """Reads the body of /v1/chat/completions, as `completion` does."""
  fields = _Fields(body)
  messages = _messages(fields.take("messages"))
  temperature = fields.number("temperature", 1.0, 0, 1e9)
  logprobs = fields.flag("logprobs")
  top = fields.number("top_logprobs", 0, 0, 20, whole=True)
  if top and not logprobs:
    raise wrong("top_logprobs", f"top_logprobs={top} needs logprobs=true")
  _check_best("top_logprobs", top, temperature)
  old = fields.number("max_tokens", None, 1, 2**31 - 1, whole=True)
  new = fields.number("max_completion_tokens", None, 1, 2**31 - 1, whole=True)
  if None not in (old, new) and old != new:
    raise wrong(
      "max_tokens", f"max_tokens={old} is not max_completion_tokens={new}"
    )
  asked = _asked(
    fields, prompts=(), messages=messages,
    n=fields.number("n", 1, 1, most_choices, whole=True), echo=False,
    logprobs=logprobs, best=bool(top), max_tokens=new or old,
    temperature=temperature,
  )
  fields.refuse(_NEUTRAL_CHAT)
  return asked


def _asked(fields: _Fields, **found: Any) -> Asked:
  """Reads the fields that completions and chats have in common."""
  fields.take("model")  # the caller has looked at it
  stream = fields.flag("stream")
  options = fields.take("stream_options")
  if options is not None and not stream:
    raise wrong("stream_options", "stream_options needs stream=true")
  within = _Fields({} if options is None else options)
  include_usage = within.flag("include_usage")
  within.refuse({"include_obfuscation": (False,)})
  top_p = fields.number("top_p", 1.0, 0, 1)
  if not top_p:
    raise wrong("top_p", "top_p=0 must be above 0; temperature=0 is greedy")
  return Asked(
    stream=stream, include_usage=include_usage, stop=_stop(fields.take("stop")),
    ignore_eos=fields.flag("ignore_eos"), top_p=top_p,
    top_k=fields.number("top_k", 0, 0, 2**31 - 1, whole=True),
    min_p=fields.number("min_p", 0.0, 0, 1),
    seed=fields.number("seed", None, -(2**63), 2**63 - 1, whole=True),
    user=fields.text("user"),
    priority=float(fields.number("priority", 0.0, -1e9, 1e9)),
    conversation=fields.text("conversation"),
    deadline_s=fields.number(
      "deadline_s", math.inf, 0, _LONGEST_DEADLINE_S
    ),
    **found,
  )


def _check_best(name: str, count: int, temperature: float) -> None:
  """Refuses more alternatives than the drawn token, where it is the best."""
  if count > (temperature == 0):
    raise wrong(
      name, f"{name}={count} must be 0, or 1 at temperature=0: only tokens "
      "that are drawn have log-probabilities here", "unsupported_field",
    )


def _stop(value: Any) -> tuple[str, ...]:
  if value is None:
    return ()
  found = [value] if isinstance(value, str) else value
  if not isinstance(found, list) or not all(
    isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in found
  ) or len(found) > _MOST_STOPS:
    raise wrong(
      "stop", f"stop must be a text or up to {_MOST_STOPS} texts of 1 to "
      f"{_LONGEST_STOP} characters"
    )
  return tuple(found)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(value, list) and value and all(map(_is_token, value)):
    return (tuple(value),)
  listed = value if isinstance(value, list) else [value]
  found: list[str | tuple[int, ...]] = []
  for prompt in listed:
    if isinstance(prompt, str):
      found.append(prompt)
    elif isinstance(prompt, list) and all(map(_is_token, prompt)):
      found.append(tuple(prompt))
    else:
      raise wrong(
        "prompt", "prompt must be a text, a list of texts, a list of tokens, "
        "or a list of lists of tokens"
      )
  if not found:
    raise wrong("prompt", "prompt=[] has no prompt")
  return tuple(found)


def _is_token(value: Any) -> bool:
  return (
    isinstance(value, int) and not isinstance(value, bool)
    and 0 <= value < 2**31
  )


def _messages(value: Any) -> tuple[dict[str, str], ...]:
  if not isinstance(value, list) or not value:
    raise wrong("messages", "messages must be a list of at least one message")
  return tuple(
    _message(message, f"messages[{i}]") for i, message in enumerate(value)
  )


def _message(message: Any, where: str) -> dict[str, str]:
  """Reads a message; parts of a text are joined."""
  if not isinstance(message, dict):
    raise wrong(where, f"{where} is no JSON object")
  given = {k: v for k, v in message.items() if v is not None}
  for name in given:
    if name not in ("role", "content", "name"):
      raise wrong(where, f"{where}.{name} is not supported by this server")
  content = given.get("content")
  if isinstance(content, list):
    parts = [
      p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None
      for p in content
    ]
    if not all(isinstance(part, str) for part in parts):
      raise wrong(where, f"{where}.content has a part that is no text")
    given["content"] = "".join(parts)
  for name in ("role", "content"):
    if not isinstance(given.get(name), str):
      raise wrong(where, f"{where}.{name} must be a text")
  return given
