"""What peers and their coordinator say to each other, and ask of their hosts.

A *round* is one exchange between the peers, and makes the next *revision* of
what they share: round r makes revision r + 1 of revision r. An *epoch* is a
list of members. A round is attempted once in an epoch: if the attempt fails,
the next one is in a new epoch, even if its members are the same.

Everything here is plain data that can be compared and hashed, so that the
protocol can be searched state by state (`parallel.elastic.membership.search`).
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

# Names a process of a peer: one that starts again has another id. Ids can be
# ordered; a younger peer has a higher one.
Id = Any
# Says what a revision's content is; the empty one is that of no content.
Digest = Hashable


# From a peer to its coordinator.


class Vote(NamedTuple):
  """How a peer's part of an exchange ended.

  Attributes:
    epoch: In which it was.
    round: Which it was.
    digest: Of the revision that it makes; None if it failed.
  """

  epoch: int
  round: int
  digest: Digest | None


class Hello(NamedTuple):
  """The first message over a connection, a new one or one made again.

  Attributes:
    epoch: The newest epoch that the peer knows, 0 for none.
    revision: Of what it has.
    digest: Of what it has.
    voted: Its vote on a round whose outcome it does not know.
  """

  epoch: int
  revision: int
  digest: Digest
  voted: Vote | None


class Prepared(NamedTuple):
  """The peer is connected to all members, and has the newest revision."""

  epoch: int


class Unreachable(NamedTuple):
  """The peer could not connect to some members of an epoch."""

  epoch: int
  peers: tuple[Id, ...]


class Ready(NamedTuple):
  """The peer has computed what it gives to a round, and asks for it."""

  epoch: int
  round: int


class Leave(NamedTuple):
  """The peer goes."""


class Report(NamedTuple):
  """What a peer has done, for people who look on; nothing depends on it.

  Attributes:
    revision: The one that its last part was counted in.
    sent_bytes: Of exchanges, since it began, those that failed, too.
    loss: Of that part, if the peer's program has said one.
  """

  revision: int
  sent_bytes: int
  loss: float | None


# From the coordinator to a peer.


class Prepare(NamedTuple):
  """An epoch is to begin. What ran in another one has ended.

  Attributes:
    epoch: Its number.
    members: Who belongs to it, in the order of their ranks.
    revision: The newest one that was committed.
    committed: In which epoch it was committed; 0 if before this run.
    digest: Of that revision.
    holders: Members that have it.
  """

  epoch: int
  members: tuple[Id, ...]
  revision: int
  committed: int
  digest: Digest
  holders: tuple[Id, ...]


class Go(NamedTuple):
  """An epoch's members are there, or a round of it was committed.

  Attributes:
    epoch: Which.
    revision: The newest one; its round is next.
    digest: Of that revision.
    holders: Members that have it.
  """

  epoch: int
  revision: int
  digest: Digest
  holders: tuple[Id, ...]


class Start(NamedTuple):
  """A round begins.

  Attributes:
    epoch: Of the round.
    round: Its number.
    contributors: Whose parts are exchanged, in the order of their ranks.
  """

  epoch: int
  round: int
  contributors: tuple[Id, ...]


class Welcome(NamedTuple):
  """What the coordinator's host says first over a connection.

  Attributes:
    silence_s: Seconds t_h after which a silent peer is dropped.
  """

  silence_s: float


class Waiting(NamedTuple):
  """What the coordinator's host says to a peer that is not admitted yet.

  It is for people, and says when to give up; the protocol needs it not.

  Attributes:
    revision: The newest one.
    lost: Whether nobody is there who has it.
    text: What is waited for, in words.
  """

  revision: int
  lost: bool
  text: str


# What the coordinator asks of its host.


class Send(NamedTuple):
  """A message to a peer, or from a peer to its coordinator.

  Attributes:
    to: The peer; None for the coordinator.
    message: Any of the above.
  """

  to: Id | None
  message: Any


class Record(NamedTuple):
  """What the coordinator must know when it starts again.

  It is on the disk before anything is sent that follows it in the effects.

  Attributes:
    epoch: The newest epoch that was proposed.
    members: Who belongs to it.
    revision: The newest revision that was committed.
    committed: In which epoch; 0 if before this run.
    digest: Of that revision.
  """

  epoch: int = 0
  members: tuple[Id, ...] = ()
  revision: int = 0
  committed: int = 0
  digest: Digest = ""


class Watch(NamedTuple):
  """The host says `Silent` when it has heard nothing of a peer for t_h."""

  peer: Id


class Close(NamedTuple):
  """The host closes its connection to a peer, which may come again."""

  peer: Id


class Arm(NamedTuple):
  """The host gives the message back to the coordinator after a time.

  Attributes:
    message: `Grace` or `Recovered`.
  """

  message: Any


# From its host to the coordinator.


class Silent(NamedTuple):
  """A peer has not been heard of for t_h."""

  peer: Id


class Grace(NamedTuple):
  """Peers that are late have been waited for."""

  epoch: int
  round: int


class Recovered(NamedTuple):
  """Peers of a coordinator that has started again have been waited for."""


# What a peer asks of its host.


class Connect(NamedTuple):
  """Connect to an epoch's members; the host answers with `Connected`.

  It may be asked for again; if it is under way that changes nothing.
  """

  epoch: int
  members: tuple[Id, ...]


class Fetch(NamedTuple):
  """Get a revision from those who have it; the answer is `Fetched`."""

  revision: int
  digest: Digest
  holders: tuple[Id, ...]


class Reduce(NamedTuple):
  """Run a round with a copy of one's part; the answer is `Reduced`."""

  epoch: int
  round: int
  contributors: tuple[Id, ...]


class Cancel(NamedTuple):
  """Stop the round that runs, and forget its result; the part is kept."""


class Discard(NamedTuple):
  """Forget the result of the round that was voted on.

  Attributes:
    keep: Whether the part that was given to it is kept.
  """

  keep: bool


class Apply(NamedTuple):
  """The round that was voted on is committed: its result is the revision."""


class Work(NamedTuple):
  """Compute a part, from the revision that is there; the answer is `Worked`."""


class Halt(NamedTuple):
  """Keep everything, and end."""


# From its host to a peer.


class Connected(NamedTuple):
  """The end of a `Connect`.

  Attributes:
    epoch: Of the epoch.
    unreachable: Members that could not be connected to.
  """

  epoch: int
  unreachable: tuple[Id, ...] = ()


class Fetched(NamedTuple):
  """What was fetched is there, and has been compared with its digest."""

  revision: int
  digest: Digest


class Reduced(NamedTuple):
  """The end of a `Reduce`.

  Attributes:
    epoch: Of the round.
    round: Its number.
    digest: Of what it makes; None if it failed.
  """

  epoch: int
  round: int
  digest: Digest | None


class Worked(NamedTuple):
  """The peer's next part is there."""


class Voided(NamedTuple):
  """The part must not be given any more: its samples went to others."""


class Reconnected(NamedTuple):
  """There is a connection to the coordinator, a first one or a new one."""


class Alone(NamedTuple):
  """There has been none for t_c."""


def to_json(value: Any) -> Any:
  """Returns a message as what JSON has, with its name under "is"."""
  if isinstance(value, tuple):
    if not hasattr(value, "_fields"):
      return [to_json(item) for item in value]
    fields = {k: to_json(v) for k, v in value._asdict().items()}
    return {"is": type(value).__name__, **fields}
  return value


def from_json(data: Any) -> Any:
  """Reads what `to_json` has made.

  Raises:
    ValueError: It is no message.
  """
  if isinstance(data, list):
    return tuple(from_json(item) for item in data)
  if not isinstance(data, dict):
    return data
  fields = {k: from_json(v) for k, v in data.items() if k != "is"}
  kind = globals().get(data.get("is"))
  if not hasattr(kind, "_fields") or set(kind._fields) != set(fields):
    raise ValueError(f"no message: {str(data)[:200]}")
  return kind(**fields)
