"""State of a federated server, and the constants of a run."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from caatnet.federated.events import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Constants of a run, most of which are keys of ``config.federated``.

  Attributes:
    clients: N; clients have the ids 0 to N - 1.
    per_round: K, the number of clients that are sampled in each round.
    rounds: Number of rounds.
    digest: Digest of the model's parameters; clients must have the same one.
    seed: Seed of the samples.
    sampling: "weighted", "uniform" or "ratio"; see `sampling.py`.
    weights: Weights of clients: their "examples", or "equal".
    stragglers: Policy for updates that miss their round's deadline: "wait"
      (with the deadline hang_s), "drop", or "late" (merged with a weight by
      age).
    deadline_s: Time limit of a round; with "wait" it has no effect.
    hang_s: Time limit of a round with "wait".
    reconnect_s: Seconds without a connection until a client is lost.
    patience: Rounds without a lower validation loss until the run stops; 0 for
      no early stopping.
    min_gain: Smallest decrease of the loss that counts, in nats.
    max_examples: Largest number of examples that a client may have.
    downlinks_at_once: Number of clients that receive models at once; 0 for all.
    uplinks_at_once: Number of clients that send updates at once; 0 for all.
    compensation: Norm of the correction of a late update for its delay,
      relative to the update; 0 for none.
  """

  clients: int
  per_round: int
  rounds: int
  digest: str
  seed: int
  sampling: str
  weights: str
  stragglers: str
  deadline_s: float
  reconnect_s: float
  patience: int
  min_gain: float
  downlinks_at_once: int = 0
  uplinks_at_once: int = 0
  compensation: float = 0.0
  hang_s: float = math.inf
  max_examples: int = 10**9

  @property
  def limit_s(self) -> float:
    """Time limit of a round in seconds."""
    return self.hang_s if self.stragglers == "wait" else self.deadline_s

  def __post_init__(self) -> None:
    if not 1 <= self.per_round <= self.clients:
      raise ValueError(
        f"per_round={self.per_round} must lie in [1, clients={self.clients}]"
      )


@dataclasses.dataclass(frozen=True)
class Member:
  """Registered client.

  Attributes:
    examples: Number of its training examples.
    connected: Whether it has a connection.
    since: Time of the last change of `connected`.
    revision: Revision of the model that it holds; -1 for none.
    retained: Round of the newest update that it has; -1 for none.
    working: Round that it works on, from the time when the server decides to
      send it the model until its update has arrived; -1 for none.
    done: Newest round whose update has been received, valid or not, or which
      no longer waits for it.
    left: Newest round that has ended without its update.
    lost: Connections that it has lost while the round in progress waited for
      its update.
    busy_s: Seconds that it took to compute its newest update.
  """

  examples: int
  connected: bool = True
  since: float = 0.0
  revision: int = -1
  retained: int = -1
  working: int = -1
  done: int = -1
  left: int = -1
  lost: int = 0
  busy_s: float = 0.0


class Contribution(NamedTuple):
  """Valid update in the round in progress, its number of draws and 2-norm."""

  update: Update
  draws: int
  norm: float


@dataclasses.dataclass(frozen=True, eq=False)
class ServerState:
  """State of the server.

  Attributes:
    params: Parameters, float32 ``[n]``.
    published: Parameters that clients with the newest revision have.
    optimizer: State of the server's optimizer.
    round: Round in progress, or the next one.
    revision: Newest revision of the model.
    differences: Coded differences that lead to the newest revision, oldest
      first, while all together are smaller than the parameters.
    members: Registered clients.
    history: Sampled clients of the round in progress and of earlier rounds
      whose late updates may arrive, by round.
    bases: Parameters that the clients of each of these rounds received, by
      round, for `Rules.compensation`; {} without it.
    started: Start of the round in progress; None if there is none.
    downlinks: Queue of clients: the first `Rules.downlinks_at_once` receive
      models, the others wait.
    uplinks: Queue of clients: the first `Rules.uplinks_at_once` send updates,
      the others wait.
    received: Valid updates of the round in progress.
    refused: (client, reason) of each update refused in the round in progress.
    counts: Number of refused updates by reason, over all rounds.
    best: Lowest validation loss.
    stale: Rounds since ``best`` was measured.
    finished: Reason for which the run has ended; "" if it has not.
  """

  params: np.ndarray
  published: np.ndarray
  optimizer: tuple[np.ndarray, ...]
  round: int = 0
  revision: int = 0
  differences: tuple[bytes, ...] = ()
  members: Mapping[int, Member] = dataclasses.field(default_factory=dict)
  history: Mapping[int, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )
  bases: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
  started: float | None = None
  downlinks: tuple[int, ...] = ()
  uplinks: tuple[int, ...] = ()
  received: tuple[Contribution, ...] = ()
  refused: tuple[tuple[int, str], ...] = ()
  counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  best: float = math.inf
  stale: int = 0
  finished: str = ""

  @property
  def sampled(self) -> tuple[int, ...]:
    """Sampled clients of the round in progress, in order."""
    return self.history.get(self.round, ())


def put(state: ServerState, client: int, member: Member) -> ServerState:
  """Returns the state with a client's member added or replaced."""
  members = {**state.members, client: member}
  return dataclasses.replace(state, members=members)


def replace_member(
  state: ServerState, client: int, **changes: Any
) -> ServerState:
  """Returns the state with changed attributes of a client's member."""
  return put(
    state, client, dataclasses.replace(state.members[client], **changes)
  )
