"""Times of execution traces (`parallel.plans.network.chakra`) on a network.

A node starts when the nodes that it waits for have ended. The k-th collectives
of a group's ranks form one *execution*, which starts when all these ranks have
reached it. The k-th send and the k-th receive with the same ranks and tag also
form one execution, and so does each compute node. Executions do not compete for
links: the time of one does not depend on the others.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools

from parallel.plans.network import routed, simulate
from parallel.plans.network.chakra import Node
from parallel.plans.schedules import builders
from parallel.plans.topology.builders import ring

# (kind, operand bytes on a rank, number of ranks) -> seconds.
CollectiveTimer = Callable[[str, int, int], float]


@dataclasses.dataclass(frozen=True)
class Replay:
  """Result of a replay.

  Attributes:
    finish_s: End of the last node, in seconds from the start.
    communicating_s: Seconds, per rank, during which the rank takes part in at
      least one collective or message.
  """

  finish_s: float
  communicating_s: tuple[float, ...]


def make_ring_timer(
  bandwidth: float, latency_s: float = 0.0
) -> CollectiveTimer:
  """Returns a function that times a collective on a ring of its n ranks.

  Reductions and gathers run the schedule "ring" of `parallel.plans.schedules`
  in the alpha-beta model, with at least one byte per chunk. An all-to-all has
  n - 1 rounds, each with 1/n of the operand. Other kinds send the operand once.

  Args:
    bandwidth: Bytes per second and direction of each link.
    latency_s: Latency of each link in seconds.

  Example:
    >>> seconds = make_ring_timer(1e9)
    >>> round(seconds("all_gather", 1000, 4) * 1e9)  # 3 rounds of 1000 bytes
    3000
  """

  @functools.cache
  def schedule(kind: str, num_ranks: int) -> routed.RoutedSchedule:
    net = ring(num_ranks, bandwidth=bandwidth, latency_s=latency_s)
    return routed.on_links(builders.build("ring", net, kind), net)

  @functools.cache
  def seconds(kind: str, size_bytes: int, num_ranks: int) -> float:
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
      whole = size_bytes * (num_ranks if kind == "all_gather" else 1)
      return simulate.lockstep(
        schedule(kind, num_ranks), max(whole, num_ranks)
      )
    rounds, part = 1, size_bytes
    if kind == "all_to_all":
      rounds, part = num_ranks - 1, -(-size_bytes // num_ranks)
    return rounds * (latency_s + part / bandwidth)

  return seconds


def replay(
  traces: Sequence[Sequence[Node]], seconds: CollectiveTimer
) -> Replay:
  """Replays the traces of all ranks.

  Args:
    traces: Nodes of each rank.
    seconds: Function from (kind, operand bytes, ranks) to a time in seconds.

  Raises:
    ValueError: A rank lacks a collective or message of its group, ranks differ
      in its kind or bytes, or nodes wait for each other in a cycle.
  """
  executions = _match_nodes(traces)
  # of: (rank, node) -> execution; waits: execution -> number of awaited nodes.
  of = {part: e for e in executions for part in e}
  waits = {e: sum(len(traces[r][n].after) for r, n in e) for e in executions}
  users: dict[tuple[int, int], list[tuple[int, int]]] = {}
  for rank, nodes in enumerate(traces):
    for number, node in enumerate(nodes):
      for before in node.after:
        users.setdefault((rank, before), []).append((rank, number))
  ready = dict.fromkeys(executions, 0.0)
  bars: list[list[tuple[float, float]]] = [[] for _ in traces]
  free = [e for e in executions if not waits[e]]
  done, finish = 0, 0.0
  while free:
    execution = free.pop()
    done += 1
    rank, number = execution[0]
    node, start = traces[rank][number], ready[execution]
    end = start + node.seconds
    if node.ranks:
      end = start + seconds(node.kind, node.bytes, len(node.ranks))
      for rank, _ in execution:
        bars[rank].append((start, end))
    finish = max(finish, end)
    for part in execution:
      for user in users.get(part, ()):
        later = of[user]
        ready[later] = max(ready[later], end)
        waits[later] -= 1
        if not waits[later]:
          free.append(later)
  if done < len(executions):
    raise ValueError(
      f"{len(executions) - done} executions can never start, since nodes wait "
      "for each other in a cycle"
    )
  return Replay(finish, tuple(map(covered_s, bars)))


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
  """Returns the seconds that at least one of the intervals covers.

  Example:
    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
  """
  total, last = 0.0, 0.0
  for start, end in sorted(intervals):
    total += max(0.0, end - max(start, last))
    last = max(last, end)
  return total


def _match_nodes(
  traces: Sequence[Sequence[Node]],
) -> list[tuple[tuple[int, int], ...]]:
  """Returns the (rank, node index) pairs of the nodes that run together.

  A compute node runs alone, the two ends of a message together, and so do the
  nodes of a collective, one for each rank.
  """
  found: dict[tuple, list[tuple[int, int]]] = {}
  for rank, nodes in enumerate(traces):
    times: dict[tuple, int] = {}
    for number, node in enumerate(nodes):
      key: tuple = (rank, number)
      if node.ranks:
        what = node.ranks, node.tag, node.kind in ("send", "receive")
        times[what] = times.get(what, -1) + 1
        key = (*what, times[what])
      found.setdefault(key, []).append((rank, number))
  for parts in found.values():
    nodes = [traces[rank][number] for rank, number in parts]
    first = nodes[0]
    present = {rank for rank, _ in parts}
    if first.ranks and present != set(first.ranks):
      raise ValueError(
        f"node {first.name}: ranks {sorted(set(first.ranks) - present)} do not "
        f"take part, but all of {list(first.ranks)} must"
      )
    kinds = {"receive" if n.kind == "send" else n.kind for n in nodes}
    if len(kinds) > 1 or len({n.bytes for n in nodes}) > 1:
      raise ValueError(
        f"node {first.name}: its ranks must agree in kind and bytes"
      )
  return [tuple(parts) for parts in found.values()]
