"""Who draws which samples, decided by the shared state alone.

Samples are numbered from 0 and drawn from one counter. What is free, and who
holds what, is a part of the shared state, and changes only when a round is
committed: then each contributor's samples are used up, and each member without
a grant is granted the next ones. So peers who have the same revision agree
without a message.

- A member whose part is late keeps its grant; its part counts in a later round.
- The grant of a peer that is no member any more goes back, and is drawn first.
- A newcomer has no grant yet. It takes samples beyond all that are granted, at
  a place that its epoch and rank give it: no two peers of any epochs since the
  last commit have the same ones. Contributors tell each other what they drew
  (a gather of `encode`), and what nobody used goes back at the commit. What a
  newcomer drew and did not contribute by then is void: it draws again, what it
  has been granted meanwhile, so a slow one is behind only once.

Nothing is drawn twice by two contributions that are both counted, and nothing
is lost: every number below the counter is used up, granted or free.
"""

from collections.abc import Iterable, Mapping
import itertools
import json
from typing import NamedTuple

from parallel.elastic.membership.messages import Id
from parallel.elastic.transport.frames import MOST_ITEMS

Span = tuple[int, int]  # from, to (excluded)
Spans = tuple[Span, ...]  # ascending, apart from one another


class Leases(NamedTuple):
  """What is known of the samples at a revision.

  Attributes:
    end: The counter: no number from here on has been drawn in a round that was
      committed, or granted.
    epoch: The epoch in which the revision was committed.
    round: How many rounds have been committed.
    free: Numbers below ``end`` that went back.
    held: What each peer was granted, in the order of the ids.
  """

  end: int = 0
  epoch: int = 1  # the first one
  round: int = 0
  free: Spans = ()
  held: tuple[tuple[Id, Spans], ...] = ()


def draw(
  leases: Leases, epoch: int, members: tuple[Id, ...], me: Id, count: int
) -> Spans:
  """Returns the samples of a peer's next part.

  Args:
    leases: Of the newest revision.
    epoch: The epoch in which the part is begun.
    members: Its members, in the order of their ranks.
    me: The peer.
    count: How many samples a part has.
  """
  held = dict(leases.held)
  if me in held:
    return held[me]
  since = epoch - leases.epoch
  # A new run that goes on from a checkpoint begins with epoch 1 again.
  since = 2 * since if since >= 0 else -2 * since - 1
  place = since * MOST_ITEMS + members.index(me)
  start = leases.end + place * count
  return ((start, start + count),)


def used(leases: Leases) -> int:
  """Returns how many samples are in rounds that were committed."""
  away = [*leases.free, *(span for _, spans in leases.held for span in spans)]
  return leases.end - sum(stop - start for start, stop in away)


def valid(leases: Leases, drawn: tuple[int, Spans], me: Id) -> bool:
  """Returns whether a part that was begun before may still be contributed.

  Args:
    leases: Of the newest revision.
    drawn: The `Leases.round` of when it was begun, and its samples.
    me: The peer.
  """
  return dict(leases.held).get(me) == drawn[1] or (
    leases.round == drawn[0] and me not in dict(leases.held)
  )


def committed(
  leases: Leases, epoch: int, members: Iterable[Id],
  used: Mapping[Id, Spans], count: int,
) -> Leases:
  """Returns the leases of the revision that a round makes.

  Args:
    leases: Of the revision before.
    epoch: In which the round is.
    members: Who belongs to the epoch.
    used: What each contributor's part has drawn.
    count: How many samples the next parts have.

  Raises:
    ValueError: A contributor has drawn what it must not.
  """
  held, members = dict(leases.held), set(members)
  for peer, spans in sorted(used.items()):
    if peer in held and held[peer] != spans:
      raise ValueError(f"{peer} has drawn {spans}, not {held[peer]}")
    if peer not in held and any(start < leases.end for start, _ in spans):
      raise ValueError(f"{peer} has drawn {spans} below {leases.end}")
  drawn = sorted(span for spans in used.values() for span in spans)
  for (_, stop), (start, _) in itertools.pairwise(drawn):
    if start < stop:
      raise ValueError(f"{start} has been drawn twice")
  kept = {
    peer: spans for peer, spans in held.items()
    if peer in members and peer not in used
  }
  end = max([leases.end, *(stop for _, stop in drawn)])
  new = [span for span in drawn if span[0] >= leases.end]
  free = [
    *leases.free, *_gaps(leases.end, end, new),
    *(s for p, spans in held.items() if p not in members and p not in used
      for s in spans),
  ]
  rest = _joined(free)
  for peer in sorted(members - kept.keys()):
    kept[peer], rest, end = _grant(rest, end, count)
  return Leases(
    end, epoch, leases.round + 1, rest, tuple(sorted(kept.items()))
  )


def _grant(free: Spans, end: int, count: int) -> tuple[Spans, Spans, int]:
  """Takes samples: those that went back first; returns what is left."""
  taken: list[Span] = []
  rest = list(free)
  while count and rest:
    start, stop = rest.pop(0)
    size = min(count, stop - start)
    taken.append((start, start + size))
    count -= size
    if start + size < stop:
      rest.insert(0, (start + size, stop))
  if count:
    taken.append((end, end + count))
  return _joined(taken), tuple(rest), end + count


def _gaps(start: int, stop: int, spans: list[Span]) -> list[Span]:
  """Returns what ascending spans leave out between two numbers."""
  found = []
  for a, b in [*spans, (stop, stop)]:
    if start < a:
      found.append((start, a))
    start = max(start, b)
  return found


def _joined(spans: Iterable[Span]) -> Spans:
  """Sorts spans that are apart, and joins those that touch."""
  found: list[Span] = []
  for start, stop in sorted(spans):
    if found and found[-1][1] == start:
      found[-1] = (found[-1][0], stop)
    elif start < stop:
      found.append((start, stop))
  return tuple(found)


def encode(leases: Leases) -> bytes:
  """Returns leases as bytes, as the shared state has them."""
  return json.dumps(leases, separators=(",", ":")).encode()


def decode(data: bytes) -> Leases:
  """Reads what `encode` has made, which the state's digest vouches for."""
  end, epoch, count, free, held = json.loads(data)
  return Leases(
    end, epoch, count, tuple(map(tuple, free)),
    tuple((peer, tuple(map(tuple, spans))) for peer, spans in held),
  )
