"""Reachability of peers, before and after their admission.

All members of an epoch connect to each other, so one member that others cannot
connect to would stop the swarm. The coordinator's host therefore asks a new
peer and the members to connect to each other before the new peer is admitted
(`Admission`). If members cannot connect later, the coordinator drops some of
them (`culprits`).

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

Pair = tuple[Id, Id]  # (peer that connects, peer that it connects to)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 60.0
_MAX_NAMED = 3  # peers in a reason


def culprits(
  failed: Iterable[Pair], kept: Collection[Id] = (),
  doubted: Collection[Id] = (),
) -> set[Id]:
  """Returns peers without which all others can connect to each other.

  The peer with the most failed pairs is removed first, until no pair is left.
  Of peers with equally many pairs, it is the one that more others could not
  reach, then the youngest. A peer that others cannot reach has more failed
  pairs than each of them, so its reports do not remove them.

  Args:
    failed: Failed connections, as (peer that connected, other peer).
    kept: Peers that are not removed; pairs of two of them are ignored.
    doubted: Peers that the coordinator could not reach, too; they are removed
      before others.
  """
  # Both directions of a pair count once.
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


def reason(peer: Id, failed: Iterable[Pair]) -> str:
  """Returns a description of a peer's failed connections."""
  failed = set(failed)
  texts = []
  inward = sorted(dialer for dialer, target in failed if target == peer)
  outward = sorted(target for dialer, target in failed if dialer == peer)
  if inward:
    texts.append(f"{names(inward)} cannot reach it")
  if outward:
    texts.append(f"it cannot reach {names(outward)}")
  return "; ".join(texts)


def names(peers: list[Id]) -> str:
  """Returns the first ids, and the number of the others."""
  more = len(peers) - _MAX_NAMED
  return ", ".join(map(str, peers[:_MAX_NAMED])) + (
    f" and {more} more" if more > 0 else ""
  )


@dataclasses.dataclass
class _Candidate:
  """Peer whose connections are checked.

  Attributes:
    hello: Its first message.
    pause_s: Pause before the next check.
    again: Time of the next check, `time.monotonic()`; None during a check.
    text: Reason for which it is not admitted; "" for none yet.
  """

  hello: Hello
  pause_s: float = dataclasses.field(default_factory=lambda: _FIRST_PAUSE_S)
  again: float | None = None
  text: str = ""


class Outcome(NamedTuple):
  """Decision about a candidate.

  Attributes:
    peer: The candidate.
    hello: Its first message if it is admitted, else None.
    text: Reason for which it is not admitted.
    dropped: (peer, reason) of each waiting peer that is dropped so that the
      candidate can be admitted.
  """

  peer: Id
  hello: Hello | None
  text: str
  dropped: tuple[tuple[Id, str], ...] = ()


class Admission:
  """Connected peers that are not admitted yet, and results of checks.

  The caller sends the questions that `questions` returns, passes the responses
  to `answered`, and executes the decisions of `outcome`. If a peer does not
  respond within the time limit, this counts against no other peer.
  """

  def __init__(self, coordinator: Id, limit_s: float) -> None:
    """Starts without candidates.

    Args:
      coordinator: Name of the coordinator, which checks candidates, too.
      limit_s: Seconds after which a missing response is ignored.
    """
    self._coordinator, self._limit_s = coordinator, limit_s
    self._candidates: dict[Id, _Candidate] = {}
    self._asked: dict[Pair, float] = {}  # time of each question
    self._errors: dict[Pair, str] = {}  # responses; "" for a success

  def __contains__(self, peer: Id) -> bool:
    return peer in self._candidates

  def __iter__(self) -> Iterator[Id]:
    return iter(tuple(self._candidates))

  def add(self, peer: Id, hello: Hello) -> None:
    """Adds a candidate, or replaces its first message and checks it again."""
    self.remove(peer)
    self._candidates[peer] = _Candidate(hello)

  def remove(self, peer: Id) -> None:
    """Removes a candidate, and all results about it or a former candidate."""
    self._candidates.pop(peer, None)
    for results in (self._asked, self._errors):
      for pair in [pair for pair in results if peer in pair]:
        del results[pair]

  def answered(self, dialer: Id, target: Id, error: str) -> None:
    """Records a response; ignores one to a question that was not asked."""
    if (dialer, target) in self._asked:
      self._errors[dialer, target] = error

  def questions(
    self, connected: Collection[Id], now: float
  ) -> dict[Id, list[Id]]:
    """Returns connecting peer -> peers that it has to connect to now.

    Args:
      connected: Members and admitted peers that can be asked.
      now: Current time, `time.monotonic()`.
    """
    found: dict[Id, list[Id]] = {}
    for peer, candidate in self._candidates.items():
      if candidate.again is not None:
        if now < candidate.again and self._own(peer, connected):
          continue
        candidate.again = None
        for pair in [pair for pair, error in self._errors.items() if error]:
          if peer in pair:  # failed: ask again
            del self._errors[pair], self._asked[pair]
      for pair in ((self._coordinator, peer), *_pairs(peer, connected)):
        if pair not in self._asked:
          self._asked[pair] = now
          found.setdefault(pair[0], []).append(pair[1])
    return found

  def outcome(
    self, there: Collection[Id], members: Collection[Id], now: float
  ) -> Outcome | None:
    """Returns the next decision, or None; removes an admitted candidate.

    Args:
      there: Members and admitted peers.
      members: Peers that must not be dropped for a candidate.
      now: Current time, `time.monotonic()`.
    """
    doubted = {
      target for (dialer, target), error in self._errors.items()
      if error and dialer == self._coordinator
    }
    bad = culprits(
      self._failed({*there, *self._candidates}), members, doubted
    )
    for peer, candidate in self._candidates.items():
      if candidate.again is not None:
        continue
      own = self._own(peer, there)
      wanted = [*_pairs(peer, set(there) - bad)]
      if own:  # the coordinator's own result may decide
        wanted.append((self._coordinator, peer))
      if any(self._is_open(pair, now) for pair in wanted):
        continue
      if peer not in bad:
        others = {*there, *self._candidates}
        dropped = tuple(
          (other, reason(other, self._own(other, others)))
          for other in sorted(bad.intersection(there))
        )
        del self._candidates[peer]
        return Outcome(peer, candidate.hello, "", dropped)
      text = reason(peer, own | self._own(peer, (self._coordinator,)))
      candidate.again = now + candidate.pause_s
      candidate.pause_s = min(2 * candidate.pause_s, _MAX_PAUSE_S)
      if text != candidate.text:
        candidate.text = text
        return Outcome(peer, None, text)
    return None

  def _own(self, peer: Id, others: Iterable[Id]) -> set[Pair]:
    """Returns the failed pairs of a peer with others."""
    return {pair for pair in _pairs(peer, others) if self._errors.get(pair)}

  def _failed(self, peers: Collection[Id]) -> set[Pair]:
    return {
      pair for pair, error in self._errors.items()
      if error and set(pair) <= set(peers)
    }

  def _is_open(self, pair: Pair, now: float) -> bool:
    """Returns whether a response is still expected.

    A question to a peer without a connection has not been asked yet.
    """
    if pair in self._errors:
      return False
    return now - self._asked.get(pair, now) < self._limit_s


def _pairs(peer: Id, others: Iterable[Id]) -> Iterator[Pair]:
  for other in others:
    if other != peer:
      yield from ((peer, other), (other, peer))
