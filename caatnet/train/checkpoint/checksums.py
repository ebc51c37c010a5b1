"""Checksums of a checkpoint's arrays, which are stored in the checkpoint.

The item ``checksums`` of a checkpoint holds the dtype of each array, one
checksum per row of the array (`row_sums`), and a CRC-32 of the data iterator's
position. Orbax renames a checkpoint's folder to its step only when all items
are written. Each process sums over its own shards, and one small all-gather
adds these sums over processes. Most arrays have one row per worker, so a run
with another number of workers can verify the workers that it reads.

Cost for 2.8 GB on two cores: a save takes 22 s, of which training waits 1.5 s;
a restore takes 21 s instead of 19 s. With devices other than CPUs, the arrays
are also copied to the host once more.
"""

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import itertools
import json
import os
from typing import Any
import zlib

from etils import epath
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from caatnet.train.checkpoint import row_sums

ITEM = "checksums"
_MISMATCH_MESSAGE = "{} has another checksum than when it was written"
# Name of an array -> its dtype, and the checksum of each row in hex digits.
Sums = Mapping[str, tuple[str, list[str]]]


def of_tree(tree: Any, dtypes: Mapping[str, str] | None = None) -> Sums:
  """Returns each array's dtype and row checksums; collective over processes.

  Args:
    tree: Tree of `jax.Array`.
    dtypes: Name of an array -> dtype in which it was stored; an array without
      an entry has its own dtype.
  """
  arrays = ocp.utils.to_flat_dict(tree, sep=".")
  stored = {k: (dtypes or {}).get(k, str(x.dtype)) for k, x in arrays.items()}

  def added(name: str) -> np.ndarray:
    x, dtype = arrays[name], jnp.dtype(stored[name])
    found = np.zeros(row_sums.num_rows(x.shape), np.uint64)
    for shard in x.addressable_shards:
      if shard.replica_id == 0:
        start = [part.start or 0 for part in shard.index]
        part = np.asarray(shard.data).astype(dtype, copy=False)
        found += row_sums.checksum_part(part, start, x.shape)
    return found

  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    found = dict(zip(arrays, pool.map(added, arrays), strict=True))
  if jax.process_count() > 1 and found:
    # As pairs of uint32, since jax disables uint64 by default.
    words = np.concatenate([*found.values()]).view(np.uint32)
    every = np.ascontiguousarray(multihost_utils.process_allgather(words))
    total = every.view(np.uint64).sum(axis=0)
    ends = np.cumsum([len(x) for x in found.values()])[:-1]
    found = dict(zip(found, np.split(total, ends), strict=True))
  return {name: (stored[name], hexes(x)) for name, x in found.items()}


def of_json(data: Any) -> str:
  """Returns the CRC-32 of data as JSON text, in hex digits."""
  return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"


def read(path: epath.Path) -> dict[str, Any] | None:
  """Returns a checkpoint's checksums by item; None if it has none.

  Raises:
    ValueError: If the checksums are damaged or cannot be read.
  """
  if not (path / ITEM).exists():
    return None
  return _read_json(path, f"{ITEM}/metadata")


def _read_json(path: epath.Path, file: str) -> dict[str, Any]:
  """Returns a JSON file's content; raises ValueError if it is damaged."""
  try:
    found = json.loads((path / file).read_text())
    for entry in found.get("array_metadatas", ()):  # as Orbax reads them
      for key in "param_name", "write_shape", "chunk_shape":
        entry["array_metadata"][key]
  except Exception as error:  # of any type, for damaged content
    raise ValueError(f"the file {file} cannot be read: {error}") from error
  return found


def write(path: epath.Path, stored: Mapping[str, Any]) -> None:
  """Writes ``stored`` as a checkpoint's item ``checksums``, as Orbax would."""
  (path / ITEM).mkdir()
  (path / ITEM / "metadata").write_text(json.dumps(stored))


def verify(item: str, stored: Mapping[str, Any], tree: Any) -> None:
  """Verifies arrays that were read; collective over processes.

  Args:
    item: Name of the item that holds the tree, such as "params".
    stored: Checksums of the checkpoint, from `read`.
    tree: Tree of `jax.Array`. Workers that the checkpoint does not have are
      not verified.

  Raises:
    ValueError: An array differs; the message names it.
    KeyError, TypeError: The stored checksums are damaged.
  """
  dtypes = {name: dtype for name, (dtype, _) in stored[item].items()}
  for name, (_, rows) in of_tree(tree, dtypes).items():
    compare(f"{item}.{name}", stored[item][name][1], rows)


def hexes(rows: np.ndarray) -> list[str]:
  """Returns an array's row checksums, uint64, as 16 hex digits each."""
  return [f"{x:016x}" for x in rows.tolist()]


def compare(name: str, stored: list[str], found: list[str]) -> None:
  """Raises ValueError if row checksums of the array ``name`` differ.

  Only rows that both lists have are compared.
  """
  num = min(len(stored), len(found))
  if not num or stored[:num] != found[:num]:
    raise ValueError(_MISMATCH_MESSAGE.format(name))


def verify_json(item: str, stored: Mapping[str, Any], data: Any) -> None:
  """Raises ValueError if an item's data and ``stored[item]`` do not match."""
  if of_json(data) != stored[item]:
    raise ValueError(_MISMATCH_MESSAGE.format(item))


def check(
  path: epath.Path, items: Sequence[str] = ("params", "outer", "rest")
) -> None:
  """Checks that all files of some items exist, and verifies their arrays.

  Holds one storage chunk at a time in memory. Not collective over processes.

  Args:
    path: The checkpoint's path. If it has no checksums, no array is read.
    items: Names of items; items that the checkpoint lacks are ignored.

  Raises:
    Exception: Of any type, at the first fault.
  """
  stored = read(path) or {}
  for item in items:
    if not (path / item).exists():
      if item in stored:
        raise ValueError(f"{item} is missing")
      continue
    url = str(path / item) + "/"
    base = url if "://" in url else f"file://{url}"
    for file in _iterate_ocdbt_files(base):
      if not (path / item / file).exists():
        raise ValueError(f"the file {item}/{file} is missing")
    sums = stored.get(item, {})
    arrays = (path / item).glob("array_metadatas/*")
    for file in (
      f"{item}/_METADATA", f"{item}/_sharding",
      *(f"{item}/array_metadatas/{place.name}" for place in arrays),
    ):
      if (path / file).exists():
        _read_json(path, file)
    try:
      tree = ocp.StandardCheckpointHandler().metadata(path / item)
    except Exception as error:  # of any type, assertions included
      raise ValueError(
        f"{item}/_METADATA or {item}/_sharding cannot be read"
      ) from error
    if sums and ocp.utils.to_flat_dict(tree, sep=".").keys() != sums.keys():
      raise ValueError(f"{item}/_METADATA names other arrays than {ITEM}")
    for name, (_, rows) in sums.items():
      store = tensorstore.open({
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
      }, open=True, read=True).result()
      compare(f"{item}.{name}", rows, hexes(_of_store(store)))
  if "position" in stored:
    verify_json("position", stored, _read_json(path, "position/metadata"))


def _of_store(store: tensorstore.TensorStore) -> np.ndarray:
  """Returns a stored array's row checksums, reading one chunk at a time."""
  found = np.zeros(row_sums.num_rows(store.shape), np.uint64)
  steps = store.chunk_layout.read_chunk.shape or ()
  starts = map(range, (0,) * store.ndim, store.shape, steps)
  for start in itertools.product(*starts):
    place = tuple(slice(i, i + n) for i, n in zip(start, steps, strict=True))
    found += row_sums.checksum_part(
      store[place].read().result(), start, store.shape
    )
  return found


def _iterate_ocdbt_files(base: str) -> Iterator[str]:
  """Yields the paths of files to which the OCDBT database ``base`` refers."""
  store = tensorstore.KvStore.open(base).result()
  newest = tensorstore.ocdbt.dump(store).result()["versions"][-1]
  left = [newest["root"]["location"]]
  while left:
    # For example "value:ocdbt.process_0/:d/name:offset:length".
    kind, folder, file, *_ = (place := left.pop()).split(":")
    yield folder + file
    if kind == "btreenode":
      node = tensorstore.ocdbt.dump(store, place).result()
      for entry in node["entries"]:
        left += [entry[x] for x in ("location", "indirect_value") if x in entry]
