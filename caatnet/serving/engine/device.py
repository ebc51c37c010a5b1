"""Executor on a device: runs a decoder's steps, and copies of its cache.

Programs run in the order of their dispatch, so a step reads the results of all
copies that were dispatched before it. A copy to the host first copies pages to
a separate device array, which later steps do not change; a thread then
transfers that array to the host. The same thread transfers pages from the host
to a staging array on the device, concurrently with steps. Only the thread that
submits steps may replace the cache, so it writes the staged pages into the
cache.

A copy has parts of bounded size: some layers of some pages
(`HostPages.parts`). The next part is dispatched when the previous one has been
transferred, so that parts alternate with steps and use one staging buffer. A
step that waits for a copy dispatches all parts of the copy.

With several experts, another thread loads their weights to weight slots,
concurrently with steps that read other weight slots
(`caatnet.serving.engine.expert_weights`).

Shape legend: D = replicas, S = sequences of a step, including padding.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import itertools
import queue
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from caatnet.inference import batches
from caatnet.inference.copies import HostPages, HostStates, PageCopy
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Asked
from caatnet.inference.sampling import TopTokens
from caatnet.serving.cache.pages import contiguous_runs
from caatnet.serving.engine.executor import (
  CompletionEvent,
  Copy,
  EngineStep,
  WeightLoad,
)
from caatnet.serving.engine.expert_weights import ExpertWeights
from caatnet.serving.engine.measured import MeasuredCosts
from caatnet.serving.engine.programs import Programs

_NO_INDICES = np.zeros(0, np.int32)


@dataclasses.dataclass
class SamplingState:
  """Sampling parameters of a request, and log-probabilities of its tokens.

  The ``payload`` of `caatnet.serving.requests.Request`.

  Attributes:
    drawing: Request with temperature, seed and filters.
    num_top: Number of most probable tokens to return at each position.
    logprobs: Log-probabilities of the drawn tokens, in nats. If a token ends
      the request, the list may contain one more entry.
    top: Log-probabilities of the most probable tokens at each position, the
      most probable first; as long as ``logprobs``, or empty if ``num_top`` is
      0.
  """

  drawing: Asked
  num_top: int = 0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  top: list[dict[int, float]] = dataclasses.field(default_factory=list)


class DispatchedStep(NamedTuple):
  """Step of all replicas that was dispatched and may not be computed yet.

  Attributes:
    steps: Step of each replica; None for a replica that reads nothing.
    rows: For each replica, the indices in `tokens[replica]` of the tokens that
      are drawn for `EngineStep.drawing`.
    tokens: Drawn tokens, int32 ``[D, S]``.
    logprobs: Log-probabilities in nats, float32 ``[D, S]``.
    top: Most probable tokens, ``[D, S, k]``; None if the program does not
      compute them.
  """

  steps: Sequence[EngineStep | None]
  rows: Sequence[np.ndarray]
  tokens: jax.Array
  logprobs: jax.Array
  top: TopTokens | None = None

  def events(self, clock: Callable[[], float]) -> list[CompletionEvent | None]:
    """Waits for the tokens; appends the log-probabilities to the requests.

    Args:
      clock: Returns the time in seconds.

    Returns:
      The event of each replica's step, or None without a step.
    """
    tokens, logprobs = np.asarray(self.tokens), np.asarray(self.logprobs)
    now, found = clock(), []
    for replica, (step, rows) in enumerate(
      zip(self.steps, self.rows, strict=True)
    ):
      if step is None:
        found.append(None)
        continue
      own = logprobs[replica, rows]
      for request, logprob in zip(step.drawn, own.tolist(), strict=True):
        # The host's list may run one token ahead of the request (see
        # `SamplingState`).
        request.payload.logprobs.append(logprob)
      self._add_top(replica, step, rows)
      found.append(CompletionEvent(
        now, step=step, tokens=tokens[replica, rows],
        failed=np.flatnonzero(np.isnan(own)).tolist(),
      ))
    return found

  def _add_top(self, replica: int, step: EngineStep, rows: np.ndarray) -> None:
    """Appends the most probable tokens to the requests that need them.

    Args:
      replica: Index of the replica.
      step: Step of the replica.
      rows: Entry of `DispatchedStep.rows` for the replica.
    """
    asked = [
      (request.payload, row)
      for request, row in zip(step.drawn, rows.tolist(), strict=True)
      if request.payload.num_top
    ]
    if asked and self.top is not None:
      top = jax.tree.map(lambda x: np.asarray(x[replica]), self.top)
      for payload, row in asked:
        payload.top.append(
          as_dict(TopTokens(*(x[row] for x in top)), payload.num_top)
        )


def as_dict(top: TopTokens, num_top: int) -> dict[int, float]:
  """Returns the most probable tokens of a position as {id: log-probability}.

  Args:
    top: Arrays ``[k]``.
    num_top: Maximum number of tokens.
  """
  pairs = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
  return {
    token: logprob for token, logprob in itertools.islice(pairs, num_top)
    if logprob > -np.inf
  }


def dispatch(
  decoder: Decoder, capacity: Capacity, steps: Sequence[EngineStep | None],
  drawings: Sequence[batches.SlotSampling], factor: int, filters: bool,
  top: bool = False, params: Any = None,
  choose: Callable[[batches.Sizes], batches.Sizes] = lambda sizes: sizes,
) -> DispatchedStep:
  """Dispatches one step per replica as one step of a decoder.

  Args:
    decoder: The model and its cache.
    capacity: The decoder's capacity; its context may be reduced to the length
      of the longest sequence.
    steps: Step of each replica; None for a replica that reads nothing.
    drawings: Sampling parameters of each replica's sequences, by slot; updated
      in place.
    factor: Ratio between successive bucket sizes for the number of decodes.
    filters: Whether top-k and top-p are applied even if no sequence of this
      step uses them.
    top: Whether the program can return the most probable tokens.
    params: Parameters that the step reads; None for those of the decoder.
    choose: Maps the sizes of a step to those of the program that runs it.
  """
  sizes = [
    batches.sizes_of(
      capacity, _NO_INDICES if step is None else step.positions + 1,
      [] if step is None else [(c.start, c.length) for c in step.chunks],
      factor,
    )
    for step in steps
  ]
  # All replicas run one program, so each size is the maximum over replicas.
  common = choose(batches.Sizes(
    *(max(each) for each in zip(*map(dataclasses.astuple, sizes), strict=True))
  ))
  parts, rows = [], []
  for step, drawing in zip(steps, drawings, strict=True):
    chunks = []
    slots = positions = _NO_INDICES
    tables = np.zeros((1, common.pages), np.int32)
    if step is not None:
      slots, positions, tables = step.slots, step.positions, step.tables
      chunks = [
        batches.Chunk(c.request.slot, c.start, c.tokens, c.draws)
        for c in step.chunks
      ]
      for chunk in step.chunks:
        payload = chunk.request.payload
        drawing.set(chunk.request.slot, payload.drawing, payload.num_top)
      filters = filters or bool(drawing.filters[step.drawing].any())
    batch = batches.batch_of(
      common, capacity.page_size, tables, slots, positions, chunks
    )
    asked = drawing.asked[batch.sequences] if top else None
    parts.append((batch, drawing.of(batch.sequences), asked))
    rows.append(np.flatnonzero(batch.sequences >= 0))
  both = batches.add_replica_dim(parts[0]) if len(parts) == 1 else (
    jax.tree.map(lambda *x: np.stack(x), *parts)
  )
  batch, sampling, asked = both
  return DispatchedStep(
    steps, rows, *decoder.step(batch, sampling, filters, asked, params)
  )


@dataclasses.dataclass
class _InFlightCopy:
  """Copy to or from the host that is under way.

  Attributes:
    copy: The copy.
    parts: Parts not dispatched yet, each a list of (memory on the host, pages
      or states that are copied from or to it).
    num_open: Number of dispatched parts whose transfer has not ended.
  """

  copy: Copy
  parts: collections.deque[list[tuple[HostPages, PageCopy]]]
  num_open: int = 0


class DecoderExecutor:
  """Executor that runs a decoder; see `executor.Executor`.

  Attributes:
    decoder: The model and its cache, with one replica.
    host: Pages of the host cache.
    host_states: Recurrent states of the host cache, as many as pages.
    factor: Ratio between successive bucket sizes for the number of decodes.
    weights: Weights of the experts; None for one model.
    programs: Compiles programs in a thread; None if steps compile their own.
    costs: Measured times of steps, and of copies that run alone. Only
      `calibration` measures copies: while serving, they wait for steps.
  """

  def __init__(
    self, decoder: Decoder, num_host_pages: int, factor: int = 4,
    filters: bool = False, top: bool = False,
    weights: ExpertWeights | None = None,
  ) -> None:
    """Allocates the host cache.

    Args:
      decoder: Decoder with one replica and without sequences.
      num_host_pages: Number of pages of the host cache.
      factor: Ratio between successive bucket sizes for the number of decodes.
      filters: Whether all steps apply top-k and top-p, so that requests which
        use them need no programs of their own.
      top: Whether requests may ask for the most probable tokens.
      weights: Weights of the experts; None for those of the decoder.

    Raises:
      ValueError: The decoder has several replicas.
    """
    if decoder.num_replicas != 1:
      raise ValueError(
        f"config.parallel.data={decoder.num_replicas} must be 1, since a "
        "server has one replica; start one server per replica"
      )
    self.decoder, self.factor = decoder, factor
    self.filters, self.top, self.weights = filters, top, weights
    self.programs: Programs | None = None
    self.host = HostPages(decoder, num_host_pages)
    self.host_states = HostStates(decoder, num_host_pages)
    self.costs = MeasuredCosts()
    self._thread = futures.ThreadPoolExecutor(1, "copies")
    # A separate thread: copies of pages must not wait for the larger weights.
    self._loader = futures.ThreadPoolExecutor(1, "loads")
    # Loads under way, in order; the first one runs.
    self._loads: collections.deque[WeightLoad] = collections.deque()
    # Steps under way: each function waits for its step and returns the event.
    self._steps: collections.deque[
      Callable[[], CompletionEvent]
    ] = collections.deque()
    # Ended loads and parts of copies: functions that return the event, or None
    # if the copy has more parts. A None instead of a function is a wake-up.
    self._ended: queue.SimpleQueue[
      Callable[[], CompletionEvent | None] | None
    ] = (
      queue.SimpleQueue()
    )
    self._events: list[CompletionEvent] = []
    self._drawing = batches.SlotSampling(decoder.capacity.batch)
    self._moving: dict[int, _InFlightCopy] = {}
    self._num_copies = 0
    self._last_s = 0.0

  def close(self) -> None:
    """Stops the threads after their work under way has ended."""
    if self.programs is not None:
      self.programs.close()
    self._thread.shutdown()
    self._loader.shutdown()

  def now(self) -> float:
    """Returns the time in seconds of a monotonic clock."""
    return time.perf_counter()

  def submit(self, step: EngineStep) -> None:
    """Dispatches a step."""
    self._finish(step.after)
    params = self.weights and self.weights.params(step.weights)
    before, begun = self.decoder.compile_seconds, time.perf_counter()
    sent = dispatch(
      self.decoder, self.decoder.capacity, [step], [self._drawing],
      self.factor, self.filters, self.top, params,
      *([self.programs.choose] if self.programs else []),
    )
    compiled = self.decoder.compile_seconds > before
    self._steps.append(lambda: self._receive(sent, begun, compiled))

  def _finish(self, copies: Sequence[int]) -> None:
    """Dispatches copies, given by number; waits for those from the host."""
    moving = [self._moving[n] for n in copies if n in self._moving]
    for each in moving:
      while each.parts:
        self._dispatch(each)
    # Parts "in" are written by this thread when it receives their ends.
    while any(m.copy.kind == "in" and m.num_open for m in moving):
      self._events += self._await_transfer()

  def _begin(
    self, work: Callable[[], Callable[[], CompletionEvent | None]],
    thread: futures.Executor | None = None,
  ) -> None:
    """Runs `work` in a thread, by default the one that transfers copies.

    `work` returns a function that `wait` calls to get the completion event.
    """
    self._num_copies += 1

    def run():
      try:
        end = work()
      except BaseException as error:  # raised again by the thread that waits
        found = error

        def end():
          raise found

      self._ended.put(end)

    (thread or self._thread).submit(run)

  def load(self, load: WeightLoad) -> None:
    """Enqueues a load; see `executor.Executor`."""
    weights = self.weights
    assert weights is not None
    weights.clear(load.slot)
    self._loads.append(load)

    def work():
      error = weights.load(load.expert, load.slot)
      event = CompletionEvent(time.perf_counter(), load=load, error=error)

      def end():
        self._loads.popleft()
        return event

      return end

    self._begin(work, self._loader)

  def _await_transfer(self, timeout: float | None = None) -> list[
    CompletionEvent
  ]:
    """Waits until a load or a part of a copy ends.

    Returns:
      The event in a list, which is empty after a wake-up or between parts.
    """
    end = self._ended.get(timeout=timeout)
    if end is None:
      return []
    self._num_copies -= 1
    event = end()
    return [] if event is None else [event]

  def _receive(
    self, sent: "DispatchedStep", begun: float, compiled: bool
  ) -> CompletionEvent:
    """Waits for a step's tokens, and measures the step unless it compiled.

    Args:
      sent: The step.
      begun: Time of its dispatch in seconds.
      compiled: Whether its dispatch compiled a program.
    """
    (event,) = sent.events(time.perf_counter)
    assert event is not None
    assert event.step is not None
    now = event.time_s
    # Steps overlap: a step's time begins at the end of the previous one.
    seconds, self._last_s = now - max(begun, self._last_s), now
    if not compiled:
      read = sum(chunk.length for chunk in event.step.chunks)
      self.costs.add_step(seconds, read)
    return event

  def copy(self, copy: Copy) -> None:
    """Enqueues a copy of pages, and of a recurrent state."""
    if copy.kind != "within":
      self._moving[copy.number] = _InFlightCopy(copy, self._parts(copy))
      self._dispatch(self._moving[copy.number])
      return
    (source,), (target,) = copy.source, copy.target  # always one page
    for part in self.host.parts([(source, (target,))]):
      for piece in part:
        run = self.host.read(piece)
        self.host.write(run, piece._replace(first=target))
    self._begin(lambda: lambda: CompletionEvent(time.perf_counter(), copy=copy))

  def _parts(
    self, copy: Copy
  ) -> collections.deque[list[tuple[HostPages, PageCopy]]]:
    """Returns the parts of a copy to or from the host.

    The recurrent state is in the first part, which `copy` dispatches at once,
    since a later step may overwrite the state.
    """
    pages, places, state = copy.source, list(copy.target), copy.state
    if copy.kind == "in":
      pages, places = copy.target, list(copy.source)
      state = state and state[::-1]
    runs = []
    for first, count in _power_of_two_runs(pages):
      runs.append((first, places[:count]))
      del places[:count]
    parts = collections.deque(
      [(self.host, piece) for piece in part] for part in self.host.parts(runs)
    )
    if state is not None:
      if not parts:
        parts.append([])
      for part in self.host_states.parts([(state[0], state[1:])]):
        parts[0] += [(self.host_states, piece) for piece in part]
    return parts

  def _dispatch(self, moving: _InFlightCopy) -> None:
    """Dispatches the next part of a copy."""
    part = moving.parts.popleft()
    moving.num_open += 1
    if moving.copy.kind == "out":
      taken = [host.read(piece) for host, piece in part]

      def work():
        for (host, piece), arrays in zip(part, taken, strict=True):
          host.keep(arrays, piece)
        return lambda: self._end_part(moving)
    else:
      # Staged by the copying thread, written by the thread that submits steps.
      def work():
        staged = [host.stage(piece) for host, piece in part]

        def end():
          for (host, piece), arrays in zip(part, staged, strict=True):
            host.write(arrays, piece)
          return self._end_part(moving)

        return end

    self._begin(work)

  def _end_part(self, moving: _InFlightCopy) -> CompletionEvent | None:
    """Dispatches a copy's next part; after the last one, returns the event."""
    moving.num_open -= 1
    if moving.parts:
      self._dispatch(moving)
    if moving.num_open:
      return None
    del self._moving[moving.copy.number]
    return CompletionEvent(time.perf_counter(), copy=moving.copy)

  def wait(self, until_s: float) -> list[CompletionEvent]:
    """Waits until a step or copy ends, or until a time.

    If steps are under way, waits for the first of them regardless of the time:
    waiting in another thread would take longer than a small model's step.
    """
    # Events that `submit` has received while it waited for copies.
    found, self._events = self._events, []
    if not found and self._steps:
      found.append(self._steps.popleft()())
    elif not found:
      assert (
        self._num_copies or self.programs or until_s < float("inf")
      ), "nothing is under way"
      begun, loading = time.perf_counter(), [*self._loads][:1]
      left = until_s - begun
      try:
        timeout = None if left == float("inf") else max(0.0, left)
        found += self._await_transfer(timeout)
      except queue.Empty:
        return []
      finally:
        for load in loading:
          moved = self.weights.counters(load.expert)
          moved.exposed_s += time.perf_counter() - begun
    while not self._ended.empty():
      found += self._await_transfer()
    return found

  def wake(self) -> None:
    """Makes `wait` return; may be called from any thread."""
    self._ended.put(None)


def _power_of_two_runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yields (first page, length) of contiguous ranges of 2^k pages each."""
  for first, count in contiguous_runs(pages):
    while count:
      size = 1 << (count.bit_length() - 1)
      yield first, size
      first, count = first + size, count - size

