"""Messages between a federated server and its clients, on a `Channel`.

A vector follows its message as parts of at most 64 KiB, so that keep-alives and
other messages are sent between parts, and even a slow link transmits a part
before the receiver's timeout.
"""

from collections.abc import Hashable, Iterator
import functools
import hashlib
import pathlib
import time
from typing import Any, NamedTuple

from parallel.peers.transport.channel import Channel
from parallel.peers.transport.frames import FrameError

PART_BYTES = 1 << 16
SERVER_ID = "federated"  # the server's id in handshakes


class ClientHello(NamedTuple):
  """First message of a client.

  Attributes:
    client: Id of the client.
    examples: Number of its training examples.
    revision: Revision of the model that it holds; None for none.
    digest: Digest of its model's parameters.
    retained: Round of its newest update; None for none.
    clock: Digest that names its monotonic clock.
  """

  client: int
  examples: int
  revision: int | None
  digest: Hashable
  retained: int | None
  clock: Hashable


class Welcome(NamedTuple):
  """First message of a server: its timeout, and its clock's digest."""

  silence_s: float
  clock: Hashable


class Work(NamedTuple):
  """Request to train, followed by the model.

  Attributes:
    round: Number of the round.
    revision: Revision of the model.
    base: Revision to which coded differences are added; None for a model in
      float32.
    sizes: Bytes of each difference, or of the model.
    sent_s: Time when it was queued, on the server's clock.
    waits: Whether the client sends its update only after a `Resend`.
  """

  round: int
  revision: int
  base: int | None
  sizes: tuple[int, ...]
  sent_s: float
  waits: bool


class Resend(NamedTuple):
  """Request for the update of a round, which the client has retained."""

  round: int


class Abandon(NamedTuple):
  """The round needs no update any more."""

  round: int


class End(NamedTuple):
  """The server no longer needs this client.

  Attributes:
    reason: Reason.
    valid: True if the run has ended; False if the client is refused.
  """

  reason: str
  valid: bool


class Result(NamedTuple):
  """A client's update, followed by the coded vector.

  Attributes:
    round: Round of the update.
    revision: Revision of the model that it started from.
    sizes: Bytes of the coded vector, as the only item.
    loss: Validation loss of the received model in nats; None for none.
    validated: Number of validation examples.
    test_loss: Validation loss of the trained model; None for none.
    downlink_s: Time from `Work.sent_s` to the last part; None if the clocks
      differ.
    training_s: Time of the local steps.
    test_s: Time of the evaluation of the trained model.
    validation_s: Time of the evaluation of the received model.
    busy_s: Time from the arrival of the model until the update is encoded.
    sent_s: Time when it was queued, on the client's clock.
  """

  round: int
  revision: int
  sizes: tuple[int, ...]
  loss: float | None
  validated: int
  test_loss: float | None
  downlink_s: float | None
  training_s: float
  test_s: float
  validation_s: float
  busy_s: float
  sent_s: float


class ModelReceived(NamedTuple):
  """The model of a round has been received."""

  round: int


class UpdateReady(NamedTuple):
  """The update of a round has been computed, and waits for a `Resend`."""

  round: int


class Failed(NamedTuple):
  """Local training has failed, and the client ends.

  Attributes:
    reason: Error, one line.
  """

  reason: str


class Part(NamedTuple):
  """Some bytes of the vectors that follow a message with ``sizes``."""

  data: bytes


FROM_CLIENT = (ClientHello, ModelReceived, UpdateReady, Result, Failed, Part)
FROM_SERVER = (Welcome, Work, Resend, Abandon, End, Part)


class ReceivedMessage(NamedTuple):
  """A message with its vectors, complete at monotonic time ``time_s``."""

  message: Any
  vectors: tuple[bytes, ...]
  time_s: float


class Assembler:
  """Joins the parts of vectors; for one connection."""

  def __init__(self, max_bytes: int) -> None:
    """Creates an assembler.

    Args:
      max_bytes: Largest size of all vectors of a message. Sizes are untrusted.
    """
    self._max_bytes = max_bytes
    self._message: Any = None
    self._data = bytearray()
    self._expected = False  # whether a message with vectors was asked for
    self._since = 0.0  # time of `expect`, or of the last part
    # Round of a sent model without its `ModelReceived`, and time when it was
    # sent.
    self._model: int | None = None
    self._left_s: float | None = None

  def expect(self) -> None:
    """Declares that the peer was asked for a message with vectors."""
    self._since, self._expected = time.monotonic(), True

  def is_stalled(self, limit_s: float) -> bool:
    """Returns whether no part of expected vectors came for ``limit_s``."""
    return (self._expected or self._message is not None) and (
      time.monotonic() - self._since > limit_s
    )

  def expect_delivered(self, round: int) -> None:
    """Declares that a round's model is being sent; see `is_unconfirmed`."""
    self._left_s, self._model = None, round

  def is_unconfirmed(self, sends: bool, limit_s: float) -> bool:
    """Returns whether a model, sent `limit_s` ago, lacks its `ModelReceived`.

    Args:
      sends: Whether the channel is still sending; the limit begins afterwards.
      limit_s: Time limit in seconds.
    """
    if self._left_s is None and not sends:
      self._left_s = time.monotonic()
    return self._model is not None and self._left_s is not None and (
      time.monotonic() - self._left_s > limit_s
    )

  def take(self, message: Any) -> Iterator[ReceivedMessage]:
    """Processes a message; yields the message that is now complete, if any.

    Raises:
      FrameError: Vectors are too long, or parts do not match their message.
    """
    # First, since another thread calls `is_stalled` and `is_unconfirmed`.
    if isinstance(message, Part) or hasattr(message, "sizes"):
      self._since, self._expected = time.monotonic(), False
    if isinstance(message, ModelReceived) and message.round == self._model:
      self._model = None
    if isinstance(message, Part):
      if self._message is None:
        raise FrameError("a part was received before its message")
      self._data += message.data
    elif hasattr(message, "sizes"):
      if self._message is not None:
        raise FrameError(
          f"a {type(message).__name__} was received before the last part of "
          "the previous message"
        )
      if sum(message.sizes) > self._max_bytes:
        raise FrameError(
          f"a message has {sum(message.sizes):,} bytes; at most "
          f"{self._max_bytes:,} are allowed"
        )
      self._message = message
    else:
      yield ReceivedMessage(message, (), time.monotonic())
      return
    left = sum(self._message.sizes) - len(self._data)
    if left < 0:
      raise FrameError(f"the parts of a message have {-left} bytes too many")
    if not left:
      whole, place, vectors = bytes(self._data), 0, []
      for size in self._message.sizes:
        vectors.append(whole[place:place + size])
        place += size
      yield ReceivedMessage(self._message, tuple(vectors), time.monotonic())
      self._message, self._data = None, bytearray()


def send(channel: Channel, message: Any, vectors: tuple[bytes, ...]) -> None:
  """Queues a message and its vectors."""
  channel.send(message)
  data = b"".join(vectors)
  for place in range(0, len(data), PART_BYTES):
    channel.send(Part(data[place:place + PART_BYTES]))


def max_queue_length(num_bytes: int) -> int:
  """Returns a queue's length in messages: two vectors' parts, and 64 more."""
  return 2 * -(-num_bytes // PART_BYTES) + 64


@functools.cache
def clock_id() -> str:
  """Returns a digest that names this machine's monotonic clock; "" if unknown.

  All processes since one boot share the clock, in any network namespace.
  """
  path = pathlib.Path("/proc/sys/kernel/random/boot_id")
  name = path.read_bytes() if path.exists() else b""
  return hashlib.sha256(name).hexdigest()[:32] if name else ""
