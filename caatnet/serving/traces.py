"""Arrivals of requests: recorded in public traces, or generated.

A trace contains lengths but no text. `tokens` generates token ids of these
lengths that agree where the trace requires it: a turn of a conversation begins
with the previous turns, and prompts with equal leading blocks have equal
leading tokens.

Sources: AzureLLMInferenceTrace of Azure/AzurePublicDataset (Patel et al.,
Splitwise, ISCA 2024); the FAST'25 traces of kvcache-ai/Mooncake (Qin et al.,
FAST 2025); HPMLL/BurstGPT (Wang et al., arXiv 2401.17644).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import csv
import dataclasses
import datetime
import gzip
import itertools
import json
import pathlib

import numpy as np

# Size of Mooncake's blocks, in tokens.
MOONCAKE_BLOCK = 512
# Seconds between Mooncake's batches, whose requests share a timestamp.
_BATCH_S = 3.0
# Magic number of a gzip file.
_GZIP = b"\x1f\x8b"
_MOST_PLACES = 2**24  # maximum length of a sequence in `tokens`


@dataclasses.dataclass(frozen=True)
class Arrival:
  """Arrival of a request.

  Attributes:
    number: Unique in its trace.
    time_s: Time of arrival in seconds after the trace's first request. For a
      later turn of a generated session: the time if responses took no time.
    prompt: Tokens of the prompt, including earlier turns.
    output: Tokens of the response.
    conversation: Number of its conversation; None if unknown.
    context: Tokens of the prompt that are earlier turns.
    think_s: Seconds between the end of the previous turn and this one; None for
      a request that depends on no other.
    more: Whether another turn follows.
    blocks: Id of each block of the prompt, the last of which may be partial.
      Requests whose first n ids are equal have n equal blocks. Empty if
      unknown.
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


def tokens(arrival: Arrival, vocabulary: int = 2**31 - 1) -> np.ndarray:
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
    >>> (tokens(a) == tokens(b)).tolist()
    [True, True, False, False, False]
  """
  places = np.arange(arrival.prompt + arrival.output, dtype=np.uint64)
  # Key space: 0 for single requests, 1 for conversations, 2 for blocks.
  kind, name = 0, arrival.number
  if arrival.conversation is not None:
    kind, name = 1, arrival.conversation
  keys = np.uint64((kind << 62) + name * _MOST_PLACES) + places
  if arrival.blocks:
    size, end = arrival.block_size, arrival.prompt
    ids = np.repeat(np.array(arrival.blocks, np.uint64), size)[:end]
    inside = places[:end] % np.uint64(size)
    keys[:end] = np.uint64(2 << 62) + ids * np.uint64(size) + inside
  return (_mixed(keys) % np.uint64(vocabulary)).astype(np.int32)


def _mixed(x: np.ndarray) -> np.ndarray:
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
    ValueError: The file cannot be read or has an unknown format, or a line is
      invalid; the message names file and line.
  """
  try:
    data = pathlib.Path(path).read_bytes()
    if data[:2] == _GZIP:
      data = gzip.decompress(data)
    lines = data.decode().splitlines()
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: cannot be read: {error}") from error
  if not lines:
    raise ValueError(f"{path}: is empty")
  rows, read = _rows(path, lines)
  found: list[Arrival] = []
  for number, row in rows:
    try:
      arrival = read(row, len(found))
    except (KeyError, TypeError, ValueError) as error:
      reason = f"{error} is missing" if isinstance(error, KeyError) else error
      raise ValueError(f"{path}, line {number}: {reason}") from error
    if arrival is not None:
      found.append(arrival)
  if not found:
    raise ValueError(f"{path}: has no requests")
  if read is _mooncake:
    found = _spread(found, seed)
  found.sort(key=lambda a: a.time_s)
  found = found[: num_requests or None]
  first = found[0].time_s
  return [
    dataclasses.replace(a, number=i, time_s=a.time_s - first)
    for i, a in enumerate(found)
  ]


_Row = Mapping[str, object]
_Read = Callable[[_Row, int], Arrival | None]


def _rows(
  path: str | pathlib.Path, lines: Sequence[str]
) -> tuple[Iterator[tuple[int, _Row]], _Read]:
  """Returns the numbered lines as dicts, and the function that parses them."""
  if lines[0].startswith("{"):
    return _json_lines(path, lines), _mooncake
  columns = next(csv.reader(lines[:1]))
  for read, needed in _COLUMNS.items():
    if set(needed) <= set(columns):
      rows = csv.DictReader(lines)
      return ((rows.line_num, row) for row in rows), read
  raise ValueError(
    f"{path}: the first line {lines[0][:80]!r} is neither JSON, as in "
    "Mooncake's traces, nor a CSV header with the columns "
    + " or ".join(", ".join(needed) for needed in _COLUMNS.values())
  )


def _json_lines(
  path: str | pathlib.Path, lines: Sequence[str]
) -> Iterator[tuple[int, _Row]]:
  """Yields line number and parsed JSON of each line."""
  for number, line in enumerate(lines, 1):
    try:
      yield number, json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}, line {number}: {error}") from error


def _count(row: _Row, key: str, least: int = 1) -> int:
  """Returns an integer field; raises ValueError if it is below `least`."""
  value = int(row[key])  # type: ignore[call-overload]
  if value < least:
    raise ValueError(f"{key}={value} must be at least {least}")
  return value


def _strict_count(row: _Row, key: str, least: int = 1) -> int:
  """Returns an integer of JSON: not a text, a truth value or a float."""
  if type(row[key]) is not int:
    raise ValueError(f"{key}={row[key]!r} must be an integer")
  return _count(row, key, least)


def _seconds(value: object) -> float:
  """Returns a time in seconds; raises ValueError if negative or not finite."""
  seconds = float(value)  # type: ignore[arg-type]
  if not 0 <= seconds < float("inf"):
    raise ValueError(f"the time {value!r} must be finite and not negative")
  return seconds


def _azure(row: _Row, number: int) -> Arrival:
  """Parses a row of Azure's traces."""
  when = datetime.datetime.fromisoformat(str(row["TIMESTAMP"]))
  if when.tzinfo is None:
    when = when.replace(tzinfo=datetime.UTC)
  return Arrival(
    number, when.timestamp(), _count(row, "ContextTokens"),
    _count(row, "GeneratedTokens"),
  )


def _burst(row: _Row, number: int) -> Arrival | None:
  """Parses a row of BurstGPT; None for a failed request."""
  output = _count(row, "Response tokens", 0)
  if not output:  # it failed
    return None
  return Arrival(
    number, _seconds(row["Timestamp"]), _count(row, "Request tokens"), output
  )


def _mooncake(row: _Row, number: int) -> Arrival:
  """Parses a line of Mooncake's traces, whose timestamps are in ms."""
  prompt, ids = _strict_count(row, "input_length"), row["hash_ids"]
  if not isinstance(ids, list) or not all(type(i) is int for i in ids):
    raise ValueError("hash_ids must be a list of integers")
  if len(ids) != -(-prompt // MOONCAKE_BLOCK):
    raise ValueError(
      f"hash_ids has {len(ids)} blocks of {MOONCAKE_BLOCK} tokens, but "
      f"input_length={prompt}"
    )
  return Arrival(
    number, _seconds(row["timestamp"]) / 1e3, prompt,
    _strict_count(row, "output_length"), blocks=tuple(ids),
    block_size=MOONCAKE_BLOCK,
  )


# Columns that identify each CSV format.
_COLUMNS: dict[_Read, tuple[str, ...]] = {
  _azure: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
  _burst: ("Timestamp", "Request tokens", "Response tokens"),
}


def _spread(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
  """Spreads requests with equal timestamps uniformly over the time to the next.

  In two of Mooncake's traces, timestamps are those of batches, 3 s apart; used
  as arrival times they would be bursts that no client sent. A request with a
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

  Example:
    >>> found = scaled([Arrival(0, 0.0, 8, 8), Arrival(1, 60.0, 8, 8)], rate=1)
    >>> [arrival.time_s for arrival in found]
    [0.0, 2.0]
  """
  # New duration over old duration.
  factor = (len(arrivals) / rate) / max(a.time_s for a in arrivals)
  return [
    dataclasses.replace(a, time_s=a.time_s * factor) for a in arrivals
  ]


def poisson(
  arrivals: Sequence[Arrival], rate: float, seed: int
) -> list[Arrival]:
  """Returns arrivals in their order at the times of a Poisson process.

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
