"""Host features: each access returns equal rows and counts what it fetches."""

from concurrent import futures
import itertools
import types

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.kernels.gather_rows import order
from parallel.memory import ways
from parallel.memory.features import CPU_PASSES, Lookup, Table, stacked

ROWS = np.random.default_rng(0).normal(size=(301, 20)).astype("f4")
IDS = np.random.default_rng(1).integers(0, 301, (24, 7)).astype("i4")


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, ("worker", "data", "tensor")[: len(shape)])


def fetched(table, on, dims, spec):
  """Returns the rows of ``IDS`` and the array that holds them."""
  lookup = Lookup(table, IDS)
  found = lookup.prepare(dims, NamedSharding(on, spec))()
  assert found.sharding.is_equivalent_to(
    NamedSharding(on, spec), found.ndim
  )
  assert found.shape == (*dims, 24 // int(np.prod(dims)), 7, 20)
  return np.asarray(found).reshape(24, 7, 20)


WAYS = {
  "cpu_gather": {"access": "cpu_gather"},
  "device": {"access": "device"},
  "device, TPU's kernel": {
    "access": "device", "implementation": ("tpu_interpret",)
  },
  "sharded": {"access": "sharded"},
}
MESHES = {
  "one device": (mesh(1), (4,), P("worker")),
  "lanes and devices": (mesh(2, 2), (4, 2), P("worker", "data")),
  "an unused mesh axis": (mesh(2, 1, 2), (2, 2), P("worker", "data")),
}


@pytest.mark.parametrize(
  ("way", "place", "hot"),
  [*itertools.product(WAYS, ["one device"], [0]),
   *itertools.product(WAYS, ["lanes and devices"], [40]),
   ("cpu_gather", "an unused mesh axis", 0)],
)
def test_fetched_rows_equal_the_table(way, place, hot):
  """Compares bit for bit, with and without a cache."""
  kept = np.random.default_rng(2).permutation(301)[:hot]
  table = Table(ROWS, hot=kept, **WAYS[way])
  np.testing.assert_array_equal(fetched(table, *MESHES[place]), ROWS[IDS])


def test_cache_may_hold_all_rows():
  """Reads all slots of the cache, the first and the last one included."""
  table = Table(ROWS, hot=np.arange(301)[::-1])
  ids = np.arange(301, dtype="i4")[None]
  found = table.prepare(ids, NamedSharding(mesh(1), P("worker")))()
  np.testing.assert_array_equal(found, ROWS[ids])
  assert table.counts.hits == table.counts.unique == 301


def test_row_is_fetched_once_per_device_and_cached_rows_never():
  """Uses four devices, each with a quarter of the batch's rows."""
  ids = np.random.default_rng(4).integers(0, 301, (24, 100)).astype("i4")
  table = Table(ROWS, hot=np.arange(100))
  on, dims, spec = MESHES["lanes and devices"]
  Lookup(table, ids).prepare(dims, NamedSharding(on, spec))()
  # [worker device, worker lane, data device, examples, n]; data has one lane.
  shaped = ids.reshape(2, 2, 2, 3, 100)
  parts = [np.unique(shaped[w, :, d]) for w in range(2) for d in range(2)]
  assert table.counts.places == ids.size
  assert table.counts.unique == sum(map(len, parts))
  assert table.counts.hits == sum((part < 100).sum() for part in parts)
  # Rounded up to 256 rows, which exceeds the number of rows on a device.
  assert max((part >= 100).sum() for part in parts) < 200
  assert min(map(len, parts)) > 230
  assert table.counts.fetched == 4 * 256


def test_one_program_is_compiled_for_many_batches():
  table = Table(ROWS)
  sharding = NamedSharding(mesh(1), P("worker"))
  rng = np.random.default_rng(3)
  for _ in range(5):
    ids = rng.integers(0, 301, (1, 50, 40)).astype("i4")
    found = Lookup(table, ids[0]).prepare((1,), sharding)()
    np.testing.assert_array_equal(found, ROWS[ids])
  assert table.counts.programs == 1
  # A full buffer is large enough, too.
  for _ in range(2):
    table.prepare(np.arange(6, dtype="i4")[None], sharding)
  assert table.counts.programs == 2


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("way", WAYS)
def test_batch_without_positions_has_no_rows(way, place):
  """Also without examples; with a cache, no row of it is counted as a hit."""
  table = Table(ROWS, hot=(4,), **WAYS[way])
  on, dims, spec = MESHES[place]
  for shape in ((*dims, 3, 0), (*dims, 0, 7)):
    found = table.prepare(np.zeros(shape, "i4"), NamedSharding(on, spec))()
    assert (found.shape, found.dtype) == ((*shape, 20), np.float32)
    assert found.sharding.is_equivalent_to(NamedSharding(on, spec), found.ndim)
  assert (table.counts.unique, table.counts.hits) == (0, 0)


def test_table_is_read_when_a_batch_is_prepared():
  """Later changes of the table do not affect a prepared batch."""
  rows = ROWS.copy()
  table = Table(rows)
  put = Lookup(table, IDS).prepare((1,), NamedSharding(mesh(1), P("worker")))
  rows[:] = 0
  np.testing.assert_array_equal(np.asarray(put())[0], ROWS[IDS])


def test_two_threads_may_prepare_concurrently():
  """Prefetching and evaluation prepare batches of growing sizes."""
  table = Table(ROWS, "sharded")
  sharding = NamedSharding(mesh(4), P("worker"))
  rng = np.random.default_rng(5)
  drawn = [
    rng.integers(0, 20 * i + 1, (4, 4, 16)).astype("i4") for i in range(1, 16)
  ]
  with futures.ThreadPoolExecutor(4) as pool:
    puts = list(pool.map(lambda ids: table.prepare(ids, sharding), drawn))
  for ids, put in zip(drawn, puts, strict=True):
    np.testing.assert_array_equal(put(), ROWS[ids])


@pytest.mark.parametrize(
  ("width", "implementation", "expected"),
  [
    (20, "auto", "cpu_gather (no kernel on cpu)"),
    (20, ("tpu_interpret", "reference"), "cpu_gather (the kernel's 102.40"),
    (768, ("tpu_interpret", "reference"), "device (tpu_interpret, 2.67 bytes"),
    (20, ("gpu_interpret",), "device (gpu_interpret, 1.00 bytes"),
  ],
)
def test_auto_access_moves_the_fewest_bytes(width, implementation, expected):
  table = Table(
    np.zeros((4, width), "f4"), "auto", implementation=implementation
  )
  assert table.summary(jax.devices()).startswith(expected)


# More elements than a GPU's kernel can address; all are one number in memory.
LARGE = np.broadcast_to(np.float32(0), (2**27, 20))
ON_GPU = f"gpu: {2**27} x 20 elements: places are int32"


@pytest.mark.parametrize(("access", "platform", "rows", "hot", "expected"), [
  ("cpu_gather", "cpu", ROWS, (), "cpu_gather"),
  ("sharded", "cpu", ROWS, (4,), "sharded, 1 hot rows on each device"),
  ("device", "cpu", ROWS, (),
   "device (CPU devices use host memory: rows are read in place)"),
  ("device", "cpu", ROWS, range(2), "device, 2 hot rows on each device (CPU d"),
  ("device", "tpu", ROWS, (), "device (tpu, 102.40 bytes per useful byte)"),
  ("auto", "gpu", ROWS, (), "device (gpu, 1.00 bytes per useful byte)"),
  ("auto", "gpu", LARGE, (), f"cpu_gather ({ON_GPU})"),
  ("auto", "rocm", ROWS, (), "cpu_gather (no kernel on rocm)"),
])
def test_summary_names_the_access_the_cache_and_the_reason(
  access, platform, rows, hot, expected
):
  devices = [types.SimpleNamespace(platform=platform)]
  assert Table(rows, access, hot).summary(devices).startswith(expected)


@pytest.mark.parametrize(
  ("platform", "rows", "reason"),
  [("rocm", ROWS, "none"), ("gpu", LARGE, ON_GPU)],
)
def test_access_by_devices_without_a_kernel_is_refused(platform, rows, reason):
  devices = [types.SimpleNamespace(platform=platform)]
  with pytest.raises(ValueError, match=rf"on {platform} \({reason}\): use"):
    Table(rows, "device").summary(devices)


def test_block_overfetch_counts_the_bytes_of_touched_blocks():
  """Counts the bytes of blocks that hold a row, in the table's layout."""
  for width in (1, 20, 100, 128, 602, 768, 2048, 2500):
    rows = np.ones((7, width), "f4")
    blocks = order.lay_out_table(rows, "tpu")
    assert blocks.sum() == rows.sum()  # padding holds no rows
    per_row = max(1, blocks.size // order.padded_width(width) // 2048)
    block_bytes = 4 * 2048 * max(1, order.padded_width(width) // 2048)
    assert order.read_amplification(width, "tpu") == block_bytes / (
      4 * width
    ), per_row
  assert (
    order.read_amplification(682, "tpu")
    > CPU_PASSES
    > order.read_amplification(683, "tpu")
  )
  assert order.read_amplification(100, "gpu") == order.read_amplification(
    100, "reference"
  ) == 1


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"access": "dma"}, "access='dma' must be one of auto, cpu_gather"),
    ({"rows": ROWS.astype("f8")}, "features are float64"),
    ({"rows": ROWS[0]}, r"features are float32 \(20,\), but must be"),
  ],
)
def test_invalid_tables_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    Table(**{"rows": ROWS} | change)


def test_ids_out_of_range_are_refused():
  for wrong in (-1, 301):
    ids = IDS.copy()
    ids[3, 3] = wrong
    with pytest.raises(ValueError, match=f"{wrong}.*; they must lie in"):
      Lookup(Table(ROWS), ids).prepare(
        (1,), NamedSharding(mesh(1), P("worker"))
      )


def test_batching_ids_equals_batching_rows():
  """Stacking, padding and slicing ids is equivalent to doing so with rows."""
  table = Table(ROWS)

  def rows(lookup):
    sharding = NamedSharding(mesh(1), P("worker"))
    return np.asarray(lookup.prepare((1,), sharding)()[0])

  examples = [Lookup(table, ids) for ids in IDS[:5]]
  batch = stacked(*examples)
  np.testing.assert_array_equal(stacked(examples[0]).ids, IDS[:1])
  np.testing.assert_array_equal(rows(batch), stacked(*ROWS[IDS[:5]]))
  assert len(batch) == 5
  np.testing.assert_array_equal(rows(batch[1:3]), ROWS[IDS[1:3]])
  padded = batch.padded(8)
  assert len(padded) == 8
  np.testing.assert_array_equal(rows(padded)[:5], ROWS[IDS[:5]])
  np.testing.assert_array_equal(
    rows(padded)[5:], np.broadcast_to(ROWS[0], (3, 7, 20))
  )


@pytest.mark.parametrize("num_rows", [300, 301])
def test_devices_share_the_rows_evenly(num_rows):
  """No device holds more than its share, rounded up."""
  way = ways.ShardedGather(
    ROWS[:num_rows], Mesh(jax.devices()[:4], ways.AXIS), ()
  )
  assert way.rows.shape == (4, -(-num_rows // 4), 20)
  for device in range(4):
    own = ROWS[device:num_rows:4]
    np.testing.assert_array_equal(way.rows[device, : len(own)], own)


def test_requests_between_devices_grow_only_if_they_do_not_fit():
  """Each of four devices requests 600 rows, most of them of device 0."""
  way = ways.ShardedGather(
    np.zeros((2000, 1), "f4"), Mesh(jax.devices()[:4], ways.AXIS), ()
  )
  for count, size in ((222, 256), (256, 256), (257, 512)):
    rest = np.arange(600 - count)
    ids = np.append(4 * np.arange(count), 4 * (rest // 3) + 1 + rest % 3)
    asked, _ = way.stage(np.tile(ids, (4, 1)))
    assert asked.shape == (4, 4, size)
    np.testing.assert_array_equal(asked[0, :, :count], [np.arange(count)] * 4)


@pytest.mark.parametrize(("count", "most", "size"), [
  (0, 10**6, 256), (222, 10**6, 256), (223, 10**6, 512), (1000, 10**6, 1280),
  (1000, 1100, 1100), (222, 100, 100),
])
def test_buffer_size_has_headroom_in_whole_blocks(
  count, most, size
):
  """The next multiple of 256 above 1.15 times the need, at most all rows."""
  assert ways.buffer_size(count, most) == size
