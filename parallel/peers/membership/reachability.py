"""Reachability of peers, before and after their admission.

All members of an epoch connect to each other, so one member that others cannot
connect to would stop the swarm. The coordinator's host therefore asks a new
peer and the members to connect to each other before the new peer is admitted
(`AdmissionCandidates`). If members cannot connect later, the coordinator drops
some of them (`culprits`).

Example:
  >>> from parallel.peers.membership import reachability
  >>> failed = {("a", "x"), ("b", "x"), ("x", "a")}  # x is closed
  >>> reachability.culprits(failed)
  {'x'}
  >>> reachability.reason("x", failed)
  'a, b cannot reach it; it cannot reach a'
"""

from collections.abc import Collection, Iterable, Iterator
import dataclasses
from typing import NamedTuple

from parallel.peers.membership.messages import Hello, Id

PeerPair = tuple[Id, Id]  # (peer that connects, peer that it connects to)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 60.0
_MAX_NAMED = 3  # ids in the text of a reason


def culprits(
  failed: Iterable[PeerPair], kept: Collection[Id] = (),
  doubted: Collection[Id] = (),
) -> set[Id]:
  """Returns peers without which all others can connect to each other.

  The peer in the most failed connections is removed first, until none is left.
  Ties are resolved by the number of peers that could not reach it, then by age:
  the youngest is removed. A peer that others cannot reach is in more failed
  connections than each of them, so they are not removed for its reports.

  Args:
    failed: Failed connections, as (peer that connects, other peer).
    kept: Peers that are never removed; connections between them are ignored.
    doubted: Peers that the coordinator could not reach either; these are
      removed before others.
  """
  # The two directions between two peers count once.
  left = {frozenset(pair) for pair in failed if not set(pair) <= set(kept)}
  calls = [target for _, target in set(failed)]
  found: set[Id] = set()
  while left:
    candidates = set().union(*left) - set(kept)
    worst = max(candidates, key=lambda peer: (
      peer in doubted, sum(peer in pair for pair in left), calls.count(peer),
      peer,
    ))
    found.add(worst)
    left = {pair for pair in left if worst not in pair}
  return found


def reason(peer: Id, failed: Iterable[PeerPair]) -> str:
  """Returns a description of a peer's failed connections."""
  failed = set(failed)
  texts = []
  inward = sorted(dialer for dialer, target in failed if target == peer)
  outward = sorted(target for dialer, target in failed if dialer == peer)
  if inward:
    texts.append(f"{format_peers(inward)} cannot reach it")
  if outward:
    texts.append(f"it cannot reach {format_peers(outward)}")
  return "; ".join(texts)


def format_peers(peers: list[Id]) -> str:
  """Returns a text with the first few ids and the number of further ones."""
  more = len(peers) - _MAX_NAMED
  return ", ".join(map(str, peers[:_MAX_NAMED])) + (
    f" and {more} more" if more > 0 else ""
  )


@dataclasses.dataclass
class _Candidate:
  """Peer whose connections are checked before it is admitted.

  Attributes:
    hello: Its first message.
    pause_s: Seconds from this check to the next one if this one fails.
    again: Time (`time.monotonic()`) of the next check of its connections; None
      during a check.
    text: Last reason for which the peer was not admitted; "" for none yet.
  """

  hello: Hello
  pause_s: float = dataclasses.field(default_factory=lambda: _FIRST_PAUSE_S)
  again: float | None = None
  text: str = ""


class AdmissionDecision(NamedTuple):
  """Decision about a candidate.

  Attributes:
    peer: The candidate.
    hello: Its first message if it is admitted, else None.
    text: Reason for which it is not admitted.
    dropped: (peer, reason) of each peer that was admitted, is no member yet,
      and is dropped so that the candidate can be admitted.
  """

  peer: Id
  hello: Hello | None
  text: str
  dropped: tuple[tuple[Id, str], ...] = ()


class AdmissionCandidates:
  """Connected peers that are not admitted yet, and results of checks.

  A question asks one peer to connect to another. The caller sends the questions
  that `questions` returns, passes the responses to `answered`, and executes the
  decisions of `outcome`. A question without a response within the time limit is
  ignored, so it counts against neither peer.
  """

  def __init__(self, coordinator: Id, limit_s: float) -> None:
    """Starts without candidates.

    Args:
      coordinator: Id of the coordinator, which connects to candidates, too.
      limit_s: Seconds after which a missing response is ignored.
    """
    self._coordinator, self._limit_s = coordinator, limit_s
    self._candidates: dict[Id, _Candidate] = {}
    self._asked: dict[PeerPair, float] = {}  # time of each question
    self._errors: dict[PeerPair, str] = {}  # responses; "" for a success

  def __contains__(self, peer: Id) -> bool:
    return peer in self._candidates

  def __iter__(self) -> Iterator[Id]:
    return iter(tuple(self._candidates))

  def add(self, peer: Id, hello: Hello) -> None:
    """Adds a candidate; if it was added before, it is checked again."""
    self.remove(peer)
    self._candidates[peer] = _Candidate(hello)

  def remove(self, peer: Id) -> None:
    """Removes a peer from the candidates, and all results about this peer."""
    self._candidates.pop(peer, None)
    for results in (self._asked, self._errors):
      for pair in [pair for pair in results if peer in pair]:
        del results[pair]

  def answered(self, dialer: Id, target: Id, error: str) -> None:
    """Records whether ``dialer`` could connect to ``target``; "" for yes.

    A response to a question that was not asked is ignored.
    """
    if (dialer, target) in self._asked:
      self._errors[dialer, target] = error

  def questions(
    self, connected: Collection[Id], now: float
  ) -> dict[Id, list[Id]]:
    """Returns the questions to ask now: peer -> peers that it connects to.

    Args:
      connected: Members and admitted peers that have a connection.
      now: Current time, `time.monotonic()`.
    """
    found: dict[Id, list[Id]] = {}
    for peer, candidate in self._candidates.items():
      if candidate.again is not None:
        if now < candidate.again and self._failed_pairs_of(peer, connected):
          continue
        candidate.again = None
        for pair in [pair for pair, error in self._errors.items() if error]:
          if peer in pair:  # the connection has failed: ask again
            del self._errors[pair], self._asked[pair]
      for pair in ((self._coordinator, peer), *_pairs(peer, connected)):
        if pair not in self._asked:
          self._asked[pair] = now
          found.setdefault(pair[0], []).append(pair[1])
    return found

  def outcome(
    self, there: Collection[Id], members: Collection[Id], now: float
  ) -> AdmissionDecision | None:
    """Returns the next decision about a candidate, or None if none is due.

    A candidate that is admitted is removed from the candidates.

    Args:
      there: Members and admitted peers, to which a candidate must connect.
      members: Those of them that must not be dropped for a candidate.
      now: Current time, `time.monotonic()`.
    """
    doubted = {
      target for (dialer, target), error in self._errors.items()
      if error and dialer == self._coordinator
    }
    bad = culprits(
      self._failed_pairs_among({*there, *self._candidates}), members, doubted
    )
    for peer, candidate in self._candidates.items():
      if candidate.again is not None:
        continue
      own = self._failed_pairs_of(peer, there)
      wanted = [*_pairs(peer, set(there) - bad)]
      if own:  # the coordinator's own result may decide
        wanted.append((self._coordinator, peer))
      if any(self._awaits_response(pair, now) for pair in wanted):
        continue
      if peer not in bad:
        others = {*there, *self._candidates}
        dropped = tuple(
          (other, reason(other, self._failed_pairs_of(other, others)))
          for other in sorted(bad.intersection(there))
        )
        del self._candidates[peer]
        return AdmissionDecision(peer, candidate.hello, "", dropped)
      text = reason(
        peer, own | self._failed_pairs_of(peer, (self._coordinator,))
      )
      candidate.again = now + candidate.pause_s
      candidate.pause_s = min(2 * candidate.pause_s, _MAX_PAUSE_S)
      if text != candidate.text:
        candidate.text = text
        return AdmissionDecision(peer, None, text)
    return None

  def _failed_pairs_of(self, peer: Id, others: Iterable[Id]) -> set[PeerPair]:
    """Returns the failed connections between a peer and others."""
    return {pair for pair in _pairs(peer, others) if self._errors.get(pair)}

  def _failed_pairs_among(self, peers: Collection[Id]) -> set[PeerPair]:
    return {
      pair for pair, error in self._errors.items()
      if error and set(pair) <= set(peers)
    }

  def _awaits_response(self, pair: PeerPair, now: float) -> bool:
    """Returns whether a response is expected from a pair (dialer, target).

    This includes questions that could not be asked yet.
    """
    if pair in self._errors:
      return False
    return now - self._asked.get(pair, now) < self._limit_s


def _pairs(peer: Id, others: Iterable[Id]) -> Iterator[PeerPair]:
  for other in others:
    if other != peer:
      yield from ((peer, other), (other, peer))
