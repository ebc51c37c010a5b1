"""Federated client: trains on its own examples when the server asks it to.

A client connects to the server; the server never connects to a client. It keeps
its newest update until it computes another one, so that a server that has
restarted, or whose connection broke, receives it without training again. A lost
connection does not end local training.
"""

from collections.abc import Callable
import contextlib
import hashlib
import queue
import threading
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from caatnet.federated import messages
from caatnet.federated.messages import ReceivedMessage
from parallel.peers.membership import ids
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.handshake import (
  Address,
  DialRequest,
  Purpose,
  Refused,
  Security,
  SocketGroup,
  dial,
  format_address,
)

_DIAL_S = 2.0
_AGAIN_S = 0.2  # pause between attempts to connect
# time for the server to receive the reason of a failure
_FAILURE_REPORT_S = 2.0
_SILENCE_S = 30.0  # timeout of a silent server, until `Welcome` sets another


class TrainingResult(NamedTuple):
  """Result of a client's local training in one round; times in seconds.

  Attributes:
    params: Trained parameters, float32 ``[n]``.
    loss: Validation loss of the received parameters; None if not evaluated.
    validated: Number of validation examples.
    test_loss: Validation loss of the trained parameters; None if not evaluated.
    training_s: Time of the local steps.
    test_s: Time of the evaluation of the trained parameters.
    validation_s: Time of the evaluation of the received parameters.
  """

  params: np.ndarray
  loss: float | None
  validated: int
  test_loss: float | None
  training_s: float
  test_s: float
  validation_s: float


class Trainer(Protocol):
  """Local training of one client.

  Attributes:
    examples: Number of training examples.
    num_params: n, the number of parameters.
    digest: Hex digest of the model's parameters.
  """

  examples: int
  num_params: int
  digest: str

  def train(
    self, params: np.ndarray, round: int, stops: Callable[[], bool]
  ) -> TrainingResult | None:
    """Trains for one round.

    Args:
      params: Received parameters, float32 ``[n]``.
      round: Number of the round, which determines the examples.
      stops: Returns whether the round needs no update any more; called between
        steps.

    Returns:
      The result, which depends on the arguments only; None if ``stops``
      returned True.
    """
    ...


class Codecs(NamedTuple):
  """Codecs of a client.

  Attributes:
    encode: Maps an update, float32 ``[n]``, and its round to bytes.
    decode: Maps a coded difference and its size n to float32 ``[n]``.
  """

  encode: Callable[[np.ndarray, int], bytes]
  decode: Callable[[bytes, int], np.ndarray]


class _ConnectionFailed(NamedTuple):
  """Event: no server accepts this client."""

  reason: str


class Client:
  """Client process.

  Attributes:
    revision: Revision of the model whose parameters it holds; None for none.
  """

  def __init__(
    self, client: int, trainer: Trainer, codecs: Codecs, address: Address,
    security: Security, *, alone_s: float = 300.0,
    say: Callable[[str], None] = print,
  ) -> None:
    """Creates a client, which connects in `run`.

    Args:
      client: Id of the client.
      trainer: Local training.
      codecs: Codecs of uplinks and downlinks.
      address: (host, port) of the server.
      security: Token and TLS settings.
      alone_s: Time without a server after which the client ends.
      say: Receives lines for the terminal.
    """
    self._client, self._trainer, self._codecs = client, trainer, codecs
    self._address, self._security = address, security
    # The same id on each connection shows that this process has reconnected.
    self._sender = ids.make(("127.0.0.1", 1), security.identity)
    self._alone_s, self._say = alone_s, say
    self._events: queue.Queue[Any] = queue.Queue()
    self._waiting: list[Any] = []  # events received during training
    self._channel: Channel | None = None
    self._ended = threading.Event()
    self._clock = ""  # digest that names the server's clock
    self._retained: tuple[messages.Result, bytes] | None = None
    # Connection and round of the update that was sent last.
    self._sent: tuple[Channel | None, int] = None, -1
    self._params = np.zeros(trainer.num_params, np.float32)
    self.revision: int | None = None

  def run(self) -> str:
    """Runs until the server ends the run; returns the reason.

    Raises:
      ValueError: The server refuses the client, or is away for `alone_s`.
    """
    threading.Thread(target=self._stay_connected, daemon=True).start()
    try:
      return self._process_events()
    finally:
      self._ended.set()
      if self._channel is not None:
        self._channel.close("done")

  def _process_events(self) -> str:
    """Processes events until the run ends; see `run`."""
    while True:
      event = self._next()
      match event:
        case _ConnectionFailed():
          raise ValueError(event.reason)
        case ReceivedMessage(message=messages.Work()):
          try:
            self._train_round(event)
          except Exception as error:
            self._report_failure(str(error) or type(error).__name__)
            raise
        case ReceivedMessage(message=messages.Resend() as resend):
          kept = self._retained
          if kept is not None and kept[0].round == resend.round:
            self._send_retained()
        case ReceivedMessage(message=messages.End() as end):
          if not end.valid:
            raise ValueError(end.reason)
          return end.reason

  def _next(self) -> Any:
    """Returns the next event."""
    return self._waiting.pop(0) if self._waiting else self._events.get()

  def _stay_connected(self) -> None:
    """Connects whenever there is no connection; runs in a thread."""
    lost, printed = time.monotonic(), ""
    while not self._ended.is_set():
      try:
        self._converse()
        lost, printed = time.monotonic(), ""
      except Refused as error:
        self._events.put(_ConnectionFailed(f"the server refuses: {error}"))
        return
      except OSError as error:
        where = f"no server at {format_address(self._address)}"
        if time.monotonic() - lost > self._alone_s:
          self._events.put(
            _ConnectionFailed(f"{where} for {self._alone_s:g} s: {error}")
          )
          return
        if str(error) != printed:
          printed = str(error)
          self._say(f"{where}, tries again: {error}")
      except Exception as error:  # else the main thread waits for ever
        self._events.put(_ConnectionFailed(
          f"the connection ended by {type(error).__name__}: {error}"
        ))
        return
      self._ended.wait(_AGAIN_S)

  def _converse(self) -> None:
    """Connects, sends `ClientHello`, and receives until the connection ends.

    Raises:
      OSError: The connection cannot be opened.
    """
    request = DialRequest(
      Purpose.CONTROL, 0, 0, self._sender, messages.SERVER_ID
    )
    size = 4 * self._trainer.num_params
    with dial(
      self._address, request, self._security, SocketGroup(), _DIAL_S
    ) as sock:
      channel = Channel(
        sock, messages.FROM_SERVER, _SILENCE_S, ends_silent=True,
        max_waiting=messages.max_queue_length(size),
      )
      assembler = messages.Assembler(size + 4096)

      def take(message: Any) -> None:
        if isinstance(message, messages.Welcome):
          channel.silence_s = message.silence_s
          self._clock = str(message.clock)
          return
        for event in assembler.take(message):
          self._events.put(event)
          if isinstance(event.message, messages.Work):
            # At once, before training: the server may then send the model to
            # the next client.
            channel.send(messages.ModelReceived(event.message.round))

      kept = self._retained
      channel.send(messages.ClientHello(
        self._client, self._trainer.examples, self.revision,
        self._trainer.digest, None if kept is None else kept[0].round,
        messages.clock_id(),
      ))
      self._channel = channel
      try:
        channel.run(take)
      except (OSError, ValueError) as error:
        if not self._ended.is_set():
          self._say(f"no connection to the server: {error}")

  def _train_round(self, event: ReceivedMessage) -> None:
    """Receives a model, trains it and sends the update."""
    work = event.message
    kept = self._retained
    if kept is not None and kept[0].round == work.round:
      # Either the server lost its state after it had received this update, or
      # it sent the work while the update was on its way on this connection.
      # Only in the first case it needs the update again.
      if self._sent != (self._channel, work.round):
        self._offer_update(work)
      return
    if not self._receive_model(work, event.vectors):
      return
    trained = self._trainer.train(
      self._params, work.round, lambda: self._is_abandoned(work.round)
    )
    if trained is None:
      return
    delta = trained.params - self._params
    data = self._codecs.encode(delta, work.round)
    now = time.monotonic()
    one_clock = self._clock == messages.clock_id() != ""
    result = messages.Result(
      work.round, work.revision, (len(data),), trained.loss, trained.validated,
      trained.test_loss,
      max(0.0, event.time_s - work.sent_s) if one_clock else None,
      trained.training_s, trained.test_s, trained.validation_s,
      now - event.time_s, now,
    )
    self._retained = result, data
    self._offer_update(work)

  def _offer_update(self, work: messages.Work) -> None:
    """Sends the retained update, or waits until the server asks for it."""
    if work.waits:
      assert self._channel is not None
      self._channel.send(messages.UpdateReady(work.round))
    else:
      self._send_retained()

  def _send_retained(self) -> None:
    assert self._retained is not None
    result, data = self._retained
    self._sent = self._channel, result.round
    self._send(result._replace(sent_s=time.monotonic()), data)

  def _report_failure(self, reason: str) -> None:
    """Sends the server the error that ends this client."""
    self._ended.set()  # no new connection
    assert self._channel is not None
    line = " ".join(reason.split()).encode("ascii", "backslashreplace")
    self._channel.send(messages.Failed(line.decode()[:400]))
    self._channel.finish(_FAILURE_REPORT_S)

  def _receive_model(
    self, work: messages.Work, vectors: tuple[bytes, ...]
  ) -> bool:
    """Sets the parameters to the model revision of ``work``.

    ``vectors`` are the model, or differences between revisions. Returns False
    if the client lacks the revision to which these must be added.
    """
    n = self._trainer.num_params
    if work.base is None:
      self._params = np.frombuffer(vectors[0], "<f4").copy()
    else:
      if work.base != self.revision:
        # The server sent this work over a new connection before this client
        # finished older work. Without a revision, it sends the whole model.
        self.revision = None
        assert self._channel is not None
        self._channel.close("needs the whole model")
        return False
      for data in vectors:  # in the order in which the server published them
        self._params = self._params + self._codecs.decode(data, n)
    self.revision = work.revision
    return True

  def _is_abandoned(self, round: int) -> bool:
    """Returns whether training in a round is to stop early."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._waiting.append(self._events.get_nowait())
    for event in self._waiting:
      match event:
        case _ConnectionFailed():
          return True
        case ReceivedMessage(
          message=messages.Work(round=other)
        ) if other != round:
          return True
        case ReceivedMessage(
          message=messages.Abandon(round=other)
        ) if other == round:
          return True
        case ReceivedMessage(message=messages.End()):
          return True
    # The same work, sent again over a new connection, changes nothing.
    self._waiting = [
      e for e in self._waiting
      if not (
        isinstance(e, ReceivedMessage) and isinstance(e.message, messages.Work)
      )
    ]
    return False

  def _send(self, result: messages.Result, data: bytes) -> None:
    assert self._channel is not None
    messages.send(self._channel, result, (data,))


def digest(shapes: Any) -> str:
  """Returns a hex digest of the parameters' names, shapes and dtypes.

  Args:
    shapes: Sequence of (name, shape, dtype), in the order of the vector.
  """
  return hashlib.sha256(repr(list(shapes)).encode()).hexdigest()[:32]
