"""Memory and time of a placement.

A phase lasts as long as its slowest resource: the device's compute, its memory,
a tier or a link, each of which serves its bytes one after the other. A tier or
link that is not duplex adds the times of reads and writes. Latencies have no
effect, since transfers are large. A mapped file is assumed to use no bandwidth
of DRAM.

If passes over a tier were measured by size (`Tier.passes`), their seconds apply
to all bytes that the CPU's optimizer reads and writes there. The policy
"optimum" uses the rates of large sizes instead, since times in a linear program
are proportional to bytes.
"""

from collections.abc import Mapping
import dataclasses

import numpy as np

from parallel.plans.placement.problem import (
  DEVICE,
  INSTANTS,
  PHASES,
  Instant,
  Phase,
  Problem,
  Tensor,
  TensorAccess,
)

# Names of a part of the state, of the way to run it, and of a tensor.
TensorKey = tuple[str, str, str]
COMPUTE = "compute"


@dataclasses.dataclass(frozen=True)
class Placement:
  """Division of state parts over execution modes, and of tensors over tiers.

  Attributes:
    ways: (name of a `StatePart`, name of one of its execution modes) ->
      fraction of the part that runs in this mode. The fractions of a part sum
      to 1.
    tiers: (part, mode, tensor) -> memory tier -> fraction of the tensor. The
      fractions of a tensor sum to that of its mode.
  """

  ways: Mapping[tuple[str, str], float]
  tiers: Mapping[TensorKey, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Cost:
  """Memory and time of a placement.

  Attributes:
    occupied: Instant of a step -> memory tier -> occupied bytes.
    missing: Memory tier -> bytes by which its capacity is exceeded; empty if
      the placement fits.
    loads: Phase of a step -> resource (compute, tier or link) -> busy seconds.
    seconds: Phase of a step -> seconds of its slowest resource.
  """

  occupied: Mapping[Instant, Mapping[str, float]]
  missing: Mapping[str, float]
  loads: Mapping[Phase, Mapping[str, float]]
  seconds: Mapping[Phase, float]

  @property
  def fits(self) -> bool:
    return not self.missing

  @property
  def step_s(self) -> float:
    """Seconds of a step."""
    return sum(self.seconds.values())

  def binding(self, phase: Phase) -> str:
    """Returns the slowest resource of a phase."""
    loads = self.loads[phase]
    return max(loads, key=lambda resource: loads[resource])


def capacities(problem: Problem, instant: Instant) -> dict[str, float]:
  """Returns the bytes of each tier that tensors can use at an instant."""
  device = problem.device_bytes - problem.reserved[instant]
  return {DEVICE: device} | {
    tier.name: tier.capacity_bytes.value for tier in problem.host.tiers
  }


def resource_seconds(
  problem: Problem, tensor: Tensor, tier: str
) -> dict[tuple[Phase, str], float]:
  """Returns (phase, resource) -> seconds if all of a tensor is on a tier."""
  found: dict[tuple[Phase, str], float] = {}
  for use in tensor.uses:
    for resource, seconds in _seconds_per_byte(problem, use, tier).items():
      key = use.phase, resource
      found[key] = found.get(key, 0.0) + tensor.size_bytes * seconds
  return found


def _seconds_per_byte(
  problem: Problem, use: TensorAccess, tier: str
) -> dict[str, float]:
  """Returns resource -> busy seconds per byte of a tensor on a tier.

  They are those of the access ``use``.
  """
  if tier == DEVICE:
    # The compute time of forward and backward includes these accesses.
    if use.phase != "update":
      return {}
    moved = use.read + use.written
    return {"device memory": moved / problem.device.memory_bandwidth}
  host = problem.host
  memory = host.tier(tier)
  crossed = [(memory.name, memory)]
  crossed += [(link.name, link) for link in host.links
              if link.name == memory.link]
  if use.by == "device":
    crossed.append((host.device_link.name, host.device_link))
  seconds: dict[str, float] = {}
  for name, resource in crossed:
    read_s = use.read / resource.read.value
    write_s = use.written / resource.write.value
    if resource.duplex:
      seconds |= {f"{name}, read": read_s, f"{name}, write": write_s}
    else:
      seconds[name] = read_s + write_s
  return seconds


def cost(problem: Problem, placement: Placement) -> Cost:
  """Returns the memory and the time of a placement.

  Example:
    `parallel.plans.placement.problem` has one.
  """
  host = problem.host
  occupied = {
    instant: dict.fromkeys(capacities(problem, instant), 0.0)
    for instant in INSTANTS
  }
  found = {phase: {COMPUTE: problem.seconds[phase]} for phase in PHASES}
  for part in problem.parts:
    for way in part.ways:
      share = placement.ways.get((part.name, way.name), 0.0)
      for phase, seconds in way.seconds.items():
        found[phase][COMPUTE] += share * seconds
  # Tier -> bytes that the CPU reads and writes in the update.
  passed = {tier.name: np.zeros(2) for tier in host.tiers if tier.passes}
  for part, way, tensor in problem.tensors():
    key = part.name, way.name, tensor.name
    for tier, share in placement.tiers.get(key, {}).items():
      for instant in tensor.held:
        occupied[instant][tier] += share * tensor.size_bytes
      for (phase, resource), seconds in resource_seconds(
        problem, tensor, tier
      ).items():
        found[phase][resource] = (
          found[phase].get(resource, 0.0) + share * seconds
        )
      for use in tensor.uses if tier in passed else ():
        if (use.phase, use.by) == ("update", "cpu"):
          passed[tier] += share * tensor.size_bytes * np.array(
            [use.read, use.written]
          )
  for name, (read, written) in passed.items():
    tier = host.tier(name)
    found["update"][name] = found["update"].get(name, 0.0) + (
      tier.pass_s(read, written)
      - read / tier.read.value - written / tier.write.value
    )
  missing: dict[str, float] = {}
  for instant in INSTANTS:
    for tier, capacity in capacities(problem, instant).items():
      excess = occupied[instant][tier] - capacity
      # An excess of one byte in 10^9 is a rounding error.
      if excess > 1e-9 * max(abs(capacity), 1.0):
        missing[tier] = max(missing.get(tier, 0.0), excess)
  return Cost(
    occupied, missing, found, {p: max(found[p].values()) for p in PHASES}
  )
