"""Messages to a federated server's core (`server.py`), and its effects.

`Hello`, `ModelReceived`, `UpdateReady`, `Update`, `Disconnected` and `Tick` are
messages. All others are effects, which the caller executes in order.
"""

import math
from typing import NamedTuple

import numpy as np


class Hello(NamedTuple):
  """A client has connected.

  Attributes:
    client: Id of the client.
    examples: Number of its training examples.
    revision: Revision of the model that it holds; -1 for none.
    digest: Digest of its model's parameters.
    retained: Round of the newest update that it computed; -1 for none.
  """

  client: int
  examples: int
  revision: int = -1
  digest: str = ""
  retained: int = -1


class Update(NamedTuple):
  """A client's contribution to a round.

  Attributes:
    client: Id of the client.
    round: Round that it was sampled in.
    revision: Revision of the model that it started from.
    delta: Trained minus received parameters, float32 ``[n]``.
    loss: Mean loss of the received model on the client's validation examples,
      in nats; NaN for none.
    validated: Number of these validation examples.
    busy_s: Seconds that the client took to compute it.
  """

  client: int
  round: int
  revision: int
  delta: np.ndarray
  loss: float = math.nan
  validated: int = 0
  busy_s: float = 0.0


class ModelReceived(NamedTuple):
  """A client has received the model of a round."""

  client: int
  round: int


class UpdateReady(NamedTuple):
  """A client has computed the update of a round; it waits for a `Resend`."""

  client: int
  round: int


class Disconnected(NamedTuple):
  """The connection to a client has ended."""

  client: int


class Tick(NamedTuple):
  """Requests a check of time limits; `server.wake_s` returns its time."""


class Save(NamedTuple):
  """The state must be on disk before later effects are executed."""


class Train(NamedTuple):
  """The client is to train; `server.downlink_payload` returns what to send.

  Attributes:
    client: Id of the client.
    round: Number of the round.
    revision: Revision of the model to start from.
    base: Revision of the model that the client holds; -1 for none.
  """

  client: int
  round: int
  revision: int
  base: int


class Resend(NamedTuple):
  """The client is to send its retained update of a round."""

  client: int
  round: int


class Abandon(NamedTuple):
  """The client need not finish a round."""

  client: int
  round: int


class RefuseClient(NamedTuple):
  """The client cannot participate; its connection is closed."""

  client: int
  reason: str


class Stop(NamedTuple):
  """The run has ended; all clients are notified."""

  reason: str


class RoundEnded(NamedTuple):
  """A round has ended.

  Attributes:
    round: Number of the round.
    revision: Revision of the model after it.
    sampled: Sampled clients, in order.
    merged: (client, round, coefficient) of each merged update.
    missing: Sampled clients without an update.
    refused: (client, reason) of each update that was refused in the round.
    loss: Validation loss of the revision before the round, over the examples of
      all clients that returned one, in nats; NaN for none.
    duration_s: Time from the round's start to its end.
    late: Whether the round ended at its time limit.
  """

  round: int
  revision: int
  sampled: tuple[int, ...]
  merged: tuple[tuple[int, int, float], ...]
  missing: tuple[int, ...]
  refused: tuple[tuple[int, str], ...]
  loss: float
  duration_s: float
  late: bool


class UpdateRefused(NamedTuple):
  """An update, or its validation loss, has been refused for a reason."""

  client: int
  reason: str


class PrintWarning(NamedTuple):
  """Print a warning: the run continues, but its results may be wrong."""

  reason: str
