"""Worker that consists of several processes; process 0 is the swarm's peer.

The processes of a worker run the same programs in the same order, so events of
the swarm must reach all of them at the same point of the program. While the
peer waits, process 0 broadcasts events periodically: nothing yet, an attempt of
a round, or the end. In an attempt all processes run the round's function. Data
are gathered among the processes, exchanged by process 0, and the result is
broadcast. All jax collectives of a process run in one thread, so a round never
overlaps with steps.
"""

from collections.abc import Callable
import pickle
import queue
import threading
from typing import Any, NamedTuple
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from parallel.peers.membership.leases import Spans
from parallel.peers.membership.revision import Revision
from parallel.peers.membership.shared_state import State
from parallel.peers.swarm import Swarm
from parallel.peers.timeouts import Finished, Halted, Stopped
from parallel.peers.transport.transfers import Lost

_EVENT_S = 1.0  # interval of broadcasts while nothing happens, in seconds
_ENDS = {x.__name__: x for x in (Halted, Finished, Stopped, ValueError)}


class SwarmView(NamedTuple):
  """Copy of the attributes of a `Swarm` that a worker reads between calls.

  Attributes:
    newest: The newest revision.
    samples: Leased samples of the next contribution.
    counted: Whether the last contribution is in a committed round.
    me: The peer's id.
    members: The members of the newest epoch.
  """

  newest: Revision
  samples: Spans
  counted: bool
  me: Any
  members: tuple[Any, ...]


class ReplicatedSwarm:
  """Replica of a swarm on each process of a worker; process 0 has the swarm."""

  def __init__(self, swarm: Swarm | None) -> None:
    """Broadcasts the attributes of process 0's swarm.

    Args:
      swarm: The swarm, which has not been entered; None on other processes.
    """
    self._swarm = swarm
    self._view = _broadcast(
      swarm and SwarmView(swarm.newest, (), False, swarm.me, swarm.members)
    )

  def __enter__(self) -> "ReplicatedSwarm":
    self._follow(lambda: self._swarm.__enter__())
    return self

  def __exit__(self, *_: Any) -> None:
    if self._swarm is not None:
      self._swarm.__exit__()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._view, name)

  @property
  def state(self) -> dict[str, Any]:
    """Shared state of the newest revision; see `Swarm`."""
    return dict(self._view.newest.visible)

  @property
  def checkpoint(self) -> tuple[int, State]:
    """Revision and shared state to store with a checkpoint; see `Swarm`."""
    return self._view.newest.number, self._view.newest.shared

  @property
  def revision(self) -> int:
    """Number of the newest revision; see `Swarm`."""
    return self._view.newest.number

  @property
  def digest(self) -> Any:
    """Hash of the newest revision's shared state; see `Swarm`."""
    return self._view.newest.digest

  def give(self, part: Any, combine: Any, weight: float = 1.0) -> Any:
    """Contributes to a round; see `Swarm`. Collective over the processes."""

    def give() -> None:
      self._swarm.give(part, self._relay_attempt, weight)

    self._follow(give, lambda *args: combine(*args, part))
    return self.state

  def _relay_attempt(self, exchange: Any, state: State, part: Any) -> State:
    """Passes an attempt to the main thread; called in a thread of the peer."""
    del part
    answer: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    self._events.put(("attempt", (exchange, state, answer)))
    made, error = answer.get()
    if error is not None:
      raise error
    return made

  def _follow(
    self, call: Callable[[], Any], attempt: Callable[..., State] | None = None
  ) -> None:
    """Runs a call on process 0, and handles its events on all processes.

    Args:
      call: Function that process 0 calls in a thread.
      attempt: Function ``(exchange, shared state) -> shared state`` of one
        attempt of a round; None if the call starts no round.

    Raises:
      Halted: If the coordinator has ended.
      Finished: If the swarm has finished training.
    """
    if self._swarm is not None:
      self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
      threading.Thread(target=self._call, args=(call,), daemon=True).start()
    while True:
      word, what = self._next()
      if word == "attempt":
        self._attempt(what, attempt)
      elif word == "end":
        self._view = _broadcast(what)
        return
      elif word == "error":
        raise _made(*_broadcast(what))

  def _call(self, call: Callable[[], Any]) -> None:
    try:
      call()
    except BaseException as error:
      self._events.put(("error", (type(error).__name__, str(error))))
      return
    swarm = self._swarm
    self._events.put(("end", SwarmView(
      swarm.newest, swarm.samples, swarm.counted, swarm.me, swarm.members
    )))

  def _next(self) -> tuple[str, Any]:
    """Returns the next event; processes other than 0 get only its name."""
    found: tuple[str, Any] = "", None
    if self._swarm is not None:
      try:
        found = self._events.get(timeout=_EVENT_S)
      except queue.Empty:
        found = "nothing", None
    return _broadcast(found[0]), found[1]

  def _attempt(self, what: Any, attempt: Callable[..., State] | None) -> None:
    real, state, answer = what or (None, None, None)
    exchange = _Exchange(real)
    state = _broadcast(state)
    made, error = None, None
    try:
      made = attempt(exchange, state)
    except Lost as lost:  # raised on all processes
      error = lost
    if answer is not None:
      answer.put((made, error))


class _Exchange:
  """Replica of an exchange on each process; process 0 has the real exchange."""

  def __init__(self, real: Any) -> None:
    self._real = real
    facts = real and (
      real.round, real.contributors, real.rank, real.weights
    )
    self.round, self.contributors, self.rank, self.weights = _broadcast(facts)

  def sum(self, x: np.ndarray, order: str = "direct") -> np.ndarray:
    return self._run(lambda: self._real.sum(x, order))

  def gather(self, data: Any) -> list[Any]:
    return self._run(lambda: [bytes(x) for x in self._real.gather(data)])

  def _run(self, call: Callable[[], Any]) -> Any:
    """Broadcasts the result of process 0's call, or raises its error on all."""
    value, failed = None, None
    if self._real is not None:
      try:
        value = call()
      except Exception as error:
        failed = type(error).__name__, str(error)
    value, failed = _broadcast((value, failed))
    if failed is not None:
      raise _made(*failed)
    return value


def _made(kind: str, text: str) -> Exception:
  """Returns the error of process 0, from the name of its class and its text."""
  if kind == Lost.__name__:
    return Lost(None, text)
  return _ENDS.get(kind, RuntimeError)(text)


def _broadcast(value: Any) -> Any:
  """Returns process 0's value on all processes (a broadcast of pickles).

  Raises:
    ValueError: It arrived with another checksum.
  """
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  facts = np.array([data.size, zlib.crc32(data)], np.uint32)
  size, crc = map(int, multihost_utils.broadcast_one_to_all(facts))
  # Sizes are rounded to powers of two, since each shape is a new program.
  room = np.zeros(1 << (size - 1).bit_length(), np.uint8)
  if jax.process_index() == 0:
    room[:size] = data
  room = np.asarray(multihost_utils.broadcast_one_to_all(room))
  if zlib.crc32(room[:size]) != crc:
    raise ValueError(
      f"{size:,} bytes of process 0 arrived with another checksum: the network "
      "or memory is damaged; the same command resumes"
    )
  return pickle.loads(room[:size].tobytes())


def joined(make: Callable[[], Swarm]) -> Any:
  """Returns a worker's membership in a swarm, for one or several processes.

  Args:
    make: Creates the membership; called on process 0 only.
  """
  if jax.process_count() == 1:
    return make()
  return ReplicatedSwarm(make() if jax.process_index() == 0 else None)
