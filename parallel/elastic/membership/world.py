"""Small worlds of peers: their states, and what may go wrong in them.

A world has a coordinator, peers, and messages under way, which may be delivered
in any order. The protocol's own functions are what is run. What goes wrong is
in a `Budget`: how often a peer or the coordinator is killed, a connection is
cut, a message comes twice, and so on, at any moment.
"""

import dataclasses
from typing import Any, NamedTuple

from parallel.elastic.membership import coordinator as coordinators
from parallel.elastic.membership import messages as m
from parallel.elastic.membership import peer as peers_


class Protocol(NamedTuple):
  """The functions that are searched; a broken copy can stand in for them."""

  coordinator: Any = coordinators
  peer: Any = peers_


class Budget(NamedTuple):
  """How often each accident may happen in a world.

  Attributes:
    crashes: A peer is killed.
    restarts: The coordinator is killed; it comes back whenever.
    cuts: A peer's connection to the coordinator breaks.
    suspicions: A peer that lives is not heard of for t_h.
    failures: A peer's exchange fails though all others live, or a connection
      between two peers cannot be made.
    copies: A message comes twice.
    halts: A peer that has no connection gives up.
    leaves: A peer says that it goes, and goes.
    voids: A part must not be given any more, for a revision that is fetched.
  """

  crashes: int = 0
  restarts: int = 0
  cuts: int = 0
  suspicions: int = 0
  failures: int = 0
  copies: int = 0
  halts: int = 0
  leaves: int = 0
  voids: int = 0


class World(NamedTuple):
  """A state of everything.

  Attributes:
    coordinator: Its state; None while it is down.
    journal: What it has written.
    armed: Messages that its host gives back at some time.
    watched: Peers of which it is told when they are silent.
    peers: Their states; None for one that was killed.
    linked: Which of them have a connection to it.
    counts: How many parts each has begun.
    messages: Under way: from, to, kind, message; None is the coordinator.
    tasks: What hosts of peers are doing: peer, kind, task.
    begun: Who has begun a round: epoch, round, peer, number of its part.
    left: The accidents that may still happen.
  """

  coordinator: Any
  journal: m.Record
  armed: frozenset[Any]
  watched: frozenset[int]
  peers: tuple[Any, ...]
  linked: tuple[bool, ...]
  counts: tuple[int, ...]
  messages: frozenset[tuple[Any, ...]]
  tasks: frozenset[tuple[Any, ...]]
  begun: frozenset[tuple[Any, ...]]
  left: Budget


@dataclasses.dataclass(frozen=True)
class Bounds:
  """Which world is searched.

  Attributes:
    peers: How many there are; all come by themselves.
    rounds: Rounds until all is done.
    budget: What may go wrong.
    rules: Of the coordinator.
    most: States after which the search gives up.
  """

  peers: int
  rounds: int
  budget: Budget
  rules: coordinators.Rules
  most: int = 10_000_000
