"""Rows of a table in the host's memory, on their way to devices.

A model reads features of the nodes that it has sampled, and the table of all
features does not fit a device. A batch holds a `Lookup` in place of these
features: ids, and the `Table` that has their rows. How rows get to the devices
is the table's access:

    cpu_gather  the host gathers rows into a staging buffer, which is copied:
                three passes over the host's memory for each useful byte
    device      the device reads rows where they lie, in pinned memory: one pass
                (Min et al., arXiv 2103.03330; `parallel.kernels.gather_rows`)
    sharded     every device keeps a share of the table; an all-to-all brings
                rows to who asked for them
    auto        "device" where a kernel reads rows with a waste of less than
                the three passes, else "cpu_gather"

Each device asks once for an id that it has several times, and not for those of
a hot cache, rows that stay on every device. The rows that arrive are put into
the places of the batch there. All accesses give the same bits.

Work on the host is apart from what is dispatched: `Table.prepare` may run in a
thread under the present step, and returns a function that only dispatches.
Devices that communicate get their programs from one thread that way, in one
order.

Shape legend: N = rows of the table, F = features, D = devices, n = places of a
device's part of a batch, U = rows that a device fetches, C = rows of the cache.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.kernels.gather_rows import api, order
from parallel.kernels.selection import Implementation, preference
from parallel.memory.ways import AXIS, WAYS, on_devices, rounded_up

ACCESSES = ("auto", "cpu_gather", "device", "sharded")
# Passes over the host's memory of a gather by the CPU: it reads rows, writes
# the staging buffer, and the link reads that.
CPU_PASSES = 3


@dataclasses.dataclass
class Counts:
  """What has been fetched for training and evaluation since the start.

  Attributes:
    places: Places of batches that rows were put into.
    unique: Rows after deduplication, added up over devices.
    hits: Those of them that were in the cache.
    fetched: Rows that were moved, those of the padding counted.
    programs: Programs that were compiled to put rows into places.
  """

  places: int = 0
  unique: int = 0
  hits: int = 0
  fetched: int = 0
  programs: int = 0


class Table:
  """Feature rows of the host, and how devices get them.

  Attributes:
    rows: float32 ``[N, F]``, mapped from a file or in memory.
    access: One of ``ACCESSES``.
    hot: The ids of the cache, C of them.
    counts: What has been fetched.
  """

  def __init__(
    self,
    rows: np.ndarray,
    access: str = "cpu_gather",
    hot: Sequence[int] | np.ndarray = (),
    implementation: Implementation = "auto",
  ) -> None:
    """Makes a table; devices get nothing before the first lookup.

    Args:
      rows: float32 ``[N, F]``.
      access: One of ``ACCESSES``.
      hot: Ids of rows that stay on every device, each once.
      implementation: Implementations of the kernel in order of preference, as
        `parallel.kernels.selection` has them.

    Raises:
      ValueError: The access is unknown, or rows are no float32.
    """
    if access not in ACCESSES:
      names = ", ".join(map(repr, ACCESSES))
      raise ValueError(f"access={access!r} must be one of {names}")
    if rows.dtype != np.float32 or rows.ndim != 2:
      raise ValueError(f"features are {rows.dtype} {rows.shape}, but must be "
                       "float32 [N, F]")
    self.rows, self.access = rows, access
    self.hot = np.asarray(hot, np.int64)
    self.implementation = implementation
    self.counts = Counts()
    self._lock = threading.Lock()
    self._placed: dict[tuple[jax.Device, ...], _Placed] = {}

  def prepare(
    self, ids: np.ndarray, sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """Does the host's part of a lookup.

    Args:
      ids: int32 ``[..., n]``, from 0 to N - 1.
      sharding: How the leading dims lie on devices.

    Returns:
      A function that dispatches the rest, and returns ``[..., n, F]``.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= len(self.rows)):
      raise ValueError(
        f"ids {ids.min()} to {ids.max()} must be 0 to {len(self.rows) - 1}"
      )
    devices = tuple(sharding.mesh.devices.flat)
    with self._lock:  # a batch may be prepared while another is evaluated
      if devices not in self._placed:
        self._placed[devices] = _Placed(self, devices)
      return self._placed[devices].prepare(ids, sharding)

  def described(self, devices: Sequence[jax.Device]) -> str:
    """Says how devices get rows, and why not otherwise, for users."""
    kind, why = _resolved(self, devices)
    cache = f", {len(self.hot):,} hot rows on each device" * bool(len(self.hot))
    return f"{kind}{cache}" + (f" ({why})" if why else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
  """Stands for rows of a table in a batch, ``[B, n, F]``.

  Attributes:
    table: The table.
    ids: int32 ``[B, n]``, or ``[n]`` in a single example.
  """

  table: Table
  ids: np.ndarray

  def __len__(self) -> int:
    return len(self.ids)

  def __getitem__(self, examples: slice) -> "Lookup":
    return Lookup(self.table, self.ids[examples])

  def padded(self, size: int) -> "Lookup":
    """Returns it with more examples, whose rows are those of id 0."""
    more = size - len(self.ids)
    return Lookup(self.table, np.pad(self.ids, ((0, more), (0, 0))))

  def prepare(
    self, dims: tuple[int, ...], sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """Does the host's part; see `Table.prepare`.

    Args:
      dims: What the dim of examples is cut into, before the examples of a rank.
      sharding: How these dims lie on devices.
    """
    ids = self.ids.reshape(*dims, -1, self.ids.shape[1])
    return self.table.prepare(ids, sharding)


def stacked(*parts: np.ndarray | Lookup) -> np.ndarray | Lookup:
  """Puts a part of single examples together, as a batch has it.

  Args:
    *parts: An array of each example, or a `Lookup` in the same table.
  """
  if isinstance(parts[0], Lookup):
    return Lookup(parts[0].table, np.stack([part.ids for part in parts]))
  return np.stack(parts)


def _resolved(table: Table, devices: Sequence[jax.Device]) -> tuple[str, str]:
  """Returns the access that is used, and a remark on it."""
  platform = devices[0].platform
  num_rows, width = table.rows.shape
  if table.access in ("cpu_gather", "sharded"):
    return table.access, ""
  names = preference(table.implementation, platform)
  chosen = api.choice(num_rows, width, table.rows.dtype, names)
  waste = order.waste(width, chosen.kind)
  refused = "; ".join(f"{k}: {v}" for k, v in chosen.refused.items())
  if table.access == "device":
    if chosen.name != "reference":
      return "device", f"{chosen.name}, {waste:.2f} bytes per useful byte"
    if platform == "cpu":
      return "device", "a CPU's memory is the host's: rows are read in place"
    raise ValueError(
      f"access='device' has no kernel on {platform} ({refused or 'none'}): use "
      "'cpu_gather' or 'sharded'"
    )
  if chosen.name == "reference":
    return "cpu_gather", refused or f"no kernel on {platform}"
  if waste >= CPU_PASSES:
    return "cpu_gather", (
      f"the kernel's {waste:.2f} bytes per useful byte are not less than the "
      f"{CPU_PASSES} passes of the CPU"
    )
  return "device", f"{chosen.name}, {waste:.2f} bytes per useful byte"


class _Placed:
  """A table on given devices."""

  def __init__(self, table: Table, devices: tuple[jax.Device, ...]) -> None:
    self.table, self.devices = table, devices
    self.mesh = Mesh(np.array(devices), (AXIS,))
    self.each = NamedSharding(self.mesh, P(AXIS))
    kind, _ = _resolved(table, devices)
    self.way = WAYS[kind](table.rows, self.mesh, table.implementation)
    self.capacity: dict[int, int] = {}
    hot = table.hot
    self.cache = on_devices(table.rows[hot], NamedSharding(self.mesh, P()))
    self.slots = None
    if len(hot):
      self.slots = np.full(len(table.rows), -1, np.int32)
      self.slots[hot] = np.arange(len(hot), dtype=np.int32)

  def prepare(
    self, ids: np.ndarray, sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """See `Table.prepare`."""
    parts = sharding.devices_indices_map(ids.shape)
    wanted, places = zip(
      *(self._wanted(ids[parts[device]]) for device in self.devices),
      strict=True,
    )
    staged = self.way.stage(self._padded(wanted, places[0].size))
    index = np.concatenate(places)  # [D * leading, ...]
    width = self.table.rows.shape[1]
    target = NamedSharding(sharding.mesh, P(*sharding.spec))

    def dispatch() -> jax.Array:
      rows = self.way.fetch(staged)
      found = _put(self.mesh)(rows, on_devices(index, self.each), self.cache)
      return jax.make_array_from_single_device_arrays(
        (*ids.shape, width), target,
        [shard.data for shard in found.addressable_shards],
      )

    return dispatch

  def _wanted(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rows a device fetches, and where each place finds its row.

    Places of rows of the cache are below C, those of fetched rows after that.
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    counts = self.table.counts
    counts.places += ids.size
    counts.unique += len(unique)
    if self.slots is None:
      return unique, inverse.reshape(ids.shape).astype(np.int32)
    slot = self.slots[unique]
    missing = slot < 0
    counts.hits += len(unique) - int(missing.sum())
    slot[missing] = len(self.table.hot) + np.arange(
      missing.sum(), dtype=np.int32
    )
    return unique[missing], slot[inverse].reshape(ids.shape)

  def _padded(
    self, wanted: Sequence[np.ndarray], places: int
  ) -> np.ndarray:
    """Pads the ids of all devices to one number of them, ``[D, U]``."""
    largest = max(map(len, wanted))
    # Nothing is fetched where all rows are in the cache; a buffer there is.
    if largest > self.capacity.get(places, -1):
      self.capacity[places] = rounded_up(largest, places)
      self.table.counts.programs += 1
    size = self.capacity[places]
    self.table.counts.fetched += size * len(wanted)
    # The last id again: its row is in a cache already.
    return np.stack([
      np.pad(ids, (0, size - len(ids)), "edge") if len(ids)
      else np.zeros(size, ids.dtype)
      for ids in wanted
    ]).astype(np.int32)


@functools.cache
def _put(mesh: Mesh) -> Callable[..., jax.Array]:
  """Makes the program that puts rows into places, on each device its own.

  It takes rows ``[D, U, F]``, the places' indices ``[D * leading, ...]`` and
  the cache ``[C, F]``, where C may be 0.
  """

  def put(rows, index, cache):
    hot = cache.shape[0]
    if not hot:
      return rows[0][index]
    return jnp.where(
      (index < hot)[..., None],
      cache[jnp.minimum(index, hot - 1)],
      rows[0][jnp.maximum(index - hot, 0)],
    )

  return jax.jit(jax.shard_map(
    put, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS)
  ))
