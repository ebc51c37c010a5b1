"""Swapping: preempted sequences are copied to the host or recomputed.

A copy runs concurrently with the following steps, unless it is short: then the
next step waits for it, which costs less than leaving the request out for a step
or two. Pages are not written while a copy to the host reads them (`Pages`), and
not read while a copy from the host writes them. A host copy that is being read
or written is not evicted.

A sequence may have a recurrent state in addition to its pages, or instead of
them. The state belongs to the slot of the sequence. It is copied out with the
pages, and copied back as soon as the sequence has a slot, by a copy for which
the next step waits. A state cannot be rewound to a shorter length, so a
sequence uses a copy only if the sequence is longer than the copy.

Source: FastSwitch (arXiv 2411.18424), sections 3.2 and 3.3.
"""

import collections
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages, contiguous_runs
from caatnet.serving.engine.executor import Copy, CopyKind, Costs
from caatnet.serving.requests import FINAL_STATES, NO_PAGES, Request, State
from caatnet.serving.scheduler.counts import Counts, Decision
from caatnet.serving.scheduler.limits import Limits


class PageSources(NamedTuple):
  """Sources of the keys and values with which a request is admitted.

  Attributes:
    start: Number of the request's tokens that need not be read again.
    found: Pages cached on the device, int32 ``[n]``.
    source: Cached page that is copied on write, int32 ``[1]``; without such a
      page, empty.
    host: Host pages of the tokens after those of `found`.
  """

  start: int
  found: np.ndarray
  source: np.ndarray
  host: Sequence[int] = ()

  def need(self, tokens: int, pages: Pages) -> int:
    """Returns how many free or idle pages the first `tokens` tokens take."""
    idle = pages.num_idle(self.found)
    if len(self.source):
      idle += pages.num_idle(self.source)
    return -(-tokens // pages.page_size) - len(self.found) + idle


class Swapping:
  """Planner of copies of pages and states, which tracks the copies under way.

  Attributes:
    host: Allocator and index of the host cache.
    costs: Estimated times of steps and copies.
    num_leaving: Number of pages that become available when copies end.
  """

  def __init__(
    self, limits: Limits, pages: Pages, host: HostCache, costs: Costs,
    counts: Counts,
  ) -> None:
    """Starts without copies."""
    self.host, self.costs = host, costs
    self._limits, self._pages, self._counts = limits, pages, counts
    self._number = 0
    self._new: list[Copy] = []
    self._waited: list[int] = []
    self._for: dict[int, tuple[Request, bool]] = {}
    self._arrived: list[Request] = []
    self._busy: collections.Counter[Hashable] = collections.Counter()
    self._turns: set[Hashable] = set()

  @property
  def under_way(self) -> bool:
    """Whether a copy is under way, or a swapped-in request waits for a slot."""
    return bool(self._for or self._arrived)

  @property
  def num_leaving(self) -> int:
    """Number of pages that become available when copies end."""
    return self._pages.num_leaving

  @property
  def num_arriving_requests(self) -> int:
    """Number of requests that are being swapped in or wait for a slot."""
    if not self._for:  # as in most steps
      return len(self._arrived)
    coming = sum(r.state is State.ARRIVING for r, _ in self._for.values())
    return coming + len(self._arrived)

  def take(self) -> list[Copy]:
    """Returns the new copies, which the caller starts."""
    new, self._new = self._new, []
    return new

  def take_awaited_copies(self) -> tuple[int, ...]:
    """Returns the numbers of copies that the next step waits for."""
    waited, self._waited = self._waited, []
    return tuple(waited)

  def take_swapped_in(self) -> list[Request]:
    """Returns the requests that have been swapped in."""
    arrived, self._arrived = self._arrived, []
    return arrived

  def defer_swapped_in(self, request: Request) -> None:
    """Keeps a swapped-in request for the next step."""
    self._arrived.append(request)

  def begin(self, request: Request) -> None:
    """Checks whether a new request continues its conversation's host copy.

    If the prompt does not begin with the copied turn, the copy is dropped. If
    another turn of the conversation has not ended, or a copy of it is under
    way, the request is treated as one without a conversation.
    """
    owner = request.owner
    if owner in self._turns or not self.host.copy_is_prefix(
      owner, request.prompt
    ):
      if owner in self._turns or self._busy[owner]:
        request.join_conversation(None)
      else:
        self.host.drop(owner)
    self._turns.add(request.owner)

  def end(self, request: Request) -> None:
    """Records the end of a turn, so that the next turn may begin."""
    self._turns.discard(request.owner)

  def _copy(
    self, kind: CopyKind, source: Sequence[int], target: Sequence[int],
    request: Request, wait: bool, state: tuple[int, int] | None = None,
  ) -> None:
    """Creates a copy, and makes the next step wait for it if `wait` is set."""
    copy = Copy(
      self._number, kind, tuple(source), tuple(target), request.owner, state
    )
    self._number += 1
    self._new.append(copy)
    self._counts.add(copy)
    self._for[copy.number] = request, wait
    if kind != "within":
      self._busy[request.owner] += 1
    if wait:
      self._waited.append(copy.number)
      self._counts.waited += 1

  def _short(self, kind: CopyKind, pages: Sequence[int]) -> bool:
    """Returns whether a copy of pages is so short that a step waits for it."""
    return self._copy_s(kind, pages) <= self._limits.wait_s

  def _copy_s(self, kind: CopyKind, pages: Sequence[int]) -> float:
    """Returns the estimated seconds of a copy of pages on the device."""
    if not pages:
      return 0.0
    states = int(self.host.states)  # each takes as long as a run of one page
    if not self.host.paged:
      return self.costs.copy_s(kind, states, states)
    num_runs = sum(1 for _ in contiguous_runs(pages))
    return self.costs.copy_s(kind, num_runs + states, len(pages) + states)

  def _copy_out(
    self, request: Request, tokens: int, pinned: bool, slot: int
  ) -> bool:
    """Copies pages that the host lacks; returns whether a copy was started.

    Args:
      request: Owner of the pages.
      tokens: Number of its tokens that the pages hold.
      pinned: Whether this will be the only copy of the pages.
      slot: Its former slot, which still contains its recurrent state.
    """
    first, last = self.host.page_range_to_copy(request.owner, tokens)
    source = request.pages[first:last].tolist()
    target = self.host.write(request.owner, tokens, pinned)
    if not source:
      return False
    self.host.pin(request.owner)  # until the copy has ended
    wait = pinned and self._short("out", source)
    state = None
    if self.host.states:
      # The state's host block has the number of the first host page.
      state = slot, self.host.pages(request.owner)[0]
    if not self.host.paged:
      source = target = []
    self._pages.begin_read(source)
    self._copy("out", source, target, request, wait, state)
    return True

  def preempt(self, request: Request, computed: int, slot: int) -> bool:
    """Releases a preempted request's pages, possibly after copying them out.

    Args:
      request: Request that no longer has a slot.
      computed: Number of its tokens that its pages hold.
      slot: Its former slot, which still contains its recurrent state.

    Returns:
      Whether the request is to be queued at once; otherwise `ended` returns it
      when the copy has ended.
    """
    decision = self._decide(request, computed)
    self._counts.add_decision(decision)
    later = False
    if decision.swapped:
      later = self._copy_out(request, computed, True, slot)
      request.swapped = computed
    request.state = (
      State.LEAVING if later
      else State.SWAPPED if decision.swapped else State.WAITING
    )
    self._release(request)
    return not later

  def _decide(self, request: Request, computed: int) -> Decision:
    """Chooses between swapping and recomputing `computed` cached tokens."""
    owner = request.owner
    recompute = self.costs.prefill_s(0, computed) if computed else 0.0
    able = (
      self._limits.preempt != "recompute" and computed > 0
      and not self._busy[owner] and self.host.fits(owner, computed)
    )
    if not able:
      return Decision(0.0, recompute, swapped=False, able=False)
    first, last = self.host.page_range_to_copy(owner, computed)
    # Further pages, allocated in advance (`Limits.growth`), hold no token.
    pages = request.pages[: -(-computed // self._pages.page_size)].tolist()
    swap = self._copy_s("out", pages[first:last]) + self._copy_s("in", pages)
    # Costs decide only with preempt="cost".
    swapped = self._limits.preempt == "swap" or swap < recompute
    return Decision(swap, recompute, swapped, able=True)

  def _release(self, request: Request) -> None:
    """Releases a request's device pages."""
    self._pages.release(request.pages)
    request.pages = NO_PAGES

  def plan(self, request: Request) -> PageSources | None:
    """Returns the sources of a request's pages; None until a copy has ended."""
    size, most = self._pages.page_size, request.length - 1
    found = self._pages.find(request.block_hashes)
    source = NO_PAGES
    # The last known token must be read by the step, since its logits are
    # needed: a cached page that ends with it is copied on write or recomputed.
    if len(found) * size > most:
      found, last = found[: most // size], found[most // size :]
      source = last if self._limits.copy_on_write else NO_PAGES
    start = most if len(source) else len(found) * size
    owner = request.owner
    valid = min(self.host.valid(owner), most)
    assert not self.host.states or valid in (0, self.host.valid(owner))
    if valid <= start:
      return PageSources(start, found, source)
    if self._busy[owner]:
      return None if request.swapped else PageSources(start, found, source)
    copied = self.host.pages(owner)[len(found) : -(-valid // size)]
    # Reading the tokens again may be faster than the copy from the host.
    if not request.swapped or self._limits.preempt == "cost":
      read = self.costs.prefill_s(start, valid - start)
      if read <= self._copy_s("in", copied):
        return PageSources(start, found, source)
    copies = copied if self.host.paged else ()
    return PageSources(valid, found, NO_PAGES, copies)

  def admit(self, request: Request, plan: PageSources, num_pages: int) -> bool:
    """Allocates a request's first pages.

    Args:
      request: Request that has already been removed from the queue.
      plan: Sources of its pages.
      num_pages: Number of pages for its cached tokens and its first chunk.

    Returns:
      Whether it can run in the next step; otherwise `take_swapped_in` returns
      it later.
    """
    pages, found, source = self._pages, plan.found, plan.source.tolist()
    pages.counts.misses += max(
      0, (request.length - 1) // pages.page_size - len(found)
    )
    # Held before `take`, so that the cached pages are not evicted.
    pages.hold(found)
    if source:
      pages.hold(plan.source)
      pages.begin_read(source)
      pages.release(plan.source)
    after = int(found[-1]) if len(found) else -1
    taken = pages.take(num_pages - len(found), after)
    request.pages = np.concatenate([found, taken])
    request.swapped = plan.start
    if source:
      pages.counts.copied += 1
      target = taken[:1].tolist()
      self._copy("within", source, target, request, wait=True)
    if not plan.host:
      restores = plan.start and self.host.states  # `restore` reads the copy
      if not restores and not self._busy[request.owner]:
        self.host.unpin(request.owner)
      return True
    target = taken[: len(plan.host)].tolist()
    self.host.pin(request.owner)
    wait = self._short("in", target)
    self._copy("in", plan.host, target, request, wait)
    if not wait:
      request.state = State.ARRIVING
    return wait

  def restore(self, request: Request) -> None:
    """Copies a resumed request's recurrent state into its slot."""
    block = self.host.pages(request.owner)[0]
    self._copy("in", (), (), request, True, (block, request.slot))

  def ended(self, copy: Copy) -> Request | None:
    """Handles the end of a copy.

    Returns:
      A request that is to be queued again, or None.
    """
    request, _ = self._for.pop(copy.number)
    owner = request.owner
    if copy.kind == "within":
      self._pages.end_read(copy.source)
      return None
    self._busy[owner] -= 1
    if not self._busy[owner]:
      del self._busy[owner]
    if copy.kind == "out":
      self._pages.end_read(copy.source)
      if request.state is State.LEAVING:
        request.state = State.SWAPPED
        return request
      if request.state in FINAL_STATES:
        self.drop(request)
      return None
    arriving = request.state is State.ARRIVING
    if not (arriving and self.host.states):  # else `restore` needs the copy
      self.host.unpin(owner)
    if arriving:
      self._arrived.append(request)
    elif request.state in FINAL_STATES:
      if len(request.pages):  # it was cancelled during the copy
        self._release(request)
      self.drop(request)
    return None

  def finish(
    self, request: Request, tokens: int, ended: bool, slot: int
  ) -> None:
    """Releases the pages of a request that has ended; may keep a host copy.

    Args:
      request: Request that no longer has a slot.
      tokens: Number of its tokens that its pages hold.
      ended: Whether it has all its tokens.
      slot: Its former slot, which contains the recurrent state after `tokens`
        tokens; -1 if steps have read more.
    """
    owner = request.owner
    keep = ended and request.more and self._limits.keep_turns
    keep = keep and (slot >= 0 or not self.host.states)
    if keep and not self._busy[owner] and self.host.fits(owner, tokens):
      self._copy_out(request, tokens, False, slot)
    self._release(request)
    if ended and request.more:
      self.host.sign(owner, request.all_tokens())
    else:
      self.drop(request)

  def drop(self, request: Request) -> None:
    """Deletes the host copy of a request that has ended."""
    if request in self._arrived:  # swapped in, but without a slot
      self._arrived.remove(request)
      self._release(request)
    elif request.state is State.ARRIVING or self._busy[request.owner]:
      return  # `ended` drops it when the copy ends
    self.host.unpin(request.owner)
    if request.conversation is None or not request.more:
      self.host.drop(request.owner)
