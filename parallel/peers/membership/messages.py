"""Messages of the membership protocol: plain data.

A *round* is one exchange of *contributions* between peers; committing it makes
the next *revision* of the shared state: round r makes revision r + 1 from
revision r. An *epoch* is a numbered list of members. Each epoch attempts a
round at most once: after a failed attempt, the next one belongs to a new epoch,
even if its members are unchanged.

The *host* of a coordinator or peer is the process around its state machine: it
owns the sockets, the clocks and the disk, and executes the effects that the
state machine returns.

All messages are hashable tuples, so that the protocol can be model-checked
(`parallel.peers.membership.search`).

Example:
  >>> from parallel.peers.membership import messages as m
  >>> vote = m.Vote(epoch=3, round=7, digest="0a")
  >>> m.to_json(vote)
  {'is': 'Vote', 'epoch': 3, 'round': 7, 'digest': '0a'}
  >>> m.from_json(m.to_json(vote)) == vote
  True
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

# Identifies a peer's process: a restarted process has a new id. Ids are
# ordered by age: a peer that started later has a higher id.
Id = Any
# Identifies a revision's content; "" stands for no content.
Digest = Hashable
MAX_CHARS = 400  # of a text in a message


# From a peer to its coordinator.


class Vote(NamedTuple):
  """Result that one contributor has computed in a round.

  Attributes:
    epoch: Epoch of the round.
    round: Number of the round.
    digest: Digest of the resulting revision; None if the round failed.
  """

  epoch: int
  round: int
  digest: Digest | None


class Hello(NamedTuple):
  """First message of a peer on each new or re-established connection.

  Attributes:
    epoch: Newest epoch (numbered list of members) that the peer has received; 0
      for none.
    revision: Number of the revision (version of the shared state) that the peer
      holds.
    digest: Digest of that revision.
    voted: Vote on a round whose outcome the peer has not received.
  """

  epoch: int
  revision: int
  digest: Digest
  voted: Vote | None


class Prepared(NamedTuple):
  """The peer is connected to all members and holds the newest revision."""

  epoch: int


class Unreachable(NamedTuple):
  """The peer is not connected to some members of an epoch.

  Attributes:
    epoch: Number of the epoch.
    peers: Members that the peer could not connect to.
    absent: Members that did not connect to the peer.
  """

  epoch: int
  peers: tuple[Id, ...]
  absent: tuple[Id, ...] = ()


class Checked(NamedTuple):
  """Result of one connection of a `Check`; the protocol ignores it.

  Attributes:
    peer: Checked peer.
    error: Reason for which that peer could not be reached; "" if it could.
  """

  peer: Id
  error: str


class Ready(NamedTuple):
  """The peer has computed its contribution, and requests to start a round."""

  epoch: int
  round: int


class Leave(NamedTuple):
  """The peer leaves the swarm."""


class Report(NamedTuple):
  """Progress of a peer, for monitoring only; the protocol ignores it.

  Attributes:
    revision: Revision that contains the peer's last contribution.
    sent_bytes: Bytes that the process has sent in all exchanges, failed ones
      included.
    loss: Training loss of that contribution, if the program reports one.
  """

  revision: int
  sent_bytes: int
  loss: float | None


# From the coordinator to a peer.


class Prepare(NamedTuple):
  """Announces a new epoch, a numbered list of members of the swarm.

  Any round of an earlier epoch has ended.

  Attributes:
    epoch: Number of the epoch.
    members: Members of the epoch, in the order of their ranks.
    revision: Newest committed revision (version of the shared state).
    committed: Epoch in which that revision was committed; 0 if it was committed
      before this run.
    digest: Digest of that revision.
    holders: Members that hold that revision.
    verify: Whether members must compute the digest of their revision again, as
      is needed after votes without a majority.
  """

  epoch: int
  members: tuple[Id, ...]
  revision: int
  committed: int
  digest: Digest
  holders: tuple[Id, ...]
  verify: bool


class Go(NamedTuple):
  """Asks for contributions to the next round.

  It is sent when all members of an epoch are prepared, and after each commit.

  Attributes:
    epoch: Number of the epoch.
    revision: Newest committed revision; equals the number of the next round.
    digest: Digest of that revision.
    holders: Members that hold that revision.
  """

  epoch: int
  revision: int
  digest: Digest
  holders: tuple[Id, ...]


class Start(NamedTuple):
  """Starts a round.

  Attributes:
    epoch: Epoch of the round.
    round: Number of the round.
    contributors: Members that exchange contributions, in the order of their
      ranks.
  """

  epoch: int
  round: int
  contributors: tuple[Id, ...]


class Welcome(NamedTuple):
  """First message of the coordinator's host on a connection.

  Attributes:
    silence_s: The coordinator drops a peer that sends nothing for this number
      of seconds (`Timing.silence_s`).
  """

  silence_s: float


class Waiting(NamedTuple):
  """Status that the coordinator's host sends to a peer not yet admitted.

  The peer's host reads it to decide when to give up; the protocol ignores it.

  Attributes:
    revision: Newest committed revision.
    lost: Whether no connected peer holds that revision.
    text: Human-readable description of what the coordinator waits for.
  """

  revision: int
  lost: bool
  text: str


class Stop(NamedTuple):
  """Request to the host of a peer to end the peer, which keeps its state.

  Attributes:
    text: Human-readable reason.
  """

  text: str


class Check(NamedTuple):
  """Requests to connect to some peers, and to report a `Checked` for each.

  The coordinator's host sends it before a peer is admitted; the protocol
  ignores it.

  Attributes:
    peers: Peers to connect to.
    limit_s: Time limit of each connection in seconds.
  """

  peers: tuple[Id, ...]
  limit_s: float


# Effects that the coordinator returns to its host.


class Send(NamedTuple):
  """Sends a message to a peer, or from a peer to its coordinator.

  Attributes:
    to: Receiving peer; None for the coordinator.
    message: Any of the messages above.
  """

  to: Id | None
  message: Any


class Record(NamedTuple):
  """Durable state of the coordinator, which a restart resumes from.

  The host writes it to disk before it executes any later effect of the same
  step.

  Attributes:
    epoch: Newest epoch (numbered list of members) that was proposed.
    members: Members of that epoch.
    revision: Newest committed revision (version of the shared state).
    committed: Epoch in which that revision was committed; 0 if it was committed
      before this run.
    digest: Digest of that revision.
  """

  epoch: int = 0
  members: tuple[Id, ...] = ()
  revision: int = 0
  committed: int = 0
  digest: Digest = ""


class Watch(NamedTuple):
  """Starts a liveness watch of a peer: the host may report `Silent`."""

  peer: Id


class Close(NamedTuple):
  """Closes the connection to a peer, which may connect again."""

  peer: Id


class Arm(NamedTuple):
  """Starts a timer, at whose end the host sends a message to the coordinator.

  Attributes:
    message: That message, `Grace` or `Recovered`.
  """

  message: Any


# Messages from the coordinator's host to the coordinator.


class Silent(NamedTuple):
  """A peer has sent nothing, or had no connection, for too long (`Timing`)."""

  peer: Id


class Grace(NamedTuple):
  """Timer: the grace time for late contributions to a round is over."""

  epoch: int
  round: int


class Recovered(NamedTuple):
  """Timer: a restarted coordinator stops waiting for its former members."""


# Effects that a peer returns to its host.


class Connect(NamedTuple):
  """Connects to an epoch's members; the host returns `Connected`.

  A repeated effect starts no second attempt to connect.
  """

  epoch: int
  members: tuple[Id, ...]


class Fetch(NamedTuple):
  """Downloads a revision from its holders; the host returns `Fetched`."""

  revision: int
  digest: Digest
  holders: tuple[Id, ...]


class Reduce(NamedTuple):
  """Runs a round on a copy of the contribution; the host returns `Reduced`."""

  epoch: int
  round: int
  contributors: tuple[Id, ...]


class Cancel(NamedTuple):
  """Aborts the running round and keeps the peer's contribution."""


class Discard(NamedTuple):
  """Discards the result of the round that the peer voted on.

  Attributes:
    keep: Whether the peer keeps its contribution for the next round.
  """

  keep: bool


class Apply(NamedTuple):
  """Applies the committed round: its result becomes the peer's revision."""


class Work(NamedTuple):
  """Computes a contribution; the host returns `Worked`."""


class Halt(NamedTuple):
  """Ends the peer; its state and contribution are kept."""


# From a peer's host to the peer.


class Connected(NamedTuple):
  """Result of a `Connect`.

  Attributes:
    epoch: Epoch of the request.
    unreachable: Members to which no connection could be made.
    absent: Members that made no connection to this peer.
  """

  epoch: int
  unreachable: tuple[Id, ...] = ()
  absent: tuple[Id, ...] = ()


class Fetched(NamedTuple):
  """Result of a `Fetch`: the revision is complete and matches its digest."""

  revision: int
  digest: Digest


class Reduced(NamedTuple):
  """Result of a `Reduce`.

  Attributes:
    epoch: Epoch of the round.
    round: Number of the round.
    digest: Digest of the resulting revision; None if the round failed.
  """

  epoch: int
  round: int
  digest: Digest | None


class Worked(NamedTuple):
  """Result of a `Work`: the next contribution has been computed."""


class Voided(NamedTuple):
  """Invalidates the contribution: its samples were granted to other peers."""


class Reconnected(NamedTuple):
  """A connection to the coordinator was established or re-established."""


class Alone(NamedTuple):
  """There was no connection to the coordinator for `PeerSettings.alone_s`."""


def to_json(value: Any) -> Any:
  """Returns a message as JSON values, with its type's name under "is"."""
  if isinstance(value, tuple):
    if not hasattr(value, "_fields"):  # a plain tuple
      return [to_json(item) for item in value]
    fields = {k: to_json(v) for k, v in value._asdict().items()}
    return {"is": type(value).__name__, **fields}
  return value


def from_json(data: Any) -> Any:
  """Returns the message that `to_json` has converted to JSON values.

  Raises:
    ValueError: The data is not a message of this module.
  """
  if isinstance(data, list):
    return tuple(from_json(item) for item in data)  # all sequences are tuples
  if not isinstance(data, dict):
    return data
  fields = {k: from_json(v) for k, v in data.items() if k != "is"}
  # The classes of this module, by name.
  kind = globals().get(data.get("is"))
  if not hasattr(kind, "_fields") or not (
    # Fields with a default may be missing in messages of older versions.
    {*kind._fields} - {*kind._field_defaults} <= {*fields} <= {*kind._fields}
  ):
    raise ValueError(f"the line is not a message: {str(data)[:200]}")
  return kind(**fields)
