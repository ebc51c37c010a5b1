"""Shared state: named arrays, their manifest of hashes, and differences.

Arrays are divided into chunks, each with a SHA-256 hash (measured: 173 ms of
one core for 256 MB; BLAKE2b takes 427 ms). A manifest lists names, dtypes,
shapes and hashes. The SHA-256 of the encoded manifest is the digest of the
revision, which the coordinator commits. A manifest with that digest can
therefore be accepted from any sender, and so can a chunk with the hash in the
manifest. A holder that sends a chunk with a wrong hash is dropped.

Source: PCCL (arXiv 2505.14065) hashes whole tensors and fetches from one peer.
Chunks let several holders send parts of one array, and identify a faulty
holder.

Example:
  >>> import numpy as np
  >>> from parallel.peers.membership import shared_state
  >>> old = shared_state.manifest({"w": np.zeros(4, np.float32), "step": b"1"})
  >>> new = shared_state.manifest({"w": np.zeros(4, np.float32), "step": b"2"})
  >>> shared_state.differing_chunks(old, new)  # (name, chunk) pairs to download
  [('step', 0)]
  >>> new["w"].dtype, new["w"].shape, new["w"].num_chunks
  ('float32', (4,), 1)
"""

from collections.abc import Mapping
import concurrent.futures
import hashlib
import math
import os
import re
import struct
from typing import Any, NamedTuple

import numpy as np

from parallel.peers.membership.messages import Digest
from parallel.peers.transport.frames import MAX_PAYLOAD_BYTES, FrameError, Kind

CHUNK_BYTES = MAX_PAYLOAD_BYTES[Kind.CHUNK]
_HASH_BYTES = 32
_MAX_NAMES, _MAX_DIMS = 1 << 16, 16
_TYPES = re.compile(r"bytes|bool|u?int(8|16|32|64)|float(16|32|64)")
_HEAD = struct.Struct("!HHB")  # lengths of name and of dtype's name; dims

# Values of a state. Bytes are for data that is not an array.
Value = np.ndarray | bytes
State = Mapping[str, Value]


class ManifestEntry(NamedTuple):
  """Manifest entry of one array or bytes value.

  Attributes:
    dtype: Name of the dtype; "bytes" for bytes.
    shape: Shape of the array; (length,) for bytes.
    hashes: Concatenated SHA-256 hashes (32 bytes each) of consecutive chunks of
      ``CHUNK_BYTES``.
  """

  dtype: str
  shape: tuple[int, ...]
  hashes: bytes

  @property
  def size(self) -> int:
    """Size in bytes."""
    width = 1 if self.dtype == "bytes" else np.dtype(self.dtype).itemsize
    return width * math.prod(self.shape)

  def chunk(self, index: int) -> tuple[int, int, bytes]:
    """Returns (start, stop, hash) of a chunk; start and stop are in bytes."""
    # The last chunk may be shorter.
    start = index * CHUNK_BYTES
    return (
      start, min(start + CHUNK_BYTES, self.size),
      self.hashes[_HASH_BYTES * index :][:_HASH_BYTES],
    )

  @property
  def num_chunks(self) -> int:
    """Number of chunks."""
    return -(-self.size // CHUNK_BYTES)


# name -> entry, in the order of the names
Manifest = Mapping[str, ManifestEntry]


def buffer(value: Value) -> memoryview:
  """Returns a view of a value's bytes, without a copy.

  Raises:
    ValueError: The value is an array that is not C-contiguous.
  """
  if isinstance(value, bytes):
    return memoryview(value)
  if not value.flags.c_contiguous:
    raise ValueError(f"an array of shape {value.shape} must be contiguous")
  # View as uint8 first: a memoryview of an empty array cannot be cast.
  return memoryview(value.reshape(-1).view(np.uint8))


def manifest(state: State) -> dict[str, ManifestEntry]:
  """Returns the manifest of a state; hashes it with one thread per core.

  Args:
    state: name -> array of booleans, integers or floats, or bytes.

  Raises:
    ValueError: A name is longer than 65,535 bytes, or a dtype is unsupported.
  """
  found = {}
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    # Sorted names make equal states have equal digests.
    for name in sorted(state):
      value = state[name]
      is_bytes = isinstance(value, bytes)
      dtype = "bytes" if is_bytes else value.dtype.name
      if not _TYPES.fullmatch(dtype) or len(name.encode()) > 0xFFFF:
        raise ValueError(
          f"{name!r} has dtype {dtype}, which cannot be shared between peers"
        )
      view = buffer(value)
      # hashlib releases the GIL, so chunks are hashed in parallel.
      hashes = pool.map(
        lambda i, view=view: hashlib.sha256(view[i : i + CHUNK_BYTES]).digest(),
        range(0, len(view), CHUNK_BYTES),
      )
      shape = (len(value),) if is_bytes else value.shape
      found[name] = ManifestEntry(dtype, shape, b"".join(hashes))
  return found


def encode(entries: Manifest) -> bytes:
  """Returns a manifest as bytes; equal manifests have equal bytes."""
  # Number of entries; then of each entry: lengths, name, dtype, shape, hashes.
  out = [struct.pack("!I", len(entries))]
  for name in sorted(entries):
    entry, raw = entries[name], name.encode()
    out.append(_HEAD.pack(len(raw), len(entry.dtype), len(entry.shape)))
    out += [raw, entry.dtype.encode()]
    out.append(struct.pack(f"!{len(entry.shape)}Q", *entry.shape))  # 64-bit
    out.append(entry.hashes)
  return b"".join(out)


def digest(entries: Manifest) -> Digest:
  """Returns the digest of a state: the hex SHA-256 of its manifest."""
  return hashlib.sha256(encode(entries)).hexdigest()


def decode(data: bytes, max_bytes: int) -> dict[str, ManifestEntry]:
  """Returns the manifest that `encode` has converted to bytes.

  The data is untrusted until its digest has been compared, so all lengths are
  checked.

  Args:
    data: Encoded manifest.
    max_bytes: Upper limit on the size of the state.

  Raises:
    FrameError: The data is not a manifest, or the state is too large.
  """
  found: dict[str, ManifestEntry] = {}
  place = total = 0

  def take(count: int) -> bytes:
    """Returns the next `count` bytes."""
    nonlocal place
    if count > len(data) - place:
      raise FrameError("a manifest is truncated")
    place += count
    return data[place - count : place]

  (count,) = struct.unpack("!I", take(4))
  if count > _MAX_NAMES:
    raise FrameError(
      f"a manifest has {count} names; at most {_MAX_NAMES} are allowed"
    )
  for _ in range(count):
    name_length, type_length, dims = _HEAD.unpack(take(_HEAD.size))
    raw, kind = take(name_length), take(type_length)
    try:
      name, dtype = raw.decode(), kind.decode("ascii")
    except UnicodeDecodeError as error:
      raise FrameError("a name in a manifest is not valid text") from error
    if dims > _MAX_DIMS or not _TYPES.fullmatch(dtype) or name in found:
      raise FrameError(
        f"a manifest has an invalid entry: name {name[:80]!r}, dtype "
        f"{dtype[:80]!r}"
      )
    # The number of hashes is not transmitted, since it follows from the size.
    entry = ManifestEntry(
      dtype, struct.unpack(f"!{dims}Q", take(8 * dims)), b""
    )
    total += entry.size
    if total > max_bytes or (dtype == "bytes" and dims != 1):
      raise FrameError(
        f"a state has at least {total:,} bytes; the limit is {max_bytes:,}"
      )
    found[name] = entry._replace(hashes=take(_HASH_BYTES * entry.num_chunks))
  # With trailing bytes, one state could have several digests.
  if place != len(data):
    raise FrameError(f"a manifest has {len(data) - place} trailing bytes")
  return found


def differing_chunks(ours: Manifest, theirs: Manifest) -> list[tuple[str, int]]:
  """Returns (name, index) of each chunk of ``theirs`` that ``ours`` lacks."""
  found = []
  for name, entry in theirs.items():
    own = ours.get(name)
    alike = own is not None and own[:2] == entry[:2]  # dtype and shape
    found += [
      (name, i) for i in range(entry.num_chunks)
      if not alike or own.chunk(i) != entry.chunk(i)
    ]
  return found


def allocate_arrays(entries: Manifest) -> dict[str, Any]:
  """Returns uninitialized arrays for a state; uint8 arrays for bytes values."""
  return {
    name: np.empty(entry.shape, "u1" if entry.dtype == "bytes" else entry.dtype)
    for name, entry in entries.items()
  }
