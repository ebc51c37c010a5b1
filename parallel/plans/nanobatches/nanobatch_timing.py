"""Times of pipelines of nano-operations on three resources.

A nano-operation is an operation on a range of tokens. It depends on the
nano-operations of its parent kinds whose ranges overlap with its own, in its
layer or in the layer before. A device has three resources, compute, memory and
network; each runs its nano-operations one at a time, in the given order. While
k resources are busy, each runs at the rate ``1 / (1 + (k - 1) interference)``:
with interference 0 they are independent, and with 1 overlap gains nothing.

Source: NanoFlow (Zhu et al., OSDI 2025, arXiv 2408.12757), sections 4 and 5.
Deviation: one parameter, interference, instead of a table of rates by the
fraction of the device that an operation uses.
"""

from collections.abc import Sequence
import dataclasses
import math

from parallel.base.checks import at_least, fraction, known

RESOURCES = ("compute", "memory", "network")


@dataclasses.dataclass(frozen=True)
class NanoOperation:
  """Operation of a layer on a range of tokens.

  Attributes:
    kind: Name of the operation on all tokens, such as "qkv".
    resource: One of ``RESOURCES``.
    start, stop: Its tokens, the range [start, stop).
    seconds: Time without interference.
    parents: Kinds that it depends on.
    carried: Whether it depends on its parents in the layer before.
  """

  kind: str
  resource: str
  start: int
  stop: int
  seconds: float
  parents: tuple[str, ...] = ()
  carried: bool = False

  def __post_init__(self) -> None:
    known("resource=", self.resource, RESOURCES)
    if not 0 <= self.start < self.stop:
      raise ValueError(
        f"operation {self.kind}: the token range [{self.start}, {self.stop}) "
        "must be ascending, and start at 0 or later"
      )
    if not 0 <= self.seconds < math.inf:
      raise ValueError(
        f"operation {self.kind}: seconds={self.seconds:g} must be finite and "
        "at least 0"
      )

  def overlaps(self, other: "NanoOperation") -> bool:
    """Returns whether the two operations have a token in common."""
    return self.start < other.stop and other.start < self.stop


def check(operations: Sequence[NanoOperation], num_tokens: int) -> None:
  """Checks that the ranges of each kind contain each token exactly once.

  Raises:
    ValueError: A range is missing, or tokens are in two ranges.
  """
  for kind in dict.fromkeys(o.kind for o in operations):
    end = 0
    ranges = sorted((o.start, o.stop) for o in operations if o.kind == kind)
    for start, stop in [*ranges, (num_tokens, num_tokens)]:
      if start != end:
        wrong = "are missing" if start > end else "are in two ranges"
        raise ValueError(
          f"operation {kind}: tokens [{min(start, end)}, {max(start, end)}) "
          f"{wrong}; each token must be in exactly one range"
        )
      end = stop


def dependencies(operations: Sequence[NanoOperation]) -> list[list[int]]:
  """Returns, for each operation, the indices of those that it depends on.

  Operation i of the layer before has the negative index ``i -
  len(operations)``.
  """
  return [
    [
      i - len(operations) * o.carried
      for i, other in enumerate(operations)
      if other.kind in o.parents and o.overlaps(other)
    ]
    for o in operations
  ]


def step_seconds(
  operations: Sequence[NanoOperation], num_layers: int,
  interference: float = 0.0,
) -> float:
  """Returns the seconds of all layers, whose operations may overlap.

  Args:
    operations: Operations of a layer; each resource runs its own in this order.
    num_layers: Number of layers.
    interference: Slowdown per other busy resource, from 0 to 1.

  Raises:
    ValueError: A number is out of range, or operations wait for each other in
      a cycle.
  """
  at_least("num_layers", num_layers)
  fraction("interference", interference)
  queues = {
    r: [i for i, o in enumerate(operations) if o.resource == r]
    for r in RESOURCES
  }
  limits = _prerequisites(operations, queues)
  ended = dict.fromkeys(RESOURCES, 0)  # number of operations, over all layers
  left = dict.fromkeys(RESOURCES, 0.0)  # seconds of the running operation
  started = dict.fromkeys(RESOURCES, False)
  time = 0.0
  while True:
    running, waiting = [], False
    for r, queue in queues.items():
      if ended[r] == num_layers * len(queue):
        continue
      layer, at = divmod(ended[r], len(queue))
      if any(
        ended[other] < layer * len(queues[other]) + limit
        for other, limit in limits[queue[at]]
      ):
        waiting = True
        continue
      if not started[r]:
        started[r], left[r] = True, operations[queue[at]].seconds
      running.append(r)
    if not running:
      break
    shortest = min(left[r] for r in running)
    time += shortest * (1 + (len(running) - 1) * interference)
    for r in running:
      left[r] -= shortest
      # The difference of two equal times may be a rounding error, not 0.
      if left[r] <= 1e-12 * shortest:
        ended[r] += 1
        started[r] = False
  if waiting:
    raise ValueError(
      "operations wait for each other in a cycle; change their order"
    )
  return time


def _prerequisites(
  operations: Sequence[NanoOperation], queues: dict[str, list[int]]
) -> list[list[tuple[str, int]]]:
  """Returns what each operation waits for, as (resource, count) pairs.

  ``queues`` has the indices of each resource's operations in order.

  The operation starts when each of these resources has ended ``count``
  operations of the same layer; a count <= 0 refers to the layer before. A
  resource runs its operations in order, so the last dependency is enough.
  """
  count = len(operations)
  found = []
  for parents in dependencies(operations):
    limits: dict[str, int] = {}
    for n in parents:
      r = operations[n % count].resource
      place = queues[r].index(n % count) + 1
      if n < 0:  # of the layer before
        place -= len(queues[r])
      limits[r] = max(limits.get(r, place), place)
    found.append(list(limits.items()))
  return found


def sequential_seconds(
  operations: Sequence[NanoOperation], num_layers: int
) -> float:
  """Returns the seconds of all layers if no operations overlap."""
  return num_layers * sum(o.seconds for o in operations)
