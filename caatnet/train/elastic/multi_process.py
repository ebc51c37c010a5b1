"""Worker that consists of several processes; process 0 is the swarm's peer.

The processes of a worker run the same programs in the same order, so events of
the swarm must reach all of them at the same point of the program. While process
0 waits for the swarm, it periodically broadcasts an event: nothing yet, an
attempt to complete a round, or the end of the wait. In an attempt all processes
run the round's function; process 0 exchanges its data with other workers and
broadcasts the results. All jax collectives of a process run in one thread, so a
round never overlaps with steps.
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
from parallel.peers.timeouts import (
  PeerHalted,
  RunFinished,
  StoppedByCoordinator,
)
from parallel.peers.transport.transfers import LinksLost

_EVENT_S = 1.0  # interval of broadcasts while nothing happens, in seconds
_ERRORS_BY_NAME = {
  x.__name__: x for x in (
    PeerHalted, RunFinished, StoppedByCoordinator, ValueError
  )
}


class SwarmView(NamedTuple):
  """Copy of the attributes of a `Swarm` that a worker reads between calls.

  Attributes:
    newest: The newest revision of the swarm's shared state.
    samples: Index ranges of the samples leased for the next contribution.
    counted: Whether the last contribution is in a committed round.
    me: The peer's id.
    members: Ids of the swarm's members.
  """

  newest: Revision
  samples: Spans
  counted: bool
  me: Any
  members: tuple[Any, ...]


class ReplicatedSwarm:
  """`Swarm` for each process of a worker, of which only process 0 is a peer."""

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
    self._run_and_relay(lambda: self._swarm.__enter__())
    return self

  def __exit__(self, *_: Any) -> None:
    if self._swarm is not None:
      self._swarm.__exit__()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._view, name)

  @property
  def state(self) -> dict[str, Any]:
    """Shared state of the newest revision; see `Swarm`."""
    return dict(self._view.newest.state_without_leases)

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
    """Contributes ``part`` to a round, which ``combine`` computes; see `Swarm`.

    All processes of the worker must call it.
    """

    def give() -> None:
      self._swarm.give(part, self._relay_attempt, weight)

    self._run_and_relay(give, lambda *args: combine(*args, part))
    return self.state

  def _relay_attempt(self, exchange: Any, state: State, part: Any) -> State:
    """Returns the shared state after a round, computed in the main thread.

    Called in the peer's thread, as the function ``combine`` of `Swarm.give`.
    """
    del part
    answer: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    self._events.put(("attempt", (exchange, state, answer)))
    made, error = answer.get()
    if error is not None:
      raise error
    return made

  def _run_and_relay(
    self, call: Callable[[], Any], attempt: Callable[..., State] | None = None
  ) -> None:
    """Runs a call on process 0, and handles its events on all processes.

    Args:
      call: Function that process 0 calls in a thread.
      attempt: Function ``(exchange, shared state) -> shared state`` of one
        attempt of a round; None if the call starts no round.

    Raises:
      PeerHalted: If the coordinator has ended.
      RunFinished: If the swarm has finished training.
    """
    if self._swarm is not None:
      self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
      threading.Thread(target=self._call, args=(call,), daemon=True).start()
    while True:
      word, what = self._next_event()
      if word == "attempt":
        self._attempt(what, attempt)
      elif word == "end":
        self._view = _broadcast(what)
        return
      elif word == "error":
        raise _make_error(*_broadcast(what))

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

  def _next_event(self) -> tuple[str, Any]:
    """Returns the next event's name and, on process 0 only, its content."""
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
    except LinksLost as lost:  # raised on all processes
      error = lost
    if answer is not None:
      answer.put((made, error))


class _Exchange:
  """Exchange with other workers for each process; process 0 executes it."""

  def __init__(self, real: Any) -> None:
    self._real = real
    facts = real and (
      real.round, real.contributors, real.rank, real.weights
    )
    self.round, self.contributors, self.rank, self.weights = _broadcast(facts)

  def sum(self, x: np.ndarray, order: str = "direct") -> np.ndarray:
    return self._call_and_broadcast(lambda: self._real.sum(x, order))

  def gather(self, data: Any) -> list[Any]:
    return self._call_and_broadcast(
      lambda: [bytes(x) for x in self._real.gather(data)]
    )

  def _call_and_broadcast(self, call: Callable[[], Any]) -> Any:
    """Broadcasts the result of process 0's call, or raises its error on all."""
    value, failed = None, None
    if self._real is not None:
      try:
        value = call()
      except Exception as error:
        failed = type(error).__name__, str(error)
    value, failed = _broadcast((value, failed))
    if failed is not None:
      raise _make_error(*failed)
    return value


def _make_error(kind: str, text: str) -> Exception:
  """Returns the error that process 0 raised, from its class name and text."""
  if kind == LinksLost.__name__:
    return LinksLost(None, text)
  return _ERRORS_BY_NAME.get(kind, RuntimeError)(text)


def _broadcast(value: Any) -> Any:
  """Returns process 0's value on all processes, sent as a pickle.

  Raises:
    ValueError: If the pickle arrived with another checksum.
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


def replicate_swarm(make: Callable[[], Swarm]) -> Any:
  """Returns a `Swarm`, or for a worker of several processes its replica.

  Args:
    make: Creates the membership; called on process 0 only.
  """
  if jax.process_count() == 1:
    return make()
  return ReplicatedSwarm(make() if jax.process_index() == 0 else None)
