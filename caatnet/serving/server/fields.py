"""Request fields: parsing and validation.

The fields are those of OpenAI's /v1/completions and /v1/chat/completions. A
field that this server does not support is refused, unless its value requests
the default behaviour. Chats accept the official fields ``metadata``, ``store``,
``service_tier``, ``safety_identifier``, ``prompt_cache_key``,
``prompt_cache_options`` and ``prompt_cache_retention``, which have no effect
here: this server stores no response and caches every prompt. Their types are
checked, their values are not, since OpenAI adds new ones. Additional fields:
filters that OpenAI's API lacks, such as ``top_k``
(`caatnet.inference.filters`); ``ignore_eos``; ``priority``, lower
is served earlier; ``conversation``, a name that the turns of a conversation
share; ``deadline_s``, the seconds after which the request expires unless its
first token has been drawn; ``chat_template_kwargs``, variables of the chat
template, such as Qwen3's ``enable_thinking``.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from caatnet.inference.filters import FILTERS, Filter
from caatnet.inference.sampling import NUM_TOP_TOKENS
from caatnet.serving.server.errors import ApiError, invalid_field

# Limits of fields, so that a request has a bounded cost.
_MAX_STOPS = 16
_LONGEST_STOP = 256  # characters
_LONGEST_NAME = 256  # characters of a user's or a conversation's name
_LONGEST_DEADLINE_S = 86400.0
# Fields with possibly long values, which messages do not quote.
_UNQUOTED_FIELDS = (
  "prompt", "messages", "stop", "user", "conversation", "tokens",
  "prompt_cache_key", "safety_identifier"
)

# Unsupported fields, with the values that request the default behaviour.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
}
_UNSUPPORTED_COMPLETION = _UNSUPPORTED | {"suffix": ("",)}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
  "audio": (), "function_call": ("none",), "functions": ([],),
  "modalities": (["text"],), "moderation": (),
  "parallel_tool_calls": (True, False), "prediction": (),
  "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
  "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",),
  "web_search_options": (),
}


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
  """Validated body of a completion or chat request.

  Attributes:
    prompts: Texts or lists of token ids; empty for a chat.
    messages: Messages of a chat; empty for a completion.
    template: Variables of the chat template.
    n: Number of choices per prompt.
    stream: Whether to send tokens as they are drawn.
    include_usage: Whether a stream ends with token counts.
    echo: Whether responses begin with their prompts.
    logprobs: Whether to return the log-probabilities of tokens, with ``echo``
      also of the prompt's tokens.
    num_top: Number of most probable tokens to return at each position.
    max_tokens: Maximum number of drawn tokens, 0 only with ``echo``; None for
      the remaining context.
    stop: Strings that end a sequence.
    ignore_eos: Whether the model's stop ids are ignored.
    drawing: Temperature and filter values, as arguments of
      `caatnet.inference.requests.Request`.
    seed: Seed of the first choice, incremented for each further one; None for a
      random seed.
    user: Identifier of the client; "" if not given.
    priority: Lower is served earlier.
    conversation: Name of the conversation; "" for none.
    deadline_s: Seconds within which the first token must be drawn.
  """

  prompts: tuple[str | tuple[int, ...], ...]
  messages: tuple[dict[str, str], ...]
  template: Mapping[str, Any]
  n: int
  stream: bool
  include_usage: bool
  echo: bool
  logprobs: bool
  num_top: int
  max_tokens: int | None
  stop: tuple[str, ...]
  ignore_eos: bool
  drawing: Mapping[str, float]
  seed: int | None
  user: str
  priority: float
  conversation: str
  deadline_s: float


def _integer_type(low: int, high: int) -> Any:
  """Returns a pydantic type for integers from `low` to `high`."""
  must = f"must be an integer in [{low}, {high}]"
  return Annotated[int, Field(ge=low, le=high, description=must)]


def _number_type(low: float, high: float) -> Any:
  """Returns a pydantic type for finite numbers from `low` to `high`."""
  must = f"must be a number in [{low}, {high}]"
  return Annotated[
    float, Field(ge=low, le=high, allow_inf_nan=False, description=must)
  ]


_Flag = Annotated[bool, Field(description="must be true or false")]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Count = _integer_type(1, 2**31 - 1)
_Name = Annotated[str, Field(
  max_length=_LONGEST_NAME,
  description=f"must be a string of at most {_LONGEST_NAME} characters",
)]
_Metadata = Annotated[
  dict[
    Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
  ],
  Field(max_length=16, description="must be an object of up to 16 strings of "
        "at most 512 characters, with names of at most 64"),
]
_StopString = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


class _Object(pydantic.BaseModel):
  """JSON object without type conversions; null is equivalent to absence."""

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, frozen=True, hide_input_in_errors=True
  )

  @pydantic.model_validator(mode="before")
  @classmethod
  def _without_null(cls, value: Any) -> Any:
    if not isinstance(value, dict):
      return value
    return {name: v for name, v in value.items() if v is not None}


class _StreamOptions(_Object):
  include_usage: _Flag = False
  include_obfuscation: Annotated[
    Literal[False], Field(description="is not supported by this server")
  ] = False


class _Part(_Object):
  type: Literal["text"]
  text: str


class _Message(_Object):
  role: str
  content: str | list[_Part]
  name: str | None = None


def _filter_field(row: Filter) -> Any:
  """Returns the pydantic type and the default of a sampling filter's field."""
  if row.kind is int:
    return _integer_type(int(row.least), int(row.most)), row.neutral
  if not row.above:
    return _number_type(row.least, row.most), row.neutral
  must = (
    f"must be above {row.least:g} and at most {row.most:g}; temperature=0 is "
    "greedy"
  )
  return Annotated[float, Field(
    gt=row.least, le=row.most, allow_inf_nan=False, description=must
  )], row.neutral


_Filters = pydantic.create_model(
  "_Filters", __base__=_Object,
  **{name: _filter_field(row) for name, row in FILTERS.items()},
)


class _Common(_Filters, _Object):
  """Fields of both completions and chats, documented in `ParsedRequest`."""

  model: Any = None  # checked by the caller
  n: Annotated[
    int, Field(ge=1, description="must be an integer of at least 1")
  ] = 1
  stream: _Flag = False
  stream_options: Annotated[
    _StreamOptions, Field(description="must be a JSON object")
  ] | None = None
  stop: Annotated[
    _StopString | Annotated[list[_StopString], Field(max_length=_MAX_STOPS)],
    Field(description=f"must be a string or up to {_MAX_STOPS} strings of 1 "
          f"to {_LONGEST_STOP} characters"),
  ] = []
  ignore_eos: _Flag = False
  temperature: _number_type(0, 1e9) = 1.0
  seed: _integer_type(-(2**63), 2**63 - 1) | None = None
  user: _Name = ""
  priority: _number_type(-1e9, 1e9) = 0.0
  conversation: _Name = ""
  deadline_s: _number_type(0, _LONGEST_DEADLINE_S) | None = None
  max_tokens: _Count | None = None

  @pydantic.field_validator("top_k", mode="before", check_fields=False)
  @classmethod
  def _accept_minus_one(cls, value: Any) -> Any:
    """Converts -1, which vLLM's clients send for all tokens, to 0."""
    return 0 if type(value) is int and value == -1 else value

  def asked(self, max_choices: int, **found: Any) -> ParsedRequest:
    """Returns the request.

    Args:
      max_choices: Maximum number of choices.
      **found: Fields of the request that this class lacks.

    Raises:
      ApiError: A field is invalid (status 400).
    """
    if self.n > max_choices:
      raise invalid_field(
        "n", f"n={self.n} must be an integer in [1, {max_choices}]"
      )
    options = self.stream_options
    if options is not None and not self.stream:
      raise invalid_field("stream_options", "stream_options needs stream=true")
    stops = [self.stop] if isinstance(self.stop, str) else self.stop
    return ParsedRequest(
      n=self.n, stream=self.stream,
      include_usage=options is not None and options.include_usage,
      stop=tuple(stops), ignore_eos=self.ignore_eos,
      drawing={n: getattr(self, n) for n in ("temperature", *FILTERS)},
      seed=self.seed, user=self.user, priority=self.priority,
      conversation=self.conversation,
      deadline_s=math.inf if self.deadline_s is None else self.deadline_s,
      **found,
    )


class _Completion(_Common):
  prompt: Annotated[
    str | list[_Token] | list[str | list[_Token]],
    Field(description="must be a string, a list of strings, a list of tokens, "
          "or a list of lists of tokens"),
  ]
  logprobs: _integer_type(0, NUM_TOP_TOKENS) | None = None
  best_of: _Count | None = None
  echo: _Flag = False
  max_tokens: _integer_type(0, 2**31 - 1) | None = None  # 0 only with `echo`


class _Chat(_Common):
  messages: Annotated[list[_Message], Field(
    min_length=1, description="must be a list of at least one message"
  )]
  logprobs: _Flag = False
  top_logprobs: _integer_type(0, NUM_TOP_TOKENS) = 0
  chat_template_kwargs: Annotated[
    dict[str, Any], Field(description="must be a JSON object")
  ] = {}
  max_completion_tokens: _Count | None = None
  # Official fields without effect here.
  metadata: _Metadata = {}
  store: _Flag = False
  service_tier: _Name = ""
  prompt_cache_key: _Name = ""
  prompt_cache_options: Annotated[
    dict[str, Any], Field(description="must be a JSON object")
  ] = {}
  prompt_cache_retention: _Name = ""
  safety_identifier: _Name = ""


def parse_completion(body: Any, max_choices: int) -> ParsedRequest:
  """Parses the body of /v1/completions.

  Args:
    body: Parsed JSON.
    max_choices: Maximum number of choices.

  Raises:
    ApiError: The body is invalid (status 400).

  Example:
    >>> fields = {"prompt": "The", "temperature": 0}
    >>> asked = parse_completion(fields, max_choices=8)
    >>> asked.prompts, asked.max_tokens, asked.drawing["temperature"]
    (('The',), 16, 0.0)
    >>> try:
    ...   parse_completion({"prompt": "The", "n": 9}, max_choices=8)
    ... except ApiError as error:
    ...   print(error.status, error)
    400 n=9 must be an integer in [1, 8]
  """
  given: _Completion = _validated(_Completion, body, _UNSUPPORTED_COMPLETION)
  prompt, n, logprobs = given.prompt, given.n, given.logprobs
  if prompt == []:
    raise invalid_field("prompt", "prompt=[] must contain a prompt")
  # One prompt or a list of prompts.
  alone = isinstance(prompt, str) or isinstance(prompt[0], int)
  prompts = tuple(
    p if isinstance(p, str) else tuple(p)
    for p in ([prompt] if alone else prompt)
  )
  if given.best_of not in (None, n):
    raise invalid_field(
      "best_of", f"best_of={given.best_of} must be n={n}, or left out"
    )
  if n <= max_choices < len(prompts) * n:
    raise invalid_field(
      "prompt", f"{len(prompts)} prompts with n={n} request "
      f"{len(prompts) * n} answers; at most {max_choices} are allowed"
    )
  if given.max_tokens == 0 and not given.echo:
    raise invalid_field("max_tokens", "max_tokens=0 needs echo=true")
  return given.asked(
    max_choices, prompts=prompts, messages=(), template={}, echo=given.echo,
    logprobs=logprobs is not None, num_top=logprobs or 0,
    # OpenAI's default for completions; chats have none.
    max_tokens=16 if given.max_tokens is None else given.max_tokens,
  )


def parse_chat(body: Any, max_choices: int) -> ParsedRequest:
  """Parses the body of /v1/chat/completions; see `parse_completion`."""
  given: _Chat = _validated(_Chat, body, _UNSUPPORTED_CHAT)
  top = given.top_logprobs
  if top and not given.logprobs:
    raise invalid_field(
      "top_logprobs", f"top_logprobs={top} needs logprobs=true"
    )
  old, new = given.max_tokens, given.max_completion_tokens
  if None not in (old, new) and old != new:
    raise invalid_field(
      "max_tokens", f"max_tokens={old} is not max_completion_tokens={new}"
    )
  return given.asked(
    max_choices, prompts=(),
    messages=tuple(map(_join_text_parts, given.messages)),
    template=given.chat_template_kwargs, echo=False, logprobs=given.logprobs,
    num_top=top, max_tokens=new or old,
  )


class _Text(_Object):
  model: Any = None  # checked by the caller
  prompt: Annotated[str, Field(description="must be a string")]
  add_special_tokens: _Flag = True


class _Tokens(_Object):
  model: Any = None  # checked by the caller
  tokens: Annotated[
    list[_Token], Field(description="must be a list of token ids")
  ]


class ExpertBody(_Object):
  """Body of a request that adds or replaces an expert.

  The router selects an added expert only if no expert was fine-tuned for the
  same kind of text (`caatnet.serving.router`).
  """

  path: Annotated[str, Field(
    min_length=1, description="must be the path of a run's folder or of a "
    "safetensors file on the server's machine",
  )]
  name: _Name = ""
  kind: _Name = ""
  description: _Name = ""


def parse_expert(body: Any) -> ExpertBody:
  """Parses the body of /v1/experts; see `parse_tokenize`."""
  return _validated(ExpertBody, body, {})


def parse_tokenize(body: Any) -> tuple[str, bool]:
  """Parses the body of /tokenize, as in vLLM.

  Returns:
    The text, and whether the tokens at the beginning of a prompt are added.

  Raises:
    ApiError: The body is invalid (status 400).
  """
  given: _Text = _validated(_Text, body, {})
  return given.prompt, given.add_special_tokens


def parse_detokenize(body: Any) -> list[int]:
  """Parses the body of /detokenize, as in vLLM; see `parse_tokenize`."""
  given: _Tokens = _validated(_Tokens, body, {})
  return given.tokens


def _join_text_parts(message: _Message) -> dict[str, str]:
  """Returns a message for the chat template, with its text parts joined."""
  found = message.model_dump(exclude_none=True)
  if not isinstance(message.content, str):
    found["content"] = "".join(part.text for part in message.content)
  return found


def _validated(
  kind: type[_Object], body: Any, neutral: Mapping[str, Sequence[Any]]
) -> Any:
  """Returns the body as an instance of ``kind``, after validation.

  Args:
    kind: Pydantic model of the body.
    body: Parsed JSON.
    neutral: Unsupported fields, with the values that request the default
      behaviour.

  Raises:
    ApiError: The body is invalid (status 400).
  """
  if not isinstance(body, dict):
    raise ApiError(400, "the body must be a JSON object", "invalid_json")
  for name, value in body.items():
    if name in neutral:
      if value is not None and value not in neutral[name]:
        raise invalid_field(
          name, f"{name}={value!r} is not supported by this server; leave it "
          "out", "unsupported_field",
        )
    elif name not in kind.model_fields:
      raise invalid_field(
        name, f"{name} is not a field of this server", "unknown_field"
      )
  # Unsupported fields are not fields of the pydantic model.
  given = {k: v for k, v in body.items() if k not in neutral}
  try:
    return kind.model_validate(given)
  except pydantic.ValidationError as error:
    raise _field_error(kind, error.errors()[0], body) from error


def _field_error(kind: type[_Object], error: Any, body: Any) -> ApiError:
  """Returns the error of a field, with its name and its allowed values."""
  # Path of the invalid value: field, then index or key.
  name, *rest = error["loc"]
  value = body.get(name)
  if name == "messages" and rest:
    where = f"messages[{rest[0]}]"
    if len(rest) == 1:
      return invalid_field(where, f"{where} must be a JSON object")
    field, message = f"{where}.{rest[1]}", value[rest[0]]
    if error["type"] == "extra_forbidden" and len(rest) == 2:
      return invalid_field(where, f"{field} is not supported by this server")
    if isinstance(message.get(rest[1]), list):
      return invalid_field(where, f"{field} has a part other than text")
    return invalid_field(where, f"{field} must be a string")
  fields = kind.model_fields
  if name == "stream_options" and rest:
    fields, name, value = _StreamOptions.model_fields, rest[0], value[rest[0]]
    if name not in fields:
      return invalid_field(
        name, f"{name} is not a field of this server", "unknown_field"
      )
  must = _description(fields[name])
  if isinstance(
    value, (bool, int, float, str)
  ) and name not in _UNQUOTED_FIELDS:
    return invalid_field(name, f"{name}={value!r} {must}")
  return invalid_field(name, f"{name} {must}")


def _description(field: pydantic.fields.FieldInfo) -> str:
  """Returns a field's description, which may be part of an optional type."""
  if field.description:
    return field.description
  inner = next(a for a in field.annotation.__args__ if a is not type(None))
  return next(m.description for m in inner.__metadata__)
