"""Simulated federated run: the server's core with a simulated clock.

The server is `server.step`, the function that `service.py` runs over sockets.
Clients and faults are simulated: a heap holds all future events. Models and
updates are transfers on a `Network`, whose durations may depend on each other.
The result depends on the arguments only, so a fault can be replayed at any time
of a round.

A fault concerns one client, or the server:

  kill   the process ends, loses its model and its updates, and starts again
  stop   the process pauses; the server closes its silent connection
  hang   the process pauses, and its connection continues
  cut    the connection ends; the process continues, and connects again
  count  the client reports its updates with the number of the next round
  server the server ends, and starts again from its last saved state
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple, Protocol

import numpy as np

from caatnet.federated import events, server
from caatnet.federated.server import Arithmetic, Rules, ServerState


class Transfer(NamedTuple):
  """Transfer between the server and a client; names a flow on the network.

  Attributes:
    client: Id of the client.
    up: Whether the client sends.
    number: Distinguishes transfers of a client in one direction.
  """

  client: int
  up: bool
  number: int


class Network(Protocol):
  """Network between the server and its clients, on a simulated clock."""

  def start(self, time: float, transfer: Transfer, size: int) -> None:
    """Starts a transfer of ``size`` bytes at the current time."""
    ...

  def cancel(self, time: float, transfer: Transfer) -> None:
    """Ends a transfer at the current time; it does not arrive."""
    ...

  def next_s(self) -> float:
    """Returns the time of the next event; infinity for none."""
    ...

  def advance(self, time: float) -> list[Transfer]:
    """Continues until a time; returns the transfers that have arrived."""
    ...


class ConstantNetwork:
  """Network with constant durations.

  Example:
    >>> network = ConstantNetwork(downlink_s=0.3, uplink_s=0.4)
    >>> network.start(1.0, Transfer(client=0, up=True, number=0), 100)
    >>> network.next_s(), network.advance(2.0)
    (1.4, [Transfer(client=0, up=True, number=0)])
  """

  def __init__(self, downlink_s: float, uplink_s: float) -> None:
    self._durations_s = downlink_s, uplink_s
    self._ends: dict[Transfer, float] = {}

  def start(self, time: float, transfer: Transfer, size: int) -> None:
    self._ends[transfer] = time + self._durations_s[transfer.up]

  def cancel(self, time: float, transfer: Transfer) -> None:
    self._ends.pop(transfer, None)

  def next_s(self) -> float:
    return min(self._ends.values(), default=math.inf)

  def advance(self, time: float) -> list[Transfer]:
    found = [k for k, end in self._ends.items() if end <= time]
    for transfer in found:
      del self._ends[transfer]
    return found


class Clients(NamedTuple):
  """Data and training of the simulated clients.

  Attributes:
    examples: Number of examples of each client.
    train: Maps client, round and the received parameters to the update.
    compute: Maps client and round to phase -> seconds, for validation "t_v",
      training "t_tr" and test "t_te".
  """

  examples: Sequence[int]
  train: Callable[[int, int, np.ndarray], np.ndarray]
  compute: Callable[[int, int], Mapping[str, float]]


class Transport(NamedTuple):
  """Times and sizes of messages.

  Attributes:
    network: Network of the models and updates.
    message_s: Time of other messages.
    silence_s: Time after which the server closes a silent connection.
    downlink_bytes: Maps the server's state and the revision of a client to the
      bytes of its downlink; None for the payload of `server.downlink_payload`.
    uplink_bytes: Bytes of an update; None for those of the parameters.
  """

  network: Network
  message_s: float = 0.01
  silence_s: float = 2.0
  downlink_bytes: Callable[[ServerState, int], int] | None = None
  uplink_bytes: int | None = None


class Fault(NamedTuple):
  """Fault of a process or its connection.

  Attributes:
    time: Time in seconds.
    kind: One of the kinds in the docstring of this module.
    client: Id of the client; ignored by "server".
    lasts_s: Duration of the fault in seconds.
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
    wakes: Time until which its process is paused.
    miscounts: Time until which its updates have the next round's number.
    phase: Current activity, for statistics of faults.
    revision: Revision of the model that it holds; -1 for none.
    retained: Newest update; None for none.
    working: Round in progress; -1 for none.
    sent: Connection and round of the newest upload.
    row: Times and bytes of the newest round.
  """

  connection: int = 0
  process: int = 0
  wakes: float = 0.0
  miscounts: float = 0.0
  phase: str = "idle"
  revision: int = -1
  retained: events.Update | None = None
  working: int = -1
  sent: tuple[int, int] = (0, -1)
  row: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Simulation:
  """Simulated run.

  Attributes:
    state: State of the server.
    time: Current time in seconds.
    effects: (time, effect) of each effect of the server, without `Save`.
    rows: One dict per received update, with the keys of
      `service.Service.rows`: times of the client's phases in seconds, and
      bytes of transfers.
    hit: (kind, phase of the client) of each fault.
  """

  def __init__(
    self, rules: Rules, arithmetic: Arithmetic, params: np.ndarray,
    clients: Clients, transport: Transport, faults: Sequence[Fault] = (),
    aggregation_s: float = 0.0,
    observe: Callable[[float, ServerState], None] | None = None,
  ) -> None:
    """Creates a run.

    Args:
      rules: Constants of the run.
      arithmetic: Computations on vectors.
      params: Initial parameters, float32 ``[n]``.
      clients: Data and training of the clients.
      transport: Network, and times and sizes of messages.
      faults: Faults.
      aggregation_s: Time from the end of a round to the next models.
      observe: Called at the end of each round with the time and the state.
    """
    self._rules, self._arithmetic = rules, arithmetic
    self._examples, self._train, self._compute = clients
    self._network = transport.network
    self._silence_s, self._message_s = transport.silence_s, transport.message_s
    self._aggregation_s = aggregation_s
    self._downlink_bytes = transport.downlink_bytes or _downlink_bytes
    self._uplink_bytes = (
      params.nbytes if transport.uplink_bytes is None
      else transport.uplink_bytes
    )
    self._observe = observe or (lambda time, state: None)
    self._transfers: dict[Transfer, Callable[[], None]] = {}
    self._events: list[tuple[float, int, Callable[[], None]]] = []
    self._count = 0
    self._clients = [_Client() for _ in clients.examples]
    self._connections = 0
    self._server = 1  # number of its process; 0 while it is down
    self._servers = 1
    self.time = 0.0
    self.state = server.initial_state(params, arithmetic)
    self._saved = self.state
    self.effects: list[tuple[float, Any]] = []
    self.rows: list[dict[str, Any]] = []
    self.hit: list[tuple[str, str]] = []
    for client in range(len(clients.examples)):
      self._after(0.01 * client, functools.partial(self._connect, client))
    for fault in faults:
      self._after(fault.time, functools.partial(self._fault, fault))

  def run(self, limit_s: float = math.inf) -> ServerState:
    """Runs until the end or a time limit; returns the server's state."""
    while not self.state.finished:
      event_s = self._events[0][0] if self._events else math.inf
      network_s = self._network.next_s()
      time = min(event_s, network_s)
      if time == math.inf or time > limit_s:
        break
      self.time = max(self.time, time)
      if event_s <= network_s:
        heapq.heappop(self._events)[2]()
        continue
      for transfer in self._network.advance(self.time):
        # A transfer that an earlier arrival cancelled has no entry.
        if arrive := self._transfers.pop(transfer, None):
          arrive()
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
    ))

  def _to_server(self, client: int, message: Any) -> None:
    """Sends a message, which is lost if the connection ends before."""
    self._after(self._message_s, self._make_arrival(client, message))

  def _make_arrival(self, client: int, message: Any) -> Callable[[], None]:
    """Returns a function that passes a message of a client to the server."""
    connection = self._clients[client].connection
    sent_s = self.time

    def arrive() -> None:
      it = self._clients[client]
      if it.wakes > self.time:  # the rest is sent after the pause
        self._after(it.wakes - self.time, arrive)
      elif connection and it.connection == connection and self._server:
        if isinstance(message, events.Update):
          it.phase = "idle"
          self.rows.append(it.row | {
            "t_u": self.time - sent_s, "bytes_up": self._uplink_bytes,
          })
        self._step(message)

    return arrive

  def _transfer(
    self, client: int, up: bool, size: int, arrive: Callable[[], None]
  ) -> None:
    """Starts a transfer, which is lost if the connection ends before."""
    self._count += 1
    transfer = Transfer(client, up, self._count)
    self._transfers[transfer] = arrive
    self._network.start(self.time, transfer, size)

  def _disconnect(self, client: int) -> None:
    """Ends the connection of a client, and its transfers."""
    self._clients[client].connection = 0
    for transfer in [t for t in self._transfers if t.client == client]:
      self._network.cancel(self.time, transfer)
      del self._transfers[transfer]

  def _step(self, message: Any) -> None:
    """Runs the server's core and executes its effects."""
    self.state, effects = server.step(
      self.state, message, self.time, self._rules, self._arithmetic
    )
    aggregates = any(
      isinstance(effect, events.RoundEnded) for effect in effects
    )
    for effect in effects:
      match effect:
        case events.Save():
          self._saved = self.state
          continue
        case events.Train():
          self._start_client_round(
            effect, self._aggregation_s if aggregates else 0.0
          )
        case events.Resend():
          self._after(
            self._message_s, functools.partial(self._resend, effect)
          )
        case events.Abandon():
          it = self._clients[effect.client]
          if it.working == effect.round:
            it.working, it.phase = -1, "idle"
        case events.RoundEnded():
          self._observe(self.time, self.state)
      self.effects.append((self.time, effect))
    wake = server.wake_s(self.state, self._rules)
    if wake is not None:
      process = self._server

      def tick() -> None:
        if self._server == process:
          self._step(events.Tick())

      if wake > self.time:
        self._after(wake - self.time, tick)

  def _start_client_round(self, train: events.Train, wait_s: float) -> None:
    """Sends a model to a client, which trains and returns its update."""
    it = self._clients[train.client]
    if it.working == train.round:  # it is still computing this round
      self._to_server(
        train.client, events.ModelReceived(train.client, train.round)
      )
      return
    connection, process = it.connection, it.process
    published, sent_s = self.state.published, self.time + wait_s
    size = self._downlink_bytes(self.state, train.base)
    phases = self._compute(train.client, train.round)
    it.phase = "downlink"

    def send() -> None:
      if it.connection == connection:
        self._transfer(train.client, False, size, received)

    def received() -> None:
      if it.wakes > self.time:
        self._after(it.wakes - self.time, received)
      elif connection and it.connection == connection:
        self._to_server(
          train.client, events.ModelReceived(train.client, train.round)
        )
        if it.sent == (connection, train.round):
          return  # the update was on its way when the server sent the model
        it.working, it.revision = train.round, train.revision
        it.phase = "training"
        it.row = {
          "round": train.round, "client": train.client,
          "t_d": self.time - sent_s, **phases, "bytes_down": size,
        }
        self._after(sum(phases.values()), computed)

    def computed() -> None:
      if it.wakes > self.time:
        self._after(it.wakes - self.time, computed)
      elif it.process == process and it.working == train.round:
        delta = self._train(train.client, train.round, published)
        it.working = -1
        it.retained = events.Update(
          train.client, train.round, train.revision, delta,
          busy_s=sum(phases.values()),
        )
        if self._rules.uplinks_at_once:
          it.phase = "waiting"
          self._to_server(
            train.client, events.UpdateReady(train.client, train.round)
          )
        else:
          self._upload(train.client, it.retained)

    if wait_s:
      self._after(wait_s, send)
    else:
      send()

  def _resend(self, resend: events.Resend) -> None:
    """Sends a retained update that the server has asked for."""
    retained = self._clients[resend.client].retained
    if retained is not None and retained.round == resend.round:
      self._upload(resend.client, retained)

  def _upload(self, client: int, update: events.Update) -> None:
    it = self._clients[client]
    it.phase = "uplink"
    if it.connection:  # else the server asks for it after a new one
      it.sent = it.connection, update.round
      if it.miscounts > self.time:
        update = update._replace(round=update.round + 1)
      self._transfer(
        client, True, self._uplink_bytes, self._make_arrival(client, update)
      )

  def _fault(self, fault: Fault) -> None:
    """Executes a fault."""
    if fault.kind == "server":
      self._stop_server(fault.lasts_s)
      return
    it = self._clients[fault.client]
    self.hit.append((fault.kind, it.phase))
    again = functools.partial(self._connect, fault.client)
    if fault.kind == "count":
      it.miscounts = self.time + fault.lasts_s
      return
    if fault.kind in ("stop", "hang"):
      it.wakes = max(it.wakes, self.time + fault.lasts_s)
      if fault.kind == "stop" and fault.lasts_s > self._silence_s:
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
    if self._clients[client].connection:
      self._disconnect(client)
      if self._server:
        self._step(events.Disconnected(client))

  def _stop_server(self, lasts_s: float) -> None:
    """Ends the server, which starts again from its saved state."""
    if not self._server:
      return
    self._server = 0
    for client, it in enumerate(self._clients):
      if it.connection:
        self._disconnect(client)
        self._after(0.5, functools.partial(self._connect, client))

    def start() -> None:
      self._servers += 1
      self._server = self._servers
      self.state = server.resume_state(self._saved, self.time, self._rules)
      self._step(events.Tick())

    self._after(lasts_s, start)


def _downlink_bytes(state: ServerState, base: int) -> int:
  """Returns the payload bytes for a client that holds revision ``base``."""
  return sum(map(len, server.downlink_payload(state, base)[1]))
