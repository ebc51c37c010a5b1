"""Helpers of greedy placement policies: initial layout, free bytes of tiers."""

from collections.abc import Sequence

from parallel.plans.placement.costs import Placement, TensorKey, capacities
from parallel.plans.placement.problem import DEVICE, INSTANTS, Problem, Tensor

_CPU_WAY_NAME = "updated by the cpu, weights on the {}"


class FreeSpace:
  """Free bytes of the tiers while tensors are placed one after the other."""

  def __init__(self, problem: Problem) -> None:
    self.problem = problem
    self.free = {i: capacities(problem, i) for i in INSTANTS}
    self.tiers: dict[TensorKey, dict[str, float]] = {}

  def of(self, tensor: Tensor, tier: str) -> float:
    """Returns how many bytes are free on a tier whenever a tensor is held.

    It is the tensor's size if it is never held.
    """
    return min(
      (max(0.0, self.free[i][tier]) for i in tensor.held),
      default=tensor.size_bytes,
    )

  def put(
    self, key: TensorKey, tensor: Tensor, tier: str, size: float
  ) -> float:
    """Places ``size`` bytes of a tensor on a tier; returns ``size``.

    ``key`` is (part, execution mode, tensor), as in `Placement.tiers`.
    """
    if size > 0:
      for instant in tensor.held:
        self.free[instant][tier] -= size
      found = self.tiers.setdefault(key, {})
      found[tier] = found.get(tier, 0.0) + size / tensor.size_bytes
    return size

  def fill(
    self, key: TensorKey, tensor: Tensor, order: Sequence[str], size: float
  ) -> float:
    """Places ``size`` bytes on tiers in ``order``; returns those without room.

    ``key`` is that of `put`.
    """
    for tier in order:
      size -= self.put(key, tensor, tier, min(size, self.of(tensor, tier)))
    return size

  def stripe(
    self, key: TensorKey, tensor: Tensor, weights: dict[str, float], size: float
  ) -> float:
    """Divides ``size`` bytes over tiers by weight; returns those without room.

    ``key`` is that of `put`.
    """
    weights = dict(weights)
    while size > 1e-6 * tensor.size_bytes and weights:
      # A round ends when a tier is full; the other tiers share the rest.
      total = sum(weights.values())
      part = min(
        size, *(self.of(tensor, t) * total / w for t, w in weights.items())
      )
      for tier, weight in weights.items():
        self.put(key, tensor, tier, part * weight / total)
      size -= part
      weights = {
        t: w for t, w in weights.items()
        if self.of(tensor, t) > 1e-9 * tensor.size_bytes
      }
    return size if size > 1e-6 * tensor.size_bytes else 0.0


def tiers(problem: Problem, *kinds: str) -> list[str]:
  """Returns the names of the host's tiers of some kinds, fastest first."""
  found = [t for t in problem.host.tiers if not kinds or t.kind in kinds]
  return [t.name for t in sorted(found, key=lambda t: -t.read.value)]


def zero_offload_layout(problem: Problem) -> tuple[
  FreeSpace, list[tuple[TensorKey, Tensor]], dict
]:
  """Returns the layout of ZeRO-Offload; the host's tensors have no tier yet.

  Returns:
    Free bytes once the device's tensors are placed; (key, tensor) of each
    tensor on the host; and (part, mode) -> fraction of the state part that runs
    in this execution mode, always 1.
  """
  room = FreeSpace(problem)
  weights = sum(
    t.size_bytes for _, way, t in problem.tensors()
    if way.name == _CPU_WAY_NAME.format("device") and t.on == "device"
  )
  fits = all(room.free[i][DEVICE] >= weights for i in INSTANTS)
  wanted = {
    "parameters": _CPU_WAY_NAME.format("device" if fits else "host"),
    "activations": "recomputed",
  }
  chosen = {}
  for part in problem.parts:
    names = [way.name for way in part.ways]
    # A part that lacks the preferred way to run it uses its first way.
    name = wanted[part.name]
    chosen[part.name] = name if name in names else names[0]
  ways = {(part, way): 1.0 for part, way in chosen.items()}
  host = []
  for part, way, tensor in problem.tensors():
    if chosen[part.name] != way.name:
      continue
    key = part.name, way.name, tensor.name
    if tensor.on in ("device", "dram"):  # the policy has no choice
      names = problem.tiers_of(tensor)
      left = room.fill(key, tensor, names[:-1], tensor.size_bytes)
      room.put(key, tensor, names[-1], left)
    else:
      host.append((key, tensor))
  return room, host, ways


def finish(
  room: FreeSpace, ways: dict, left: Sequence[tuple[TensorKey, Tensor, float]]
) -> Placement:
  """Returns the placement; bytes ``left`` over go to the slowest NUMA node.

  ``room`` has the tensors placed so far; ``ways`` are `Placement.ways`.
  """
  last = tiers(room.problem, "dram", "cxl")[-1:] or tiers(room.problem)[-1:]
  for key, tensor, size in left:
    room.put(key, tensor, last[0], size)
  return Placement(ways, room.tiers)
