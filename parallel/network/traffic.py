"""Flows to route: of patterns, of schedules, of a program's collectives."""

import collections
from collections.abc import Callable, Sequence
import random

from parallel.network.flows import Fabric, Flow
from parallel.schedules.schedule import Schedule

Pattern = Callable[[Fabric, int], list[Flow]]


def shift(net: Fabric, _: int) -> list[Flow]:
  """Every host to the one as far on as a leaf has hosts; bytes are 1."""
  n = len(net.leaf_of)
  hosts = net.leaf_of.count(net.leaf_of[0])
  return [Flow(i, (i + hosts) % n, 1) for i in range(n)]


def permutation(net: Fabric, seed: int) -> list[Flow]:
  """Every host to one host, drawn at random; bytes are 1."""
  hosts = range(len(net.leaf_of))
  drawn = random.Random(seed).sample(hosts, len(hosts))
  return [Flow(i, j, 1) for i, j in zip(hosts, drawn, strict=True) if i != j]


def all_to_all(net: Fabric, _: int) -> list[Flow]:
  """Every host to every host of the other leaves; bytes are 1."""
  n = len(net.leaf_of)
  return [
    Flow(i, j, 1) for i in range(n) for j in range(n)
    if net.leaf_of[i] != net.leaf_of[j]
  ]


PATTERNS: dict[str, Pattern] = {
  "shift": shift, "permutation": permutation, "all_to_all": all_to_all
}


def demands(schedule: Schedule, size_bytes: int) -> list[tuple[Flow, ...]]:
  """The flows of each round: what one rank sends another is one flow.

  Chunks count size_bytes / num_chunks, which must be whole bytes.
  """
  each, rest = divmod(size_bytes, schedule.num_chunks)
  if rest or not each:
    raise ValueError(
      f"size_bytes={size_bytes} must be a multiple of the "
      f"{schedule.num_chunks} chunks of {schedule.name}"
    )
  rounds = []
  for transfers in schedule.rounds:
    pairs = collections.Counter((t.source, t.destination) for t in transfers)
    rounds.append(tuple(
      Flow(*pair, count * each) for pair, count in sorted(pairs.items())
    ))
  return rounds


def ring_demands(
  kind: str, groups: Sequence[Sequence[int]], operand_bytes: int
) -> tuple[tuple[Flow, ...], int]:
  """What the ring algorithm makes of a collective of a program.

  Args:
    kind: As in `parallel.xla.ledger`: "all_reduce", "all_gather",
      "reduce_scatter", "all_to_all", "permute" or "broadcast".
    groups: Ranks of each replica group, in ring order.
    operand_bytes: Of one rank's operand.

  Returns:
    The flows of a step, and how many such steps follow one another. Bytes
    that do not divide are rounded up.
  """
  size = len(groups[0])
  steps, parts = {
    "all_reduce": (2 * (size - 1), size),
    "reduce_scatter": (size - 1, size),
    "all_gather": (size - 1, 1),
    "all_to_all": (1, size),
    "permute": (1, 1),
    "broadcast": (1, 1),
  }.get(kind, (0, 0))
  if not parts:
    raise ValueError(f"no ring algorithm for the kind {kind!r}")
  amount = -(-operand_bytes // parts)
  flows = []
  for group in groups:
    for place, source in enumerate(group):
      far = range(1, size if kind == "all_to_all" else min(size, 2))
      flows += [Flow(source, group[(place + k) % size], amount) for k in far]
  return tuple(flows), steps
