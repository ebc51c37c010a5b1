"""Simulated federated run: the server's core with a simulated clock.

The server is `server.step`, the function that `service.py` runs over sockets.
Clients, their durations and faults are simulated: a heap holds all future
events. The result depends on the arguments only, so a fault can be replayed at
any time of a round.

A fault concerns one client, or the server:

  kill   the process ends, loses its model and its updates, and starts again
  stop   the process pauses; the server closes its silent connection
  cut    the connection ends; the process continues, and connects again
  server the server ends, and starts again from its last saved state
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple

import numpy as np

from caatnet.federated import events, server
from caatnet.federated.server import Arithmetic, Rules, Server


class Durations(NamedTuple):
  """Durations of a client's part of a round, in seconds."""

  downlink_s: float
  compute_s: float
  uplink_s: float


class Fault(NamedTuple):
  """Fault of a process or its connection.

  Attributes:
    time: Time in seconds.
    kind: "kill", "stop", "cut" or "server"; see the head of this module.
    client: Id of the client; ignored by "server".
    lasts_s: Time until the process runs, or the connection is there, again.
  """

  time: float
  kind: str
  client: int
  lasts_s: float


@dataclasses.dataclass
class _Client:
  """State of a simulated client.

  Attributes:
    connection: Number of its connection; 0 for none. Messages of an earlier
      connection are lost.
    process: Number of its process. Events of an earlier process are void.
    wakes: Time until which it is stopped.
    phase: Current activity, for statistics of faults.
    revision: Revision that it holds; -1 for none.
    retained: Newest update; None for none.
    working: Round in progress; -1 for none.
  """

  connection: int = 0
  process: int = 0
  wakes: float = 0.0
  phase: str = "idle"
  revision: int = -1
  retained: events.Update | None = None
  working: int = -1


class Simulation:
  """Simulated run.

  Attributes:
    state: State of the server.
    time: Current time in seconds.
    effects: (time, effect) of each effect of the server, without `Save`.
    hit: (kind, phase of the client) of each fault.
  """

  def __init__(
    self, rules: Rules, arithmetic: Arithmetic, params: np.ndarray,
    examples: Sequence[int],
    train: Callable[[int, int, np.ndarray], np.ndarray],
    durations: Callable[[int, int, int], Durations],
    faults: Sequence[Fault] = (), silence_s: float = 2.0,
  ) -> None:
    """Creates a run.

    Args:
      rules: Constants of the run.
      arithmetic: Computations on vectors.
      params: Initial parameters, float32 ``[n]``.
      examples: Number of examples of each client.
      train: Maps client, round and the received parameters to the update.
      durations: Maps client, round and the bytes of the downlink to durations.
      faults: Faults.
      silence_s: Time after which the server closes a silent connection.
    """
    self._rules, self._arithmetic = rules, arithmetic
    self._examples, self._train, self._durations = examples, train, durations
    self._silence_s = silence_s
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._count = 0
    self._clients = [_Client() for _ in examples]
    self._connections = 0
    self._server = 1  # number of its process; 0 while it is down
    self._servers = 1
    self.time = 0.0
    self.state = server.initial(params, arithmetic)
    self._saved = self.state
    self.effects: list[tuple[float, Any]] = []
    self.hit: list[tuple[str, str]] = []
    for client in range(len(examples)):
      self._after(0.01 * client, functools.partial(self._connect, client))
    for fault in faults:
      self._after(fault.time, functools.partial(self._fault, fault))

  def run(self, limit_s: float = math.inf) -> Server:
    """Runs until the end or a time limit; returns the server's state."""
    while self._events and not self.state.finished:
      time, _, event = heapq.heappop(self._events)
      if time > limit_s:
        break
      self.time = max(self.time, time)
      event()
    return self.state

  def _after(self, wait_s: float, event: Callable[[], None]) -> None:
    self._count += 1  # equal times in the order of their creation
    heapq.heappush(self._events, (self.time + wait_s, self._count, event))

  def _connect(self, client: int) -> None:
    """Connects a client, or tries again later."""
    it = self._clients[client]
    if it.connection:
      return
    if it.wakes > self.time or not self._server:
      wait_s = max(it.wakes - self.time, 0.0) or 0.5
      self._after(wait_s, functools.partial(self._connect, client))
      return
    self._connections += 1
    it.connection = self._connections
    retained = -1 if it.retained is None else it.retained.round
    self._to_server(client, events.Hello(
      client, self._examples[client], it.revision, self._rules.digest, retained
    ), 0.01)

  def _to_server(self, client: int, message: Any, wait_s: float) -> None:
    """Sends a message, which is lost if the connection ends before."""
    connection = self._clients[client].connection

    def arrive() -> None:
      it = self._clients[client]
      if it.wakes > self.time:  # the rest is sent after the pause
        self._after(it.wakes - self.time, arrive)
      elif connection and it.connection == connection and self._server:
        if isinstance(message, events.Update):
          it.phase = "idle"
        self._step(message)

    self._after(wait_s, arrive)

  def _step(self, message: Any) -> None:
    """Runs the server's core and executes its effects."""
    self.state, effects = server.step(
      self.state, message, self.time, self._rules, self._arithmetic
    )
    for effect in effects:
      match effect:
        case events.Save():
          self._saved = self.state
          continue
        case events.Train():
          size = sum(map(len, server.downlink(self.state, effect.base)[1]))
          self._work(effect, self.state.published, size)
        case events.Resend():
          retained = self._clients[effect.client].retained
          if retained is not None and retained.round == effect.round:
            self._upload(effect.client, retained)
        case events.Abandon():
          it = self._clients[effect.client]
          if it.working == effect.round:
            it.working, it.phase = -1, "idle"
      self.effects.append((self.time, effect))
    wake = server.wake_s(self.state, self._rules)
    if wake is not None:
      process = self._server

      def tick() -> None:
        if self._server == process:
          self._step(events.Tick())

      if wake > self.time:
        self._after(wake - self.time, tick)

  def _work(
    self, train: events.Train, published: np.ndarray, size: int
  ) -> None:
    """Sends a model to a client, which trains and returns its update."""
    it = self._clients[train.client]
    if it.working == train.round:
      return  # it has not stopped computing
    times = self._durations(train.client, train.round, size)
    connection, process = it.connection, it.process
    it.phase = "downlink"

    def received() -> None:
      if it.wakes > self.time:
        self._after(it.wakes - self.time, received)
      elif connection and it.connection == connection:
        it.working, it.revision = train.round, train.revision
        it.phase = "training"
        self._after(times.compute_s, computed)

    def computed() -> None:
      if it.wakes > self.time:
        self._after(it.wakes - self.time, computed)
      elif it.process == process and it.working == train.round:
        delta = self._train(train.client, train.round, published)
        it.working = -1
        it.retained = events.Update(
          train.client, train.round, train.revision, delta
        )
        self._upload(train.client, it.retained)

    self._after(times.downlink_s, received)

  def _upload(self, client: int, update: events.Update) -> None:
    it = self._clients[client]
    it.phase = "uplink"
    times = self._durations(client, update.round, 0)
    self._to_server(client, update, times.uplink_s)

  def _fault(self, fault: Fault) -> None:
    """Executes a fault."""
    if fault.kind == "server":
      self._stop_server(fault.lasts_s)
      return
    it = self._clients[fault.client]
    self.hit.append((fault.kind, it.phase))
    again = functools.partial(self._connect, fault.client)
    if fault.kind == "stop":
      it.wakes = max(it.wakes, self.time + fault.lasts_s)
      if fault.lasts_s > self._silence_s:
        self._after(
          self._silence_s, functools.partial(self._lose, fault.client)
        )
        self._after(fault.lasts_s, again)
      return
    self._lose(fault.client)
    if fault.kind == "kill":
      it.process += 1
      it.revision, it.retained, it.working, it.phase = -1, None, -1, "idle"
      it.wakes = 0.0
    self._after(fault.lasts_s, again)

  def _lose(self, client: int) -> None:
    """Ends the connection of a client."""
    it = self._clients[client]
    if it.connection:
      it.connection = 0
      if self._server:
        self._step(events.Gone(client))

  def _stop_server(self, lasts_s: float) -> None:
    """Ends the server, which starts again from its saved state."""
    if not self._server:
      return
    self._server = 0
    for client, it in enumerate(self._clients):
      if it.connection:
        it.connection = 0
        self._after(0.5, functools.partial(self._connect, client))

    def start() -> None:
      self._servers += 1
      self._server = self._servers
      self.state = server.resumed(self._saved, self.time, self._rules)
      self._step(events.Tick())

    self._after(lasts_s, start)
