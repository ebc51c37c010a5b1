"""Simulated server: construction from a config, and its event loop."""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import heapq
import math
from typing import Any

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.simulator import CopyTimes, Simulator
from caatnet.serving.engine.times import Roofline
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.priorities import Priorities
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.traces import Arrival, synthetic_token_ids
from parallel.base.checks import known
from parallel.base.naming import prefix_error_keys
from parallel.plans.hardware.devices import DEVICES, Device
from parallel.plans.network import inference
from parallel.plans.workload import Transformer

# Number of arrays of the cache: keys and values. Both are [layers, pages,
# page_size, heads, head_width], so a run of pages is one range per layer.
_ARRAYS = 2
# Interval, in steps, at which free pages are sampled.
_SAMPLE_INTERVAL_STEPS = 16
# Minimum pages of a "large" free group: 512 tokens with page_size=16.
LARGE_GROUP_PAGES = 32


@dataclasses.dataclass(frozen=True)
class Machine:
  """Device that serves a model, and the host's memory.

  Attributes:
    steps: Cost model of steps.
    copies: Cost model of copies between device and host.
    page_size: Tokens per page.
    pages: Pages of the cache.
    host_pages: Pages in the host's memory.
  """

  steps: Roofline
  copies: CopyTimes
  page_size: int
  pages: int
  host_pages: int

  @property
  def tokens(self) -> int:
    """Number of tokens that the cache holds."""
    return self.pages * self.page_size


def device_of(
  hardware: Mapping[str, Any], key: str = "hardware.device"
) -> Device:
  """Returns the device of a section like ``config.hardware``.

  Args:
    hardware: The section.
    key: Config key of the device, for messages.

  Raises:
    ValueError: The device is unknown.
  """
  known(f"config.{key}=", hardware["device"], DEVICES)
  return DEVICES[hardware["device"]]


def machine(
  model: Mapping[str, Any], hardware: Mapping[str, Any], ranks: int = 1,
  p: float = 1.0, key: str = "hardware.device",
) -> Machine:
  """Returns the machine that a config describes.

  Args:
    model: Section ``config.model``: sizes.
    hardware: Section like ``config.hardware``: device, rates, memory.
    ranks: Tensor ranks; if more than 1, they are devices of one node.
    p: Fraction of channels that all row-parallel projections reduce.
    key: Config key of the device, for messages.

  Raises:
    ValueError: The device is unknown, the times of all-reduces over the ranks
      are not known, or the model does not fit on the device.
  """
  device, sizes = device_of(hardware, key), Transformer(**model)
  several = None
  if ranks > 1:
    try:
      several = inference.machine(f"gpu:{device.name}:1x{ranks}")
    except ValueError as error:
      raise ValueError(f"config.ranks={ranks}: {error}") from error
  slower = dataclasses.replace(
    device,
    memory_bandwidth=device.memory_bandwidth * hardware["memory_fraction"],
  )
  one = inference.ModelStep(1, 1, 1)
  weights = inference.memory_bytes(sizes, one, 1)["weights"] / ranks
  heads = math.ceil(sizes.num_kv_heads / ranks)  # of keys and values, per rank
  page_size = hardware["page_size"]
  page_bytes = (
    _ARRAYS * sizes.num_layers * page_size * heads * sizes.head_width
    * sizes.item_bytes
  )
  room = hardware["memory_share"] * device.memory_bytes - weights
  pages = hardware["pages"] or int(room // page_bytes)
  if pages < 1:
    raise ValueError(
      f"config.{key}={device.name!r} has no memory left for a cache: weights "
      f"of config.model take {weights / 1e9:.1f} GB of "
      f"{device.memory_bytes / 1e9:.0f}, a page of "
      f"config.hardware.page_size={page_size} tokens {page_bytes / 1e9:.3g} GB"
    )
  rate = hardware["copy_rate"]
  copies = CopyTimes(
    page_bytes, _ARRAYS * sizes.num_layers, hardware["copy_call_s"], rate, rate,
    # A copy within the device reads and writes each byte: half the bandwidth.
    slower.memory_bandwidth / 2,
  )
  return Machine(
    Roofline(sizes, slower, several, p, hardware["utilisation"]), copies,
    page_size, pages, int(hardware["host_bytes"] // page_bytes),
  )


@dataclasses.dataclass
class Outcome:
  """Outcome of a simulated run.

  Attributes:
    requests: All requests, including rejected ones.
    scheduler: Scheduler in its final state.
    copies: Cost model of copies.
    seconds: Time of the last completion, in seconds of the simulated clock.
    busy_s: Seconds in which a step was computed.
    present_s: Seconds in which at least one request was in the system.
    in_system: Number of requests in the system, integrated over time.
    held: Pages of running requests, summed over the sampled steps.
    filled: Pages that these requests' computed tokens fill, summed likewise.
    large: Free pages in free blocks of at least `LARGE_GROUP_PAGES`, summed
      likewise.
    free: Free pages, summed likewise.
  """

  requests: list[Request]
  scheduler: Scheduler
  copies: CopyTimes
  seconds: float = 0.0
  busy_s: float = 0.0
  present_s: float = 0.0
  in_system: float = 0.0
  held: int = 0
  filled: float = 0.0
  large: int = 0
  free: int = 0

  @property
  def served(self) -> list[Request]:
    """Requests that were not rejected."""
    return [r for r in self.requests if r.tokens]


def serve(
  host: Machine, arm: Mapping[str, Any], arrivals: Sequence[Arrival],
  limits: Mapping[str, Any], priorities: Mapping[str, Any],
  policy: str = "strict_priority",
  clients: Mapping[int, tuple[Hashable, float]] | None = None,
) -> Outcome:
  """Serves requests on a simulated clock until all have finished.

  A later turn of a conversation arrives after the previous turn has finished
  and the user's thinking time has passed.

  Args:
    host: The machine.
    arm: Preemption method (rules for pages), an entry of ``config.arms``.
    arrivals: Requests with their arrival times.
    limits: Maximum running requests ("slots") and tokens of a step, and
      ``steps_ahead`` of `Engine`.
    priorities: Arguments of `Priorities`.
    policy: Name of the scheduling policy.
    clients: Number of an arrival -> its client and priority; None for a single
      client with random ``priorities``.

  Raises:
    ValueError: No request fits into the cache.
  """
  with prefix_error_keys("config.arms", arm):
    options = Limits(
      slots=limits["slots"], tokens=limits["tokens"],
      preempt=arm["preempt"], growth=arm["growth"], wait_s=arm["wait_s"],
      keep_turns=arm["keep"],
    )
  pages = Pages(host.pages, host.page_size, arm["found"])
  copies = dataclasses.replace(host.copies, single=arm["single"])
  simulator = Simulator(
    host.steps, copies, most=limits["tokens"], draw=_own_token
  )
  memory = HostCache(host.host_pages, host.page_size, arm["keep"], arm["keep"])
  scheduler = Scheduler(
    options, registry.make(policy, pages), pages, memory, simulator.costs
  )
  engine = Engine(scheduler, simulator, limits["steps_ahead"])
  outcome = Outcome([], scheduler, copies)
  _EventLoop(engine, arrivals, Priorities(**priorities), clients, outcome).run()
  if not outcome.served:
    raise ValueError(
      f"config.hardware.pages={host.pages} are too few for any of the requests"
    )
  outcome.busy_s = simulator.busy_s
  pages.check()
  memory.check()
  return outcome


def _own_token(request: Request, position: int) -> int:
  return int(request.payload[position])  # type: ignore[index]


class _EventLoop:
  """Event loop: adds requests, changes priorities, samples statistics."""

  def __init__(
    self, engine: Engine, arrivals: Sequence[Arrival], priorities: Priorities,
    clients: Mapping[int, tuple[Hashable, float]] | None, outcome: Outcome,
  ) -> None:
    self._engine, self._priorities = engine, priorities
    self._clients, self._outcome = clients, outcome
    self._coming = [
      (a.time_s, a.number, a) for a in arrivals if a.think_s is None
    ]
    heapq.heapify(self._coming)
    # Later turns of each conversation, in reverse order.
    self._turns: dict[Hashable, list[Arrival]] = {}
    for arrival in reversed(arrivals):
      if arrival.think_s is not None:
        self._turns.setdefault(arrival.conversation, []).append(arrival)
    # Requests that another turn follows, and their conversations.
    self._awaited: dict[int, tuple[Request, Hashable]] = {}
    self._last = 0.0

  def run(self) -> None:
    """Runs until all requests have arrived and finished."""
    engine, clock = self._engine, self._engine.executor
    scheduler = engine.scheduler
    while self._coming or not engine.idle:
      # Adds all requests that have arrived before the next step.
      while self._coming and self._coming[0][0] <= clock.now():
        self._add(*heapq.heappop(self._coming))
      until = self._coming[0][0] if self._coming else math.inf
      present = len(scheduler.requests)
      if engine.step(until) is not None:
        self._after_step()
        continue
      self._advance_time(clock.now(), present)
      self._next_turns()
    self._outcome.seconds = self._last

  def _add(self, time_s: float, number: int, arrival: Arrival) -> None:
    text = synthetic_token_ids(arrival)
    # Without clients, priorities are drawn; otherwise they are the clients'.
    if self._clients is None:
      client, priority = "", self._priorities.first()
    else:
      client, priority = self._clients[number]
    request = Request(
      number, text[: arrival.prompt], arrival.output, client=client,
      priority=priority,
      arrival_s=time_s, conversation=arrival.conversation, more=arrival.more,
      payload=text,
    )
    self._outcome.requests.append(request)
    self._engine.scheduler.add(request)
    if self._turns.get(arrival.conversation):
      self._awaited[number] = request, arrival.conversation

  def _after_step(self) -> None:
    scheduler = self._engine.scheduler
    if self._priorities.due():
      for request in self._priorities.update(scheduler.requests):
        scheduler.update(request)
    if scheduler.counts.steps % _SAMPLE_INTERVAL_STEPS == 0:
      found, running = self._outcome, scheduler.running
      found.held += sum(len(request.pages) for request in running)
      filled = int(running.computed[running.slots].sum())
      found.filled += filled / scheduler.pages.page_size
      sizes = scheduler.pages.sizes()
      # sizes[k] is the number of free blocks of 2^k pages (buddy allocator).
      pages = [count << k for k, count in enumerate(sizes)]
      found.free += sum(pages)
      found.large += sum(pages[LARGE_GROUP_PAGES.bit_length() - 1 :])

  def _advance_time(self, now: float, present: int) -> None:
    passed = now - self._last
    self._outcome.in_system += present * passed
    self._outcome.present_s += passed if present else 0.0
    self._last = now

  def _next_turns(self) -> None:
    for number, (request, conversation) in list(self._awaited.items()):
      if request.end_s is not None:
        del self._awaited[number]
        turn = self._turns[conversation].pop()
        time_s = request.end_s + (turn.think_s or 0.0)
        heapq.heappush(self._coming, (time_s, turn.number, turn))
