"""Ids of peers, which say where a peer listens.

An id begins with the time at which it was made, so the id of a younger peer is
higher as far as clocks agree; the order of ranks and who is dropped of a pair
depend on it, and nothing else does.
"""

import re
import secrets
import time

from parallel.elastic.membership.messages import Id
from parallel.elastic.transport.frames import ID
from parallel.elastic.transport.handshake import Address

_FORM = re.compile(r"[0-9a-f]{12}-[0-9a-f]{4}-(.+):([0-9]{1,5})")


def make(address: Address) -> Id:
  """Returns a new id of a peer that listens at an address.

  Raises:
    ValueError: The host's name is too long, or has other characters.
  """
  millis = time.time_ns() // 1_000_000
  found = f"{millis:012x}-{secrets.token_hex(2)}-{address[0]}:{address[1]}"
  if not ID.fullmatch(found):
    raise ValueError(
      f"{address[0]!r} must be at most 40 letters, digits and any of _.:- to "
      "be a host's name in an id; its number will do"
    )
  return found


def address(peer: Id) -> Address:
  """Returns where a peer listens.

  Raises:
    ValueError: It is no id of this form.
  """
  match = _FORM.fullmatch(peer)
  if not match or not 0 < int(match[2]) < 1 << 16:
    raise ValueError(f"{peer!r} is no id of a peer")
  return match[1], int(match[2])
