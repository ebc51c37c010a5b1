"""The engine in a thread of its own, and the calls that wait for it.

All of the scheduler's state belongs to the engine's thread. Who handles HTTP
runs in asyncio's loop and sends functions to that thread; what a turn of the
engine has brought comes back at once, by one call into the loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import logging
import queue
import threading
from typing import Any, Protocol

from caatnet.inference.transcripts import Transcript
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.executor import Executor
from caatnet.serving.requests import Request, State
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.snapshot import describe

_LOG = logging.getLogger(__name__)
# How long an answer about the state waits for the engine's thread, in seconds.
_PATIENCE_S = 2.0


class Wakeable(Executor, Protocol):
  """An executor for which another thread may wait."""

  def wake(self) -> None:
    """Lets `wait` return."""
    ...

  def close(self) -> None:
    """Ends its threads."""
    ...


@dataclasses.dataclass(frozen=True)
class News:
  """A token of a choice, or its end without one.

  Attributes:
    choice: Whose.
    time_s: When, on the executor's clock.
    text: More of its text, maybe "".
    token: The token; None for an end without one.
    logprob: The token's log-probability.
    offset: How long the text was before it, in characters.
    state: What it has ended with, else None.
  """

  choice: "Choice"
  time_s: float
  text: str = ""
  token: int | None = None
  logprob: float = 0.0
  offset: int = 0
  state: State | None = None


@dataclasses.dataclass(eq=False)
class Choice:
  """A sequence that a call waits for.

  Attributes:
    index: Its number among the call's.
    prompt: The number of its prompt among the call's.
    request: What the scheduler knows of it.
    transcript: Its text, and where it ends.
    call: Who waits for it.
    last_s: When its last token came; None before the first.
    ended: Whether the call knows its end.
  """

  index: int
  prompt: int
  request: Request
  transcript: Transcript
  call: "Call"
  last_s: float | None = None
  ended: bool = False


class Call:
  """The sequences that one request of HTTP asks for.

  Attributes:
    choices: They.
    gone: Whether the client has gone.
  """

  def __init__(self) -> None:
    """Makes a call that waits for nothing yet."""
    self.choices: list[Choice] = []
    self.gone = False
    self._news: list[News] = []
    self._error: ApiError | None = None
    self._ready = asyncio.Event()

  @property
  def num_open(self) -> int:
    """How many of its sequences have not ended."""
    return sum(not choice.ended for choice in self.choices)

  @property
  def failed(self) -> bool:
    """Whether it has ended with an error."""
    return self._error is not None

  def push(self, news: News) -> None:
    """Takes news of one of its sequences."""
    self._news.append(news)
    self._ready.set()

  def fail(self, error: ApiError) -> None:
    """Ends all of it with an error."""
    self._error = error
    self._ready.set()

  def leave(self) -> None:
    """Notes that the client has gone."""
    self.gone = True
    self._ready.set()

  async def next(self) -> Sequence[News]:
    """Waits for news; there are none if the client has gone.

    Raises:
      ApiError: The call has failed.
    """
    await self._ready.wait()
    self._ready.clear()
    found, self._news = self._news, []
    if self._error is not None and not found:
      raise self._error
    if self._error is not None:
      self._ready.set()
    return [] if self.gone else found


class Service:
  """Runs an engine, and hands what it draws to who waits.

  Attributes:
    engine: The engine, of which only the thread knows the state.
    metrics: What was measured.
    calls: The calls under way.
    error: Why the engine has stopped; None while it runs.
  """

  def __init__(self, engine: Engine, metrics: Metrics) -> None:
    """Takes an engine with nothing to do.

    Args:
      engine: Its executor is `Wakeable`.
      metrics: Where to note what is measured.
    """
    self.engine, self.metrics = engine, metrics
    self.calls: set[Call] = set()
    self.error: BaseException | None = None
    self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._news: list[News] = []
    self._served: dict[int, Choice] = {}
    engine.scheduler.ended = self._note_end
    self._going = True
    self._seen: dict[str, Any] = describe(engine.scheduler)
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

  @property
  def num_open(self) -> int:
    """How many sequences have not ended."""
    return sum(call.num_open for call in self.calls)

  def now(self) -> float:
    """Returns the time on the executor's clock, in seconds."""
    return self._executor.now()

  # What follows is called in asyncio's loop.

  def start(self) -> None:
    """Begins to serve those in the loop in which it is called."""
    self._loop = asyncio.get_running_loop()
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread, and the executor's."""
    self._do(self._end)
    self._thread.join()
    self._executor.close()

  def submit(self, call: Call) -> None:
    """Lets the engine begin a call's sequences."""
    self.calls.add(call)
    self._do(lambda: self._add(call.choices))

  def close(self, call: Call) -> None:
    """Forgets a call; what has not ended of it is cancelled."""
    self.calls.discard(call)
    left = [choice for choice in call.choices if not choice.ended]
    for choice in left:
      choice.ended = True
      self.metrics.ended(
        choice.request, State.FAILED if call.failed else State.CANCELLED
      )
    if left:
      self._do(lambda: self._cancel(left))

  async def state(self) -> dict[str, Any]:
    """Returns what `caatnet.serving.server.snapshot` says, or said last.

    While the engine compiles, or has stopped, it says nothing new: ``age_s`` is
    how long ago it said this, in seconds.
    """
    answer = self._loop.create_future()

    def look() -> None:
      self._seen = describe(self._scheduler)
      self._seen_s = self.now()
      self._loop.call_soon_threadsafe(
        lambda: answer.done() or answer.set_result(None)
      )

    if self.error is None:
      self._do(look)
      await asyncio.wait([answer], timeout=_PATIENCE_S)
    return self._seen | {"age_s": self.now() - self._seen_s}

  def _deliver(self, batch: Sequence[News]) -> None:
    """Hands news to the calls."""
    for news in batch:
      choice = news.choice
      if choice.ended:  # it was cancelled
        continue
      if news.token is not None:
        since = choice.last_s
        self.metrics.token(choice.request, news.time_s, since)
        choice.last_s = news.time_s
      if news.state is not None:
        choice.ended = True
        self.metrics.ended(choice.request, news.state)
      choice.call.push(news)

  def fail(self, error: ApiError) -> None:
    """Ends all calls with an error."""
    for call in list(self.calls):
      call.fail(error)

  def _do(self, function: Callable[[], None]) -> None:
    """Lets the engine's thread call a function."""
    self._inbox.put(function)
    self._executor.wake()

  # What follows is called in the engine's thread.

  def _run(self) -> None:
    try:
      while self._going:
        self._take_calls()
        if not self._going:
          return
        self.engine.turn()
        self._send()
    except BaseException as error:  # for those who wait, and for health
      self.error = error
      _LOG.error(
        "the engine has stopped: %s: %s", type(error).__name__, error,
        exc_info=_LOG.isEnabledFor(logging.DEBUG),
      )
      failure = ApiError(500, f"the engine has stopped: {error}", "broken")
      self._loop.call_soon_threadsafe(self.fail, failure)

  def _take_calls(self) -> None:
    """Calls what others have sent; waits for that if nothing is to be done."""
    if self.engine.idle:
      self._inbox.get()()
    while not self._inbox.empty():
      self._inbox.get()()

  def _end(self) -> None:
    self._going = False

  def _add(self, choices: Iterable[Choice]) -> None:
    for choice in choices:
      self._served[choice.request.number] = choice
      self._scheduler.add(choice.request)

  def _cancel(self, choices: Iterable[Choice]) -> None:
    for choice in choices:
      self._scheduler.cancel(choice.request, self.now())

  def take(self, choice: Choice, token: int) -> bool:
    """Takes a choice's next token, and returns whether it has ended.

    It is what `caatnet.serving.requests.Request.ends` calls.
    """
    transcript = choice.transcript
    logprob = choice.request.payload.logprobs[len(transcript.tokens)]
    offset = len(transcript.text)
    text = transcript.push(token, logprob)
    state = State.FINISHED if transcript.ended else None
    self._news.append(
      News(choice, self.now(), text, token, logprob, offset, state)
    )
    return transcript.ended

  def _note_end(self, request: Request) -> None:
    choice = self._served.pop(request.number)
    if request.state not in (State.FINISHED, State.CANCELLED):
      self._news.append(News(choice, self.now(), state=request.state))

  def _send(self) -> None:
    if self._news:
      batch, self._news = self._news, []
      self._loop.call_soon_threadsafe(self._deliver, batch)
