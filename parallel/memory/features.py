"""Feature tables in host memory, and lookups of their rows by devices.

A model reads features of sampled nodes; the table of all features does not fit
in device memory. Instead of features, a batch has a `Lookup`: ids of rows, and
the `Table` with the rows. The table's access determines how rows are
transferred to the devices:

    cpu_gather  the host gathers rows into a staging buffer, which is copied:
                three passes over host memory per useful byte
    device      the device reads rows directly from pinned host memory: one pass
                (Min et al., arXiv 2103.03330; `parallel.kernels.gather_rows`)
    sharded     every device holds a shard of the table; an all-to-all delivers
                rows to the devices that request them
    auto        "device" if a kernel reads less than three bytes per useful byte
                (the passes of "cpu_gather"), else "cpu_gather"

Each device requests an id once even if its batch contains the id several times,
and does not request rows of the hot cache, which is replicated on all devices.
The received rows are then copied to their positions in the batch. All accesses
give bitwise equal results.

Host work is separated from dispatch: `Table.prepare` may run in another thread
during the current step, and returns a function that only dispatches. One thread
can thus dispatch all programs with communication, in the same order on all
devices.

Shape legend: N = rows of the table, F = features, D = devices, n = positions of
a device's part of a batch, U = rows that a device fetches, C = rows of the
cache.
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

from parallel.base.checks import known
from parallel.kernels.gather_rows import api, order
from parallel.kernels.selection import Implementation, preference
from parallel.memory.ways import AXIS, ROW_TRANSFERS, buffer_size, on_devices

ACCESSES = ("auto", "cpu_gather", "device", "sharded")
# Passes over host memory when the CPU gathers rows: reading rows, writing the
# staging buffer, and reading the buffer for the transfer.
CPU_PASSES = 3


@dataclasses.dataclass
class LookupStats:
  """Statistics of all lookups, in training and evaluation together.

  Attributes:
    places: Number of batch positions that were filled with table rows.
    unique: Number of table rows after deduplication, summed over devices.
    hits: Number of these rows that were in the cache.
    fetched: Number of table rows that were moved, including padding.
    programs: Number of buffer sizes so far, each of which compiles a program.
  """

  places: int = 0
  unique: int = 0
  hits: int = 0
  fetched: int = 0
  programs: int = 0


class Table:
  """Table of feature rows in host memory, from which devices fetch rows.

  Attributes:
    rows: float32 ``[N, F]``, memory-mapped from a file or in memory.
    access: One of ``ACCESSES``.
    hot: Ids of the rows in the cache, int64 ``[C]``.
    counts: Statistics of the lookups.

  Example:
    >>> table = Table(np.arange(8, dtype=np.float32).reshape(4, 2))
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> fetch = table.prepare(np.array([[3, 0, 3]]), NamedSharding(mesh, P()))
    >>> fetch().tolist(), table.counts.unique
    ([[[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]]], 2)
  """

  def __init__(
    self,
    rows: np.ndarray,
    access: str = "cpu_gather",
    hot: Sequence[int] | np.ndarray = (),
    implementation: Implementation = "auto",
  ) -> None:
    """Initializes the table; no data is transferred before the first lookup.

    Args:
      rows: float32 ``[N, F]``.
      access: One of ``ACCESSES``.
      hot: Ids of the rows that are cached on every device, each once.
      implementation: Implementations of the kernel in order of preference
        (`parallel.kernels.selection`).

    Raises:
      ValueError: The access is unknown, or rows are not float32 ``[N, F]``.
    """
    known("access=", access, ACCESSES)
    if rows.dtype != np.float32 or rows.ndim != 2:
      # Staging buffers are float32; rows are never cast.
      raise ValueError(f"features are {rows.dtype} {rows.shape}, but must be "
                       "float32 [N, F]")
    self.rows, self.access = rows, access
    self.hot = np.asarray(hot, np.int64)
    self.implementation = implementation
    self.counts = LookupStats()
    self._lock = threading.Lock()
    # Devices of a mesh -> the table on these devices, created on first use.
    self._placed: dict[tuple[jax.Device, ...], _PlacedTable] = {}

  def prepare(
    self, ids: np.ndarray, sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """Runs the host's part of a lookup.

    Args:
      ids: int32 ``[..., n]``, from 0 to N - 1.
      sharding: Sharding of the leading dims over devices.

    Returns:
      A function that dispatches the device's part, and returns the rows,
      float32 ``[..., n, F]``.

    Raises:
      ValueError: An id is out of range.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= len(self.rows)):
      raise ValueError(
        f"ids lie in [{ids.min()}, {ids.max()}]; they must lie in [0, "
        f"{len(self.rows) - 1}]"
      )
    if not ids.size:  # no device fetches a row
      none = np.zeros((*ids.shape, self.rows.shape[1]), np.float32)
      target = NamedSharding(sharding.mesh, P(*sharding.spec))
      return lambda: on_devices(none, target)
    devices = tuple(sharding.mesh.devices.flat)
    with self._lock:  # training and evaluation may prepare batches concurrently
      if devices not in self._placed:
        self._placed[devices] = _PlacedTable(self, devices)
      return self._placed[devices].prepare(ids, sharding)

  def summary(self, devices: Sequence[jax.Device]) -> str:
    """Returns text for users: the access that is used, and the reason."""
    kind, why = _resolve_access(self, devices)
    cache = f", {len(self.hot):,} hot rows on each device" * bool(len(self.hot))
    return f"{kind}{cache}" + (f" ({why})" if why else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
  """Placeholder in a batch for the features ``[B, n, F]`` of B examples.

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
    """Returns a lookup of ``size`` examples, padded with id 0."""
    more = size - len(self.ids)
    return Lookup(self.table, np.pad(self.ids, ((0, more), (0, 0))))

  def prepare(
    self, dims: tuple[int, ...], sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """Runs the host's part of the lookup; see `Table.prepare`.

    Args:
      dims: Leading dims into which the dim of examples is split; it is followed
        by a dim of the examples of one rank.
      sharding: Sharding of these dims over devices.
    """
    ids = self.ids.reshape(*dims, -1, self.ids.shape[1])
    return self.table.prepare(ids, sharding)


def stacked(*parts: np.ndarray | Lookup) -> np.ndarray | Lookup:
  """Stacks one field of several examples to the field of a batch.

  Args:
    *parts: One array per example, or one `Lookup` per example, all in the same
      table.
  """
  if isinstance(parts[0], Lookup):
    return Lookup(parts[0].table, np.stack([part.ids for part in parts]))
  return np.stack(parts)


def _resolve_access(
  table: Table, devices: Sequence[jax.Device]
) -> tuple[str, str]:
  """Returns the access of ``ACCESSES`` that is used, and the reason for it."""
  platform = devices[0].platform
  num_rows, width = table.rows.shape
  if table.access in ("cpu_gather", "sharded"):
    return table.access, ""
  names = preference(table.implementation, platform)
  chosen = api.select_kernel(num_rows, width, table.rows.dtype, names)
  waste = order.read_amplification(width, chosen.kind)
  refused = "; ".join(f"{k}: {v}" for k, v in chosen.refused.items())
  if table.access == "device":
    if chosen.name != "reference":
      return "device", f"{chosen.name}, {waste:.2f} bytes per useful byte"
    if platform == "cpu":
      return "device", "CPU devices use host memory: rows are read in place"
    raise ValueError(
      f"access='device' has no kernel on {platform} ({refused or 'none'}): use "
      "'cpu_gather' or 'sharded'"
    )
  if chosen.name == "reference":
    return "cpu_gather", refused or f"no kernel on {platform}"
  # A TPU's kernel reads padding in addition to useful bytes
  # (`order.read_amplification`).
  if waste >= CPU_PASSES:
    return "cpu_gather", (
      f"the kernel's {waste:.2f} bytes per useful byte are not less than the "
      f"{CPU_PASSES} passes of the CPU"
    )
  return "device", f"{chosen.name}, {waste:.2f} bytes per useful byte"


class _PlacedTable:
  """State of a table on a set of devices: hot cache, access, buffer sizes."""

  def __init__(self, table: Table, devices: tuple[jax.Device, ...]) -> None:
    self.table, self.devices = table, devices
    self.mesh = Mesh(np.array(devices), (AXIS,))
    self.each = NamedSharding(self.mesh, P(AXIS))
    kind, _ = _resolve_access(table, devices)
    self.way = ROW_TRANSFERS[kind](table.rows, self.mesh, table.implementation)
    self.capacity: dict[int, int] = {}  # positions of a device -> U
    hot = table.hot
    self.cache = on_devices(table.rows[hot], NamedSharding(self.mesh, P()))
    # Row -> its slot in the cache, -1 if it is not cached: int32 [N].
    self.slots = None
    if len(hot):
      self.slots = np.full(len(table.rows), -1, np.int32)
      self.slots[hot] = np.arange(len(hot), dtype=np.int32)

  def prepare(
    self, ids: np.ndarray, sharding: NamedSharding
  ) -> Callable[[], jax.Array]:
    """Runs the host's part of a lookup; see `Table.prepare`."""
    # Device -> its slices of the ids.
    parts = sharding.devices_indices_map(ids.shape)
    wanted, places = zip(
      *(self._rows_to_fetch(ids[parts[device]]) for device in self.devices),
      strict=True,
    )
    staged = self.way.stage(self._padded(wanted, places[0].size))
    index = np.concatenate(places)  # [D * leading, ...]
    width = self.table.rows.shape[1]
    target = NamedSharding(sharding.mesh, P(*sharding.spec))

    def dispatch() -> jax.Array:
      rows = self.way.fetch(staged)  # [D, U, F]
      found = _build_put(self.mesh)(
        rows, on_devices(index, self.each), self.cache
      )
      # A device has the same shard in ``target`` as in ``found``, which differ
      # only in their meshes, so no data are moved.
      return jax.make_array_from_single_device_arrays(
        (*ids.shape, width), target,
        [shard.data for shard in found.addressable_shards],
      )

    return dispatch

  def _rows_to_fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the table rows that a device fetches, and an index for each id.

    Args:
      ids: Ids of rows at the positions of the device's part of a batch.

    Returns:
      Ids of distinct rows that are not in the cache; and, in the shape of
      ``ids``, where each position's row is: an index below C is a slot of the
      cache of C rows; C + i is the i-th fetched row.
    """
    # ids.ravel() == unique[inverse.ravel()]
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
    """Pads the ids of rows of all D devices to equal length U, ``[D, U]``.

    Args:
      wanted: Ids of the rows that each device fetches.
      places: Number of batch positions of a device, the largest possible U.
    """
    largest = max(map(len, wanted))
    # -1: the buffer is allocated even if all rows are in the cache.
    if largest > self.capacity.get(places, -1):
      self.capacity[places] = buffer_size(largest, places)
      self.table.counts.programs += 1
    size = self.capacity[places]
    self.table.counts.fetched += size * len(wanted)
    # Padding repeats the last id, whose row is then in the processor's cache.
    return np.stack([
      np.pad(ids, (0, size - len(ids)), "edge") if len(ids)
      else np.zeros(size, ids.dtype)
      for ids in wanted
    ]).astype(np.int32)


@functools.cache
def _build_put(mesh: Mesh) -> Callable[..., jax.Array]:
  """Builds the program that copies rows to their positions in the batch.

  Its arguments are the U rows of F features that each of D devices has fetched,
  ``[D, U, F]``; for each position of the batch an index, int32 ``[D * dim 0 of
  a device's part, ...]`` (both sharded over devices); and the cache of C rows,
  ``[C, F]`` (replicated; C may be 0). An index below C is a row of the cache; C
  + i is the i-th fetched row of the device. The result has the shape of the
  indices, and dim F.
  """

  def put(rows, index, cache):
    hot = cache.shape[0]
    if not hot:
      return rows[0][index]
    # Both branches are evaluated, so both indices are clipped to valid ranges.
    return jnp.where(
      (index < hot)[..., None],
      cache[jnp.minimum(index, hot - 1)],
      rows[0][jnp.maximum(index - hot, 0)],
    )

  return jax.jit(jax.shard_map(
    put, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS)
  ))
