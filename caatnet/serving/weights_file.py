"""Safetensors files of a server: read as a whole, written reproducibly.

Files are copied to memory instead of mapped: an access to a mapped file that
another process truncates ends this process by SIGBUS. Unlike
`caatnet.interop.tensors`, this module imports no jax.

Source of the format: huggingface.co/docs/safetensors.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import struct
from typing import Any
import weakref

import ml_dtypes
import numpy as np

from parallel.base import atomic

_DTYPES = {
  "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16), "U8": np.dtype(np.uint8),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library


@dataclasses.dataclass(frozen=True)
class Header:
  """Header of a safetensors file.

  Attributes:
    metadata: Texts by key.
    tensors: Dtype, shape and byte offset of each tensor, by name.
    size_bytes: Size of the file that the header implies.
  """

  metadata: Mapping[str, str]
  tensors: Mapping[str, tuple[np.dtype, tuple[int, ...], int]]
  size_bytes: int

  def views(self, data: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors by name, as views of a file's bytes."""
    return {
      name: data[start : start + math.prod(shape) * dtype.itemsize]
      .view(dtype).reshape(shape)
      for name, (dtype, shape, start) in self.tensors.items()
    }


class WeightsFile:
  """Safetensors file that is open for reading until this object is deleted.

  The content stays readable after the file has been unlinked.
  """

  def __init__(self, path: pathlib.Path) -> None:
    """Opens a file.

    Raises:
      ValueError: It cannot be opened.
    """
    self.path = path
    try:
      self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
      raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    # Unlike `__del__`, it does not run after the exit has deleted modules.
    weakref.finalize(self, os.close, self._descriptor)

  def header(self) -> Header:
    """Reads and checks the header.

    Raises:
      ValueError: The file is truncated or its header is damaged.
    """
    size = os.fstat(self._descriptor).st_size
    try:
      (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
      if length > min(size - 8, _LARGEST_HEADER):
        raise ValueError("the header is longer than the file")
      text = os.pread(self._descriptor, length, 8)
      found = _header(text)
      if found.size_bytes != size:
        raise ValueError(
          f"the file has {size} bytes; according to its header it must have "
          f"{found.size_bytes}"
        )
    except (
      struct.error, AttributeError, KeyError, OSError, RecursionError,
      TypeError, ValueError,
    ) as error:
      raise ValueError(
        f"{self.path} is truncated, damaged or not a safetensors file: {error}"
      ) from error
    return found

  def content(self, size_bytes: int) -> tuple[np.ndarray, Any]:
    """Returns all bytes, uint8 ``[size_bytes]``, and the `stat_fingerprint`.

    Raises:
      ValueError: The file is truncated, or another process changed it.
    """
    data = np.empty(size_bytes, np.uint8)
    view = memoryview(data)
    before = stat_fingerprint(os.fstat(self._descriptor))
    done = 0
    while done < size_bytes:
      # At most 1 GiB at a time: Linux transfers less than 2 GiB per call.
      part = view[done : done + 2**30]
      count = os.preadv(self._descriptor, [part], done)
      if not count:
        raise ValueError(f"{self.path} is truncated: {done} of {size_bytes} B")
      done += count
    # The fingerprint omits the number of links, which a replacement changes.
    if stat_fingerprint(os.fstat(self._descriptor)) != before:
      raise ValueError(f"{self.path} changed while it was read")
    return data, before


def stat_fingerprint(stat: os.stat_result) -> tuple[int, ...]:
  """Returns device, inode, size and time in ns of a file's last change."""
  return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _header(text: bytes) -> Header:
  """Parses a header; raises ValueError if tensors overlap or leave gaps."""
  found = json.loads(text)
  metadata = found.pop("__metadata__", {})
  if not all(isinstance(text, str) for text in metadata.values()):
    raise ValueError("the values of its metadata must be strings")
  end = start = 8 + len(text)
  tensors = {}
  for name, fields in sorted(
    found.items(), key=lambda item: item[1]["data_offsets"]
  ):
    if fields["dtype"] not in _DTYPES:
      raise ValueError(
        f"{name} has dtype {fields['dtype']}; it must be one of "
        f"{', '.join(_DTYPES)}"
      )
    dtype, shape = _DTYPES[fields["dtype"]], tuple(fields["shape"])
    first, last = fields["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in shape):
      raise ValueError(f"{name} has the invalid shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    if (start + first, start + last) != (end, end + size):
      raise ValueError(
        f"{name} has invalid offsets: they must be ascending and match its size"
      )
    tensors[name] = dtype, shape, end
    end += size
  return Header(metadata, tensors, end)


def write(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, str],
) -> str:
  """Writes a safetensors file durably; returns its SHA-256 hash.

  Equal tensors and metadata give equal bytes, unlike with the safetensors
  library, which does not order metadata.
  """
  header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
  start = 0
  for name, x in tensors.items():
    header[name] = {
      "dtype": _CODES[x.dtype], "shape": list(x.shape),
      "data_offsets": [start, start + x.nbytes],
    }
    start += x.nbytes
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # so that tensors are aligned to 8 bytes
  digest = hashlib.sha256()
  with open(path, "wb") as file:
    arrays = (np.ascontiguousarray(x).reshape(-1) for x in tensors.values())
    for part in (
      struct.pack("<Q", len(text)), text, *(x.view(np.uint8) for x in arrays)
    ):
      file.write(part)
      digest.update(part)
    file.flush()
    os.fsync(file.fileno())
  return digest.hexdigest()


def replace(path: pathlib.Path, content: bytes) -> None:
  """Replaces a file atomically."""
  with atomic.atomic_file(path) as temporary:
    temporary.write_bytes(content)
