"""Arrivals of requests: recorded in public traces, or generated.

A trace contains lengths but no text. `synthetic_token_ids` generates token ids
of these lengths that agree where the trace requires it: a turn of a
conversation begins with the previous turns, and prompts that begin with equal
blocks begin with equal tokens.

Sources: AzureLLMInferenceTrace of Azure/AzurePublicDataset (Patel et al.,
Splitwise, ISCA 2024); the FAST'25 traces of kvcache-ai/Mooncake (Qin et al.,
FAST 2025); HPMLL/BurstGPT (Wang et al., arXiv 2401.17644).
"""

from collections.abc import Callable, Sequence
import csv
import dataclasses
import datetime
import itertools
import pathlib
from typing import Annotated, Any, NamedTuple

import numpy as np

from parallel.base import checks, schema
from parallel.base.schema import Field, OpenSchema, Schema, Seconds

# Size of Mooncake's blocks, in tokens.
MOONCAKE_BLOCK = 512
# Seconds between Mooncake's batches, whose requests share a timestamp.
_BATCH_S = 3.0
# maximum length of a sequence in `synthetic_token_ids`
_MAX_SEQUENCE_TOKENS = 2**24
_MAX_BLOCKS = 2**48  # maximum id of a block in `synthetic_token_ids`


@dataclasses.dataclass(frozen=True)
class Arrival:
  """Request of a trace: its time of arrival and its lengths in tokens.

  Attributes:
    number: Number of the request, unique in its trace.
    time_s: Time of arrival in seconds after the trace's first request. Times of
      later turns in generated sessions assume that responses take no time.
    prompt: Number of prompt tokens, including earlier turns.
    output: Number of response tokens.
    conversation: Number of its conversation; None if unknown.
    context: Number of prompt tokens that belong to earlier turns.
    think_s: Seconds between the end of the previous turn and this one; None for
      a request that depends on no other.
    more: Whether another turn follows.
    blocks: Id of each block of the prompt, the last of which may be partial.
      Requests whose first n ids are equal begin with the same n blocks of
      tokens. Empty if unknown.
    block_size: Tokens per block; 0 without blocks.
  """

  number: int
  time_s: float
  prompt: int
  output: int
  conversation: int | None = None
  context: int = 0
  think_s: float | None = None
  more: bool = False
  blocks: tuple[int, ...] = ()
  block_size: int = 0


def synthetic_token_ids(
  arrival: Arrival, vocabulary: int = 2**31 - 1
) -> np.ndarray:
  """Returns token ids of a prompt and its response.

  A token is a hash of its sequence (or block) and position, so that sequences
  agree only where the trace requires it, except by chance.

  Args:
    arrival: A request.
    vocabulary: Number of different tokens.

  Returns:
    int32 ``[prompt + output]``.

  Example:
    Two prompts that share their first block of two tokens:

    >>> a = Arrival(0, 0.0, 4, 1, blocks=(7, 8), block_size=2)
    >>> b = Arrival(1, 0.0, 4, 1, blocks=(7, 9), block_size=2)
    >>> (synthetic_token_ids(a) == synthetic_token_ids(b)).tolist()
    [True, True, False, False, False]
  """
  places = np.arange(arrival.prompt + arrival.output, dtype=np.uint64)
  # Key space: 0 for single requests, 1 for conversations, 2 for blocks.
  kind, name = 0, arrival.number
  if arrival.conversation is not None:
    kind, name = 1, arrival.conversation
  keys = np.uint64((kind << 62) + name * _MAX_SEQUENCE_TOKENS) + places
  if arrival.blocks:
    size, end = arrival.block_size, arrival.prompt
    ids = np.repeat(np.array(arrival.blocks, np.uint64), size)[:end]
    inside = places[:end] % np.uint64(size)
    keys[:end] = np.uint64(2 << 62) + ids * np.uint64(size) + inside
  return (_splitmix64(keys) % np.uint64(vocabulary)).astype(np.int32)


def _splitmix64(x: np.ndarray) -> np.ndarray:
  """Returns hashes, uint64: the output function of SplitMix64.

  Source: Steele, Lea and Flood, OOPSLA 2014.
  """
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def load(
  path: str | pathlib.Path, num_requests: int = 0, seed: int = 0
) -> list[Arrival]:
  """Reads a trace, whose format is detected from its first line.

  Args:
    path: A CSV of Azure (2023 or 2024) or BurstGPT, or a JSONL of Mooncake, as
      published; gzipped or not.
    num_requests: Number of requests to keep, from the first; 0 for all.
    seed: Seed of the arrival times of requests that share a timestamp.

  Returns:
    The requests in the order of arrival; the first one arrives at 0.

  Raises:
    ValueError: The file cannot be read or has an unknown format, a line is
      invalid, or it has a field that is not part of the format and may change
      the meaning of the others; the message names file and line.
  """
  try:
    text = schema.read_bytes(pathlib.Path(path)).decode()
  except (OSError, ValueError) as error:
    raise ValueError(f"{path}: cannot be read: {error}") from error
  try:
    form = _detect_format(text)
    parse = schema.parse_table if form.is_table else schema.parse_lines
    found: list[Arrival] = []
    for number, row in parse(form.row, text):
      try:
        arrival = form.arrival(row, len(found))
      except (OverflowError, ValueError) as error:
        raise ValueError(f"line {number}: {error}") from error
      if arrival is not None:
        found.append(arrival)
  except ValueError as error:
    raise ValueError(f"{path}, {error}") from error
  if not found:
    raise ValueError(f"{path}: has no requests")
  if form.row is _Mooncake:
    found = _spread_equal_times(found, seed)
  found.sort(key=lambda a: a.time_s)
  found = found[: num_requests or None]
  first = found[0].time_s
  return [
    dataclasses.replace(a, number=i, time_s=a.time_s - first)
    for i, a in enumerate(found)
  ]


_Tokens = Annotated[int, Field(ge=1, le=_MAX_SEQUENCE_TOKENS)]
_TokensOrZero = Annotated[int, Field(ge=0, le=_MAX_SEQUENCE_TOKENS)]


class _Azure(Schema):
  TIMESTAMP: str
  ContextTokens: _Tokens
  GeneratedTokens: _Tokens


class _Burst(OpenSchema):  # its models and sessions are ignored
  time_s: Seconds = Field(alias="Timestamp")
  request: _TokensOrZero = Field(alias="Request tokens")
  response: _TokensOrZero = Field(alias="Response tokens")


class _Mooncake(Schema):
  timestamp: Annotated[float, Field(ge=0, le=1e15)]  # ms
  input_length: _Tokens
  output_length: _Tokens
  hash_ids: list[Annotated[int, Field(ge=0, lt=_MAX_BLOCKS)]]


def _azure(row: _Azure, number: int) -> Arrival:
  """Converts a row of Azure's traces to the request `number`."""
  when = datetime.datetime.fromisoformat(row.TIMESTAMP)
  if when.tzinfo is None:
    when = when.replace(tzinfo=datetime.UTC)
  return Arrival(
    number, when.timestamp(), row.ContextTokens, row.GeneratedTokens
  )


def _burst(row: _Burst, number: int) -> Arrival | None:
  """Converts a BurstGPT row to the request `number`; None if it failed."""
  if not row.response:  # it failed
    return None
  if not row.request:
    raise ValueError("Request tokens=0 must be at least 1")
  return Arrival(number, row.time_s, row.request, row.response)


def _mooncake(row: _Mooncake, number: int) -> Arrival:
  """Converts a line of Mooncake's traces to the request `number`."""
  prompt, ids = row.input_length, row.hash_ids
  if len(ids) != -(-prompt // MOONCAKE_BLOCK):
    raise ValueError(
      f"hash_ids has {len(ids)} blocks of {MOONCAKE_BLOCK} tokens, but "
      f"input_length={prompt}"
    )
  return Arrival(
    number, row.timestamp / 1e3, prompt, row.output_length, blocks=tuple(ids),
    block_size=MOONCAKE_BLOCK,
  )


class _Format(NamedTuple):
  """Format of traces.

  Attributes:
    row: Schema of a row (or line) of a trace.
    arrival: Function from a row and the request's number to the request; None
      for a row without a request.
    is_table: Whether it is a CSV table, not lines of JSON.
  """

  row: type[Schema]
  arrival: Callable[[Any, int], Arrival | None]
  is_table: bool = True


_TABLES = (_Format(_Azure, _azure), _Format(_Burst, _burst))


def _detect_format(text: str) -> _Format:
  """Returns the format of a trace; raises ValueError if it is unknown."""
  first = text.split("\n", 1)[0]
  if not first.strip():
    raise ValueError("line 1: is empty")
  if first.startswith("{"):
    return _Format(_Mooncake, _mooncake, is_table=False)
  columns = next(csv.reader([first.rstrip("\r")]))
  needed = [
    [field.alias or name for name, field in form.row.model_fields.items()]
    for form in _TABLES
  ]
  for form, names in zip(_TABLES, needed, strict=True):
    if {*names} <= {*columns}:
      return form
  raise ValueError(
    f"line 1: {first[:80]!r} is neither JSON, as in Mooncake's traces, nor a "
    f"CSV header with the columns {' or '.join(map(', '.join, needed))}"
  )


def _spread_equal_times(
  arrivals: Sequence[Arrival], seed: int
) -> list[Arrival]:
  """Spreads requests of equal timestamps uniformly until the next timestamp.

  In two of Mooncake's traces, timestamps belong to batches, 3 s apart; used as
  arrival times they would be bursts that no client sent. A request with a
  timestamp of its own, as in the synthetic trace, keeps it. The order is kept,
  so that no turn of a conversation arrives before the previous one.
  """
  rng = np.random.default_rng(seed)
  ordered = sorted(arrivals, key=lambda a: a.time_s)
  groups = [
    list(group) for _, group in itertools.groupby(ordered, lambda a: a.time_s)
  ]
  found: list[Arrival] = []
  for members, following in itertools.zip_longest(groups, groups[1:]):
    if len(members) == 1:
      found += members
      continue
    begin = members[0].time_s
    length = min(_BATCH_S, following[0].time_s - begin if following else np.inf)
    offsets = np.sort(rng.uniform(0, length, len(members))).tolist()
    found += [
      dataclasses.replace(a, time_s=begin + offset)
      for a, offset in zip(members, offsets, strict=True)
    ]
  return found


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
  """Returns arrivals with times scaled to a mean rate in requests per second.

  Raises:
    ValueError: The rate is not positive, or there are several requests that all
      arrive at the same time.

  Example:
    >>> found = scaled([Arrival(0, 0.0, 8, 8), Arrival(1, 60.0, 8, 8)], rate=1)
    >>> [arrival.time_s for arrival in found]
    [0.0, 2.0]
  """
  checks.positive("rate", rate)
  times = [a.time_s for a in arrivals]
  if len(times) > 1 and min(times) == max(times):
    raise ValueError(
      f"rate={rate:g} cannot be applied, since all {len(times):,} requests "
      "arrive at the same time"
    )
  last = max(times, default=0.0)
  if not last:
    return list(arrivals)
  # New duration over old duration.
  factor = (len(arrivals) / rate) / last
  return [
    dataclasses.replace(a, time_s=a.time_s * factor) for a in arrivals
  ]


def poisson(
  arrivals: Sequence[Arrival], rate: float, seed: int
) -> list[Arrival]:
  """Returns arrivals, in the same order, at the times of a Poisson process.

  Args:
    arrivals: The requests.
    rate: Requests per second.
    seed: Seed of the random numbers.
  """
  gaps = np.random.default_rng(seed).exponential(1 / rate, len(arrivals))
  times = (np.cumsum(gaps) - gaps[0]).tolist() if len(arrivals) else []
  return [
    dataclasses.replace(a, time_s=t)
    for a, t in zip(arrivals, times, strict=True)
  ]


@dataclasses.dataclass(frozen=True)
class Sessions:
  """Synthetic conversations of several turns with a server.

  Lengths are log-normal. Mean and standard deviation of their logarithms are
  those of the 58,787 ShareGPT prompts and responses whose lengths NanoFlow
  published (efeslab/Nanoflow); responses are truncated to 1,000 tokens, their
  99th percentile there. The number of turns is geometric, with the mean of
  FastSwitch's conversations (arXiv 2411.18424). A turn's prompt consists of all
  previous turns and a new user message.

  Attributes:
    num_sessions: Number of conversations.
    rate: Mean rate in turns per second, in the steady state.
    seed: Seed of the random numbers.
    turns: Mean number of turns.
    think_s: Mean of the exponential time in seconds between a response and the
      next turn; an assumption without a source.
    question: Mean and standard deviation of the logarithm of the length of a
      user message, in tokens.
    answer: Mean and standard deviation of the logarithm of the length of a
      response, in tokens.
    longest_answer: Maximum length of a response, in tokens.
    longest: Maximum length of a conversation, in tokens; a conversation ends
      before the turn that would exceed it.
  """

  num_sessions: int = 1000
  rate: float = 1.0
  seed: int = 0
  turns: float = 5.5
  think_s: float = 30.0
  question: tuple[float, float] = (4.01, 1.72)
  answer: tuple[float, float] = (5.35, 1.14)
  longest_answer: int = 1000
  longest: int = 16384

  def arrivals(self) -> list[Arrival]:
    """Returns the turns of all sessions, sorted by arrival time."""
    rng = np.random.default_rng(self.seed)
    # Sessions arrive as a Poisson process at rate / turns per second.
    gaps = rng.exponential(self.turns / self.rate, self.num_sessions)
    found: list[Arrival] = []
    for session, begin in enumerate(np.cumsum(gaps) - gaps[0]):
      found += self._session(session, float(begin), rng)
    found.sort(key=lambda a: a.time_s)
    return [dataclasses.replace(a, number=i) for i, a in enumerate(found)]

  def _session(
    self, session: int, time_s: float, rng: np.random.Generator
  ) -> list[Arrival]:
    """Returns the turns of one session."""
    turns: list[Arrival] = []
    context = 0
    for turn in range(rng.geometric(1 / self.turns)):
      question = max(1, round(rng.lognormal(*self.question)))
      answer = max(1, round(rng.lognormal(*self.answer)))
      answer = min(answer, self.longest_answer)
      think_s = float(rng.exponential(self.think_s)) if turn else None
      # A first turn is truncated, a later one ends the session.
      if context + question + answer > self.longest:
        if turns:
          break
        question = self.longest - answer
      time_s += think_s or 0.0
      turns.append(Arrival(
        0, time_s, context + question, answer, session, context, think_s,
        more=True,
      ))
      context += question + answer
    return [*turns[:-1], dataclasses.replace(turns[-1], more=False)]
