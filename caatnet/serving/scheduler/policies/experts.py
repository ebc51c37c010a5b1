"""Experts: requests of one expert share steps, and weights move on demand.

The weights of some experts are in weight slots on the device. An expert with
requests and without a slot is *absent*. Its load runs concurrently with steps
of other experts. A load that evicts an expert without requests starts at once.
One that evicts an expert with requests starts only when

    requests of the absent expert x seconds since its last step
    >= patience x switch_s x requests of the evicted expert,

where switch_s is the time of a load. The requests of the absent expert have
then waited as long in total as those of the evicted expert will (the break-even
rule of the ski rental problem). The load also starts when the absent expert has
had no step for `deadline_s`. Overdue experts are served in the order of their
last steps.

An expert with requests is not evicted before it has drawn a token since its
load, nor within min(patience x switch_s, deadline_s) after that. Each load thus
makes progress, even if the pages of evicted experts are lost, and with N
experts each expert with requests has a step at least every

    deadline_s + N (load + prefill + min(patience x switch_s, deadline_s)).

Experts with a slot have steps in turn; their requests are admitted in the order
of arrival. Requests of an evicted expert keep their pages until other requests
need pages, and are then preempted first.
"""

from collections.abc import Callable, Hashable, Sequence
import operator

from caatnet.serving.engine.executor import WeightLoad
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.clients import ClientQueues
from caatnet.serving.scheduler.running import RunningRequests
from parallel.plans.placement.slots import Slots


def _single_model_slots() -> Slots:
  """Returns one weight slot, with the expert "" of a server of one model."""
  slots = Slots(1, "lru")
  slots.reserve("")
  slots.loaded(0)
  return slots


class ExpertsPolicy(ClientQueues):
  """Policy with one queue per expert, and weight slots for some experts.

  Attributes:
    slots: Weight slots on the device.
  """

  batch_key = operator.attrgetter("expert")
  line = operator.attrgetter("expert")

  def __init__(
    self, slots: Slots | None = None,
    switch_s: float | Callable[[], float] = 0.0,
    deadline_s: float = 30.0, prefetch: int = 1, patience: float = 1.0,
  ) -> None:
    """Makes empty queues.

    Args:
      slots: Weight slots on the device; None for a server with one model.
      switch_s: Time of a load in seconds, or a function that returns the time
        of recent loads, which is longer if they read files.
      deadline_s: Seconds without a step after which an expert with requests is
        loaded regardless of the switching cost.
      prefetch: Largest number of loads that run concurrently with steps; 0 to
        load only if no expert in a slot has requests, or an expert is overdue.
      patience: Factor of the switching cost; larger values switch less.
    """
    super().__init__()
    self.slots = _single_model_slots() if slots is None else slots
    self._switch_s = switch_s if callable(switch_s) else lambda: switch_s
    self._deadline_s = deadline_s
    self._prefetch, self._patience = prefetch, patience
    self._now = 0.0
    # Time of each expert's last step, or of the arrival of its first request,
    # whichever is later.
    self._since: dict[Hashable, float] = {}
    # Number of each expert's last step.
    self._turns: dict[Hashable, int] = {}
    # Time of the first token that each expert has drawn since its last load.
    self._drawn: dict[Hashable, float] = {}
    self._num_steps = self._num_loading = 0
    self._loads: list[WeightLoad] = []
    # Selected load, which begins when no step reads its slot any more. No step
    # of the expert that it evicts is made.
    self._next: WeightLoad | None = None

  @property
  def loading(self) -> bool:
    """Whether a load of weights is under way."""
    return self._num_loading > 0

  def arrived(self, request: Request) -> None:
    """Counts a request; an expert without requests begins to wait."""
    if request.expert not in self._present:
      self._since[request.expert] = request.arrival_s
    super().arrived(request)

  def ended(self, request: Request) -> None:
    """Decrements an expert's number of requests."""
    super().ended(request)
    if request.expert not in self._present:
      del self._since[request.expert]
      self._turns.pop(request.expert, None)

  def peek(self) -> Request | None:
    """Returns the first queued request of the step's expert."""
    line = self._lines.get(self.current)
    return line[0][2] if line else None

  def victim(self, running: RunningRequests) -> Request:
    """Returns the newest request of absent experts, or else of all experts."""
    absent = self._unloaded_requests(running)
    if not absent:
      return running.last()
    return max(absent, key=lambda request: request.number)

  def displaces(self, waiting: Request, running: RunningRequests) -> bool:
    """Returns whether the expert of any running request is absent."""
    del waiting
    return bool(self._unloaded_requests(running))

  def _unloaded_requests(self, running: RunningRequests) -> list[Request]:
    find = self.slots.find
    return [request for request in running if find(request.expert) is None]

  def keys(self, now: float) -> Sequence[Hashable]:
    """Starts loads; returns experts that can run, the longest idle first."""
    self._now = now
    self._switch()
    leaving = self._next and self.slots.expert(self._next.slot)
    able = [
      expert for expert in self._present
      if self.slots.ready(expert) and expert != leaving
    ]
    return sorted(able, key=lambda expert: self._turns.get(expert, -1))

  def _switch(self) -> None:
    """Starts loads of absent experts, the one that waits longest first."""
    slots, present, since = self.slots, self._present, self._since
    self._begin_next()
    busy = any(map(slots.ready, present))
    queue = sorted(present, key=since.__getitem__)
    for expert in queue:
      if self._next or self._num_loading >= max(1, self._prefetch):
        return
      if slots.find(expert) is not None:
        continue
      waited_s = self._now - since[expert]
      overdue = waited_s >= self._deadline_s
      if busy and not self._prefetch and not overdue:
        return
      keep = [e for e in present if slots.ready(e) and self._must_keep_slot(e)]
      slot = slots.select_slot(queue, keep)
      if slot is None:
        return
      num_evicted = present[slots.expert(slot)]
      cost = self._patience * self._switch_s() * num_evicted
      if overdue or present[expert] * waited_s >= cost:
        self._next = WeightLoad(expert, slot)
        self._begin_next()

  def _must_keep_slot(self, expert: Hashable) -> bool:
    """Returns whether an expert with requests must keep its weight slot."""
    min_s = min(self._patience * self._switch_s(), self._deadline_s)
    drawn_s = self._drawn.get(expert)
    return drawn_s is None or self._now - drawn_s < min_s

  def _begin_next(self) -> None:
    """Begins the selected load if no step reads its weight slot any more."""
    load = self._next
    if load is None or self.slots.users(load.slot):
      return
    self._next = None
    if load.expert in self._present:  # else its requests were cancelled
      self._drawn.pop(self.slots.expert(load.slot), None)
      self.slots.reserve(load.expert, slot=load.slot)
      self._loads.append(load)
      self._num_loading += 1

  def take_loads(self) -> Sequence[WeightLoad]:
    """Returns the loads to begin."""
    loads, self._loads = self._loads, []
    return loads

  def loaded(self, load: WeightLoad, error: str) -> None:
    """Handles the end of a load."""
    self._num_loading -= 1
    if error:
      self.slots.failed(load.slot)
    else:
      self.slots.loaded(load.slot)

  def begin_step(self, num_drawn: int) -> int:
    """Returns the weight slot of the step's expert; marks it as in use."""
    expert = self.current
    slot = self.slots.find(expert)
    self.slots.use(slot)
    self._since[expert], self._turns[expert] = self._now, self._num_steps
    self._num_steps += 1
    if num_drawn:
      self._drawn.setdefault(expert, self._now)
    return slot

  def end_step(self, weights: int) -> None:
    """Handles the end of a step that has read the weight slot `weights`."""
    self.slots.release(weights)

  def admitted(self, request: Request, num_read: int) -> None:
    """Counts a request as a hit or a miss at its first admission."""
    del num_read
    if not request.num_preempted:
      self.slots.touch(self.slots.find(request.expert))
