"""Engine thread, and the HTTP calls that wait for its tokens.

The scheduler's state is accessed only by the engine's thread. HTTP handlers run
in asyncio's event loop and send functions to that thread; the events of an
engine step are returned together, by one call into the loop.
"""

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
import dataclasses
import itertools
import logging
import queue
import threading
from typing import Any, Protocol

import jax

from caatnet.inference.scoring import Scorer, TargetScores
from caatnet.inference.transcripts import Transcript
from caatnet.serving.engine.device import SamplingState
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.executor import Executor
from caatnet.serving.requests import Request, State
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.snapshot import describe

_LOG = logging.getLogger(__name__)
# Timeout in seconds for a snapshot of the state by the engine's thread.
_SNAPSHOT_TIMEOUT_S = 2.0


class Wakeable(Executor, Protocol):
  """Executor whose `wait` another thread can interrupt."""

  def wake(self) -> None:
    """Makes `wait` return."""
    ...

  def close(self) -> None:
    """Stops the executor's threads."""
    ...


@dataclasses.dataclass(frozen=True)
class ChoiceEvent:
  """Event of a choice: a new token, or the choice's end without a token.

  A choice that draws no token, since only its prompt is scored, has one event:
  its end with the state FINISHED.

  Attributes:
    choice: Sequence that the event belongs to.
    time_s: Time in seconds on the executor's clock.
    text: New text; may be "".
    token: Token id; None for an end without a token.
    logprob: Log-probability of the token in nats.
    offset: Length of the text before it, in characters.
    state: Final state if the sequence has ended, else None.
    top: Log-probabilities of the most probable tokens, if requested.
    error: Reason of the state FAILED, as in `caatnet.serving.requests.Request`.
  """

  choice: "WaitingChoice"
  time_s: float
  text: str = ""
  token: int | None = None
  logprob: float = 0.0
  offset: int = 0
  state: State | None = None
  top: Mapping[int, float] = dataclasses.field(default_factory=dict)
  error: str = ""


@dataclasses.dataclass(eq=False)
class WaitingChoice:
  """Sequence that an HTTP call waits for.

  Attributes:
    index: Index among the choices of the call.
    prompt: Index of its prompt among the prompts of the call.
    request: The sequence's request in the scheduler.
    transcript: Text so far, and stop conditions.
    call: Call that waits for the sequence.
    draws: Whether tokens are drawn; if not, only its prompt is scored.
    scores: Scores of the prompt's tokens after the first, if requested; set
      before its first event.
    last_s: Time of its last token; None before the first.
    ended: Whether its end has been delivered to the call.
  """

  index: int
  prompt: int
  request: Request
  transcript: Transcript
  call: "Call"
  draws: bool = True
  scores: TargetScores | None = None
  last_s: float | None = None
  ended: bool = False


class Call:
  """All sequences of one HTTP request.

  Attributes:
    choices: The sequences.
    scored: Whether the tokens of prompts are scored before any are drawn.
    on_end: Called in asyncio's event loop after the call has been closed and
      the scheduler has none of its sequences.
    gone: Whether the client has disconnected.
  """

  def __init__(
    self, scored: bool = False, on_end: Callable[[], None] = lambda: None
  ) -> None:
    """Makes a call without sequences."""
    self.choices: list[WaitingChoice] = []
    self.scored, self.on_end = scored, on_end
    self.gone = False
    self._news: list[ChoiceEvent] = []
    self._error: ApiError | None = None
    self._ready = asyncio.Event()

  @property
  def num_open(self) -> int:
    """Number of its sequences that have not ended."""
    return sum(not choice.ended for choice in self.choices)

  @property
  def failed(self) -> bool:
    """Whether the call has ended with an error."""
    return self._error is not None

  def push(self, news: ChoiceEvent) -> None:
    """Adds an event of one of its sequences."""
    self._news.append(news)
    self._ready.set()

  def fail(self, error: ApiError) -> None:
    """Ends the whole call with an error."""
    self._error = error
    self._ready.set()

  def leave(self) -> None:
    """Records that the client has disconnected."""
    self.gone = True
    self._ready.set()

  async def next(self) -> Sequence[ChoiceEvent]:
    """Waits for events; returns none if the client has disconnected.

    Raises:
      ApiError: The call has failed.
    """
    await self._ready.wait()
    self._ready.clear()  # events after this point wake the next call
    found, self._news = self._news, []
    # Events before the error are delivered first.
    if self._error is not None and not found:
      raise self._error
    if self._error is not None:
      self._ready.set()
    return [] if self.gone else found


class Service:
  """Thread of an engine, and the delivery of its tokens to calls.

  The thread also scores prompts, at most one between two steps, without the
  cache. Since one thread launches all programs, every device runs them in the
  same order. Another thread compiles programs for new prompt lengths, so that
  decoding continues.

  The prompt of an expert is scored with the weights in the expert's weight
  slot. The scheduler gets the expert a weight slot for a *ticket*, a request
  that reads one token. When the ticket has ended, and before the next step is
  made, the slot still has the weights, and the prompt is scored. An expert has
  one ticket at a time, so decoding waits for one prompt at most.

  Attributes:
    engine: The engine; only the thread may access its state.
    metrics: Metrics of the server.
    calls: Calls that have not been closed.
    num_open: Number of sequences that have not ended.
    error: Exception that has stopped the engine; None while it runs.
  """

  def __init__(
    self, engine: Engine, metrics: Metrics, scorer: Scorer
  ) -> None:
    """Takes an idle engine.

    Args:
      engine: Engine whose executor is `Wakeable`.
      metrics: Metrics to update.
      scorer: Scores prompts with the engine's model or experts.
    """
    self.engine, self.metrics = engine, metrics
    self._scorer = scorer
    self._compiler = futures.ThreadPoolExecutor(1, "scorers")
    # Choices to score, grouped by prompt, whose weights are on the device.
    self._unscored: collections.deque[list[WaitingChoice]] = collections.deque()
    # By expert: choices to score, grouped by prompt, that wait for its weights;
    # and its ticket, which is for the first group.
    self._absent: dict[str, collections.deque[list[WaitingChoice]]] = {}
    self._tickets: dict[str, Request] = {}
    self.calls: set[Call] = set()
    self.num_open = 0
    self.error: BaseException | None = None
    self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._news: list[ChoiceEvent] = []
    self._served: dict[int, WaitingChoice] = {}
    engine.scheduler.ended = self._note_end
    self._going = True
    self._seen: dict[str, Any] = describe(engine)
    self._seen_s = self.now()
    self._thread = threading.Thread(
      target=self._run, name="engine", daemon=True
    )

  @property
  def _executor(self) -> Wakeable:
    return self.engine.executor  # type: ignore[return-value]

  @property
  def _scheduler(self) -> Scheduler:
    return self.engine.scheduler

  def now(self) -> float:
    """Returns the time on the executor's clock, in seconds."""
    return self._executor.now()

  # The following methods are called in asyncio's event loop.

  def start(self) -> None:
    """Starts the engine's thread; events are delivered to the running loop."""
    self._loop = asyncio.get_running_loop()
    self._thread.start()

  def stop(self) -> None:
    """Stops the engine's thread and the executor's threads."""
    self._do(self._end)
    self._thread.join()
    self._compiler.shutdown(cancel_futures=True)
    self._executor.close()

  def submit(self, call: Call) -> None:
    """Queues a call's sequences in the engine."""
    self.calls.add(call)
    self.num_open += call.num_open
    self._do(lambda: self._begin(call))

  def close(self, call: Call) -> None:
    """Removes a call; its unfinished sequences are cancelled."""
    self.calls.discard(call)
    left = [choice for choice in call.choices if not choice.ended]
    for choice in left:
      choice.ended = True
      self.num_open -= 1
      self.metrics.ended(
        choice.request, State.FAILED if call.failed else State.CANCELLED
      )
    if left:
      self._do(lambda: self._cancel(left))
    self._do(lambda: self._loop.call_soon_threadsafe(call.on_end))

  async def state(self) -> dict[str, Any]:
    """Returns a snapshot of the state (`caatnet.serving.server.snapshot`).

    While the engine compiles, or after it has stopped, the previous snapshot is
    returned; ``age_s`` is its age in seconds.
    """
    answer = self._loop.create_future()

    def look() -> None:
      self._seen = describe(self.engine)
      self._seen_s = self.now()
      self._loop.call_soon_threadsafe(
        lambda: answer.done() or answer.set_result(None)
      )

    if self.error is None:
      self._do(look)
      await asyncio.wait([answer], timeout=_SNAPSHOT_TIMEOUT_S)
    return self._seen | {"age_s": self.now() - self._seen_s}

  def forget(self, experts: Sequence[str], pinned: frozenset[str]) -> None:
    """Frees the memory of experts that no later request needs.

    Args:
      experts: Keys of revisions without requests. One that is loading keeps its
        weight slot until it is evicted.
      pinned: Keys of the experts that are never evicted from now on.
    """

    def drop() -> None:
      self._scheduler.policy.slots.pinned = pinned
      for key in experts:
        self.engine.executor.weights.forget(key)
        self._scheduler.policy.slots.drop(key)

    self._do(drop)

  def _deliver(self, batch: Sequence[ChoiceEvent]) -> None:
    """Delivers events to their calls, and updates the metrics."""
    for news in batch:
      choice = news.choice
      if choice.ended:  # cancelled, or its call is closed
        continue
      if news.token is not None:
        since = choice.last_s
        self.metrics.token(choice.request, news.time_s, since)
        choice.last_s = news.time_s
      if news.state is not None:
        choice.ended = True
        self.num_open -= 1
        self.metrics.ended(choice.request, news.state)
      choice.call.push(news)

  def fail(self, error: ApiError) -> None:
    """Ends all calls with an error."""
    for call in list(self.calls):
      call.fail(error)

  def _do(self, function: Callable[[], None]) -> None:
    """Sends a function to the engine's thread."""
    # The inbox wakes an idle thread, `wake` one that waits for the executor.
    self._inbox.put(function)
    self._executor.wake()

  # The following methods are called in the engine's thread.

  def _run(self) -> None:
    """Runs the engine until it is stopped or fails."""
    try:
      while self._going:
        self._run_inbox()
        if not self._going:
          return
        self._score()
        self.engine.step()
        self._send()
    except BaseException as error:  # reported to open calls and by /health
      self.error = error
      _LOG.error(
        "the engine has stopped: %s: %s", type(error).__name__, error,
        exc_info=_LOG.isEnabledFor(logging.DEBUG),
      )
      failure = ApiError(500, f"the engine has stopped: {error}", "broken")
      self._loop.call_soon_threadsafe(self.fail, failure)

  def _run_inbox(self) -> None:
    """Runs functions of the inbox; waits for one if the engine is idle."""
    if self.engine.idle and not (self._unscored or self._absent):
      self._inbox.get()()
    while not self._inbox.empty():
      self._inbox.get()()

  def _end(self) -> None:
    """Ends the loop of `_run`."""
    self._going = False

  def _begin(self, call: Call) -> None:
    """Has a call's prompts scored if required; else adds its sequences."""
    if call.scored:
      self._compiler.submit(self._compile, call)
    else:
      self._add(call.choices)

  def _compile(self, call: Call) -> None:
    """Compiles programs that score a call's prompts; runs in `_compiler`."""
    try:
      for choice in call.choices:
        self._scorer.compile(len(choice.request.prompt))
    except Exception as error:  # any layer of the compiler may fail
      failure = ApiError(
        500, f"the program to score the prompt cannot be compiled: {error}",
        "not_compiled",
      )
      self._loop.call_soon_threadsafe(call.fail, failure)
    else:
      self._do(lambda: self._queue_prompts(call))

  def _queue_prompts(self, call: Call) -> None:
    """Queues the prompts of a call to be scored."""
    for _, group in itertools.groupby(call.choices, lambda c: c.prompt):
      choices = list(group)
      if expert := choices[0].request.expert:
        self._absent.setdefault(expert, collections.deque()).append(choices)
      else:
        self._unscored.append(choices)

  def _score(self) -> None:
    """Scores the next prompt, if any, and adds its sequences."""
    self._add_tickets()
    if not self._unscored:
      return
    choices = self._unscored.popleft()
    if choices[0].ended:  # the call is closed
      return
    prompt, expert = choices[0].request.prompt, choices[0].request.expert
    params = None
    if expert:  # its ticket has ended, and no load has begun since
      slot = self._scheduler.policy.slots.find(expert)
      params = self.engine.executor.weights.params(slot)
    try:
      (scores,) = self._scorer.score([prompt], top=True, params=params)
    except ValueError:  # tokens and length were checked: the logits are NaN
      self._end_without_token(choices, State.FAILED)
      return
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      # The logits of all positions are larger than those of a step.
      failure = ApiError(
        500, f"scoring a prompt of {len(prompt):,} tokens takes more memory "
        "than is available", "out_of_memory",
      )
      self._loop.call_soon_threadsafe(choices[0].call.fail, failure)
      return
    for choice in choices:
      choice.scores = scores
    self._add(choices)

  def _add_tickets(self) -> None:
    """Adds tickets of experts that have unscored prompts and no ticket."""
    for expert in [e for e in self._absent if e not in self._tickets]:
      line = self._absent[expert]
      while line and line[0][0].ended:  # the call is closed
        line.popleft()
      if not line:
        del self._absent[expert]
        continue
      first = line[0][0].request
      ticket = Request(
        first.number, first.prompt[:1], 1, client=first.client, expert=expert,
        priority=first.priority, arrival_s=first.arrival_s,
        deadline_s=first.deadline_s,
        payload=SamplingState(first.payload.drawing),
      )
      self._tickets[expert] = ticket
      self._scheduler.add(ticket)

  def _note_ticket(self, ticket: Request) -> None:
    """Queues the prompt of an ended ticket for scoring, or ends its choices."""
    expert = ticket.expert
    del self._tickets[expert]
    choices = self._absent[expert].popleft()
    if not self._absent[expert]:
      del self._absent[expert]
    if ticket.state is State.FINISHED:
      self._unscored.append(choices)
    elif ticket.state is not State.CANCELLED:
      self._end_without_token(choices, ticket.state, ticket.error)

  def _add(self, choices: Sequence[WaitingChoice]) -> None:
    """Adds sequences to the scheduler; ends those that draw no token."""
    for choice in choices:
      if choice.draws:
        self._served[choice.request.number] = choice
        self._scheduler.add(choice.request)
      else:
        choice.transcript.interrupt()
        self._end_without_token([choice], State.FINISHED)

  def _end_without_token(
    self, choices: Iterable[WaitingChoice], state: State, error: str = ""
  ) -> None:
    """Queues the end of sequences that were not added to the scheduler."""
    now = self.now()
    self._news += [
      ChoiceEvent(choice, now, state=state, error=error) for choice in choices
    ]

  def _cancel(self, choices: Iterable[WaitingChoice]) -> None:
    """Cancels sequences, and the ticket of an unscored prompt."""
    for choice in choices:
      request = choice.request
      ticket = self._tickets.get(request.expert)
      if request.number in self._served:
        self._scheduler.cancel(request, self.now())
      elif ticket is not None and ticket.number == request.number:
        self._scheduler.cancel(ticket, self.now())

  def take(self, choice: WaitingChoice, token: int) -> bool:
    """Appends a token to a choice; returns whether it has ended.

    The function is used as `caatnet.serving.requests.Request.stop`.
    """
    transcript = choice.transcript
    payload, index = choice.request.payload, len(transcript.tokens)
    logprob = payload.logprobs[index]
    top = payload.top[index] if payload.num_top else {}
    offset = len(transcript.text)
    text = transcript.push(token, logprob)
    state = State.FINISHED if transcript.ended else None
    self._news.append(
      ChoiceEvent(choice, self.now(), text, token, logprob, offset, state, top)
    )
    return transcript.ended

  def _note_end(self, request: Request) -> None:
    """Queues an event for a sequence that ended without a token."""
    if self._tickets.get(request.expert) is request:
      self._note_ticket(request)
      return
    choice = self._served.pop(request.number)
    if request.state not in (State.FINISHED, State.CANCELLED):
      self._news.append(
        ChoiceEvent(
          choice, self.now(), state=request.state, error=request.error
        )
      )

  def _send(self) -> None:
    """Sends the queued events to asyncio's event loop."""
    if self._news:
      batch, self._news = self._news, []
      self._loop.call_soon_threadsafe(self._deliver, batch)
