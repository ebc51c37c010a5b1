"""Writes schedules as MSCCL's XML, which its runtimes run on GPUs.

A written file has one threadblock per rank, peer and direction: it sends to
that peer, or receives from it, in the order of the rounds. The attributes
`depid` and `deps` make a step wait for a step of another threadblock. Each
further step to wait for takes a step of type "nop" before it.
`parallel.schedules.msccl.importer` reads such files, and those of others.

All three collectives work in place: an all-gather in the output buffer, the
others in the input buffer. Paths are not part of the format, since the network
routes the messages. The attribute `round` of a step is an addition of ours,
which MSCCL ignores: it looks attributes up by their names.

Source: the format is that of microsoft/msccl-tools, msccl/language/ir.py (old
format); what a file must have and how large it may be is read from the loaders
of the runtimes in ``RUNTIMES``. Written files were not run on GPUs.
"""

import collections
import dataclasses
from xml.etree import ElementTree

from parallel import checks
from parallel.schedules import colouring
from parallel.schedules.check import check
from parallel.schedules.schedule import Schedule, Transfer


@dataclasses.dataclass(frozen=True)
class Runtime:
  """What a runtime takes.

  Attributes:
    source: Where the limits are read.
    max_steps: The most steps of a threadblock, nops counted.
    max_blocks: The most threadblocks of a rank.
    scatter: What it calls a reduce-scatter.
  """

  source: str
  max_steps: int
  max_blocks: int
  scatter: str = "reducescatter"


RUNTIMES = {
  # Its number of steps can be changed when it is built.
  "nccl": Runtime("Azure/msccl-executor-nccl, commit c6f6b36", 64, 32 * 32),
  "rccl": Runtime("ROCm/rccl, commit 0cbce2a", 64, 64),
  "msccl": Runtime("microsoft/msccl, commit b23e9cd", 256, 216,
                   "reduce_scatter"),
}
PROTOCOLS = ("Simple", "LL", "LL128")
# The rest is the same in all of them: the most peers to which the threadblocks
# of one channel send, or from which they receive; the most channels; the
# largest number of a threadblock that others can wait for (an int8), and of a
# place in a buffer (an int16); and the elements that a loader has room for.
MAX_PEERS = 32
MAX_CHANNELS = 32
MAX_AWAITED = 127
MAX_CHUNKS = 32767
MAX_ELEMENTS = 4096
# For all sizes: one runtime reads a maxBytes of 0 as "no limit", another one as
# "never".
NO_LIMIT = 2**63 - 1

# A threadblock: the peers (send to, receive from), -1 for none; the channel.
_Block = tuple[int, int, int]


@dataclasses.dataclass(eq=False)
class _Step:
  """One end of a transfer, as a step of a threadblock.

  Attributes:
    transfer: The transfer.
    round: Number of its round.
    sends: Whether this is the sending end.
    after: Steps of the same rank that must be done before this one.
    block: Its threadblock.
    place: Its number in the threadblock, nops counted.
    awaited: Whether another threadblock's step waits for it.
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

  Args:
    schedule: The schedule.
    runtime: A key of ``RUNTIMES``, whose limits must hold.
    protocol: The transport protocol, one of ``PROTOCOLS``.
    min_bytes: The smallest buffer for which the runtime takes the algorithm.
    max_bytes: The largest one.

  Returns:
    The text of an XML file in MSCCL's old format.

  Raises:
    ValueError: The schedule is wrong, or has more steps, threadblocks, channels
      or chunks than the runtime takes; ranks own different numbers of chunks;
      or an option is not as above.
  """
  check_options(runtime, protocol, min_bytes, max_bytes)
  check(schedule)
  buffer, offsets, sizes = _buffers(schedule)
  blocks = _threadblocks(schedule)
  _check_limits(schedule, blocks, runtime)
  channels = {block[2] for of_rank in blocks for block in of_rank}
  algorithm = ElementTree.Element("algo", {
    "name": schedule.name, "proto": protocol,
    "nchannels": str(max(channels, default=0) + 1),
    "nchunksperloop": str(schedule.num_chunks),
    "ngpus": str(schedule.num_ranks),
    "coll": RUNTIMES[runtime].scatter
    if schedule.collective == "reduce_scatter"
    else schedule.collective.replace("_", ""),
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


def _check_limits(
  schedule: Schedule,
  blocks: list[dict[_Block, list[_Step]]],
  runtime: str,
) -> None:
  """Refuses what a runtime's loader would refuse."""
  limits = RUNTIMES[runtime]

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


def _buffers(
  schedule: Schedule,
) -> tuple[str, list[int], dict[str, str]]:
  """Lays the chunks out in MSCCL's buffers.

  Returns:
    The buffer in use, "i" (input) or "o" (output); the place of each chunk in
    it; and the attributes of a gpu that give the sizes of the buffers, in
    chunks.
  """
  chunks = schedule.num_chunks
  offsets = list(range(chunks))
  # MSCCL takes slices to lie in the order of the ranks, so chunks are numbered
  # anew if a schedule's do not.
  if schedule.owners:
    slices = [schedule.owned(rank) for rank in range(schedule.num_ranks)]
    if len({len(s) for s in slices}) > 1:
      raise ValueError(
        f"{schedule.name}: ranks own different numbers of chunks"
      )
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
  """Puts both ends of all transfers into threadblocks.

  Returns:
    ``[rank]``: threadblock -> steps, each with the steps that it waits for.
  """
  channels = _channels(schedule)
  blocks = [collections.defaultdict(list) for _ in range(schedule.num_ranks)]
  # (rank, chunk) -> the steps that write it, and the ones that read it since
  # the last write.
  writes: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)
  reads: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)

  def add(rank: int, where: _Block, step: _Step) -> None:
    # Steps of one threadblock run in order and need not wait for each other.
    step.after = [s for s in step.after if s.block != where]
    for before in step.after:
      before.awaited = True
    block = blocks[rank][where]
    step.block = where
    # Each dependency but the last one is a nop before the step.
    end = block[-1].place + 1 if block else 0
    step.place = end + max(len(step.after) - 1, 0)
    block.append(step)

  for number, unordered in enumerate(schedule.rounds):
    # Sorted, so that the file does not depend on the order within a round.
    transfers = sorted(unordered)
    # All sends of a round come before its receives: a round's transfers read
    # the state before it. A send waits for the last write of its chunk only,
    # since that one has waited for the writes before it.
    for t in transfers:
      held = (t.source, t.chunk)
      step = _Step(t, number, True, list(writes[held][-1:]))
      reads[held].append(step)
      add(t.source, (t.destination, -1, channels[t[:2]]), step)
    for t in transfers:
      held = (t.destination, t.chunk)
      # Threadblocks run side by side. So a write waits for the last write of
      # the chunk and for everyone who still has to read that value.
      step = _Step(t, number, False, writes[held][-1:] + reads.pop(held, []))
      writes[held].append(step)
      add(t.destination, (-1, t.source, channels[t[:2]]), step)
  return blocks


def check_options(
  runtime: str, protocol: str, min_bytes: int, max_bytes: int
) -> None:
  """Refuses options of `export_xml` that are not as it says."""
  checks.known("runtime=", runtime, RUNTIMES)
  checks.known("protocol=", protocol, PROTOCOLS)
  if not 0 <= min_bytes <= max_bytes <= NO_LIMIT:
    raise ValueError(
      f"min_bytes={min_bytes} and max_bytes={max_bytes} must be in order, from "
      f"0 to {NO_LIMIT}"
    )


def _channels(schedule: Schedule) -> dict[tuple[int, int], int]:
  """Gives each pair of ranks a channel, so that none has too many peers.

  Returns:
    (source, destination) -> number of the channel.
  """
  pairs = sorted({t[:2] for transfers in schedule.rounds for t in transfers})
  # An equitable colouring with k colours cuts each rank's peers into k parts of
  # nearly the same size.
  count = max(1, -(-colouring.largest_degree(pairs) // MAX_PEERS))
  return dict(zip(pairs, colouring.equitable(pairs, count), strict=True))


def _add_transfer(
  block: ElementTree.Element, step: _Step,
  where: tuple[str, int, str, int, int], numbers: dict[_Block, int],
) -> None:
  """Adds a transfer, and before it nops that wait for what it depends on.

  A step has one `depid` only. All but the last dependency are waited for by
  nops, whose buffers mean nothing.
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
  """Appends a step to a threadblock; it waits for the step `before`, if any."""
  keys = ("srcbuf", "srcoff", "dstbuf", "dstoff", "cnt")
  return ElementTree.SubElement(block, "step", {
    "s": str(len(block)), "type": kind,
    **dict(zip(keys, map(str, where), strict=True)),
    "depid": str(numbers[before.block] if before else -1),
    "deps": str(before.place if before else -1), "hasdep": "0",
  })
