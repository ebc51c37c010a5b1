"""Choice of the fastest schedule of a collective for a message size.

Small messages need few rounds and shallow trees; large ones keep all links busy
only if their chunks are cut into many pieces (pipelining). The optimum depends
on links, latencies and switches, and on the numbering of ranks
(`parallel.plans.schedules.renumber`). So candidates are built and timed by the
simulator.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import functools
from typing import Any, Literal

from parallel.plans.network import simulate
from parallel.plans.network.routed import RoutedSchedule, on_links
from parallel.plans.schedules import builders, renumber
from parallel.plans.schedules.check import check
from parallel.plans.schedules.pipeline import pipelined
from parallel.plans.schedules.schedule import Collective, Schedule
from parallel.plans.topology.graph import Topology

TimeModel = Literal["events", "barrier", "lockstep"]

# Limits on candidates that cut chunks or grow trees. The time models count only
# latency and bytes, and ignore other costs that matter for small messages.
MAX_TRANSFERS = 2**15
MAX_TREES = 160  # number of grown trees, of all ranks together
MIN_CHUNK_BYTES = 2**12


@dataclasses.dataclass(frozen=True)
class ChosenSchedule:
  """Schedule with its builder, options and time.

  Attributes:
    schedule: The schedule.
    builder: Key of `builders.BUILDERS` that made it.
    options: Keyword arguments of the builder.
    pieces: Number of pieces into which each chunk is cut.
    seconds: Predicted time of the schedule, in seconds.
  """

  schedule: Schedule
  builder: str
  options: dict[str, Any]
  pieces: int
  seconds: float

  def __str__(self) -> str:
    """Returns the name and options of the schedule, as configs give them."""
    options = self.options | {"pieces": self.pieces}
    return ",".join([self.builder, *(f"{k}={x}" for k, x in options.items())])


def fastest(
  name: str,
  topology: Topology,
  collective: Collective,
  size_bytes: int,
  /,  # "size_bytes" is an option of grown trees, too
  *,
  model: TimeModel = "events",
  pieces: int | None = None,
  random_numberings: int = 0,
  fits: Callable[[Schedule], bool] = lambda schedule: True,
  **options: Any,
) -> ChosenSchedule:
  """Returns a builder's fastest schedule for a message.

  Candidates are the builder's schedules on all transpositions of a grid. If
  ``pieces`` is None, they are also cut into several numbers of pieces, and
  "optimal" without options also tries grown trees and those of "multitree".

  Example:
    >>> from parallel.plans.topology.builders import ring
    >>> choice = fastest("ring", ring(4), "all_reduce", 2**20)
    >>> choice.builder, choice.pieces, f"{choice.seconds:.3g} s"
    ('ring', 64, '2.7e-05 s')

  Args:
    name: Key of `builders.BUILDERS`.
    topology: Network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    size_bytes: Bytes of the buffer.
    model: "events" for machines that forward a chunk as soon as it has arrived
      (`simulate.events`). For machines with a barrier after each round, such as
      `parallel.schedules.run`: "lockstep" (`simulate.lockstep`) or "barrier"
      (`simulate.events`, in which switches wait for whole messages).
    pieces: Number of pieces into which each chunk is cut; None for the fastest
      number.
    random_numberings: Number of random numberings of ranks that are tried in
      addition to transpositions, with whole chunks; schedules of more than
      ``MAX_TRANSFERS`` transfers are not renumbered.
    fits: Function that returns whether a schedule is a candidate.
    **options: Keyword arguments of the builder; ``numbering`` selects one
      numbering.

  Returns:
    The fastest candidate, after `check` has verified it.

  Raises:
    ValueError: The builder does not support the topology, the message has
      fewer bytes than chunks, or no schedule fits.
  """
  def timed(
    builder: str, options: dict[str, Any], pieces: int, capacity: int | None
  ) -> ChosenSchedule:
    schedule, routed = _build_candidate(
      topology, collective, builder, tuple(options.items()), pieces, capacity
    )
    if model == "lockstep":
      seconds = simulate.lockstep(routed, size_bytes)
    else:
      barrier = model == "barrier"
      timeline = simulate.events(routed, size_bytes, barrier=barrier)
      seconds = timeline.finish_ns / 1e9
    return ChosenSchedule(schedule, builder, options, pieces, seconds)

  kinds: list[Iterable[tuple[str, dict[str, Any]]]] = [[(name, options)]]
  whole_search = name == "optimal" and topology.num_ranks > 1 and not options
  if pieces is None and whole_search:
    grown = _grown_tree_options(topology, size_bytes, model)
    kinds += [[("multitree", {})], grown]
  found = []
  for kind in kinds:
    # The fastest schedule of each kind with whole chunks is then pipelined.
    wholes = [
      choice for x in kind
      for choice in _try_numberings(
        topology, random_numberings, *x, pieces or 1, timed
      )
      if fits(choice.schedule)
    ]
    if not wholes:
      continue
    found.append(whole := _soonest(wholes))
    if pieces is None:
      cut = _try_piece_counts(whole, topology, size_bytes, model, timed)
      found += (choice for choice in cut if fits(choice.schedule))
  if not found:
    raise ValueError(f"no schedule of {name!r} fits the topology")
  best = _soonest(found)
  check(best.schedule, topology)
  return best


@functools.lru_cache(maxsize=16)
def _build_candidate(
  topology: Topology,
  collective: Collective,
  builder: str,
  options: tuple[tuple[str, Any], ...],
  pieces: int,
  capacity: int | None,
) -> tuple[Schedule, RoutedSchedule]:
  """Builds and routes a schedule; cached for other sizes and time models.

  Args:
    topology: Network that the schedule runs on.
    collective: Collective that it performs.
    builder: Key of `builders.BUILDERS`.
    options: Keyword arguments of the builder, as pairs.
    pieces: Number of pieces into which each chunk is cut.
    capacity: Number of pieces that a slowest link carries in a round; None for
      the number of chunks that it carries if they are not cut.
  """
  if pieces == 1:
    schedule = builders.build(builder, topology, collective, **dict(options))
  else:
    # Pieces derive from the cached schedule of whole chunks.
    whole = _build_candidate(topology, collective, builder, options, 1, None)[0]
    schedule = pipelined(whole, topology, pieces, capacity)
  return schedule, on_links(schedule, topology)


def _try_numberings(
  topology: Topology,
  num_random: int,
  builder: str,
  options: dict[str, Any],
  pieces: int,
  timed: Callable[..., ChosenSchedule],
) -> Iterator[ChosenSchedule]:
  """Yields a builder's schedules for several numberings of ranks.

  Args:
    topology: Network that the schedules run on.
    num_random: Number of random numberings.
    builder: Key of `builders.BUILDERS`.
    options: Keyword arguments of the builder.
    pieces: Number of pieces into which each chunk is cut.
    timed: Builds and times a schedule, from builder, options, pieces and link
      capacity.
  """
  plain = timed(builder, options, pieces, None)
  if "numbering" in options or plain.schedule.num_transfers > MAX_TRANSFERS:
    yield plain
    return
  for number in renumber.numberings_to_try(topology, num_random):
    if not number:
      yield plain
      continue
    # A builder may need the shape of a grid, which random numberings destroy.
    with contextlib.suppress(ValueError):
      yield timed(builder, options | {"numbering": number}, pieces, None)


def _soonest(choices: Iterable[ChosenSchedule]) -> ChosenSchedule:
  """Returns the fastest schedule; the first one if several are equally fast."""
  return min(choices, key=lambda choice: choice.seconds)


def _try_piece_counts(
  whole: ChosenSchedule,
  topology: Topology,
  size_bytes: int,
  model: TimeModel,
  timed: Callable[..., ChosenSchedule],
) -> Iterator[ChosenSchedule]:
  """Yields a schedule cut into 2, 4, ... pieces, while it gets faster.

  Args:
    whole: Schedule of whole chunks.
    topology: Network that it runs on.
    size_bytes: Bytes of the buffer.
    model: Time model, as for `fastest`.
    timed: Builds and times a schedule, see `_try_numberings`.
  """
  schedule, least, in_vain = whole.schedule, whole.seconds, 0
  for pieces in (2, 4, 8, 16, 32, 64):
    chunk_bytes = size_bytes / schedule.num_chunks / pieces
    num_transfers = schedule.num_transfers * pieces
    if num_transfers > MAX_TRANSFERS or chunk_bytes < MIN_CHUNK_BYTES:
      return
    # If bandwidths differ, loads can match them only if a link may carry
    # several chunks in a round. With "events", the rounds of transfers
    # do not matter.
    capacities = [schedule.link_capacity]
    if model != "events" and not topology.even and schedule.link_capacity:
      capacities += [
        max(1, schedule.link_capacity * pieces // parts) for parts in (8, 2)
      ]
    choice = _soonest([
      timed(whole.builder, whole.options, pieces, capacity)
      for capacity in dict.fromkeys(capacities)
    ])
    yield choice
    # Stops after two successive doublings that gain less than 1% each.
    in_vain = 0 if choice.seconds < 0.99 * least else in_vain + 1
    if in_vain == 2:
      return
    least = min(least, choice.seconds)


def _grown_tree_options(
  topology: Topology, size_bytes: int, model: TimeModel
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields options of "optimal" that grow 1, 2, 4, ... trees per rank."""
  for weight in (1, 2, 4, 8, 16):
    num_trees = weight * topology.num_ranks
    # One tree per rank is always tried; more only if their chunks are large
    # enough and their growth does not take too long.
    small = size_bytes < num_trees * MIN_CHUNK_BYTES
    if weight > 1 and (small or num_trees > MAX_TREES):
      return
    # With "events", the assignment of transfers to rounds does not matter.
    for capacity in (1,) if model == "events" else (1, 2, 16):
      yield "optimal", {
        "trees": "grown", "weight": weight, "size_bytes": size_bytes,
        "link_capacity": capacity,
      }
