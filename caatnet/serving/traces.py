"""Arrivals of requests: recorded ones out of public traces, and generated ones.

A trace has lengths, no text. `tokens` makes up texts of these lengths which
agree where the trace says so: turns of a conversation begin with the turns
before, and prompts with equal blocks begin alike.

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

# Mooncake's blocks, in tokens.
MOONCAKE_BLOCK = 512
# Mooncake's timestamps are those of batches, which came this often.
_BATCH_S = 3.0
# The first two bytes of a gzip file.
_GZIP = b"\x1f\x8b"
_MOST_PLACES = 2**24  # tokens of a sequence, in `tokens`


@dataclasses.dataclass(frozen=True)
class Arrival:
  """A request that comes.

  Attributes:
    number: Unique in its trace.
    time_s: When it comes, from the trace's first request on. Of a later turn of
      a generated session: when it would, if answers took no time.
    prompt: The tokens of its prompt, those of earlier turns among them.
    output: The tokens of its answer.
    conversation: Of which conversation it is a turn; None if that is not known.
    context: How many of the prompt's tokens are the turns before it.
    think_s: The time between the end of the turn before and this one; None for
      one that depends on no other.
    more: Whether another turn follows.
    blocks: What stands in the prompt, an id for each block, the last one of
      which may be cut short; requests whose first n ids are equal have equal
      blocks there. Empty if that is not known.
    block_size: The tokens of a block; 0 if there are none.
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
  """Returns the tokens of a prompt and of the answer to it.

  Sequences agree only where the trace says that they do, but for chance: tokens
  are hashes of whose they are and of where they stand.

  Args:
    arrival: A request.
    vocabulary: How many different tokens there are.

  Returns:
    int32 ``[prompt + output]``.
  """
  places = np.arange(arrival.prompt + arrival.output, dtype=np.uint64)
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
  """Reads a trace; its first line says of which kind it is.

  Args:
    path: A CSV of Azure (2023 or 2024) or BurstGPT, or a JSONL of Mooncake, as
      published; gzipped or not.
    num_requests: The first so many requests; 0 for all.
    seed: Of the times within Mooncake's batches.

  Returns:
    The requests in the order of their arrivals; the first one comes at 0.

  Raises:
    ValueError: The file cannot be read or is of no known kind, or a line is not
      what it should be; the message names file and line.
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
  """Returns numbered lines as dicts, and who reads them."""
  if lines[0].startswith("{"):
    return _json_lines(path, lines), _mooncake
  columns = next(csv.reader(lines[:1]))
  for read, needed in _COLUMNS.items():
    if set(needed) <= set(columns):
      rows = csv.DictReader(lines)
      return ((rows.line_num, row) for row in rows), read
  raise ValueError(
    f"{path}: its first line {lines[0][:80]!r} is neither JSON, as in "
    "Mooncake's traces, nor has it the columns "
    + " or ".join(", ".join(needed) for needed in _COLUMNS.values())
  )


def _json_lines(
  path: str | pathlib.Path, lines: Sequence[str]
) -> Iterator[tuple[int, _Row]]:
  for number, line in enumerate(lines, 1):
    try:
      yield number, json.loads(line)
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: {error}") from error


def _count(row: _Row, key: str, least: int = 1) -> int:
  value = int(row[key])  # type: ignore[call-overload]
  if value < least:
    raise ValueError(f"{key}={value} must be at least {least}")
  return value


def _seconds(value: object) -> float:
  seconds = float(value)  # type: ignore[arg-type]
  if not 0 <= seconds < float("inf"):
    raise ValueError(f"the time {value!r} must be finite and not negative")
  return seconds


def _azure(row: _Row, number: int) -> Arrival:
  when = datetime.datetime.fromisoformat(str(row["TIMESTAMP"]))
  if when.tzinfo is None:
    when = when.replace(tzinfo=datetime.UTC)
  return Arrival(
    number, when.timestamp(), _count(row, "ContextTokens"),
    _count(row, "GeneratedTokens"),
  )


def _burst(row: _Row, number: int) -> Arrival | None:
  output = _count(row, "Response tokens", 0)
  if not output:  # it failed
    return None
  return Arrival(
    number, _seconds(row["Timestamp"]), _count(row, "Request tokens"), output
  )


def _mooncake(row: _Row, number: int) -> Arrival:
  prompt, ids = _count(row, "input_length"), row["hash_ids"]
  if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
    raise ValueError("hash_ids must be a list of integers")
  if len(ids) != -(-prompt // MOONCAKE_BLOCK):
    raise ValueError(
      f"hash_ids has {len(ids)} blocks of {MOONCAKE_BLOCK} tokens, but "
      f"input_length={prompt}"
    )
  return Arrival(
    number, _seconds(row["timestamp"]) / 1e3, prompt,
    _count(row, "output_length"), blocks=tuple(ids), block_size=MOONCAKE_BLOCK,
  )


# By what a CSV is known.
_COLUMNS: dict[_Read, tuple[str, ...]] = {
  _azure: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
  _burst: ("Timestamp", "Request tokens", "Response tokens"),
}


def _spread(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
  """Spreads those that came in one batch over the time to the next.

  The times of the trace are those of batches, 3 s apart: as arrivals they would
  be bursts that nobody sent. The order stays.
  """
  rng = np.random.default_rng(seed)
  found: list[Arrival] = []
  for time_s, batch in itertools.groupby(arrivals, lambda a: a.time_s):
    members = list(batch)
    offsets = np.sort(rng.uniform(0, _BATCH_S, len(members))).tolist()
    found += [
      dataclasses.replace(a, time_s=time_s + offset)
      for a, offset in zip(members, offsets, strict=True)
    ]
  return found


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
  """Returns arrivals with another mean rate, in requests per second."""
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
    seed: Of the random numbers.
  """
  gaps = np.random.default_rng(seed).exponential(1 / rate, len(arrivals))
  times = (np.cumsum(gaps) - gaps[0]).tolist() if len(arrivals) else []
  return [
    dataclasses.replace(a, time_s=t)
    for a, t in zip(arrivals, times, strict=True)
  ]


@dataclasses.dataclass(frozen=True)
class Sessions:
  """Conversations of several turns with a server.

  Lengths are log-normal, with the mean and standard deviation of logarithms of
  the 58,787 ShareGPT prompts and answers whose lengths NanoFlow published
  (efeslab/Nanoflow); answers end at 1,000 tokens, their 99th percentile there.
  The number of turns is geometric, the mean that of FastSwitch's conversations
  (arXiv 2411.18424). A turn's prompt is all turns before it and a new question.

  Attributes:
    num_sessions: How many.
    rate: Turns per second, on average, once sessions begin and end alike often.
    seed: Of the random numbers.
    turns: The mean number of turns.
    think_s: The mean of the exponential time between an answer and the next
      turn; it is of no source.
    question: Mean and standard deviation of the logarithm of a question.
    answer: Those of an answer.
    longest_answer: Tokens of an answer at most.
    longest: Tokens of a conversation at most; a turn that would exceed it is
      not taken, and ends it.
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
    """Returns the turns of all sessions, by the times at which they come."""
    rng = np.random.default_rng(self.seed)
    gaps = rng.exponential(self.turns / self.rate, self.num_sessions)
    found: list[Arrival] = []
    for session, begin in enumerate(np.cumsum(gaps) - gaps[0]):
      found += self._session(session, float(begin), rng)
    found.sort(key=lambda a: a.time_s)
    return [dataclasses.replace(a, number=i) for i, a in enumerate(found)]

  def _session(
    self, session: int, time_s: float, rng: np.random.Generator
  ) -> list[Arrival]:
    turns: list[Arrival] = []
    context = 0
    for turn in range(rng.geometric(1 / self.turns)):
      question = max(1, round(rng.lognormal(*self.question)))
      answer = max(1, round(rng.lognormal(*self.answer)))
      answer = min(answer, self.longest_answer)
      think_s = float(rng.exponential(self.think_s)) if turn else None
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
