"""Block hashes: names of full pages that identify their whole prefix.

The block hash of a page is a hash of its tokens and of the block hash of the
page before it. Equal hashes therefore mean equal tokens from the start to this
page, so keys and values can be shared. The hash is 128 bits of BLAKE2: no
client can construct two prompts with colliding hashes to read another client's
cache; Python's 64-bit hash of bytes does not give that guarantee. A salt per
process prevents clients from finding prompts whose hashes collide in the slots
of the hash table.
"""

import hashlib
import os

import numpy as np

ROOT = b""
HASH_BYTES = 16  # bytes of a block hash
_HASH_DTYPE = np.dtype(f"V{HASH_BYTES}")
# Copying a hash object is faster than constructing one.
_EMPTY_HASHER = hashlib.blake2b(digest_size=HASH_BYTES, salt=os.urandom(16))


def root(expert: str) -> bytes:
  """Returns the parent block hash of an expert's first page.

  Keys and values depend on the weights, so no expert may find the pages of
  another one, or of another revision of itself.

  Args:
    expert: Key of the expert; "" for a server with one model.
  """
  if not expert:
    return ROOT
  first = _EMPTY_HASHER.copy()
  first.update(expert.encode())
  return first.digest()


def block_hashes(parent: bytes, tokens: bytes, size: int) -> bytes:
  """Returns the block hashes of consecutive full pages, concatenated.

  Args:
    parent: Block hash of the page before these pages; at the start, `root`.
    tokens: Token ids, as the bytes of int32 ``[n]``; a partly filled last page
      gets no hash.
    size: Bytes of a page's tokens.

  Example:
    Two prompts that agree in their first page of four tokens:

    >>> a = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32).tobytes()
    >>> b = np.array([1, 2, 3, 4, 0, 6, 7, 8], np.int32).tobytes()
    >>> x, y = (split(block_hashes(ROOT, tokens, 16)) for tokens in (a, b))
    >>> x[0] == y[0], x[1] == y[1]
    (True, False)
  """
  found, new = [], _EMPTY_HASHER.copy
  for stop in range(size, len(tokens) + 1, size):
    page = new()
    page.update(parent + tokens[stop - size : stop])
    parent = page.digest()
    found.append(parent)
  return b"".join(found)


def split(block_hashes: bytes) -> list[bytes]:
  """Splits concatenated block hashes into a list."""
  return np.frombuffer(block_hashes, _HASH_DTYPE).tolist()
