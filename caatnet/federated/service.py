"""Federated server: runs the core (`server.py`) over connections.

One thread processes the messages of all connections, from a bounded queue. It
executes effects in order, so the state is on disk before clients receive work
that depends on it. A stopped client is detected by its silence: channels send
keep-alives while a client trains.

Times are defined as in arXiv 2504.04678: aggregation t_a (decoding, merging and
coding by the server), downlink t_d, training t_tr, test t_te (trained model),
validation t_v (received model) and uplink t_u, and the round's time t_a +
max_k(t_d + t_v + t_tr + t_te + t_u). One-way times need one clock: with
clients on other machines only the sum t_d + t_u is known, from the server's
elapsed time and the client's busy time.
"""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import itertools
import pathlib
import queue
import socket
import time
from typing import Any, NamedTuple

import numpy as np

from caatnet.federated import events, messages, server, snapshot
from caatnet.federated.messages import ReceivedMessage
from caatnet.federated.server import Arithmetic, Rules, ServerState
from parallel.base import atomic, files, schema
from parallel.peers.membership.messages import Id
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.handshake import (
  Address,
  DialRequest,
  Purpose,
  Security,
  format_address,
)
from parallel.peers.transport.listener import AcceptRule, Listener

STATE_FILE, METRICS_FILE = "server.npz", "metrics.jsonl"
_TICK_S = 0.05
_MAX_EVENTS = 1024
_REPORT_AFTER_S = 2.0  # time without a change after which a wait is printed
_FINISH_S = 5.0  # time limit for clients to close their connections at the end

# Maps the bytes of an uplink and the number of elements to the update.
Decode = Callable[[bytes, int], np.ndarray]


class _ConnectionEnded(NamedTuple):
  """Event: a connection has ended."""

  reason: str


class _Round(schema.OpenSchema):
  """Line of `metrics.jsonl`: a round, with a row for each client."""

  round: int
  t_a: float
  clients: tuple[dict[str, Any], ...]


class Service:
  """Server process: core, snapshots and connections.

  Attributes:
    address: (host, port) at which it listens, after `listen`.
    workdir: Folder of the state and the metrics.
    state: State of the core.
    rows: One dict per client and round, as in "clients" of `metrics.jsonl`.
  """

  def __init__(
    self, rules: Rules, arithmetic: Arithmetic, params: np.ndarray,
    decode: Decode, workdir: pathlib.Path, *, silence_s: float = 10.0,
    say: Callable[[str], None] = print,
  ) -> None:
    """Creates a service, with the state of the workdir if it has one.

    Args:
      rules: Constants of the run.
      arithmetic: Computations on vectors.
      params: Initial parameters, float32 ``[n]``.
      decode: Decodes uplinks; raises ValueError for invalid data.
      workdir: Folder of the state and the metrics.
      silence_s: Time after which a silent connection is closed.
      say: Receives lines for the terminal.

    Raises:
      ValueError: The workdir has the state of another run.
    """
    self._rules, self._arithmetic, self._decode = rules, arithmetic, decode
    self._silence_s, self._say = silence_s, say
    self.workdir = workdir
    self._events: queue.Queue[tuple[Channel, Id, Any]] = queue.Queue(
      _MAX_EVENTS
    )
    self._assemblers: dict[Channel, messages.Assembler] = {}
    self._channels: dict[int, Channel] = {}
    self._senders: dict[int, Id] = {}  # ids of the clients' processes
    self._clocks: dict[int, str] = {}
    self._sent: dict[int, float] = {}  # time of each client's last `Work`
    # Bytes (down, up) of ended channels, minus those already in a record.
    self._counted: dict[int, tuple[int, int]] = {}
    self._refused: dict[int, str] = {}  # reasons, until the client connects
    self._results: dict[int, dict[str, Any]] = {}  # of the round in progress
    self._aggregation_s = 0.0
    # Last description of a wait, its start, and whether it was printed.
    self._wait, self._since, self._said = "", time.monotonic(), False
    self.rows: list[dict[str, Any]] = []
    saved = snapshot.read(workdir / STATE_FILE, rules)
    if saved is None:
      self.state = server.initial_state(params, arithmetic)
    else:
      self.state = server.resume_state(saved, time.monotonic(), rules)
      say(f"resumes round {saved.round} from revision {saved.revision}")
    self._metrics = workdir / METRICS_FILE
    for path in (workdir / STATE_FILE, self._metrics):
      atomic.remove_unfinished(path)
    self._read_metrics()
    self._listener: Listener | None = None

  def listen(self, address: Address, security: Security) -> None:
    """Starts to listen; `serve` accepts connections.

    Args:
      address: (host, port); port 0 selects a free port.
      security: Token and TLS settings of connections.

    Raises:
      ValueError: The address cannot be used.
    """
    try:
      self._listener = Listener(messages.SERVER_ID, security, address)
    except OSError as error:
      raise ValueError(
        f"cannot listen at {format_address(address)}: {error}"
      ) from error
    self.address = self._listener.address

  def serve(self, check: Callable[[], None] = lambda: None) -> ServerState:
    """Runs until the run ends; returns the state.

    Args:
      check: Called several times per second; an error ends the service.
    """
    assert self._listener is not None, "listen was not called"
    self._listener.serve(Purpose.CONTROL, AcceptRule(0, None, self._meet))
    while not self.state.finished:
      self._step(events.Tick())  # first, for a run that is complete
      with contextlib.suppress(queue.Empty):
        self._take(*self._events.get(timeout=_TICK_S))
      for channel, assembler in list(self._assemblers.items()):
        if assembler.is_stalled(self._silence_s):
          channel.close("sends keep-alives, but not its update")
        elif assembler.is_unconfirmed(channel.sends, self._silence_s):
          channel.close("sends keep-alives, but does not confirm its model")
      self._report()
      check()
    for channel in list(self._channels.values()):
      channel.finish(_FINISH_S)
    return self.state

  def close(self) -> None:
    """Ends all connections; the workdir suffices to resume later."""
    if self._listener is not None:
      self._listener.close()

  def __enter__(self) -> "Service":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _meet(self, sock: socket.socket, request: DialRequest) -> None:
    """Receives the messages of a new connection, in a thread of the listener.

    ``request`` names the sender. Messages become events of `serve`.
    """
    size = self.state.params.nbytes
    channel = Channel(
      sock, messages.FROM_CLIENT, self._silence_s, ends_silent=True,
      max_waiting=messages.max_queue_length(size),
    )
    # Scales of a padded last block can make a code longer than float32.
    assembler = messages.Assembler(size + 4096)
    self._assemblers[channel] = assembler
    channel.send(messages.Welcome(float(self._silence_s), messages.clock_id()))

    def take(message: Any) -> None:
      for event in assembler.take(message):
        self._events.put((channel, request.sender, event))

    try:
      channel.run(take)
    except Exception as error:  # of any kind: the round waits for the event
      reason = channel.reason or str(error) or type(error).__name__
      self._events.put((channel, request.sender, _ConnectionEnded(reason)))
    finally:
      del self._assemblers[channel]

  def _take(self, channel: Channel, sender: Id, event: Any) -> None:
    """Processes an event of a connection: a message, or the end."""
    known = {c: k for k, c in self._channels.items()}
    client = known.get(channel)
    if isinstance(event, _ConnectionEnded):
      if client is not None:
        self._say(f"client {client} has no connection: {event.reason}")
        self._lose(client)
    elif isinstance(event.message, messages.ClientHello) and client is None:
      self._connect(channel, sender, event.message)
    elif isinstance(event.message, messages.Failed):
      # Untrusted text, printed with escapes; `_ConnectionEnded` follows.
      channel.close(f"it has failed: {event.message.reason!a}")
    elif client is not None:
      match event.message:
        case messages.ModelReceived(round=round):
          self._step(events.ModelReceived(client, round))
        case messages.UpdateReady(round=round):
          self._step(events.UpdateReady(client, round))
        case messages.ClientHello():
          channel.close("has sent a second ClientHello on one connection")
        case _:
          self._receive(client, event)

  def _connect(
    self, channel: Channel, sender: Id, hello: messages.ClientHello
  ) -> None:
    """Registers a connection under its client's id.

    The handshake has proven that the sender's process owns the sender's id.
    """
    client, old = hello.client, self._channels.get(hello.client)
    if old is not None:
      silent_s = time.monotonic() - old.last_received
      if sender != self._senders[client] and silent_s < self._silence_s / 2:
        self._refuse(
          channel, f"client {client} is connected from another process"
        )
        return
      # A reconnect replaces the old connection, which may be half-open.
      old.close("has connected again")
      self._lose(client)
    self._channels[client], self._senders[client] = channel, sender
    self._clocks[client] = str(hello.clock)
    self._refused.pop(client, None)
    self._step(events.Hello(
      client, hello.examples,
      -1 if hello.revision is None else hello.revision, str(hello.digest),
      -1 if hello.retained is None else hello.retained,
    ))

  def _refuse(self, channel: Channel, reason: str) -> None:
    """Sends a client the reason of a refusal, after which it disconnects."""
    self._say(f"refused: {reason}")
    channel.send(messages.End(reason[:400], False))

  def _lose(self, client: int) -> None:
    channel = self._channels.pop(client)
    down, up = self._counted.get(client, (0, 0))
    self._counted[client] = (
      down + channel.sent_bytes, up + channel.received_bytes
    )
    self._step(events.Disconnected(client))

  def _receive(self, client: int, event: ReceivedMessage) -> None:
    """Decodes an update, and passes it to the core."""
    result = event.message
    start = time.monotonic()
    try:
      (data,) = event.vectors
      delta = self._decode(data, self.state.params.size)
    except ValueError as error:
      self._say(f"client {client}: {error}")
      delta = np.zeros(0, np.float32)  # the core refuses this size
    self._aggregation_s += time.monotonic() - start
    self._results[client] = self._make_client_row(client, event)
    self._step(events.Update(
      client, result.round, result.revision, delta,
      float("nan") if result.loss is None else result.loss, result.validated,
      result.busy_s,
    ))

  def _make_client_row(
    self, client: int, event: ReceivedMessage
  ) -> dict[str, Any]:
    """Returns the times, losses and sizes of a client's part in a round."""
    result = event.message
    one_clock = result.downlink_s is not None and (
      self._clocks[client] == messages.clock_id() != ""
    )
    row = {
      "round": result.round, "client": client,
      "t_tr": result.training_s, "t_te": result.test_s,
      "t_v": result.validation_s, "payload_up": sum(map(len, event.vectors)),
      "loss": result.loss, "test_loss": result.test_loss,
    }
    if one_clock:
      row["t_d"], row["t_u"] = result.downlink_s, event.time_s - result.sent_s
    elif client in self._sent:
      elapsed_s = event.time_s - self._sent[client]
      row["t_d + t_u"] = elapsed_s - result.busy_s
    return row

  def _step(self, message: Any) -> None:
    """Processes a message and executes the effects."""
    start = time.monotonic()
    self.state, effects = server.step(
      self.state, message, start, self._rules, self._arithmetic
    )
    self._aggregation_s += time.monotonic() - start
    for effect in effects:
      match effect:
        case events.Save():
          snapshot.write(self.workdir / STATE_FILE, self.state, self._rules)
        case events.Train():
          self._send_work(effect)
        case events.Resend():
          channel = self._channels[effect.client]
          channel.send(messages.Resend(effect.round))
          assembler = self._assemblers.get(channel)
          # With late updates, the client may be training, and answer later.
          if assembler is not None and self._rules.stragglers != "late":
            assembler.expect()
        case events.Abandon():
          self._channels[effect.client].send(messages.Abandon(effect.round))
        case events.RefuseClient():
          self._refuse(self._channels.pop(effect.client), effect.reason)
          if 0 <= effect.client < self._rules.clients:
            self._refused[effect.client] = effect.reason
        case events.UpdateRefused() | events.PrintWarning():
          self._say(effect.reason)
        case events.RoundEnded():
          self._record(effect)
        case events.Stop():
          for channel in self._channels.values():
            channel.send(messages.End(effect.reason, True))

  def _send_work(self, train: events.Train) -> None:
    """Sends the model as differences, or as a whole."""
    coded, vectors = server.downlink_payload(self.state, train.base)
    now = time.monotonic()
    self._sent[train.client] = now
    channel = self._channels[train.client]
    assembler = self._assemblers.get(channel)
    # Only with a queue does an unconfirmed model delay other clients.
    if assembler is not None and self._rules.downlinks_at_once:
      assembler.expect_delivered(train.round)
    messages.send(channel, messages.Work(
      train.round, train.revision, train.base if coded else None,
      tuple(map(len, vectors)), now, self._rules.uplinks_at_once > 0,
    ), vectors)

  def _record(self, end: events.RoundEnded) -> None:
    """Writes the metrics of a round, and prints a line."""
    clients = []
    for client in dict.fromkeys((*end.sampled, *self._results)):
      row = self._results.get(client, {"round": end.round, "client": client})
      down, up = self._counted.get(client, (0, 0))
      if client in self._channels:
        channel = self._channels[client]
        down, up = down + channel.sent_bytes, up + channel.received_bytes
        self._counted[client] = (-channel.sent_bytes, -channel.received_bytes)
      else:
        self._counted[client] = (0, 0)
      clients.append(row | {"bytes_down": down, "bytes_up": up})
    slowest = max((_client_s(row) for row in clients), default=0.0)
    record = {
      "round": end.round, "revision": end.revision,
      "loss": None if np.isnan(end.loss) else end.loss,
      "sampled": end.sampled, "merged": end.merged, "missing": end.missing,
      "refused": end.refused, "late": end.late,
      "duration_s": end.duration_s, "t_a": self._aggregation_s,
      "slowest_s": slowest, "clients": clients,
    }
    with open(self._metrics, "a") as file:
      file.write(files.to_json(record) + "\n")
    self._add_rows(clients, self._aggregation_s)
    self._results, self._aggregation_s = {}, 0.0
    loss = "" if np.isnan(end.loss) else f", loss {end.loss:.4f} before it"
    missing = (
      f", without {', '.join(map(str, end.missing))}" if end.missing else ""
    )
    self._say(
      f"round {end.round}: revision {end.revision} from {len(end.merged)} "
      f"updates{missing}{loss}, {end.duration_s:.2f} s"
    )

  def _read_metrics(self) -> None:
    """Reads rows; removes the records of rounds that are executed again."""
    if not self._metrics.exists():
      return
    # A last line without an end was being written when the server was killed.
    try:
      lines = self._metrics.read_text().splitlines(keepends=True)
      whole = [line for line in lines if line.endswith("\n")]
      found = [x for _, x in schema.parse_lines(_Round, "".join(whole))]
    except ValueError as error:
      raise ValueError(f"{self._metrics} is damaged: {error}") from error
    kept = [x.round < self.state.round for x in found]
    with atomic.atomic_file(self._metrics) as temporary:
      temporary.write_text("".join(itertools.compress(whole, kept)))
    for record in itertools.compress(found, kept):
      self._add_rows(record.clients, record.t_a)

  def _add_rows(
    self, clients: Iterable[dict[str, Any]], aggregation_s: float
  ) -> None:
    """Adds the rows of a round's clients."""
    self.rows += [row | {"t_a": aggregation_s} for row in clients]

  def _report(self) -> None:
    """Prints what the server waits for, once it has waited for a while."""
    now, text = time.monotonic(), server.describe_wait(self.state, self._rules)
    if self._refused:
      text += f"; refused: {'; '.join(self._refused.values())}"
    if text != self._wait:
      self._wait, self._since, self._said = text, now, False
    elif not self._said and now - self._since > _REPORT_AFTER_S:
      self._said = True
      self._say(text)


def _client_s(row: Mapping[str, Any]) -> float:
  """Returns the sum of a client's phases in a round, in seconds."""
  names = ("t_d", "t_v", "t_tr", "t_te", "t_u", "t_d + t_u")
  return sum(row.get(name, 0.0) for name in names)
