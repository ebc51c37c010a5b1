"""Implementations of row transfers from the host to the devices.

`parallel.memory.features` selects one. Each class has two methods: ``stage``
does the host's part of a transfer, ``fetch`` dispatches the device's part.
``stage`` takes ids int32 ``[D, U]``, one row of ids per device; ``fetch``
returns feature rows ``[D, U, F]``, sharded over devices.

Shape legend: N = rows of the table, F = features, D = devices, U = rows that a
device fetches, Q = rows that a device requests from another one.
"""


import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.axes import Axis
from parallel.collectives import all_to_all
from parallel.kernels.gather_rows import api, order
from parallel.kernels.selection import Implementation, preference

# Name of the mesh axis of all devices.
AXIS = "features"
# Buffer sizes are multiples of BUFFER_MULTIPLE, and BUFFER_HEADROOM times the
# largest number of rows so far, so that few programs are compiled.
BUFFER_MULTIPLE, BUFFER_HEADROOM = 256, 1.15


def on_devices(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Copies a host array to the devices with a sharding."""
  return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])


def buffer_size(count: int, most: int) -> int:
  """Returns how many rows to allocate for ``count`` rows, at most ``most``.

  Example:
    >>> buffer_size(1000, most=10_000)  # 1151 rows with room, in units of 256
    1280
  """
  return min(
    most,
    -(-int(count * BUFFER_HEADROOM + 1) // BUFFER_MULTIPLE) * BUFFER_MULTIPLE
  )


class CpuGather:
  """Transfer of rows that the host gathers into a staging buffer."""

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, _: Implementation
  ) -> None:
    self.rows = rows
    self.sharding = NamedSharding(mesh, P(AXIS))
    # Whether each device belongs to this process, which gathers its rows.
    self.here = [
      d.process_index == jax.process_index() for d in mesh.devices.flat
    ]

  def stage(self, ids: np.ndarray) -> np.ndarray:
    """Gathers the U rows of each of D devices, ``[D, U, F]``, by their ids.

    Rows for devices of other processes are not gathered.

    Every call allocates a new buffer, since the transfer of the previous buffer
    may be in progress, and XLA:CPU uses the buffer without a copy.
    """
    staging = np.empty((*ids.shape, self.rows.shape[1]), np.float32)
    for wanted, buffer, here in zip(ids, staging, self.here, strict=True):
      if here:
        np.take(self.rows, wanted, axis=0, out=buffer, mode="clip")
    return staging

  def fetch(self, staging: np.ndarray) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    return on_devices(staging, self.sharding)


class DeviceGather:
  """Transfer of rows that devices read directly from host memory.

  A device executes programs in the order of dispatch, so it reads the rows of
  the next batch after the current step. There is one pinned copy of the table
  per device; CPU devices share the memory-mapped table.
  """

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, implementation: Implementation
  ) -> None:
    num_rows, width = rows.shape
    platform = mesh.devices.flat[0].platform
    names = preference(implementation, platform)
    chosen = api.select_kernel(num_rows, width, rows.dtype, names)
    whole = {} if platform == "cpu" else {"memory_kind": "pinned_host"}
    # XLA:CPU uses the memory-mapped table without a copy.
    self.rows = on_devices(
      order.lay_out_table(rows, chosen.kind), NamedSharding(mesh, P(), **whole)
    )
    self.sharding = NamedSharding(mesh, P(AXIS))
    self.gather = jax.jit(jax.shard_map(
      lambda rows, ids: api.gather_rows(rows, ids[0], width, chosen)[None],
      mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS),
    ))

  def stage(self, ids: np.ndarray) -> np.ndarray:
    """Returns the ids ``[D, U]`` unchanged: the host has no work."""
    return ids

  def fetch(self, ids: np.ndarray) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    return self.gather(self.rows, on_devices(ids, self.sharding))


class ShardedGather:
  """Transfer of rows of a sharded table by an all-to-all.

  Row r is stored on device ``r % D``. The host computes the requests of all
  devices.
  """

  def __init__(
    self, rows: np.ndarray, mesh: Mesh, _: Implementation
  ) -> None:
    num_rows, width = rows.shape
    self.num = mesh.devices.size
    self.sharding = NamedSharding(mesh, P(AXIS))
    most = -(-num_rows // self.num)  # rows of the largest shard

    def share(part: tuple[slice, ...]) -> np.ndarray:
      own = rows[part[0].start :: self.num]
      return np.pad(own, ((0, most - len(own)), (0, 0)))[None]

    self.rows = jax.make_array_from_callback(
      (self.num, most, width), self.sharding, share
    )
    self.capacity = 0
    axis = Axis(AXIS, self.num, self.num)

    def exchange(rows, asked, places):
      """Sends the rows that others have ``asked`` for; returns this device's.

      ``asked`` are indices in this device's shard ``rows``, ``[1, D, Q]``;
      ``places`` are positions in the received rows, ``[1, U]``.
      """
      found = rows[0][asked[0]]  # [D, Q, F], for each requesting device
      got = all_to_all(found[None], axis, split_dim=0, concat_dim=0)[0]
      return got.reshape(-1, width)[places[0]][None]

    self.exchange = jax.jit(jax.shard_map(
      exchange, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    ))

  def stage(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the ids by the device that stores their rows.

    Returns:
      Requested rows by owner and requesting device, ``[D, D, Q]``; and the
      position of each id's row in the responses of a device, ``[D, U]``.
    """
    owner, row = ids % self.num, ids // self.num
    by_owner = np.argsort(owner, axis=1, kind="stable")
    # [requesting device, owner]: number of requested rows.
    counts = np.stack([np.bincount(o, minlength=self.num) for o in owner])
    if counts.max() > self.capacity:
      self.capacity = buffer_size(int(counts.max()), ids.shape[1])
    asked = np.zeros((self.num, self.num, self.capacity), np.int32)
    places = np.empty(ids.shape, np.int32)
    for device, sorted_ids in enumerate(by_owner):
      starts = np.cumsum(counts[device]) - counts[device]
      whose = owner[device, sorted_ids]
      # Index of each id among the ids with the same owner, 0 to Q - 1.
      number = np.arange(len(sorted_ids)) - starts[whose]
      asked[whose, device, number] = row[device, sorted_ids]
      places[device, sorted_ids] = whose * self.capacity + number
    return asked, places

  def fetch(self, staged: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Returns the rows on the devices, ``[D, U, F]``."""
    asked, places = (on_devices(x, self.sharding) for x in staged)
    return self.exchange(self.rows, asked, places)


# Value of `Table.access` -> implementation.
ROW_TRANSFERS = {
  "cpu_gather": CpuGather, "device": DeviceGather, "sharded": ShardedGather
}
