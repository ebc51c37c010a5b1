"""Export of schedules as XML of MSCCL, whose runtimes execute it on GPUs.

A written file has one threadblock per rank, peer and direction: it sends to
that peer, or receives from it, in the order of the rounds. The attributes
`depid` and `deps` make a step wait for a step of another threadblock. For each
additional dependency, a step of type "nop" precedes the step.
`parallel.plans.schedules.msccl.importer` reads such files, and those of other
tools.

All three collectives work in place: an all-gather in the output buffer, the
others in the input buffer. Paths are not part of the format, since the network
routes the messages. The attribute `round` of a step is an extension, which
MSCCL ignores because it looks attributes up by name.

Source of the format: microsoft/msccl-tools, msccl/language/ir.py (old format).
The required attributes and the limits are read from the loaders of the runtimes
in ``RUNTIMES``. Written files have not been run on GPUs.
"""

import collections
import dataclasses
from xml.etree import ElementTree

from parallel.base import checks
from parallel.plans.schedules import colouring
from parallel.plans.schedules.check import check
from parallel.plans.schedules.schedule import Schedule, Transfer


@dataclasses.dataclass(frozen=True)
class Runtime:
  """Limits and naming of an MSCCL runtime.

  Attributes:
    source: Repository and commit from which the limits were read.
    max_steps: Maximum number of steps of a threadblock, nops included.
    max_blocks: Maximum number of threadblocks of a rank.
    scatter: Name of the reduce-scatter in the attribute `coll`.
  """

  source: str
  max_steps: int
  max_blocks: int
  scatter: str = "reducescatter"


RUNTIMES = {
  # The maximum number of steps is a build option of this runtime.
  "nccl": Runtime("Azure/msccl-executor-nccl, commit c6f6b36", 64, 32 * 32),
  "rccl": Runtime("ROCm/rccl, commit 0cbce2a", 64, 64),
  "msccl": Runtime("microsoft/msccl, commit b23e9cd", 256, 216,
                   "reduce_scatter"),
}
PROTOCOLS = ("Simple", "LL", "LL128")
# Limits that all runtimes share: number of peers to which the threadblocks of
# one channel send, or from which they receive; number of channels; largest id
# of a threadblock for which another one can wait (an int8); largest offset in a
# buffer (an int16); number of XML elements for which a loader has space.
MAX_PEERS = 32
MAX_CHANNELS = 32
MAX_AWAITED = 127
MAX_CHUNKS = 32767
MAX_ELEMENTS = 4096
# Maximum message size that means "all sizes": some runtimes read a maxBytes of
# 0 as "no limit", others as "never".
NO_LIMIT = 2**63 - 1

# A threadblock: (peer to send to, peer to receive from, channel); -1 for none.
_Block = tuple[int, int, int]


@dataclasses.dataclass(eq=False)
class _Step:
  """Send or receive of a transfer, as a step of a threadblock.

  Attributes:
    transfer: Transfer whose send or receive the step performs.
    round: Number of the transfer's round.
    sends: Whether the step sends.
    after: Steps of the same rank that must complete before this one.
    block: Threadblock of the step.
    place: Number of the step in the threadblock, nops included.
    awaited: Whether a step of another threadblock waits for this one.
  """

  transfer: Transfer
  round: int
  sends: bool
  after: list["_Step"]
  block: _Block = (-1, -1, 0)
  place: int = -1
  awaited: bool = False


def export_xml(
  schedule: Schedule,
  *,
  runtime: str = "nccl",
  protocol: str = "Simple",
  min_bytes: int = 0,
  max_bytes: int = NO_LIMIT,
) -> str:
  """Proves a schedule and writes it as an MSCCL algorithm.

  Example:
    >>> from parallel.plans.schedules import builders
    >>> from parallel.plans.topology.builders import ring
    >>> schedule = builders.build("ring", ring(2), "all_gather")
    >>> print(export_xml(schedule).split(" minBytes")[0])
    <algo name="ring" proto="Simple" nchannels="1" nchunksperloop="2" \
ngpus="2" coll="allgather" inplace="1" outofplace="0"

  Args:
    schedule: Schedule to write.
    runtime: Key of ``RUNTIMES`` whose limits the file must respect.
    protocol: Transport protocol, one of ``PROTOCOLS``.
    min_bytes: Smallest buffer, in bytes, for which the runtime selects the
      algorithm.
    max_bytes: Largest buffer, in bytes.

  Returns:
    Text of an XML file in MSCCL's old format.

  Raises:
    ValueError: The schedule is wrong, or exceeds the runtime's limits on steps,
      threadblocks, channels or chunks; or an option is out of range.
  """
  check_options(runtime, protocol, min_bytes, max_bytes)
  check(schedule)
  buffer, offsets, sizes = _buffers(schedule)
  blocks = check_limits(schedule, runtime)
  channels = {block[2] for of_rank in blocks for block in of_rank}
  name = schedule.collective.replace("_", "")
  if schedule.collective == "reduce_scatter":
    name = RUNTIMES[runtime].scatter
  algorithm = ElementTree.Element("algo", {
    "name": schedule.name, "proto": protocol,
    "nchannels": str(max(channels, default=0) + 1),
    "nchunksperloop": str(schedule.num_chunks),
    "ngpus": str(schedule.num_ranks), "coll": name,
    "inplace": "1", "outofplace": "0",
    "minBytes": str(min_bytes), "maxBytes": str(max_bytes),
  })
  for rank in range(schedule.num_ranks):
    gpu = ElementTree.SubElement(
      algorithm, "gpu", {"id": str(rank), **sizes}
    )
    numbers = {block: i for i, block in enumerate(sorted(blocks[rank]))}
    for peers, number in numbers.items():
      block = ElementTree.SubElement(gpu, "tb", {
        "id": str(number), "send": str(peers[0]), "recv": str(peers[1]),
        "chan": str(peers[2]),
      })
      for step in blocks[rank][peers]:
        # Sender and receiver use the same buffer and offset (in place).
        offset = offsets[step.transfer.chunk]
        _add_transfer(
          block, step, (buffer, offset, buffer, offset, 1), numbers
        )
  ElementTree.indent(algorithm)
  return ElementTree.tostring(algorithm, encoding="unicode") + "\n"


def check_limits(
  schedule: Schedule, runtime: str
) -> list[dict[_Block, list[_Step]]]:
  """Returns each rank's threadblocks -> steps, within a runtime's limits.

  Raises:
    ValueError: The runtime's loader would reject the schedule.
  """
  limits, blocks = RUNTIMES[runtime], _threadblocks(schedule)

  def within(what: str, count: int, most: int) -> None:
    if count > most:
      raise ValueError(
        f"{schedule.name}: {what} are more than the {most} that the runtime "
        f"{runtime!r} takes"
      )

  within(f"{schedule.num_chunks} chunks", schedule.num_chunks, MAX_CHUNKS)
  for rank, of_rank in enumerate(blocks):
    within(
      f"rank {rank}'s {len(of_rank)} threadblocks", len(of_rank),
      limits.max_blocks,
    )
    channels = len({channel for _, _, channel in of_rank})
    within(f"rank {rank}'s {channels} channels", channels, MAX_CHANNELS)
    elements = 1 + schedule.num_ranks
    for number, (block, steps) in enumerate(sorted(of_rank.items())):
      count = steps[-1].place + 1
      elements += 1 + count
      within(
        f"rank {rank}'s {count} steps with rank {max(block[:2])}", count,
        limits.max_steps,
      )
      if any(step.awaited for step in steps):
        within(
          f"{number + 1} threadblocks of rank {rank}, of which one waits for "
          "the last,", number, MAX_AWAITED,
        )
    within(f"rank {rank}'s {elements} elements", elements, MAX_ELEMENTS - 1)
  return blocks


def _buffers(
  schedule: Schedule,
) -> tuple[str, list[int], dict[str, str]]:
  """Assigns the chunks to positions in MSCCL's buffers.

  Returns:
    Buffer in use, "i" (input) or "o" (output); offset of each chunk in it; and
    attributes of a gpu element that give the sizes of the buffers, in chunks.
  """
  chunks = schedule.num_chunks
  offsets = list(range(chunks))
  # MSCCL expects slices in the order of the ranks, so chunks are renumbered if
  # the order of the schedule differs.
  if schedule.owners:
    slices = [schedule.owned(rank) for rank in range(schedule.num_ranks)]
    for place, chunk in enumerate(c for s in slices for c in s):
      offsets[chunk] = place
  each = chunks // schedule.num_ranks
  buffer, sizes = {
    "all_reduce": ("i", (chunks, 0, 0)),
    "reduce_scatter": ("i", (chunks, each, 0)),
    "all_gather": ("o", (each, chunks, 0)),
  }[schedule.collective]
  keys = ("i_chunks", "o_chunks", "s_chunks")
  return buffer, offsets, dict(zip(keys, map(str, sizes), strict=True))


def _threadblocks(
  schedule: Schedule,
) -> list[dict[_Block, list[_Step]]]:
  """Puts the sends and receives of all transfers into threadblocks.

  Returns:
    For each rank, threadblock -> steps, each with the steps that it waits for.
  """
  channels = _channels(schedule)
  blocks = [collections.defaultdict(list) for _ in range(schedule.num_ranks)]
  # (rank, chunk) -> steps that write it, and steps that read it since the last
  # write.
  writes: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)
  reads: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)

  def add(rank: int, where: _Block, step: _Step) -> None:
    # Steps of one threadblock run in order and need no dependencies.
    step.after = [s for s in step.after if s.block != where]
    for before in step.after:
      before.awaited = True
    block = blocks[rank][where]
    step.block = where
    # Each dependency except the last one is a nop before the step.
    end = block[-1].place + 1 if block else 0
    step.place = end + max(len(step.after) - 1, 0)
    block.append(step)

  for number, unordered in enumerate(schedule.rounds):
    # Sorted, so that the file does not depend on the order within a round.
    transfers = sorted(unordered)
    # All sends of a round precede its receives, because transfers of a round
    # read the state before it. A send waits only for the last write of its
    # chunk, which itself has waited for the earlier writes.
    for t in transfers:
      held = (t.source, t.chunk)
      step = _Step(t, number, True, list(writes[held][-1:]))
      reads[held].append(step)
      add(t.source, (t.destination, -1, channels[t[:2]]), step)
    for t in transfers:
      held = (t.destination, t.chunk)
      # Threadblocks run concurrently, so a write waits for the last write of
      # the chunk and for all pending reads of that value.
      step = _Step(t, number, False, writes[held][-1:] + reads.pop(held, []))
      writes[held].append(step)
      add(t.destination, (-1, t.source, channels[t[:2]]), step)
  return blocks


def check_options(
  runtime: str, protocol: str, min_bytes: int, max_bytes: int
) -> None:
  """Checks the options of `export_xml`; raises ValueError if out of range."""
  checks.known("runtime=", runtime, RUNTIMES)
  checks.known("protocol=", protocol, PROTOCOLS)
  if not 0 <= min_bytes <= max_bytes <= NO_LIMIT:
    raise ValueError(
      f"min_bytes={min_bytes} and max_bytes={max_bytes} must be in order, from "
      f"0 to {NO_LIMIT}"
    )


def _channels(schedule: Schedule) -> dict[tuple[int, int], int]:
  """Assigns a channel to each pair of ranks, within the limit on peers.

  Returns:
    (source, destination) -> number of the channel.
  """
  pairs = sorted({t[:2] for transfers in schedule.rounds for t in transfers})
  # An equitable colouring with k colours splits each rank's peers into k parts
  # of nearly the same size.
  count = max(1, -(-colouring.largest_degree(pairs) // MAX_PEERS))
  return dict(zip(pairs, colouring.equitable(pairs, count), strict=True))


def _add_transfer(
  block: ElementTree.Element, step: _Step,
  where: tuple[str, int, str, int, int], numbers: dict[_Block, int],
) -> None:
  """Adds a step's XML, preceded by nops for all dependencies except the last.

  A step has only one `depid`. ``block`` is the XML element of its threadblock,
  ``where`` are the step's attributes srcbuf, srcoff, dstbuf, dstoff and cnt,
  and ``numbers`` the threadblocks' ids.
  """
  for before in step.after[:-1]:
    _add_step(block, "nop", ("i", -1, "o", -1, 0), before, numbers)
  reduces = step.transfer.operation == "reduce"
  kind = "s" if step.sends else "rrc" if reduces else "r"
  element = _add_step(
    block, kind, where, step.after[-1] if step.after else None, numbers
  )
  element.set("hasdep", str(int(step.awaited)))
  element.set("round", str(step.round))


def _add_step(
  block: ElementTree.Element,
  kind: str,
  where: tuple[str, int, str, int, int],
  before: _Step | None,
  numbers: dict[_Block, int],
) -> ElementTree.Element:
  """Appends a step that waits for the step `before`, if any, to a threadblock.

  Other arguments are those of `_add_transfer`.
  """
  keys = ("srcbuf", "srcoff", "dstbuf", "dstoff", "cnt")
  return ElementTree.SubElement(block, "step", {
    "s": str(len(block)), "type": kind,
    **dict(zip(keys, map(str, where), strict=True)),
    "depid": str(numbers[before.block] if before else -1),
    "deps": str(before.place if before else -1), "hasdep": "0",
  })
