"""Scheduler: continuous batching with chunked prefill.

A step first decodes one token for every running request whose prompt has been
read, then reads chunks of prompts up to a token budget, and admits queued
requests as far as slots, pages and budget allow. If a running request needs a
page and none is available, the policy selects a preemption victim;
`caatnet.serving.scheduler.swapping` decides whether its pages are copied to the
host or recomputed. The scheduler runs no model and depends on no device: it
makes steps and copies, and receives an event when one has ended.

A step is made before the tokens of the previous step are known. A request that
a token ends is therefore part of one more step, whose token is dropped; its
pages are released once the host knows the token.
"""

from collections.abc import Callable, Sequence
import heapq

import numpy as np

from caatnet.serving.cache import prefixes
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.executor import (
  Chunk,
  CompletionEvent,
  Copy,
  Costs,
  EngineStep,
  WeightLoad,
)
from caatnet.serving.requests import FINAL_STATES, Request, State
from caatnet.serving.scheduler.counts import Counts
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.base import Policy, checked_value
from caatnet.serving.scheduler.running import RunningRequests
from caatnet.serving.scheduler.swapping import Swapping


class Scheduler:
  """Scheduler of one replica: admits and preempts requests, and makes steps.

  Attributes:
    limits: Limits of a step.
    policy: Admission order and preemption victims.
    pages: Pages of the cache.
    running: Running requests, each of which has a slot.
    swapping: Copies of pages.
    counts: Counters of steps, preemptions and copies.
    ended: Callback for each request that has ended, or None.
    has_program: Returns whether a compiled program can run a step, given its
      numbers of decodes and chunks, the tokens of its longest chunk, and the
      positions of its longest sequence; if not, the program is being compiled.
      Raises ValueError if that failed. None if the executor runs any step.
  """

  ended: Callable[[Request], None] | None = None
  has_program: Callable[[int, int, int, int], bool] | None = None

  def __init__(
    self, limits: Limits, policy: Policy, pages: Pages, host: HostCache,
    costs: Costs,
  ) -> None:
    """Makes an idle scheduler.

    Args:
      limits: Limits of a step.
      policy: Policy with an empty queue.
      pages: Pages of the cache, all of them free.
      host: Host cache; without pages if swapping is disabled.
      costs: Estimated times of steps and copies.
    """
    self.limits, self.policy, self.pages = limits, policy, pages
    self.counts = Counts()
    self.running = RunningRequests(
      limits.slots, pages.num_pages, pages.page_size
    )
    self.swapping = Swapping(limits, pages, host, costs, self.counts)
    self._requests: dict[int, Request] = {}
    self._deadlines: list[tuple[float, int]] = []
    self._short, self._now = False, 0.0
    self._chunks: list[Chunk] = []
    # Hooks that the policy does not override are not called.
    own, base = type(policy), Policy
    self._keyed = own.batch_key is not base.batch_key
    self._displacing = own.displaces is not base.displaces
    self._charged = own.served is not base.served
    self._hashing = own.published is not base.published

  @property
  def idle(self) -> bool:
    """Whether all requests have ended and no copy or load is under way."""
    under_way = self.swapping.under_way or self.policy.loading
    return not self._requests and not under_way

  @property
  def requests(self) -> list[Request]:
    """All requests that have not ended."""
    return list(self._requests.values())

  def add(self, request: Request) -> None:
    """Queues a request, or refuses it if it can never fit in the cache."""
    size = self.pages.page_size
    if -(-request.longest // size) > self.pages.num_pages:
      self._end(request, State.REFUSED, request.arrival_s)
      return
    request.hash_pages(size)
    self.swapping.begin(request)
    self._requests[request.number] = request
    if request.deadline_s < float("inf"):
      heapq.heappush(self._deadlines, (request.deadline_s, request.number))
    # `arrived` first: it may adjust a client's service before the queue orders
    # it.
    self.policy.arrived(request)
    self.policy.push(request)

  def cancel(self, request: Request, now: float) -> None:
    """Cancels a request whose client has disconnected, unless it has ended."""
    if request.state not in FINAL_STATES:
      self._remove_request(request)
      self._end(request, State.CANCELLED, now)

  def update(self, request: Request) -> None:
    """Applies a changed request priority."""
    if request.slot >= 0:
      self.running.values[request.slot] = checked_value(self.policy, request)
    self.policy.update(request)

  def take_copies(self) -> list[Copy]:
    """Returns the copies to begin before the step that was just made."""
    return self.swapping.take()

  def take_loads(self) -> Sequence[WeightLoad]:
    """Returns the loads to begin before the step that was just made."""
    return self.policy.take_loads()

  def step(self, now: float) -> EngineStep | None:
    """Makes the next step; None if there is nothing to compute yet."""
    self._now = now
    self._expire(now)
    for key in self.policy.keys(now):
      self.policy.current = key
      step = self._step(now)
      if step is not None:
        return step
    return None

  def _step(self, now: float) -> EngineStep | None:
    """Makes a step of the policy's current batch key, if there is work."""
    self._short = False
    decodes, reading = self._ready()
    epochs = self.running.epochs[decodes]
    without = self._grow(decodes)
    # Decodes first: each reads one token of the budget.
    budget = self.limits.tokens - len(decodes) + len(without)
    chunks = self._chunks = []
    for request in reading:
      if room := self._max_chunk_length(budget, chunks):
        budget -= self._add_chunk(request, room, chunks)
    if not self._short:
      self._admit(now, budget, chunks)
    # Leave out requests that wait for pages or were preempted in this call.
    if without or self._short:
      alive = self.running.epochs[decodes] == epochs
      alive[without] = False
      decodes = decodes[alive]
    if not len(decodes) and not chunks:
      if self._short:
        self._admit(now, self.limits.tokens, chunks)  # all were preempted
      if not chunks:
        return None
    return self._make(decodes, chunks)

  def _max_chunk_length(self, budget: int, chunks: list[Chunk]) -> int:
    """Returns the maximum length of another chunk of the step, in tokens.

    Args:
      budget: Number of tokens that the step may still read.
      chunks: Chunks that the step has already.
    """
    limits = self.limits.chunks
    if not limits or budget <= 0:
      return max(0, budget)
    longest = max((chunk.length for chunk in chunks), default=0)
    for count, length in limits:
      # The first alternative that fits both the number and the lengths of
      # chunks.
      if len(chunks) < count and longest <= length:
        return min(length, budget)
    return 0

  def _ready(self) -> tuple[np.ndarray, list[Request]]:
    """Returns `RunningRequests.ready` without requests of other batch keys."""
    decodes, reading = self.running.ready()
    if not self._keyed:
      return decodes, reading
    requests = self.running.requests[decodes].tolist()
    return (
      decodes[[self._matches(request) for request in requests]],
      [request for request in reading if self._matches(request)],
    )

  def _matches(self, request: Request) -> bool:
    """Returns whether a request may be part of the step that is being made."""
    return self.policy.batch_key(request) == self.policy.current

  def _grow(self, decodes: np.ndarray) -> list[int]:
    """Allocates a page to each decode whose last page is full.

    Returns:
      Indices of the decodes that did not get the page that they need.
    """
    slots, growth = self.running, self.limits.growth
    if self.pages.grow(slots, decodes, growth):  # as in most steps
      return []
    without, size = [], self.pages.page_size
    full = np.flatnonzero(slots.computed[decodes] >= slots.room[decodes])
    growing = slots.requests[decodes[full]].tolist()
    for i, request in zip(full.tolist(), growing, strict=True):
      if request.slot >= 0:  # else it was preempted in this loop
        left = -(-request.longest // size) - len(request.pages)
        if self._allocate_pages(request, min(growth, left), least=1):
          continue
      without.append(i)
    return without

  def _allocate_pages(
    self, request: Request, count: int, least: int = 0
  ) -> bool:
    """Allocates pages to a running request, preempting requests if necessary.

    The victim may be the request itself.

    Args:
      request: The running request.
      count: Number of pages to allocate if available.
      least: Number of pages that suffice; 0 for `count`.

    Returns:
      Whether the pages were allocated. If not, the request was preempted, or it
      waits for pages that are being copied.
    """
    if self.pages.num_available < count:
      count = least or count
    while self.pages.num_available < count:
      # Copies under way will free enough pages: skip this step instead of
      # preempting another request.
      if self.swapping.num_leaving + self.pages.num_available >= count:
        self.counts.stalls += 1
        return False
      victim = self.policy.victim(self.running)
      self._preempt(victim)
      if victim is request:
        return False
    held = len(request.pages)
    after = int(request.pages[-1]) if held else -1
    self.running.extend(request, self.pages.take(count, after), held)
    return True

  def _preempt(self, victim: Request) -> None:
    """Frees a request's slot and pages; queues it unless a copy has begun."""
    self._short, slot = True, victim.slot
    computed = self._free_slot(victim)
    self._chunks[:] = [c for c in self._chunks if c.request is not victim]
    victim.num_preempted += 1
    if self.swapping.preempt(victim, computed, slot):
      self.policy.push(victim)

  def _free_slot(self, request: Request) -> int:
    """Frees a request's slot and publishes the pages that it has filled.

    The block hashes of pages with drawn tokens are published only now, for the
    request itself if it is resumed, and for the next turn of its conversation.

    Returns:
      Number of its tokens whose keys and values are in its pages.
    """
    computed = int(self.running.computed[request.slot])
    self.running.remove(request)
    request.hash_pages(self.pages.page_size)
    # Pages before the admission's context are published already.
    first = request.context // self.pages.page_size
    self._publish(request, min(computed, request.length), first)
    return computed

  def _add_chunk(self, request: Request, room: int, chunks: list[Chunk]) -> int:
    """Adds a chunk of up to `room` tokens to `chunks`; returns its length.

    The request is running. Returns 0 if it cannot read a chunk in this step.
    """
    if request.slot < 0:  # preempted in this step
      return 0
    start = int(self.running.computed[request.slot])
    length = min(request.context - start, room)
    if not self._runnable(request, length):
      return 0
    pages = -(-(start + length) // self.pages.page_size) - len(request.pages)
    if pages > 0 and not self._allocate_pages(request, pages):
      return 0
    draws = start + length == request.context
    chunks.append(Chunk(request, start, length, draws))
    return length

  def _admit(self, now: float, budget: int, chunks: list[Chunk]) -> None:
    """Admits swapped-in requests, then queued ones, as far as there is room.

    Args:
      now: Time in seconds.
      budget: Number of tokens that the step may still read.
      chunks: Chunks of the step, to which those of the requests are added.
    """
    for request in self.swapping.take_swapped_in():
      room, matches = self._max_chunk_length(
        budget, chunks
      ), self._matches(request)
      full = self.running.full
      if full and self._keyed and matches:
        full = not self._preempt_for(request)
      if full or (matches and not room):
        self.swapping.defer_swapped_in(request)
        continue
      # A request of another batch key gets a slot too: only requests with a
      # slot can be preempted.
      self._assign_slot(request, request.swapped)
      if matches:
        budget -= self._add_chunk(request, room, chunks)
    while room := self._max_chunk_length(budget, chunks):
      taken = len(self.running) + self.swapping.num_arriving_requests
      free = taken < self.limits.slots
      if not free and not self._displacing:
        return
      request = self.policy.peek()
      if request is None or request.num_pending:
        return
      if not free and not self.policy.displaces(request, self.running):
        return
      plan = self.swapping.plan(request)
      if plan is None:
        return
      # First chunk after the cached tokens.
      known = request.length
      num_read = known - plan.start
      length = min(num_read, room)
      if not self._runnable(request, length):
        if request.state in FINAL_STATES:
          continue
        return
      if not self.limits.whole_prompt:
        known = plan.start + length
      if not free or plan.need(known, self.pages) > self.pages.num_available:
        if not self._preempt_for(request):
          return
        continue  # the preemption may have changed the plan
      self.policy.remove(request)
      last = -(-(plan.start + length) // self.pages.page_size)
      arrived = self.swapping.admit(request, plan, last)
      self.policy.admitted(request, num_read)
      if request.scheduled_s is None:
        request.scheduled_s, request.num_hits = now, plan.start
      if arrived:
        self._assign_slot(request, plan.start, len(plan.found))
        budget -= self._add_chunk(request, room, chunks)

  def _runnable(self, request: Request, length: int) -> bool:
    """Returns whether the step can read `length` tokens of a request.

    A program must be able to run the chunk together with a decode of each
    running request at its maximum length, so that none of their later steps
    waits for the compiler. If the compilation fails, the request ends.
    """
    if self.has_program is None:
      return True
    lengths = [length, *(chunk.length for chunk in self._chunks)]
    beside = State.RUNNING, State.ARRIVING
    most = [
      x.longest for x in self.requests if x is request or x.state in beside
    ]
    try:
      return self.has_program(len(most), len(lengths), max(lengths), max(most))
    except ValueError as error:
      request.error = str(error)
      self._remove_request(request)
      self._end(request, State.FAILED, self._now)
      return False

  def _preempt_for(self, request: Request) -> bool:
    """Preempts a running request in favour of a queued one.

    Returns whether it did; False if the policy does not allow it.
    """
    if self.swapping.num_leaving:
      return False  # pages that are being copied may suffice
    if not self.policy.displaces(request, self.running):
      return False
    self._preempt(self.policy.victim(self.running))
    return True

  def _assign_slot(self, request: Request, start: int, found: int = 0) -> None:
    """Assigns a slot to a request, which then runs.

    Args:
      request: Request that has its first pages.
      start: Number of its tokens whose keys and values are cached.
      found: Number of its pages whose block hashes are published already.
    """
    request.state, request.swapped = State.RUNNING, 0
    value = checked_value(self.policy, request)
    self.running.add(request, start, request.length, value)
    if start and self.swapping.host.states:
      self.swapping.restore(request)
    self._publish(request, start, found)

  def _publish(self, request: Request, stop: int, first: int = 0) -> None:
    """Publishes the block hashes of the full pages of the first `stop` tokens.

    Args:
      request: Owner of the pages.
      stop: Number of tokens.
      first: Index of the first page to publish.
    """
    last = min(stop // self.pages.page_size, request.num_hashed)
    if first < last:
      block_hashes = request.block_hashes[
        first * prefixes.HASH_BYTES : last * prefixes.HASH_BYTES
      ]
      self.pages.publish(request.pages[first:last], block_hashes)
      if self._hashing:
        self.policy.published(block_hashes)

  def _make(self, decodes: np.ndarray, chunks: list[Chunk]) -> EngineStep:
    """Makes a step, and advances the positions of its requests."""
    slots, size = self.running, self.pages.page_size
    chunked = [chunk.request.slot for chunk in chunks if chunk.draws]
    requests = slots.requests[decodes]
    narrow, positions, drawing, epochs = slots.advance(decodes, chunked)
    step = EngineStep(
      self.counts.steps, requests, narrow, positions, tuple(chunks),
      slots.tables, self.swapping.take_awaited_copies(), drawing, epochs,
      self.policy.begin_step(len(drawing)),
    )
    if self._charged:
      self.policy.served(*slots.clients(drawing))
    for chunk in chunks:
      request, stop = chunk.request, chunk.start + chunk.length
      slots.computed[request.slot] = stop  # before the step has run
      self._publish(request, stop, chunk.start // size)
    self.counts.steps += 1
    return step

  def receive(self, event: CompletionEvent) -> None:
    """Handles the end of a step, a copy or a load."""
    if event.load is not None:
      self.policy.loaded(event.load, event.error)
      if event.error:
        self._fail_expert(event.load.expert, event.error, event.time_s)
      return
    if event.copy is not None:
      back = self.swapping.ended(event.copy)
      if back is not None:
        self.policy.push(back)
      return
    step, now, slots = event.step, event.time_s, self.running
    assert step is not None
    self.policy.end_step(step.weights)
    tokens = np.asarray(event.tokens, np.int32)
    for request in map(step.request, event.failed):
      if request.state not in FINAL_STATES:
        self._remove_request(request)
        self._end(request, State.FAILED, now)
    ended, late = slots.record(step.drawing, step.epochs, tokens, now)
    for request in ended:
      self._finish(request, now)
    for i in late:
      self._receive_late_token(step.request(i), int(tokens[i]), now)

  def _fail_expert(self, expert: str, error: str, now: float) -> None:
    """Ends all requests of an expert whose load has failed."""
    for request in self.requests:
      if request.expert == expert:
        request.error = error
        self._remove_request(request)
        self._end(request, State.FAILED, now)

  def _receive_late_token(
    self, request: Request, token: int, now: float
  ) -> None:
    """Handles the token of a request that no longer has a slot."""
    request.num_pending -= 1
    if request.state not in FINAL_STATES:  # else it ended a step before
      request.take(np.array([token], np.int32), np.array([now]))
      if request.is_end(token) or len(request.tokens) == request.max_tokens:
        self._finish(request, now)

  def _finish(self, request: Request, now: float) -> None:
    """Ends a request that has all its tokens."""
    self._remove_request(request, ended=True)
    self._end(request, State.FINISHED, now)

  def _expire(self, now: float) -> None:
    """Ends requests without a token whose deadline has passed."""
    while self._deadlines and self._deadlines[0][0] <= now:
      number = heapq.heappop(self._deadlines)[1]
      request = self._requests.get(number)
      if request is not None and not request.tokens:
        self._remove_request(request)
        self._end(request, State.EXPIRED, now)

  def _remove_request(self, request: Request, ended: bool = False) -> None:
    """Removes a request, which has all tokens if `ended`; frees its pages."""
    if request.state is State.RUNNING:
      slot, computed = request.slot, self._free_slot(request)
      # Later steps may have read tokens after the end, which have changed the
      # recurrent state: it is then not copied (-1).
      slot = slot if computed <= request.length else -1
      self.swapping.finish(request, min(computed, request.length), ended, slot)
    elif request.state in (State.WAITING, State.SWAPPED):
      self.policy.remove(request)
      self.swapping.drop(request)
    else:
      self.swapping.drop(request)

  def _end(self, request: Request, state: State, now: float) -> None:
    """Sets a request's final state and notifies the policy and the callback."""
    request.state, request.end_s = state, now
    self._requests.pop(request.number, None)
    if state is not State.REFUSED:
      self.swapping.end(request)
      self.policy.ended(request)
    if self.ended is not None:
      self.ended(request)
