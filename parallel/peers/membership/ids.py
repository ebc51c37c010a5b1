"""Peer ids, which contain the peer's key fingerprint and listening address.

An id begins with its creation time in milliseconds, so ids sort by age as far
as clocks agree. This order determines only the ranks, and which of two peers is
dropped if they cannot connect to each other. The fingerprint binds the id to
the process that has the key (`parallel.peers.transport.identity`).

Example:
  >>> from parallel.peers.membership import ids
  >>> ids.address(ids.make(("10.0.0.7", 4100)))
  ('10.0.0.7', 4100)
"""

import re
import secrets
import time

from parallel.peers.membership.messages import Id
from parallel.peers.transport.frames import ID_PATTERN
from parallel.peers.transport.handshake import Address
from parallel.peers.transport.identity import (
  Identity,
  owner_fingerprint,
  process_identity,
)

# 48-bit time in ms, 16 random bits, fingerprint, host, port.
_FORM = re.compile(r"[0-9a-f]{12}-[0-9a-f]{4}-[0-9a-f]+-(.+):([0-9]{1,5})")


def make(address: Address, identity: Identity | None = None) -> Id:
  """Returns a new id for a peer that listens at an address.

  Args:
    address: (host, port).
    identity: Key pair that owns the id; None for this process's key pair.

  Raises:
    ValueError: The host name is too long or contains unsupported characters.
  """
  # The time has a fixed width, so that ids are sorted by time.
  key = (identity or process_identity()).fingerprint
  millis = time.time_ns() // 1_000_000
  found = (
    f"{millis:012x}-{secrets.token_hex(2)}-{key}-{address[0]}:{address[1]}"
  )
  if not ID_PATTERN.fullmatch(found):
    raise ValueError(
      f"the host name {address[0]!r} of an id must have at most 40 characters, "
      "which must be letters, digits, '_', '.', ':' or '-'; use its IP "
      "address instead"
    )
  return found


def address(peer: Id) -> Address:
  """Returns the (host, port) at which a peer listens.

  Raises:
    ValueError: The id does not have the form that `make` produces.
  """
  match = _FORM.fullmatch(peer)
  if (
    not match or not owner_fingerprint(peer) or not 0 < int(match[2]) < 1 << 16
  ):
    raise ValueError(f"{peer!r} is not a peer id")
  return match[1], int(match[2])
