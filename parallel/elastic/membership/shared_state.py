"""Shared state: named arrays with hashes, and how a peer gets what it lacks.

An array is cut into chunks, each with a SHA-256 (173 ms of a core for 256 MB
here; BLAKE2b takes 427 ms). A manifest lists names, types, shapes and hashes,
and its own SHA-256 is the digest of the revision, on which the coordinator has
decided. So a manifest is believed if it has that digest, whoever sends it, and
a chunk is believed if it has the hash of the manifest. A holder that sends
another one is known to be wrong, and is asked no more.

Source: PCCL (arXiv 2505.14065) hashes whole tensors and fetches from one peer.
Chunks let several holders send parts of one array, and show who was wrong.
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

from parallel.elastic.membership.messages import Digest
from parallel.elastic.transport.frames import LIMITS, FrameError, Kind

CHUNK_BYTES = LIMITS[Kind.CHUNK]
_HASH_BYTES = 32
_MOST_NAMES, _MOST_DIMS = 1 << 16, 16
_TYPES = re.compile(r"bytes|bool|u?int(8|16|32|64)|float(16|32|64)")
_HEAD = struct.Struct("!HHB")

# Values of a state. Bytes are for what is no array.
Value = np.ndarray | bytes
State = Mapping[str, Value]


class Entry(NamedTuple):
  """One array of a state, or bytes.

  Attributes:
    dtype: Its type's name; "bytes" for bytes.
    shape: Its shape; (length,) of bytes.
    hashes: The SHA-256 of each ``CHUNK_BYTES`` of it, one after the other.
  """

  dtype: str
  shape: tuple[int, ...]
  hashes: bytes

  @property
  def size(self) -> int:
    """Its bytes."""
    width = 1 if self.dtype == "bytes" else np.dtype(self.dtype).itemsize
    return width * math.prod(self.shape)

  def chunk(self, index: int) -> tuple[int, int, bytes]:
    """Returns where a chunk begins and ends, in bytes, and its hash."""
    start = index * CHUNK_BYTES
    return (
      start, min(start + CHUNK_BYTES, self.size),
      self.hashes[_HASH_BYTES * index :][:_HASH_BYTES],
    )

  @property
  def num_chunks(self) -> int:
    """How many chunks it has."""
    return -(-self.size // CHUNK_BYTES)


Manifest = Mapping[str, Entry]  # name -> entry, in the order of the names


def buffer(value: Value) -> memoryview:
  """Returns a value's bytes without a copy.

  Raises:
    ValueError: It is an array that is not contiguous.
  """
  if isinstance(value, bytes):
    return memoryview(value)
  if not value.flags.c_contiguous:
    raise ValueError(f"an array of shape {value.shape} must be contiguous")
  # Through uint8, since views of empty arrays cannot be cast.
  return memoryview(value.reshape(-1).view(np.uint8))


def manifest(state: State) -> dict[str, Entry]:
  """Hashes a state, on all cores.

  Args:
    state: name -> array of booleans, integers or floats, or bytes.

  Raises:
    ValueError: A name is longer than 65,535 bytes, or a type is another one.
  """
  found = {}
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for name in sorted(state):
      value = state[name]
      is_bytes = isinstance(value, bytes)
      dtype = "bytes" if is_bytes else value.dtype.name
      if not _TYPES.fullmatch(dtype) or len(name.encode()) > 0xFFFF:
        raise ValueError(f"{name!r} is of type {dtype}: cannot be shared")
      view = buffer(value)
      # hashlib releases the interpreter's lock.
      hashes = pool.map(
        lambda i, view=view: hashlib.sha256(view[i : i + CHUNK_BYTES]).digest(),
        range(0, len(view), CHUNK_BYTES),
      )
      shape = (len(value),) if is_bytes else value.shape
      found[name] = Entry(dtype, shape, b"".join(hashes))
  return found


def encode(entries: Manifest) -> bytes:
  """Returns a manifest as bytes, of which a state has only one form."""
  out = [struct.pack("!I", len(entries))]
  for name in sorted(entries):
    entry, raw = entries[name], name.encode()
    out.append(_HEAD.pack(len(raw), len(entry.dtype), len(entry.shape)))
    out += [raw, entry.dtype.encode()]
    out.append(struct.pack(f"!{len(entry.shape)}Q", *entry.shape))
    out.append(entry.hashes)
  return b"".join(out)


def digest(entries: Manifest) -> Digest:
  """Returns what names a content: the hash of its manifest."""
  return hashlib.sha256(encode(entries)).hexdigest()


def decode(data: bytes, most_bytes: int) -> dict[str, Entry]:
  """Reads a manifest.

  Args:
    data: What `encode` has made.
    most_bytes: What the state may take, at most.

  Raises:
    FrameError: It is no manifest, or of too large a state.
  """
  found: dict[str, Entry] = {}
  place = total = 0

  def take(count: int) -> bytes:
    nonlocal place
    if count > len(data) - place:
      raise FrameError("a manifest ends too early")
    place += count
    return data[place - count : place]

  (count,) = struct.unpack("!I", take(4))
  if count > _MOST_NAMES:
    raise FrameError(f"a manifest of {count} names")
  for _ in range(count):
    name_length, type_length, dims = _HEAD.unpack(take(_HEAD.size))
    raw, kind = take(name_length), take(type_length)
    try:
      name, dtype = raw.decode(), kind.decode("ascii")
    except UnicodeDecodeError as error:
      raise FrameError("a name in a manifest is no text") from error
    if dims > _MOST_DIMS or not _TYPES.fullmatch(dtype) or name in found:
      raise FrameError(f"a manifest has {name[:80]!r} of type {dtype[:80]!r}")
    entry = Entry(dtype, struct.unpack(f"!{dims}Q", take(8 * dims)), b"")
    total += entry.size
    if total > most_bytes or (dtype == "bytes" and dims != 1):
      raise FrameError(
        f"a state of at least {total:,} bytes; the most are {most_bytes:,}"
      )
    found[name] = entry._replace(hashes=take(_HASH_BYTES * entry.num_chunks))
  if place != len(data):
    raise FrameError(f"a manifest has {len(data) - place} bytes too many")
  return found


def differing(ours: Manifest, theirs: Manifest) -> list[tuple[str, int]]:
  """Returns the chunks of their state that ours has not: name, index."""
  found = []
  for name, entry in theirs.items():
    own = ours.get(name)
    alike = own is not None and own[:2] == entry[:2]
    found += [
      (name, i) for i in range(entry.num_chunks)
      if not alike or own.chunk(i) != entry.chunk(i)
    ]
  return found


def empty(entries: Manifest) -> dict[str, Any]:
  """Returns arrays for a state's values, bytes as arrays of uint8."""
  return {
    name: np.empty(entry.shape, "u1" if entry.dtype == "bytes" else entry.dtype)
    for name, entry in entries.items()
  }
