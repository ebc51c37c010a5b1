"""Names of full pages by all that stands before them.

A page is named by a hash of its tokens and of the name of the page before it,
so equal names mean equal sequences up to there, and keys and values that may be
shared. The hash is 128 bits of BLAKE2: nobody makes two prompts whose names
collide to read another's cache. Python's own hash of bytes has 64 bits and is
not made for that. A salt of the process keeps clients from finding prompts
whose names crowd one place of a hash table.
"""

import hashlib
import os

import numpy as np

ROOT = b""
SIZE = 16  # bytes of a name
_NAME = np.dtype(f"V{SIZE}")
# Copied, which is faster than made.
_EMPTY = hashlib.blake2b(digest_size=SIZE, salt=os.urandom(16))


def names(parent: bytes, tokens: bytes, size: int) -> bytes:
  """Returns the names of full pages that follow one another, as one run.

  Args:
    parent: The name of the page before them, `ROOT` for the first ones.
    tokens: Their tokens, as the bytes of int32 ``[n]``; what fills no page has
      no name.
    size: The bytes of a page's tokens.
  """
  found, new = [], _EMPTY.copy
  for stop in range(size, len(tokens) + 1, size):
    page = new()
    page.update(parent + tokens[stop - size : stop])
    parent = page.digest()
    found.append(parent)
  return b"".join(found)


def split(names: bytes) -> list[bytes]:
  """Returns each name of a run."""
  return np.frombuffer(names, _NAME).tolist()
