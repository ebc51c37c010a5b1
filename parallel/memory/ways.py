"""The ways of rows from the host to the devices; `features` chooses.

A way has the host's part of a fetch, ``stage``, and the dispatch of the rest,
``fetch``. Both are of ids int32 ``[D, U]``, a row for each device; the result
is ``[D, U, F]``, on each device its own.

Shape legend: N = rows, F = features, D = devices, U = rows that a device
fetches, Q = rows that a device asks another one for.
"""


import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.axes import Axis
from parallel.collectives import all_to_all
from parallel.kernels.gather_rows import api, order
from parallel.kernels.selection import Implementation, preference

# The name of the mesh axis of all devices.
AXIS = "features"
# A buffer is padded to a multiple of the first, and by the second more than has
# been needed so far, so that few programs are compiled.
ROUNDING, ROOM = 256, 1.15


def on_devices(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Puts a host's array on the devices, each its own part."""
  return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def rounded_up(count: int, most: int) -> int:
  """Returns the size of a buffer for some rows, at most ``most``."""
  return min(most, -(-int(count * ROOM + 1) // ROUNDING) * ROUNDING)


class CpuGather:
  """Rows are gathered by the host, and copied to the device."""

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, _: Implementation
  ) -> None:
    self.rows = rows
    self.sharding = NamedSharding(mesh, P(AXIS))
    self.here = [
      d.process_index == jax.process_index() for d in mesh.devices.flat
    ]

  def stage(self, ids: np.ndarray) -> np.ndarray:
    """Gathers rows ``[D, U, F]`` of ids ``[D, U]``, those of this process.

    The buffer is new each time: the copy of the last one may be under way, and
    XLA:CPU takes a buffer as it is, without one.
    """
    staging = np.empty((*ids.shape, self.rows.shape[1]), np.float32)
    for wanted, buffer, here in zip(ids, staging, self.here, strict=True):
      if here:
        np.take(self.rows, wanted, axis=0, out=buffer, mode="clip")
    return staging

  def fetch(self, staging: np.ndarray) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    return on_devices(staging, self.sharding)


class Device:
  """Devices read rows where they lie, in the host's memory.

  A device runs this after what was dispatched to it before, so the read of the
  next batch follows the present step. Each device of a host has a pinned copy
  of the table; on CPUs all have the one that is mapped.
  """

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, implementation: Implementation
  ) -> None:
    num_rows, width = rows.shape
    platform = mesh.devices.flat[0].platform
    names = preference(implementation, platform)
    chosen = api.choice(num_rows, width, rows.dtype, names)
    whole = {} if platform == "cpu" else {"memory_kind": "pinned_host"}
    # On a CPU XLA takes the table where it is mapped, without a copy.
    self.rows = on_devices(
      order.stored(rows, chosen.kind), NamedSharding(mesh, P(), **whole)
    )
    self.sharding = NamedSharding(mesh, P(AXIS))
    self.gather = jax.jit(jax.shard_map(
      lambda rows, ids: api.gather_rows(rows, ids[0], width, chosen)[None],
      mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS),
    ))

  def stage(self, ids: np.ndarray) -> np.ndarray:
    """Returns the ids ``[D, U]``: the host has nothing to do."""
    return ids

  def fetch(self, ids: np.ndarray) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    return self.gather(self.rows, on_devices(ids, self.sharding))


class Sharded:
  """Row r lies on device ``r % D``; the host knows who asks whom for what."""

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, _: Implementation
  ) -> None:
    num_rows, width = rows.shape
    self.num = mesh.devices.size
    self.sharding = NamedSharding(mesh, P(AXIS))
    most = -(-num_rows // self.num)

    def share(part: tuple[slice, ...]) -> np.ndarray:
      own = rows[part[0].start or 0 :: self.num]
      return np.pad(own, ((0, most - len(own)), (0, 0)))[None]

    self.rows = jax.make_array_from_callback(
      (self.num, most, width), self.sharding, share
    )
    self.capacity = 0
    axis = Axis(AXIS, self.num, self.num)

    def exchange(rows, asked, places):
      """Answers ``[1, D, Q]`` and puts the answers into ``[1, U]`` places."""
      found = rows[0][asked[0]]  # [D, Q, F], for each device that asks
      got = all_to_all(found[None], axis, split_dim=0, concat_dim=0)[0]
      return got.reshape(-1, width)[places[0]][None]

    self.exchange = jax.jit(jax.shard_map(
      exchange, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    ))

  def stage(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the ids by owner.

    Returns:
      For each owner the rows that every device asks it for, ``[D, D, Q]``, and
      for each device where it finds what it asked for, ``[D, U]``.
    """
    owner, row = ids % self.num, ids // self.num
    by_owner = np.argsort(owner, axis=1, kind="stable")
    counts = np.stack([np.bincount(o, minlength=self.num) for o in owner])
    if counts.max() > self.capacity:
      self.capacity = rounded_up(int(counts.max()), ids.shape[1])
    asked = np.zeros((self.num, self.num, self.capacity), np.int32)
    places = np.empty(ids.shape, np.int32)
    for device, sorted_ids in enumerate(by_owner):
      starts = np.cumsum(counts[device]) - counts[device]
      whose = owner[device, sorted_ids]
      number = np.arange(len(sorted_ids)) - starts[whose]
      asked[whose, device, number] = row[device, sorted_ids]
      places[device, sorted_ids] = whose * self.capacity + number
    return asked, places

  def fetch(self, staged: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    asked, places = (on_devices(x, self.sharding) for x in staged)
    return self.exchange(self.rows, asked, places)


# The ways by the names of accesses.
WAYS = {"cpu_gather": CpuGather, "device": Device, "sharded": Sharded}
