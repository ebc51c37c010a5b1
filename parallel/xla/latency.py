"""Time of a compiled program's collectives with latency, as a span.

`overlap.wire_seconds` counts bytes over links. `parallel.hardware` has what
all-reduces take with latency. A collective of another kind does a part of an
all-reduce's work: an all-gather or a reduce-scatter is one half of it, and so
each takes half as long at least and as long at most as the all-reduce of the
whole array. That is an assumption.
"""

from collections.abc import Callable
import functools

import jax
import numpy as np

from parallel.hardware import collective_times
from parallel.hardware.collective_times import Span, Times
from parallel.xla import overlap
from parallel.xla.ledger import Collective
from parallel.xla.targets import Target


def seconds(
  target: Target, mesh: jax.sharding.Mesh
) -> Callable[[Collective], Span]:
  """Returns a function that gives the seconds of a collective.

  Args:
    target: What the program is compiled for; no CPU.
    mesh: The mesh of the target's devices that the program was compiled for.

  Returns:
    A function from a collective to the least and the greatest time of one
    execution, which are no less than that of its bytes over the links. It
    raises a ``ValueError`` where nothing is known of such a collective.
  """
  wire = overlap.wire_seconds(target, mesh)

  def span(entry: Collective) -> Span:
    if not entry.bytes:
      return Span(0.0, 0.0)
    known = times(target, mesh, entry)
    if entry.kind == "all_reduce":
      found = known.all_reduce(entry.bytes)
    else:
      parts = entry.group_size if entry.kind == "all_gather" else 1
      found = known.all_reduce(entry.bytes * parts).stretched(0.5, 1)
    return Span(*(max(wire(entry), end) for end in found))

  return functools.cache(span)


def times(
  target: Target, mesh: jax.sharding.Mesh, entry: Collective
) -> Times:
  """Returns what is known of all-reduces among a collective's devices.

  Args:
    target: What the program is compiled for.
    mesh: The mesh.
    entry: The collective.

  Raises:
    ValueError: Nothing is known.
  """
  hardware, group = target.hardware, overlap.group(mesh, entry)
  if hardware.num_links > 1:
    everywhere = np.array([d.coords for d in target.devices])
    places = np.array([d.coords for d in group])
    return collective_times.on_torus(
      hardware.name, hardware.link,
      (everywhere.max(axis=0) + 1).tolist(),
      (np.ptp(places, axis=0) + 1).tolist(),
    )
  level = overlap.level_of(target, group)
  return collective_times.between(level.link, entry.group_size)
