"""Flows to route: from traffic patterns, schedules and compiled programs."""

import collections
from collections.abc import Callable, Sequence
import random

from caatnet.studies.flows.link_loads import Fabric, Flow
from parallel.plans.schedules.schedule import Schedule

Pattern = Callable[[Fabric, int], list[Flow]]


def shift(net: Fabric, _: int) -> list[Flow]:
  """Returns flows of 1 byte from each host to its peer on the next leaf."""
  n = len(net.leaf_of)
  hosts = net.leaf_of.count(net.leaf_of[0])  # hosts per leaf
  return [Flow(i, (i + hosts) % n, 1) for i in range(n)]


def permutation(net: Fabric, seed: int) -> list[Flow]:
  """Returns flows of 1 byte from hosts to others, by a random permutation."""
  hosts = range(len(net.leaf_of))
  drawn = random.Random(seed).sample(hosts, len(hosts))
  return [Flow(i, j, 1) for i, j in zip(hosts, drawn, strict=True) if i != j]


def all_to_all(net: Fabric, _: int) -> list[Flow]:
  """Returns flows of 1 byte from each host to all hosts of other leaves."""
  n = len(net.leaf_of)
  return [
    Flow(i, j, 1) for i in range(n) for j in range(n)
    if net.leaf_of[i] != net.leaf_of[j]
  ]


PATTERNS: dict[str, Pattern] = {
  "shift": shift, "permutation": permutation, "all_to_all": all_to_all
}


def demands(schedule: Schedule, size_bytes: int) -> list[tuple[Flow, ...]]:
  """Returns the flows of each round of a schedule.

  All chunks that one rank sends another in a round are one flow.

  Args:
    schedule: Collective schedule.
    size_bytes: Bytes of the collective's buffer, all chunks together.

  Returns:
    One tuple of flows per round.

  Raises:
    ValueError: The size of a chunk is not a whole number of bytes.
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
  """Returns the flows of a program's collective under the ring algorithm.

  Args:
    kind: Kind of the collective, as named in `parallel.ledger.ledger`:
      "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute" or
      "broadcast".
    groups: Ranks of each replica group, in ring order.
    operand_bytes: Bytes of one rank's operand.

  Returns:
    Flows of one step, and the number of such steps. Fractional bytes are
    rounded up.

  Raises:
    ValueError: The kind is unknown.
  """
  # Kind -> (steps, parts into which the operand is cut). In an all-gather the
  # operand, one rank's slice of the result, is forwarded as a whole.
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
  amount = -(-operand_bytes // parts)  # rounded up
  # Each rank sends to the next one or, in an all-to-all, to all others.
  flows = []
  for group in groups:
    for place, source in enumerate(group):
      far = range(1, size if kind == "all_to_all" else min(size, 2))
      flows += [Flow(source, group[(place + k) % size], amount) for k in far]
  return tuple(flows), steps
