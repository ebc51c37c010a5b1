"""An executor that computes: a decoder's steps, and copies of its cache.

Programs run in the order in which they are dispatched, so a step reads what
copies that were dispatched before it have written, and a copy to the host is a
run of its own from the moment on in which it is dispatched: what is written
over its pages afterwards does not change it. One thread waits for tokens, and
another moves runs between the run's array and the host's pages. What comes back
from the host is staged by that thread, beside the steps, and written into the
cache by the thread that submits steps, the only one that may hand the cache on.

Shape legend: D = decodes, C = chunks, T = tokens of each chunk, N = D + C T,
S = D + C, P = pages of a table.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import queue
import time
from typing import Any

import jax
import numpy as np

from caatnet.inference import buckets
from caatnet.inference.buckets import bucket
from caatnet.inference.copies import HostPages
from caatnet.inference.decoder import Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.requests import stacked
from caatnet.models.paged import Batch
from caatnet.serving.executor import Copy, Event, Step
from caatnet.serving.groups import runs
from caatnet.serving.measured import MeasuredCosts
from caatnet.serving.requests import Request

# The lengths of chunks for which there are programs grow by it.
CHUNK_FACTOR = 4


@dataclasses.dataclass
class Drawn:
  """What an executor draws a request's tokens by, and what it says of them.

  The ``payload`` of `caatnet.serving.requests.Request`.

  Attributes:
    drawing: Temperature and seed, with whatever else decides.
    logprobs: The log-probabilities of the tokens that were drawn, in nats. If
      a token ends the request, the one behind it may be there, too.
  """

  drawing: Drawing
  logprobs: list[float] = dataclasses.field(default_factory=list)


class DecoderExecutor:
  """Computes with a decoder, as `caatnet.serving.executor.Executor` says.

  Attributes:
    decoder: The model and its cache, of one replica.
    host: The host's pages.
    factor: The numbers of decodes for which there are programs grow by it.
    costs: What steps and copies have taken.
  """

  def __init__(
    self, decoder: Decoder, num_host_pages: int, factor: int = 4,
    filters: bool = False,
  ) -> None:
    """Takes the host's memory.

    Args:
      decoder: With one replica, and no sequences.
      num_host_pages: How many pages the host keeps at a time.
      factor: Decodes of a step come in sizes each of which is so many times
        the one before.
      filters: Whether all steps look at top-k and top-p, so that those with
        such requests run no programs of their own.

    Raises:
      ValueError: The decoder has several replicas.
    """
    if decoder.num_replicas != 1:
      raise ValueError(
        f"config.parallel.data={decoder.num_replicas}: a server has one "
        "replica; start one for each"
      )
    self.decoder, self.factor, self._filters = decoder, factor, filters
    self.host = HostPages(decoder, num_host_pages)
    self.costs = MeasuredCosts()
    self._tokens, self._copies = (
      futures.ThreadPoolExecutor(1, name) for name in ("tokens", "copies")
    )
    # Functions that the thread of `wait` calls; each returns an event.
    # None of one that only wakes.
    self._ended: queue.SimpleQueue[Callable[[], Event | None]] = (
      queue.SimpleQueue()
    )
    self._events: list[Event] = []
    self._unwritten: set[int] = set()
    self._under_way = 0
    self._last_s = 0.0

  def close(self) -> None:
    """Ends the threads, once what is under way has ended."""
    self._tokens.shutdown()
    self._copies.shutdown()

  def now(self) -> float:
    """Returns the time in seconds, on a clock that only goes on."""
    return time.perf_counter()

  def submit(self, step: Step) -> None:
    """Dispatches a step."""
    while self._unwritten.intersection(step.after):
      self._events += self._take(None)
    batch, requests = _batch(step, self.decoder, self.factor)
    before = self.decoder.compile_seconds
    begun = time.perf_counter()
    result = self.decoder.step(
      of_one_replica(batch), of_one_replica(stacked(requests)),
      self._filters or any(r is not None and r.filters for r in requests),
    )
    compiled = self.decoder.compile_seconds > before
    drawn = [
      *enumerate(step.decodes),
      *(
        (batch.num_decodes + i, chunk.request)
        for i, chunk in enumerate(step.chunks) if chunk.draws
      ),
    ]
    self._begin(
      self._tokens, lambda: self._receive(step, result, drawn, begun, compiled)
    )

  def _begin(
    self, pool: futures.ThreadPoolExecutor, work: Callable[[], Any]
  ) -> None:
    """Lets a thread do something that returns what returns the event."""
    self._under_way += 1

    def run():
      try:
        end = work()
      except BaseException as error:  # for who waits for the event
        found = error

        def end():
          raise found

      self._ended.put(end)

    pool.submit(run)

  def _receive(
    self, step: Step, result: Sequence[Any],
    drawn: Sequence[tuple[int, Request]], begun: float, compiled: bool,
  ) -> Callable[[], Event]:
    """Waits for a step's tokens."""
    tokens, logprobs = (np.asarray(x)[0].tolist() for x in result)
    now = time.perf_counter()
    seconds, self._last_s = now - max(begun, self._last_s), now

    def end():
      if not compiled:
        self.costs.add_step(seconds, sum(c.length for c in step.chunks))
      for row, request in drawn:
        if np.isnan(logprobs[row]):
          raise ValueError(
            f"the logits of the model are NaN after {request.length} tokens of "
            f"request {request.number}"
          )
        request.payload.logprobs.append(logprobs[row])
      return Event(now, step=step, tokens=[tokens[row] for row, _ in drawn])

    return end

  def copy(self, copy: Copy) -> None:
    """Begins a copy of pages."""
    begun = time.perf_counter()
    pieces = list(_pieces(copy.target if copy.kind == "in" else copy.source))

    def event():
      now = time.perf_counter()
      self.costs.add_copy(copy.kind, len(pieces), len(copy.source), now - begun)
      return Event(now, copy=copy)

    if copy.kind == "within":
      places = iter(copy.target)
      for first, count in pieces:
        run = self.host.read(first, count)
        target = [next(places) for _ in range(count)]
        assert target == list(range(target[0], target[0] + count))
        self.host.write(run, target[0])
      self._begin(self._copies, lambda: event)
    elif copy.kind == "out":
      taken = [self.host.read(first, count) for first, count in pieces]

      def keep():
        places = list(copy.target)
        for (_, count), run in zip(pieces, taken, strict=True):
          self.host.keep(run, places[:count])
          del places[:count]
        return event

      self._begin(self._copies, keep)
    else:
      self._unwritten.add(copy.number)

      def stage():
        places, staged = list(copy.source), []
        for first, count in pieces:
          staged.append((self.host.stage(places[:count]), first))
          del places[:count]

        def write():
          for run, first in staged:
            self.host.write(run, first)
          self._unwritten.discard(copy.number)
          return event()

        return write

      self._begin(self._copies, stage)

  def wait(self, until_s: float) -> list[Event]:
    """Waits until something has ended, or for a time."""
    found, self._events = self._events, []
    if not found:
      assert self._under_way or until_s < float("inf"), "nothing is under way"
      left = until_s - time.perf_counter()
      try:
        timeout = None if left == float("inf") else max(0.0, left)
        found += self._take(timeout)
      except queue.Empty:
        return []
    while not self._ended.empty():
      found += self._take(None)
    self._under_way -= len(found)
    return found

  def wake(self) -> None:
    """Lets `wait` return; for a thread that has news for the one that waits."""
    self._ended.put(lambda: None)

  def _take(self, timeout: float | None) -> list[Event]:
    """Waits for what comes next: an event, or nothing if it is to wake."""
    event = self._ended.get(timeout=timeout)()
    return [] if event is None else [event]


def _pieces(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yields first page and length of runs, cut into few different lengths."""
  for first, count in runs(pages):
    while count:
      size = 1 << (count.bit_length() - 1)
      yield first, size
      first, count = first + size, count - size


def of_one_replica(tree: Any) -> Any:
  """Gives arrays the leading dim of replicas."""
  return jax.tree.map(lambda x: x[None], tree)


def _batch(
  step: Step, decoder: Decoder, factor: int
) -> tuple[Batch, list[Drawing | None]]:
  """Returns a step's arrays, in sizes of which there are few.

  Returns:
    The batch, and how each of its S sequences draws its next token; None for
    those that draw none.
  """
  capacity = decoder.capacity
  size, num, chunks = capacity.page_size, len(step.decodes), step.chunks
  # With chunks there is room for a decode, which spares programs without.
  num_decodes = bucket(num or 1, 1, capacity.batch, factor)
  num_chunks = bucket(len(chunks), 1, 1 << 30, 2)
  length = bucket(
    max((c.length for c in chunks), default=0), buckets.MIN_CHUNK, 1 << 30,
    CHUNK_FACTOR,
  )
  last = max(
    int(step.positions.max(initial=0)) + 1,
    *(c.start + c.length for c in chunks), 1, 1,
  )
  most_pages = capacity.pages_per_sequence
  num_pages = bucket(
    -(-last // size), min(most_pages, -(-buckets.SHORT // size)), most_pages, 2
  )
  num_rows = num_decodes + num_chunks
  num_tokens = num_decodes + num_chunks * length
  tokens = np.zeros(num_tokens, np.int32)
  positions = np.full(num_tokens, -1, np.int32)
  places = np.full(num_tokens, -1, np.int32)
  tables = np.zeros((num_rows, num_pages), np.int32)
  rows = np.arange(num_rows, dtype=np.int32)
  sequences = np.full(num_rows, -1, np.int32)
  drawing: list[Drawing | None] = [None] * num_rows

  tokens[:num], positions[:num] = -1, step.positions
  pages = step.tables[step.slots, step.positions // size]
  places[:num] = pages * size + step.positions % size
  width = min(num_pages, step.tables.shape[1])
  tables[:num, :width] = step.tables[step.slots, :width]
  sequences[:num] = step.slots
  drawing[:num] = [request.payload.drawing for request in step.decodes]
  for i in range(num_chunks):
    row, first = num_decodes + i, num_decodes + i * length
    rows[row] = first
    if i >= len(chunks):  # padding ends before the first position
      positions[first : first + length] = np.arange(-length, 0)
      continue
    chunk, table = chunks[i], step.tables[chunks[i].request.slot]
    # Padding of a chunk goes on counting.
    positions[first : first + length] = chunk.start + np.arange(length)
    inside = slice(first, first + chunk.length)
    tokens[inside] = chunk.tokens
    at = positions[inside]
    places[inside] = table[at // size] * size + at % size
    tables[row, :width] = table[:width]
    rows[row] = first + chunk.length - 1
    if chunk.draws:
      sequences[row] = chunk.request.slot
      drawing[row] = chunk.request.payload.drawing
  batch = Batch(
    tokens, positions, places, tables, rows, sequences, num_decodes
  )
  return batch, drawing
