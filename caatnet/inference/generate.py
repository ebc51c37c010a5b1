"""Continues many prompts at once, each until something ends it.

Up to ``Capacity.batch`` sequences of each replica are going at a time. A step
reads the newest token of all whose prompt has been read, beside one chunk of a
prompt. Where a sequence ends, the next prompt takes its slot.

A step is dispatched before the tokens of the step before it are on the host:
the program keeps the newest token of each sequence. So a sequence that a stop
id or a stop string ends is in one more step, whose token is dropped.
"""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference import batches, buckets
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Decoder
from caatnet.inference.requests import Completion, Request
from caatnet.inference.transcripts import Transcript


@dataclasses.dataclass
class Speed:
  """What generation took, without the time in which XLA compiled.

  Tokens that are drawn in a step which also reads a prompt are not among the
  decoded ones.

  Attributes:
    prompt_tokens: Tokens of prompts.
    prompt_seconds: Time of steps that read parts of prompts.
    decoded_tokens: Tokens drawn in other steps.
    decode_seconds: Time of other steps.
  """

  prompt_tokens: int = 0
  prompt_seconds: float = 0.0
  decoded_tokens: int = 0
  decode_seconds: float = 0.0

  def add(self, sent: "_Sent", seconds: float) -> None:
    """Counts a step and the time until its tokens came."""
    if sent.num_read:
      self.prompt_tokens += sent.num_read
      self.prompt_seconds += seconds
    else:
      self.decoded_tokens += len(sent.drawn)
      self.decode_seconds += seconds


@dataclasses.dataclass(eq=False)
class _Sequence:
  """A request on its way.

  Attributes:
    index: Its place among the requests.
    request: The request.
    slot: Its number among the sequences of its replica.
    pages: Its pages.
    transcript: The tokens that are known to the host, and their text.
    num_read: How many of its tokens have been read, in steps dispatched so far.
    num_drawn: How many tokens have been drawn in them.
  """

  index: int
  request: Request
  slot: int
  pages: list[int]
  transcript: Transcript
  num_read: int = 0
  num_drawn: int = 0

  @property
  def unread(self) -> int:
    """How many tokens of the prompt are still to be read."""
    return max(0, len(self.request.prompt) - self.num_read)

  def read(self, count: int) -> batches.Chunk:
    """Goes on to read ``count`` tokens of the prompt."""
    first = self.num_read
    self.num_read += count
    tokens = self.request.prompt[first : first + count]
    return batches.Chunk(self.slot, first, tokens, not self.unread)


class _Replica:
  """The sequences and pages of one replica."""

  def __init__(self, decoder: Decoder) -> None:
    self.sequences: dict[int, _Sequence] = {}
    self._slots = list(reversed(range(decoder.capacity.batch)))
    self._pages = list(reversed(range(decoder.cache_shape.num_pages)))
    self._page_size = decoder.capacity.page_size
    self.tables = np.zeros(
      (decoder.capacity.batch, decoder.capacity.pages_per_sequence), np.int32
    )
    self.drawing = batches.Drawing(decoder.capacity.batch)

  def admit(
    self, index: int, request: Request, transcript: Transcript
  ) -> bool:
    """Starts a request, if there are a slot and pages for all of it."""
    count = transcript.num_pages(self._page_size)
    if not self._slots or count > len(self._pages):
      return False
    pages = [self._pages.pop() for _ in range(count)]
    slot = self._slots.pop()
    self.tables[slot, :count] = pages
    self.drawing.set(slot, request)
    self.sequences[slot] = _Sequence(index, request, slot, pages, transcript)
    return True

  def release(self, sequence: _Sequence) -> None:
    """Takes slot and pages of a sequence back."""
    del self.sequences[sequence.slot]
    self._slots.append(sequence.slot)
    self._pages += sequence.pages

  def decodes(self) -> list[_Sequence]:
    """Returns the sequences that draw from their newest token."""
    return [
      s for s in self.sequences.values()
      if not s.unread and s.num_drawn < s.transcript.most_tokens
    ]

  def chunk(self) -> _Sequence | None:
    """Returns the sequence whose prompt is read next."""
    return next((s for s in self.sequences.values() if s.unread), None)


class _Sent(NamedTuple):
  """A step that has been dispatched.

  Attributes:
    tokens: int32 ``[D, S]``, maybe still being computed.
    logprobs: float32 ``[D, S]``.
    drawn: The sequences that get one of these tokens, and where it is.
    num_read: How many tokens of prompts the step reads.
  """

  tokens: jax.Array
  logprobs: jax.Array
  drawn: list[tuple[_Replica, _Sequence, tuple[int, int]]]
  num_read: int


class Generation:
  """Continues requests with a decoder.

  Attributes:
    speed: What it took so far.
  """

  def __init__(
    self,
    decoder: Decoder,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    on_text: Callable[[int, str], None] = lambda index, text: None,
    on_end: Callable[[int], None] = lambda index: None,
  ) -> None:
    """Checks the requests.

    Args:
      decoder: The model and its cache, whose sequences have all ended.
      requests: The prompts, and how each is continued.
      tokenizer: Makes text of tokens.
      on_text: Is called with a request's number and more of its text.
      on_end: Is called with a request's number when it has ended.

    Raises:
      ValueError: The model cannot take a request; the message says which.
    """
    self.speed = Speed()
    self._decoder, self._on_text, self._on_end = decoder, on_text, on_end
    # In all steps if in any, so that no step is compiled twice.
    self._filters = any(request.filters for request in requests)
    self._replicas = [_Replica(decoder) for _ in range(decoder.num_replicas)]
    context = decoder.capacity.context
    vocab_size = decoder.program.model.vocab_size
    for index, request in enumerate(requests):
      try:
        request.check(vocab_size, context)
      except ValueError as error:
        raise ValueError(f"prompt {index + 1}: {error}") from error
    self._transcripts = [Transcript(r, tokenizer, context) for r in requests]
    # Of sequences that stay short the longest one decides, so that there is no
    # program of each length.
    page_size = decoder.capacity.page_size
    self._most_pages = bucket(
      max((t.num_pages(page_size) for t in self._transcripts), default=1),
      1, decoder.capacity.pages_per_sequence, 2,
    )
    self._least_pages = min(self._most_pages, -(-buckets.SHORT // page_size))
    self._waiting = list(
      zip(range(len(requests)), requests, self._transcripts, strict=True)
    )
    self._waiting.reverse()  # the next one is the last

  def run(
    self, interrupted: Callable[[], bool] = lambda: False
  ) -> list[Completion]:
    """Continues all requests to their ends.

    Args:
      interrupted: Whether to end those that have not ended; asked after each
        step.

    Returns:
      What followed each prompt, in the order of the requests.

    Raises:
      ValueError: The model's logits are NaN: it has diverged, or overflows in
        the dtype that it has.
    """
    pending: _Sent | None = None
    self._arrived = self._clock()
    while self._going and not interrupted():
      self._admit()
      sent = self._send()
      if pending is not None:
        self._receive(pending)
      pending = sent
    for index, transcript in enumerate(self._transcripts):
      if not transcript.ended:
        self._show(index, transcript.interrupt())
    return [transcript.completion for transcript in self._transcripts]

  def _clock(self) -> float:
    """Returns a time in seconds that stands still while XLA compiles."""
    return time.perf_counter() - self._decoder.compile_seconds

  @property
  def _going(self) -> bool:
    return bool(self._waiting or any(r.sequences for r in self._replicas))

  def _admit(self) -> None:
    """Starts waiting requests in turn, where there is most room first."""
    while self._waiting:
      replicas = sorted(self._replicas, key=lambda r: len(r.sequences))
      if not any(r.admit(*self._waiting[-1]) for r in replicas):
        return
      self._waiting.pop()

  def _send(self) -> _Sent | None:
    """Dispatches the next step; None if all that is left is on its way."""
    capacity = self._decoder.capacity
    decodes = [r.decodes() for r in self._replicas]
    chunks = [r.chunk() for r in self._replicas]
    read = [min(c.unread, capacity.chunk) if c else 0 for c in chunks]
    num_decodes = bucket(max(map(len, decodes)), 1, capacity.batch, 4)
    length = bucket(max(read), buckets.MIN_CHUNK, capacity.chunk, 4)
    if not num_decodes and not length:
      return None
    last = max(
      *(s.num_read + 1 for each in decodes for s in each),
      *(c.num_read + n for c, n in zip(chunks, read, strict=True) if c), 1, 1,
    )
    num_pages = bucket(
      -(-last // capacity.page_size), self._least_pages, self._most_pages, 2
    )
    sizes = batches.Sizes(num_decodes, int(length > 0), length, num_pages)
    parts, drawn = [], []
    for number, replica in enumerate(self._replicas):
      sequences, chunk = decodes[number], chunks[number]
      read_on = [] if chunk is None else [chunk.read(read[number])]
      batch = batches.batch_of(
        sizes, capacity.page_size, replica.tables,
        np.array([s.slot for s in sequences], np.int32),
        np.array([s.num_read for s in sequences], np.int32), read_on,
      )
      parts.append((batch, replica.drawing.of(batch.sequences)))
      for row, sequence in enumerate(sequences):
        sequence.num_read += 1
        sequence.num_drawn += 1
        drawn.append((replica, sequence, (number, row)))
      if chunk is not None and not chunk.unread:
        chunk.num_drawn += 1
        drawn.append((replica, chunk, (number, num_decodes)))
    both = jax.tree.map(lambda *x: np.stack(x), *parts)
    result = self._decoder.step(*both, self._filters)
    return _Sent(*result, drawn, sum(read))

  def _receive(self, sent: _Sent) -> None:
    """Waits for the tokens of a step, and hands them to their sequences."""
    tokens, logprobs = np.asarray(sent.tokens), np.asarray(sent.logprobs)
    now = self._clock()
    self.speed.add(sent, now - self._arrived)
    self._arrived = now
    for replica, sequence, row in sent.drawn:
      transcript = sequence.transcript
      if transcript.ended:  # a step before
        continue
      if np.isnan(logprobs[row]):
        raise ValueError(
          f"prompt {sequence.index + 1}: the logits of the model are NaN after "
          f"{len(transcript.tokens)} tokens that it has written"
        )
      text = transcript.push(int(tokens[row]), float(logprobs[row]))
      self._show(sequence.index, text)
      if transcript.ended:
        self._on_end(sequence.index)
        replica.release(sequence)

  def _show(self, index: int, text: str) -> None:
    if text:
      self._on_text(index, text)
