"""Names of full pages by all that stands before them.

A page is named by a hash of its tokens and of the name of the page before it,
so equal names mean equal sequences up to there, and keys and values that may be
shared. The hash is 128 bits of BLAKE2: nobody makes two prompts whose names
collide to read another's cache. Python's own hash of bytes has 64 bits and is
not made for that; it would save about a microsecond for each page.
"""

import hashlib

ROOT = b""


def name(parent: bytes, tokens: bytes) -> bytes:
  """Returns the name of a full page.

  Args:
    parent: The name of the page before it, `ROOT` for the first one.
    tokens: The page's tokens, as the bytes of int32 ``[page_size]``.
  """
  return hashlib.blake2b(parent + tokens, digest_size=16).digest()
