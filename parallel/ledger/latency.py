"""Time of a compiled program's collectives including latency, as an interval.

`overlap.build_wire_time_model` gives the time of bytes on the links, without
latency. `parallel.plans.hardware.collective_times` has the times of all-reduces
with latency. Other collectives do a part of the work of an all-reduce; an
all-gather or a reduce-scatter is one half. Their times are assumed to lie
between half the time of the all-reduce of the whole array and its full time.
"""

from collections.abc import Callable
import functools

import jax
import numpy as np

from parallel.ledger import overlap
from parallel.ledger.ledger import Collective
from parallel.ledger.targets import Target
from parallel.plans.hardware import collective_times
from parallel.plans.hardware.collective_times import AllReduceTimes, Span


def build_time_model(
  target: Target, mesh: jax.sharding.Mesh
) -> Callable[[Collective], Span]:
  """Returns a function from a collective to an interval of its seconds.

  Args:
    target: Target of the compilation; not a CPU.
    mesh: Mesh of the target's devices that the program was compiled for.

  Returns:
    A function from a collective to the least and the greatest time of one
    execution in seconds. Both are at least the time of its bytes on the links.
    The function raises ``ValueError`` if no times of such a collective are
    known.
  """
  wire = overlap.build_wire_time_model(target, mesh)

  def span(entry: Collective) -> Span:
    if not entry.bytes:
      return Span(0.0, 0.0)
    known = all_reduce_times(target, mesh, entry)
    # The operand of an all-gather is one slice; the whole array is n slices.
    if entry.kind == "all_reduce":
      found = known.all_reduce(entry.bytes)
    else:
      parts = entry.group_size if entry.kind == "all_gather" else 1
      found = known.all_reduce(entry.bytes * parts).stretched(0.5, 1)
    # Both ends are at least the time of the bytes on the links.
    return Span(*(max(wire(entry), end) for end in found))

  return functools.cache(span)


def all_reduce_times(
  target: Target, mesh: jax.sharding.Mesh, entry: Collective
) -> AllReduceTimes:
  """Returns a model of all-reduce times among a collective's devices.

  Args:
    target: Target of the compilation.
    mesh: Mesh of the target's devices.
    entry: The collective.

  Raises:
    ValueError: No times are known for these devices.
  """
  hardware, group = target.hardware, overlap.first_group_devices(mesh, entry)
  if hardware.num_links > 1:  # a torus: the time depends on the group's box
    everywhere = np.array([d.coords for d in target.devices])
    # Coordinates of the group, [devices, dims]; its box is their extent.
    places = np.array([d.coords for d in group])
    return collective_times.on_torus(
      hardware.name, hardware.link,
      (everywhere.max(axis=0) + 1).tolist(),
      (np.ptp(places, axis=0) + 1).tolist(),
    )
  level = overlap.level_of(target, group)
  return collective_times.times_between_gpus(level.link, entry.group_size)
