"""Moves sequences off the device and back: by copies, or by reading again.

A copy runs under the steps that follow, unless it is short: then the next step
waits for it, which costs less than to do without the request for a step or two.
While a copy to the host reads pages nobody writes them (`Pages`), while one
from the host writes them nobody reads them, and a copy on the host that is
being read or written stays.

A sequence may have a state in addition to its pages, or without any. The state
belongs to the slot of the sequence: it is copied out with the pages, and copied
back as soon as the sequence has a slot, in a copy for which the next step
waits. It is that of one length and cannot be rewound, so a copy is used only
where the sequence continues behind that length.

Source: FastSwitch (arXiv 2411.18424), sections 3.2 and 3.3.
"""

import collections
from collections.abc import Hashable, Sequence
import dataclasses

import numpy as np

from caatnet.serving.cache.host import Host
from caatnet.serving.cache.pages import Pages, runs
from caatnet.serving.engine.executor import Copy, Costs, Kind
from caatnet.serving.requests import ENDS, NO_PAGES, Request, State
from caatnet.serving.scheduler.counts import Counts, Decision
from caatnet.serving.scheduler.limits import Limits


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a request gets the pages that it begins with.

  Attributes:
    start: How many of its tokens these hold.
    found: Pages that the device has, int32 ``[n]``.
    source: The page of which a copy is to be continued, if there is one, int32
      ``[0 or 1]``.
    host: Pages that the host has of what follows.
  """

  start: int
  found: np.ndarray
  source: np.ndarray
  host: Sequence[int] = ()

  def need(self, tokens: int, pages: Pages) -> int:
    """Returns how many available pages it takes to have so many tokens."""
    idle = pages.num_idle(self.found) + pages.num_idle(self.source)
    return -(-tokens // pages.page_size) - len(self.found) + idle


class Swapping:
  """Copies of pages: which there are to be, and which are under way.

  Attributes:
    host: The host's memory.
    costs: Times, as the executor knows them.
    num_leaving: Pages that are available once copies have ended.
  """

  def __init__(
    self, limits: Limits, pages: Pages, host: Host, costs: Costs,
    counts: Counts,
  ) -> None:
    """Makes it with no copies under way."""
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
    """Whether a copy is under way, or has brought somebody who waits."""
    return bool(self._for or self._arrived)

  @property
  def num_leaving(self) -> int:
    """How many pages are available once copies have ended."""
    return self._pages.num_leaving

  @property
  def num_arriving(self) -> int:
    """How many requests are being brought back."""
    if not self._for:  # as in most steps
      return len(self._arrived)
    coming = sum(r.state is State.ARRIVING for r, _ in self._for.values())
    return coming + len(self._arrived)

  def take(self) -> list[Copy]:
    """Returns the copies that are to begin."""
    new, self._new = self._new, []
    return new

  def take_waited(self) -> tuple[int, ...]:
    """Returns the numbers of copies that the next step waits for."""
    waited, self._waited = self._waited, []
    return tuple(waited)

  def take_arrived(self) -> list[Request]:
    """Returns the requests whose pages are back."""
    arrived, self._arrived = self._arrived, []
    return arrived

  def arrived_later(self, request: Request) -> None:
    """Keeps a request that is back for the next step."""
    self._arrived.append(request)

  def begin(self, request: Request) -> None:
    """Looks whether a new request continues what the host has.

    It stands alone if its prompt does not begin with the turns before, or if
    another turn of the conversation has not ended.
    """
    owner = request.owner
    if owner in self._turns or not self.host.begins(owner, request.prompt):
      if owner in self._turns or self._busy[owner]:
        request.conversation = None
      else:
        self.host.drop(owner)
    self._turns.add(request.owner)

  def end(self, request: Request) -> None:
    """Notes that a request has ended, so that the next turn may begin."""
    self._turns.discard(request.owner)

  def _copy(
    self, kind: Kind, source: Sequence[int], target: Sequence[int],
    request: Request, wait: bool, state: tuple[int, int] | None = None,
  ) -> None:
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

  def _short(self, kind: Kind, pages: Sequence[int]) -> bool:
    """Returns whether a copy is worth waiting for."""
    return self._copy_s(kind, pages) <= self._limits.wait_s

  def _copy_s(self, kind: Kind, pages: Sequence[int]) -> float:
    if not pages:
      return 0.0
    states = int(self.host.states)  # each takes as long as a run of one page
    if not self.host.paged:
      return self.costs.copy_s(kind, states, states)
    num_runs = sum(1 for _ in runs(pages))
    return self.costs.copy_s(kind, num_runs + states, len(pages) + states)

  def _out(
    self, request: Request, tokens: int, pinned: bool, slot: int
  ) -> bool:
    """Copies what the host has not; returns whether that takes a while."""
    first, last = self.host.increment(request.owner, tokens)
    source = request.pages[first:last].tolist()
    target = self.host.write(request.owner, tokens, pinned)
    if not source:
      return False
    self.host.pin(request.owner)  # as long as it is being written
    wait = pinned and self._short("out", source)
    state = None
    if self.host.states:
      state = slot, self.host.pages(request.owner)[0]
    if not self.host.paged:
      source = target = []
    self._pages.begin_read(source)
    self._copy("out", source, target, request, wait, state)
    return True

  def preempt(self, request: Request, computed: int, slot: int) -> bool:
    """Takes a request's pages.

    Args:
      request: It has no slot any more.
      computed: How many of its tokens they hold.
      slot: The slot that it had, which still has its state.

    Returns:
      Whether it is to stand in line at once; else `ended` says when.
    """
    decision = self._decide(request, computed)
    self._counts.decide(decision)
    later = False
    if decision.swapped:
      later = self._out(request, computed, True, slot)
      request.swapped = computed
    request.state = (
      State.LEAVING if later
      else State.SWAPPED if decision.swapped else State.WAITING
    )
    self._release(request)
    return not later

  def _decide(self, request: Request, computed: int) -> Decision:
    owner = request.owner
    recompute = self.costs.prefill_s(0, computed) if computed else 0.0
    able = (
      self._limits.preempt != "recompute" and computed > 0
      and not self._busy[owner] and self.host.fits(owner, computed)
    )
    if not able:
      return Decision(0.0, recompute, swapped=False, able=False)
    first, last = self.host.increment(owner, computed)
    pages = request.pages.tolist()
    swap = self._copy_s("out", pages[first:last]) + self._copy_s("in", pages)
    swapped = self._limits.preempt == "swap" or swap < recompute
    return Decision(swap, recompute, swapped, able=True)

  def _release(self, request: Request) -> None:
    self._pages.release(request.pages)
    request.pages = NO_PAGES

  def plan(self, request: Request) -> Plan | None:
    """Returns how a request gets its pages; None if it must wait for a copy."""
    size, most = self._pages.page_size, request.length - 1
    found = self._pages.find(request.names)
    source = NO_PAGES
    if len(found) * size > most:  # the last token is read again
      found, last = found[: most // size], found[most // size :]
      source = last if self._limits.copy_on_write else NO_PAGES
    start = most if len(source) else len(found) * size
    owner = request.owner
    valid = min(self.host.valid(owner), most)
    assert not self.host.states or valid in (0, self.host.valid(owner))
    if valid <= start:
      return Plan(start, found, source)
    if self._busy[owner]:
      return None if request.swapped else Plan(start, found, source)
    copied = self.host.pages(owner)[len(found) : -(-valid // size)]
    if not request.swapped or self._limits.preempt == "cost":
      read = self.costs.prefill_s(start, valid - start)
      if read <= self._copy_s("in", copied):
        return Plan(start, found, source)
    return Plan(valid, found, NO_PAGES, copied if self.host.paged else ())

  def admit(self, request: Request, plan: Plan, num_pages: int) -> bool:
    """Gives a request its first pages.

    Args:
      request: It stands in line no more.
      plan: How it gets them.
      num_pages: How many it needs for all that is read at first.

    Returns:
      Whether it can begin; else it is among `take_arrived` later.
    """
    pages, found, source = self._pages, plan.found, plan.source.tolist()
    pages.counts.misses += max(
      0, (request.length - 1) // pages.page_size - len(found)
    )
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
      restores = plan.start and self.host.states  # then its copy is needed
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
    """Copies the state of a request that continues into its slot."""
    block = self.host.pages(request.owner)[0]
    self._copy("in", (), (), request, True, (block, request.slot))

  def ended(self, copy: Copy) -> Request | None:
    """Notes the end of a copy.

    Returns:
      A request that is to stand in line again.
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
      if request.state in ENDS:
        self.drop(request)
      return None
    arriving = request.state is State.ARRIVING
    if not (arriving and self.host.states):  # else its state is still needed
      self.host.unpin(owner)
    if arriving:
      self._arrived.append(request)
    elif request.state in ENDS:
      if len(request.pages):  # it was cancelled while it was brought back
        self._release(request)
      self.drop(request)
    return None

  def finish(
    self, request: Request, tokens: int, ended: bool, slot: int
  ) -> None:
    """Takes the pages of a request that has ended.

    Args:
      request: It has no slot any more.
      tokens: How many of its tokens they hold.
      ended: Whether it has all its tokens.
      slot: The slot that it had, which has the state of so many tokens; -1 if
        steps have read more.
    """
    owner = request.owner
    keep = ended and request.more and self._limits.keep_turns
    keep = keep and (slot >= 0 or not self.host.states)
    if keep and not self._busy[owner] and self.host.fits(owner, tokens):
      self._out(request, tokens, False, slot)
    self._release(request)
    if ended and request.more:
      self.host.sign(owner, request.all_tokens())
    else:
      self.drop(request)

  def drop(self, request: Request) -> None:
    """Forgets what the host has of a request that has ended."""
    if request in self._arrived:  # it is back, and has not begun
      self._arrived.remove(request)
      self._release(request)
    elif request.state is State.ARRIVING or self._busy[request.owner]:
      return  # `ended` does it
    self.host.unpin(request.owner)
    if request.conversation is None or not request.more:
      self.host.drop(request.owner)
