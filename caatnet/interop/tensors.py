"""Safetensors files of a folder, read and written one tensor at a time.

Reading uses the safetensors library, which checks a file's header against its
size. `read` opens and closes the file for each tensor, since mapped pages of a
file count as memory of this process. Writing is implemented here, since the
library takes all tensors of a file at once. A folder that this module wrote has
a file `CHECKSUMS_FILE` with the CRC-32 of each tensor and of each other file;
other programs ignore it.

Source of the format: huggingface.co/docs/safetensors.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import struct
from typing import IO, Any
import zlib

import jax.numpy as jnp
import numpy as np
import safetensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUMS_FILE = "checksums.json"
# Maximum size of a file, as in published models.
SHARD_BYTES = 5 * 10**9

# Supported dtypes of weights by their names in the file format.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPE_CODES = {name: code for code, name in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Location, dtype and shape of a tensor in a safetensors file.

  Attributes:
    path: The file.
    dtype: Name of the dtype in jax, or in the file if it is not in `DTYPES`.
    shape: Shape.
    checksum: CRC-32 of its bytes in hex digits; None if it is not known.
  """

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  checksum: str | None = None

  @property
  def size_bytes(self) -> int:
    """Size in bytes, for a supported dtype."""
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def find(folder: pathlib.Path) -> tuple[dict[str, TensorInfo], list[str]]:
  """Returns a folder's tensors, from one file or from an index and its shards.

  If the folder has `CHECKSUMS_FILE`, the files other than safetensors are
  verified here, and each tensor when `read` reads it.

  Args:
    folder: The folder.

  Returns:
    The tensors by name, and messages on problems with the files.

  Raises:
    FileNotFoundError: The folder has no safetensors files.
    ValueError: The index, or `CHECKSUMS_FILE`, is damaged.
  """
  if not (folder / CHECKSUMS_FILE).exists():
    return _find(folder)
  stored = read_json(folder / CHECKSUMS_FILE)
  try:
    (sums := stored["tensors"]).keys()
    wrong = [
      f"{name} has another checksum than in {CHECKSUMS_FILE}; if the change is "
      f"intended, delete {CHECKSUMS_FILE}"
      for name, sum_ in stored["files"].items()
      if not (folder / name).is_file()
      or _crc((folder / name).read_bytes()) != sum_
    ]
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(
      f"{folder / CHECKSUMS_FILE} is damaged: {error}"
    ) from error
  found, problems = _find(folder)
  return {
    name: dataclasses.replace(x, checksum=sums.get(name, "none"))
    for name, x in found.items()
  }, wrong + problems


def _find(folder: pathlib.Path) -> tuple[dict[str, TensorInfo], list[str]]:
  """Implements `find`, without checksums."""
  if (folder / SINGLE_FILE).exists():
    return _read_file_headers(folder / SINGLE_FILE)
  if not (folder / INDEX_FILE).exists():
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    why = (
      f"only {pickled[0]}, which is pickled: reading it can run any code. "
      "Convert it to safetensors first" if pickled else "no such file"
    )
    raise FileNotFoundError(
      f"{folder} must have {SINGLE_FILE} or {INDEX_FILE}; there is {why}"
    )
  place_of = _read_index(folder / INDEX_FILE)
  found: dict[str, TensorInfo] = {}
  wrong: list[str] = []
  there = {path.name for path in folder.iterdir() if path.is_file()}
  for shard in sorted(set(place_of.values())):
    path = folder / shard
    # A name with a directory could point outside the folder.
    if pathlib.Path(shard).name != shard or shard not in there:
      wrong.append(f"{INDEX_FILE} names {shard!r}, which is not in the folder")
      continue
    tensors, problems = _read_file_headers(path)
    wrong += problems
    listed = {name for name, place in place_of.items() if place == shard}
    # A damaged shard has its own message, so its tensors are not also missing.
    lacking = set() if problems else listed - set(tensors)
    wrong += [f"{shard} lacks {name}" for name in sorted(lacking)]
    wrong += [
      f"{name} is in {shard}, but not according to {INDEX_FILE}"
      for name in sorted(set(tensors) - listed)
    ]
    found |= {name: x for name, x in tensors.items() if name in listed}
  return found, wrong


def read(tensor: TensorInfo, name: str) -> np.ndarray:
  """Returns the values of a tensor.

  Raises:
    ValueError: The file is damaged.
  """
  with _opened(tensor.path) as file:
    values = file.get_tensor(name)
  if tensor.checksum not in (None, _crc(values)):
    raise ValueError(
      f"{tensor.path} is damaged: {name} has another checksum than in "
      f"{CHECKSUMS_FILE}"
    )
  return values


def write_checksums(folder: pathlib.Path, sums: Mapping[str, str]) -> None:
  """Writes `CHECKSUMS_FILE`, after all other files.

  Args:
    folder: The folder.
    sums: Checksums of the tensors, from `Writer.checksums`.
  """
  others = {
    path.name: _crc(path.read_bytes()) for path in sorted(folder.iterdir())
    if path.suffix != ".safetensors"
  }
  text = json.dumps({"tensors": sums, "files": others}, indent=2)
  (folder / CHECKSUMS_FILE).write_text(text + "\n")


def _crc(data: bytes | np.ndarray) -> str:
  """Returns the CRC-32 of bytes, or of an array, in hex digits."""
  if isinstance(data, np.ndarray):
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
  return f"{zlib.crc32(data):08x}"


class Writer:
  """Writer of a folder's safetensors files, one tensor at a time, in any order.

  Attributes:
    checksums: Checksums of the tensors that were written, by name.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    shard_bytes: int = SHARD_BYTES,
  ) -> None:
    """Writes the headers, and an index if there are several files.

    Args:
      folder: The folder, which exists.
      tensors: Dtype and shape of each tensor, in the order of the files.
      shard_bytes: Maximum size of a file in bytes, unless a single tensor is
        larger.
    """
    sizes = {
      name: TensorInfo(folder, *tensor).size_bytes
      for name, tensor in tensors.items()
    }
    self._place: dict[str, tuple[IO[bytes], int]] = {}
    self._tensors, self._left = tensors, set(tensors)
    self.checksums: dict[str, str] = {}
    with contextlib.ExitStack() as opened:
      shards = list(_shards(sizes, shard_bytes))
      place_of: dict[str, str] = {}
      for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path = folder / (SINGLE_FILE if len(shards) == 1 else shard)
        file = opened.enter_context(open(path, "wb"))
        self._write_header(file, {name: sizes[name] for name in names})
        place_of |= dict.fromkeys(names, path.name)
      if len(shards) > 1:
        index = {
          "metadata": {"total_size": sum(sizes.values())},
          "weight_map": dict(sorted(place_of.items())),
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
      self._opened = opened.pop_all()

  def _write_header(self, file: IO[bytes], sizes: Mapping[str, int]) -> None:
    """Writes the header of a file, and records the offsets of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, size in sizes.items():
      dtype, shape = self._tensors[name]
      header[name] = {
        "dtype": _DTYPE_CODES[dtype], "shape": list(shape),
        "data_offsets": [start, start + size],
      }
      start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    for name in sizes:
      self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0]

  def write(self, name: str, values: np.ndarray) -> None:
    """Writes a tensor, which must have the declared dtype and shape."""
    dtype, shape = self._tensors[name]
    assert values.shape == tuple(shape), name
    assert values.dtype == jnp.dtype(dtype), name
    file, start = self._place[name]
    file.seek(start)
    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    self.checksums[name] = _crc(values)
    self._left.remove(name)

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    with self._opened:
      if kind is None:
        assert not self._left, self._left
        for file in {file for file, _ in self._place.values()}:
          file.flush()
          os.fsync(file.fileno())  # durable before the folder is renamed


def _shards(
  sizes: Mapping[str, int], shard_bytes: int
) -> Iterator[list[str]]:
  """Splits names, in order, into groups of at most `shard_bytes` bytes."""
  names: list[str] = []
  total = 0
  for name, size in sizes.items():
    if names and total + size > shard_bytes:
      yield names
      names, total = [], 0
    names.append(name)
    total += size
  yield names


def _read_index(path: pathlib.Path) -> dict[str, str]:
  """Returns the file name of each tensor, by the tensor's name."""
  index = read_json(path)
  place_of = index.get("weight_map") if isinstance(index, dict) else None
  if not isinstance(place_of, dict) or not all(
    isinstance(place, str) for place in place_of.values()
  ):
    raise ValueError(f"{path} is damaged: it has no weight_map of names")
  return place_of


def _read_file_headers(path: pathlib.Path) -> tuple[
  dict[str, TensorInfo], list[str]
]:
  """Returns the tensors of one file, and messages on its problems."""
  try:
    with _opened(path) as file:
      tensors = {}
      for name in list(file.keys()):
        part = file.get_slice(name)
        dtype = part.get_dtype()
        tensors[name] = TensorInfo(
          path, DTYPES.get(dtype, dtype), tuple(part.get_shape())
        )
    # The library ignores duplicate names: the last tensor of a name is used.
    with open(path, "rb") as file:
      size = struct.unpack("<Q", file.read(8))[0]
      read_json(path, file.read(size), unique=True)
  except ValueError as error:
    return {}, [str(error)]
  return tensors, []


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
  """Opens a file with safetensors, whose errors become ValueErrors."""
  try:
    with safetensors.safe_open(path, "numpy") as file:
      yield file
  except (OSError, safetensors.SafetensorError) as error:
    reason = str(error).removeprefix("Error while deserializing header: ")
    raise ValueError(
      f"{path} is damaged or not a safetensors file: {reason}"
    ) from error


def read_json(
  path: pathlib.Path, text: str | bytes | None = None, unique: bool = False
) -> Any:
  """Parses a JSON file, or a text that is part of one.

  Args:
    path: The file, named in error messages.
    text: Text to parse instead of the file's content; None for the file.
    unique: Whether a duplicate key is an error.

  Raises:
    ValueError: The text is not JSON, or has a duplicate key; the message names
      the file.
  """

  def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(name for name, _ in found)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
      raise ValueError(f"{', '.join(twice)}: duplicate keys")
    return dict(found)

  hook: Callable[..., Any] | None = pairs if unique else None
  try:
    text = path.read_bytes() if text is None else text
    return json.loads(text, object_pairs_hook=hook)
  except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
    raise ValueError(f"{path} is damaged: {error}") from error
