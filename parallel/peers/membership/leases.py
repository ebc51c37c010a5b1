"""Sample leases: assignment of training samples to peers.

Samples are numbered from 0 and granted from one counter. The free samples and
each peer's grant are part of the shared state and change only when a round is
committed: the samples of each contributor become used, and each member without
a grant receives the next ones. Peers with the same revision therefore agree
without communication.

- A member whose contribution is late keeps its grant; the contribution counts
  in a later round.
- The grant of a peer that is no longer a member becomes free and is granted
  first.
- A new member has no grant. It draws samples above the counter, at an offset
  computed from its epoch and rank, which is unique among all peers of all
  epochs since the last commit. At the start of a round, contributors exchange
  the numbers of their samples (`parallel.peers.exchange`), and unused numbers
  become free at the commit. Samples that a new member drew but did not
  contribute by the next commit are void: it starts again with its grant from
  that commit, so a slow member loses at most one contribution.

Invariants: no sample is used by two counted contributions, and every number
below the counter is used, granted or free.

Example:
  >>> from parallel.peers.membership import leases
  >>> new = leases.SampleLeases()
  >>> a = leases.next_samples(new, epoch=1, members=("a", "b"), me="a", count=4)
  >>> a
  ((0, 4),)
  >>> after = leases.leases_after_commit(new, 1, ("a", "b"), {"a": a}, count=4)
  >>> after.held  # grants of the next contributions
  (('a', ((4, 8),)), ('b', ((8, 12),)))
  >>> leases.count_used_samples(after)
  4
"""

from collections.abc import Iterable, Mapping
import itertools
import json
from typing import NamedTuple

from parallel.peers.membership.messages import Id
from parallel.peers.transport.frames import MAX_ITEMS

Span = tuple[int, int]  # sample numbers [start, stop)
Spans = tuple[Span, ...]  # ascending, disjoint and not adjacent


class SampleLeases(NamedTuple):
  """Assignment of training samples at a revision of the shared state.

  Attributes:
    end: Counter: no sample with this or a higher number has been used or
      granted.
    epoch: Epoch (numbered list of members) in which the revision was committed.
    round: Number of committed rounds.
    free: Samples below ``end`` that are neither used nor granted.
    held: (peer, granted samples) pairs, sorted by id.
  """

  end: int = 0
  epoch: int = 1  # the first epoch of a run
  round: int = 0
  free: Spans = ()
  held: tuple[tuple[Id, Spans], ...] = ()


def next_samples(
  leases: SampleLeases, epoch: int, members: tuple[Id, ...], me: Id, count: int
) -> Spans:
  """Returns the samples of a peer's next contribution.

  Args:
    leases: Leases of the newest revision.
    epoch: Epoch in which the peer starts to compute the contribution.
    members: Members of the epoch, in the order of their ranks.
    me: Id of the peer.
    count: Number of samples per contribution.

  Returns:
    The peer's grant, or a span above the counter if it has none.
  """
  held = dict(leases.held)
  if me in held:
    return held[me]
  since = epoch - leases.epoch
  # A run that resumes from a checkpoint starts with epoch 1 again, so `since`
  # may be negative; the map from integers to naturals is one-to-one.
  since = 2 * since if since >= 0 else -2 * since - 1
  # An epoch has at most MAX_ITEMS members, so the offsets are unique.
  place = since * MAX_ITEMS + members.index(me)
  start = leases.end + place * count
  return ((start, start + count),)


def count_used_samples(leases: SampleLeases) -> int:
  """Returns the number of samples used in committed rounds."""
  # Samples below the counter that are not used yet.
  away = [*leases.free, *(span for _, spans in leases.held for span in spans)]
  return leases.end - sum(stop - start for start, stop in away)


def are_samples_valid(
  leases: SampleLeases, drawn: tuple[int, Spans], me: Id
) -> bool:
  """Returns whether a contribution in progress may still be counted.

  Args:
    leases: Leases of the newest revision.
    drawn: (`SampleLeases.round` when the contribution was started, samples of
      the contribution).
    me: Id of the peer.
  """
  return dict(leases.held).get(me) == drawn[1] or (
    # Drawn without a grant: valid until the next commit.
    leases.round == drawn[0] and me not in dict(leases.held)
  )


def leases_after_commit(
  leases: SampleLeases, epoch: int, members: Iterable[Id],
  used: Mapping[Id, Spans], count: int,
) -> SampleLeases:
  """Returns the leases after a round is committed.

  Args:
    leases: Leases of the previous revision.
    epoch: Epoch of the round.
    members: Members of the epoch.
    used: contributor -> samples of its contribution.
    count: Number of samples per contribution of the next round.

  Raises:
    ValueError: A contributor used samples that were not assigned to it.
  """
  held, members = dict(leases.held), set(members)
  # Other contributors have reported these samples, which are not trusted.
  for peer, spans in sorted(used.items()):
    if peer in held and held[peer] != spans:
      raise ValueError(
        f"{peer} reports that it used the samples {spans}, but it was assigned "
        f"{held[peer]}"
      )
    if peer not in held and any(start < leases.end for start, _ in spans):
      raise ValueError(
        f"{peer} reports samples {spans} that begin below {leases.end}, and it "
        "was assigned none of them"
      )
  drawn = sorted(span for spans in used.values() for span in spans)
  for (_, stop), (start, _) in itertools.pairwise(drawn):
    if start < stop:
      raise ValueError(f"sample {start} is reported twice")
  # Late members keep their grants.
  kept = {
    peer: spans for peer, spans in held.items()
    if peer in members and peer not in used
  }
  # The counter moves past the samples of new members.
  end = max([leases.end, *(stop for _, stop in drawn)])
  new = [span for span in drawn if span[0] >= leases.end]  # of new members
  # Free samples, numbers that new members skipped, grants of former members.
  free = [
    *leases.free, *_gaps(leases.end, end, new),
    *(s for p, spans in held.items() if p not in members and p not in used
      for s in spans),
  ]
  rest = _merge_spans(free)
  # In the order of ids, so that all peers compute the same grants.
  for peer in sorted(members - kept.keys()):
    kept[peer], rest, end = _grant(rest, end, count)
  return SampleLeases(
    end, epoch, leases.round + 1, rest, tuple(sorted(kept.items()))
  )


def _grant(free: Spans, end: int, count: int) -> tuple[Spans, Spans, int]:
  """Grants ``count`` samples: ``free`` ones, then those from ``end`` on.

  Returns (grant, remaining free samples, new value of the counter ``end``).
  """
  taken: list[Span] = []
  rest = list(free)
  while count and rest:
    start, stop = rest.pop(0)
    # A grant may consist of several spans.
    size = min(count, stop - start)
    taken.append((start, start + size))
    count -= size
    if start + size < stop:
      rest.insert(0, (start + size, stop))
  if count:
    taken.append((end, end + count))
  return _merge_spans(taken), tuple(rest), end + count


def _gaps(start: int, stop: int, spans: list[Span]) -> list[Span]:
  """Returns the parts of [start, stop) that ascending spans do not cover."""
  found = []
  # The empty last span closes the gap at the end.
  for a, b in [*spans, (stop, stop)]:
    if start < a:
      found.append((start, a))
    start = max(start, b)
  return found


def _merge_spans(spans: Iterable[Span]) -> Spans:
  """Sorts disjoint spans and merges adjacent ones."""
  found: list[Span] = []
  for start, stop in sorted(spans):
    if found and found[-1][1] == start:  # adjacent
      found[-1] = (found[-1][0], stop)
    elif start < stop:
      found.append((start, stop))
  return tuple(found)


def encode(leases: SampleLeases) -> bytes:
  """Returns leases as JSON bytes, the form stored in the shared state."""
  return json.dumps(leases, separators=(",", ":")).encode()


def decode(data: bytes) -> SampleLeases:
  """Returns the leases that `encode` has converted to bytes.

  The bytes are trusted: they are part of a state whose digest was committed.
  """
  # JSON lists become tuples again, since leases are hashable.
  end, epoch, count, free, held = json.loads(data)
  return SampleLeases(
    end, epoch, count, tuple(map(tuple, free)),
    tuple((peer, tuple(map(tuple, spans))) for peer, spans in held),
  )
