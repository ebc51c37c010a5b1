"""Host cache: copies of sequences in host memory, kept between turns.

A sequence's keys and values are append-only, so a copy never becomes invalid. A
copy to the host therefore moves only the pages that changed since the previous
copy, in whole pages. The owner of a copy is a conversation or, for a request
without one, the request. The pages of a copy are allocated with room for the
next turn, in contiguous ranges whose length is a power of two.

If the model has recurrent state, a copy also contains the state after its last
token. The state's index in host memory is the number of the copy's first page.
Such a copy is useful only to a sequence that continues after exactly this
token. If the model's cache has no pages, a host page stands for one state, and
its page size is the whole context.

A copy is *pinned* while its sequence waits without pages on the device. Other
copies are evicted when room is needed, the least recently used first.

Source: the reuse of key/value caches of FastSwitch (arXiv 2411.18424).
"""

import collections
from collections.abc import Hashable, Sequence
import dataclasses
import hashlib

import numpy as np

from caatnet.serving.cache.pages import Pages


def _signature(tokens: np.ndarray) -> bytes:
  """Returns a 128-bit hash of token ids."""
  return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


@dataclasses.dataclass
class HostCopy:
  """Copy of a sequence in host memory.

  Attributes:
    pages: Its host pages, including those reserved for later tokens.
    tokens: Number of copied tokens, counted from the start of the sequence.
    pinned: Whether it is the only copy of a sequence, or is being read.
    signature: Hash of the copied tokens, set at the end of the turn.
  """

  pages: list[int] = dataclasses.field(default_factory=list)
  tokens: int = 0
  pinned: bool = False
  signature: bytes = b""


class HostCache:
  """Allocator and index of the host cache.

  Attributes:
    num_pages: Total number of host pages.
    num_pinned: Number of pages in pinned copies.
    page_size: Tokens per page.
    paged: Whether a copy has pages.
    states: Whether a copy has a recurrent state.
  """

  def __init__(
    self, num_pages: int, page_size: int, reserve: bool, keep: bool = True,
    paged: bool = True, states: bool = False,
  ) -> None:
    """Makes an empty host cache.

    Args:
      num_pages: Number of host pages; 0 disables swapping.
      page_size: Tokens per page.
      reserve: Whether a copy reserves host pages for the next turn.
      keep: Whether a copy stays after the sequence is back on the device.
      paged: Whether the model's cache has pages of keys and values.
      states: Whether the model's cache has recurrent states of fixed size.
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
    """Number of pages that hold copies or are reserved for later tokens."""
    return self._pages.num_used

  def valid(self, owner: Hashable) -> int:
    """Returns how many tokens of an owner's sequence the host cache has."""
    return self._copies[owner].tokens if owner in self._copies else 0

  def page_range_to_copy(self, owner: Hashable, tokens: int) -> tuple[int, int]:
    """Returns which pages of a sequence a copy has to move: ``[first, last)``.

    Args:
      owner: Owner of the sequence.
      tokens: Length of the sequence in tokens.
    """
    valid = self.valid(owner)
    if valid >= tokens:
      return 0, 0
    # The last copied page may be partial and is copied again.
    return valid // self.page_size, -(-tokens // self.page_size)

  def fits(self, owner: Hashable, tokens: int) -> bool:
    """Returns whether a copy of `tokens` tokens fits, evicting if needed."""
    own = self._copies.get(owner)
    kept = self.num_pinned  # pages that cannot be evicted
    if own is not None and not own.pinned:
      kept += len(own.pages)
    have = len(own.pages) if own is not None else 0
    need = -(-tokens // self.page_size) - have
    return need <= self.num_pages - kept

  def pages(self, owner: Hashable) -> Sequence[int]:
    """Returns an owner's host pages in the order of the sequence."""
    return self._copies[owner].pages if owner in self._copies else ()

  def write(self, owner: Hashable, tokens: int, pinned: bool) -> list[int]:
    """Allocates the pages of a copy and records the copy as complete.

    Args:
      owner: Owner of the sequence, for which `fits` returned True.
      tokens: Length of the sequence in tokens.
      pinned: Whether this will be the only copy of the sequence's pages.

    Returns:
      The host pages to which the caller has to copy the changed pages.
    """
    first, last = self.page_range_to_copy(owner, tokens)
    copy = self._copies.setdefault(owner, HostCopy())
    self._copies.move_to_end(owner)  # most recently used
    pinned = pinned or copy.pinned
    self._pin(copy, False)  # `num_pinned` counts the new length below
    need = last - len(copy.pages)
    if need > 0:
      self._evict_others(owner, need)
      want = need
      if self._reserve:  # to the next power of two
        want = (1 << (last - 1).bit_length()) - len(copy.pages)
      want = max(need, min(want, self._pages.num_available))
      copy.pages += self._pages.take(want).tolist()
    self._pin(copy, pinned)
    copy.tokens = max(copy.tokens, tokens)
    return copy.pages[first:last]

  def _evict_others(self, owner: Hashable, need: int) -> None:
    """Evicts other owners' unpinned copies until `need` pages are free."""
    for other in list(self._copies):
      if self._pages.num_available >= need:
        return
      if other != owner and not self._copies[other].pinned:
        self.drop(other)

  def sign(self, owner: Hashable, tokens: np.ndarray) -> None:
    """Stores the hash of an owner's copied tokens at the end of a turn.

    Args:
      owner: Owner of the copy.
      tokens: Token ids of the sequence, int32 ``[n]``; the copy holds a prefix
        of them.
    """
    if owner in self._copies:
      copy = self._copies[owner]
      copy.signature = _signature(tokens[: copy.tokens])

  def copy_is_prefix(self, owner: Hashable, tokens: np.ndarray) -> bool:
    """Returns whether the copied tokens are a proper prefix of a sequence.

    The result is also True for an owner without a copy.
    """
    if owner not in self._copies:
      return True
    copy = self._copies[owner]
    return copy.tokens < len(tokens) and copy.signature == _signature(
      tokens[: copy.tokens]
    )

  def pin(self, owner: Hashable) -> None:
    """Protects an owner's copy from eviction while it is read."""
    self._pin(self._copies[owner], True)

  def _pin(self, copy: HostCopy, pinned: bool) -> None:
    """Sets the pinned flag of a copy and updates `num_pinned`."""
    self.num_pinned += len(copy.pages) * (pinned - copy.pinned)
    copy.pinned = pinned

  def unpin(self, owner: Hashable) -> None:
    """Releases an owner's copy after the sequence is back on the device."""
    if owner in self._copies:
      self._pin(self._copies[owner], False)
      if not self._keep:
        self.drop(owner)

  def drop(self, owner: Hashable) -> None:
    """Deletes an owner's copy and frees its pages."""
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
