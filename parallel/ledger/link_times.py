"""Times of collectives on a measured matrix of links.

A collective is a ring over the devices of its group: its hops follow one
another, and the slowest link of all groups determines the time.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax.sharding import AbstractMesh
import numpy as np

from parallel.ledger.ledger import Collective
from parallel.plans.hardware.link_matrix import LinkMatrix


def groups(
  mesh: jax.sharding.Mesh | AbstractMesh, entry: Collective
) -> np.ndarray:
  """Returns the groups of a collective's devices, int ``[groups, k]``.

  Devices are numbered by their ids; on an abstract mesh, by their position. A
  collective whose groups no axes describe has one group of all devices, since
  its groups can be anywhere.
  """
  sizes = tuple(mesh.shape.values())
  numbers = np.arange(mesh.size).reshape(sizes)
  if not isinstance(mesh, AbstractMesh):
    numbers = np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
  names = list(mesh.axis_names)
  if not entry.axes or not set(entry.axes) <= set(names):
    return numbers.reshape(1, -1)
  last = [names.index(axis) for axis in entry.axes]
  order = [i for i in range(len(names)) if i not in last] + last
  return numbers.transpose(order).reshape(-1, entry.group_size)


def build_time_model(
  links: LinkMatrix, mesh: jax.sharding.Mesh | AbstractMesh
) -> Callable[[Collective], float]:
  """Returns a function from a collective to the seconds of one execution.

  The time is hops * latency + bytes / bandwidth of the slowest link between
  neighbours of a group, for the hops and bytes of the ring algorithm.

  Args:
    links: Links between the devices, by their ids.
    mesh: Mesh of the program.

  Raises:
    ValueError: The mesh has more devices than the cluster.
  """
  if mesh.size > links.num_devices:
    raise ValueError(
      f"the cluster {links.name!r} has {links.num_devices} devices, fewer than "
      f"the {mesh.size} of the mesh"
    )

  def of(entry: Collective) -> float:
    if not entry.bytes:
      return 0.0
    found = groups(mesh, entry)
    if entry.group_size is None:
      entry = dataclasses.replace(entry, group_size=found.shape[1])
    pair = found, np.roll(found, -1, 1)
    return float((
      entry.ring_hops * links.latency_s[pair]
      + entry.wire_bytes_ring / links.bandwidth[pair]
    ).max())

  return functools.cache(of)
