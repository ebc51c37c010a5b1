"""State space of the model checker: a few peers with faults.

A world is a state of a coordinator, of peers, and of messages in flight, which
may be delivered in any order. The protocol's own `step` functions are executed.
A `FaultBudget` limits the number of faults of each kind (crashes, lost
connections, duplicated messages, ...), which may occur at any moment.
"""

import dataclasses
from typing import Any, NamedTuple

from parallel.peers.membership import coordinator as coordinators
from parallel.peers.membership import messages as m
from parallel.peers.membership import peer as peers_


class ProtocolModules(NamedTuple):
  """Modules under test; tests replace one with a copy that has a bug."""

  coordinator: Any = coordinators
  peer: Any = peers_


class FaultBudget(NamedTuple):
  """Maximum number of occurrences of each fault in an execution.

  Attributes:
    crashes: A peer is killed.
    restarts: The coordinator is killed; it restarts at any later moment.
    losses: The journal is lost while the coordinator is down.
    cuts: A peer's connection to the coordinator breaks.
    suspicions: A live peer is reported as silent.
    failures: A peer's exchange fails although all contributors are alive, or a
      connection between two live peers cannot be made.
    copies: A message is delivered twice.
    halts: A peer without a connection halts.
    leaves: A peer sends `Leave` and ends.
    voids: A fetched revision makes a peer's contribution void.
  """

  crashes: int = 0
  restarts: int = 0
  losses: int = 0
  cuts: int = 0
  suspicions: int = 0
  failures: int = 0
  copies: int = 0
  halts: int = 0
  leaves: int = 0
  voids: int = 0


class World(NamedTuple):
  """Global state: all processes, messages in flight and running tasks.

  Attributes:
    coordinator: State of the coordinator; None while it is down.
    journal: Last record in its journal.
    armed: Messages of the coordinator's timers that have not expired yet.
    watched: Peers under a liveness watch.
    peers: State of each peer; None for a peer that was killed or left.
    linked: Whether each peer has a connection to the coordinator.
    counts: Number of contributions that each peer has started.
    messages: (source, destination, kind, message) in flight; None is the
      coordinator.
    tasks: (peer, kind, task) that the hosts of peers are executing.
    begun: (epoch, round, peer, number of its contribution) of each exchange
      that a peer has started.
    left: Number of further faults of each kind.
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
  left: FaultBudget


@dataclasses.dataclass(frozen=True)
class SearchBounds:
  """Numbers of peers, rounds and faults of a search.

  Attributes:
    peers: Number of peers; all connect at some moment.
    rounds: Number of rounds after which the run is complete.
    budget: Maximum number of faults.
    rules: Rules of the coordinator.
    most: Number of states after which the search stops.
  """

  peers: int
  rounds: int
  budget: FaultBudget
  rules: coordinators.Rules
  most: int = 10_000_000
