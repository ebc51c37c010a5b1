"""Copies of sequences in the host's memory, which outlive a turn.

Keys and values are only ever added to a sequence, so what was copied stays
valid, and a copy to the host moves what has been added since: whole pages, from
the first one that has changed. The owner of a copy is a conversation or, where
there is none, a request. Its pages are taken with room for the next turn, as
runs of powers of two.

If the model keeps states, a copy has the state of its last token, too, in the
block with the number of its first page. A copy is then of use only to a
sequence that continues at exactly that length. Without a paged component, a
page stands for the state alone and has the positions of a whole context.

A copy of a sequence that waits without pages on the device is *pinned*. The
others are dropped when room is needed, those used longest ago first.

Source: the reuse of key/value caches of FastSwitch (arXiv 2411.18424).
"""

import collections
from collections.abc import Hashable, Sequence
import dataclasses
import hashlib

import numpy as np

from caatnet.serving.cache.pages import Pages


def _signature(tokens: np.ndarray) -> bytes:
  return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


@dataclasses.dataclass
class HostCopy:
  """What the host has of a sequence.

  Attributes:
    pages: Its pages on the host, those for what is to come among them.
    tokens: How many tokens of the sequence are copied, from its beginning on.
    pinned: Whether it is the only copy of a sequence, or is being read.
    signature: A hash of the copied tokens once their turn has ended.
  """

  pages: list[int] = dataclasses.field(default_factory=list)
  tokens: int = 0
  pinned: bool = False
  signature: bytes = b""


class Host:
  """The pages of the host's memory.

  Attributes:
    num_pages: How many pages it has.
    num_pinned: How many of them hold pinned copies.
    page_size: The tokens of a page.
    paged: Whether a copy has pages.
    states: Whether a copy has a state.
  """

  def __init__(
    self, num_pages: int, page_size: int, reserve: bool, keep: bool = True,
    paged: bool = True, states: bool = False,
  ) -> None:
    """Makes an empty memory.

    Args:
      num_pages: How many pages it has; 0 for a server that does not swap.
      page_size: The tokens of a page.
      reserve: Whether copies have room for the next turn.
      keep: Whether a copy stays when the device has the sequence again.
      paged: Whether the model's cache has a paged component.
      states: Whether it has fixed-size components.
    """
    self.paged, self.states = paged, states
    self.page_size, self._reserve, self._keep = page_size, reserve, keep
    self._pages = Pages(num_pages, page_size, reuse=False)
    self.num_pages = num_pages
    self._copies: collections.OrderedDict[Hashable, HostCopy] = (
      collections.OrderedDict()
    )
    self.num_pinned = 0

  @property
  def num_used(self) -> int:
    """How many pages hold copies, or have room for what is to come."""
    return self._pages.num_used

  def valid(self, owner: Hashable) -> int:
    """Returns how many tokens of an owner's sequence the host has."""
    return self._copies[owner].tokens if owner in self._copies else 0

  def increment(self, owner: Hashable, tokens: int) -> tuple[int, int]:
    """Returns the pages ``[first, last)`` that a copy of a sequence moves.

    Args:
      owner: Whose sequence.
      tokens: How many tokens it has.
    """
    valid = self.valid(owner)
    if valid >= tokens:
      return 0, 0
    return valid // self.page_size, -(-tokens // self.page_size)

  def fits(self, owner: Hashable, tokens: int) -> bool:
    """Returns whether there is room for a sequence, if others are dropped."""
    own = self._copies.get(owner)
    kept = self.num_pinned
    if own is not None and not own.pinned:
      kept += len(own.pages)
    have = len(own.pages) if own is not None else 0
    need = -(-tokens // self.page_size) - have
    return need <= self.num_pages - kept

  def pages(self, owner: Hashable) -> Sequence[int]:
    """Returns an owner's pages on the host, in the order of the sequence."""
    return self._copies[owner].pages if owner in self._copies else ()

  def write(self, owner: Hashable, tokens: int, pinned: bool) -> list[int]:
    """Makes room for a sequence, and takes its copy for made.

    Args:
      owner: Whose sequence, one that `fits`.
      tokens: How many tokens it has.
      pinned: Whether the copy will be the only one.

    Returns:
      The pages on the host of the increment.
    """
    first, last = self.increment(owner, tokens)
    copy = self._copies.setdefault(owner, HostCopy())
    self._copies.move_to_end(owner)
    pinned = pinned or copy.pinned
    self._pin(copy, False)
    need = last - len(copy.pages)
    if need > 0:
      self._drop(owner, need)
      want = need
      if self._reserve:  # to the next power of two
        want = (1 << (last - 1).bit_length()) - len(copy.pages)
      want = max(need, min(want, self._pages.num_available))
      copy.pages += self._pages.take(want).tolist()
    self._pin(copy, pinned)
    copy.tokens = max(copy.tokens, tokens)
    return copy.pages[first:last]

  def _drop(self, owner: Hashable, need: int) -> None:
    for other in list(self._copies):
      if self._pages.num_available >= need:
        return
      if other != owner and not self._copies[other].pinned:
        self.drop(other)

  def sign(self, owner: Hashable, tokens: np.ndarray) -> None:
    """Notes of which tokens an owner's copy is, when the turn has ended.

    Args:
      owner: Whose copy.
      tokens: The sequence, int32 ``[n]``, of which the copy is the beginning.
    """
    if owner in self._copies:
      copy = self._copies[owner]
      copy.signature = _signature(tokens[: copy.tokens])

  def begins(self, owner: Hashable, tokens: np.ndarray) -> bool:
    """Returns whether a sequence begins with what is copied, and goes on."""
    if owner not in self._copies:
      return True
    copy = self._copies[owner]
    return copy.tokens < len(tokens) and copy.signature == _signature(
      tokens[: copy.tokens]
    )

  def pin(self, owner: Hashable) -> None:
    """Keeps an owner's copy while it is read."""
    self._pin(self._copies[owner], True)

  def _pin(self, copy: HostCopy, pinned: bool) -> None:
    self.num_pinned += len(copy.pages) * (pinned - copy.pinned)
    copy.pinned = pinned

  def unpin(self, owner: Hashable) -> None:
    """Notes that the device has an owner's sequence again."""
    if owner in self._copies:
      self._pin(self._copies[owner], False)
      if not self._keep:
        self.drop(owner)

  def drop(self, owner: Hashable) -> None:
    """Forgets an owner's copy."""
    copy = self._copies.pop(owner, None)
    if copy is not None:
      self._pin(copy, False)
      self._pages.release(np.array(copy.pages, np.int32))

  def check(self) -> None:
    """Asserts that each page has one owner or is free."""
    pages = [p for c in self._copies.values() for p in c.pages]
    assert len(set(pages)) == len(pages)
    assert len(pages) + self._pages.num_available == self.num_pages
    pinned = sum(len(c.pages) for c in self._copies.values() if c.pinned)
    assert pinned == self.num_pinned
