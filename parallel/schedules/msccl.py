"""Writes and reads schedules as MSCCL's XML, which its runtime runs on GPUs.

A written file has one threadblock per rank, peer and direction: it sends to
that peer, or receives from it, in the order of the rounds. The attributes
`depid` and `deps` make a step wait for a step of another threadblock. Each
further step to wait for takes a step of type "nop" before it.

All three collectives work in place: an all-gather in the output buffer, the
others in the input buffer. Paths are not part of the format, since the network
routes the messages. The attribute `round` of a step is an addition of ours,
which MSCCL ignores: it looks attributes up by their names.

Source: microsoft/msccl-tools, msccl/language/ir.py (old format), and the
files of Azure/msccl-scheduler. Written files were not run on GPUs.
"""

import collections
from collections.abc import Iterator
import dataclasses
from xml.etree import ElementTree

from parallel.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.topology.graph import Topology

# The most steps of a threadblock, MSCCL_MAX_NUM_STEPS of MSCCL's runtime.
MAX_STEPS = 256

_NAMES = {name: name.replace("_", "") for name in COLLECTIVES}
# Type of a step -> whether it receives, and whether it sends. In a name, r is
# receive, s send, rr receive and reduce, c store at the destination. An rrs
# does not store its sum in MSCCL; read as a transfer, it does.
_TYPES = {
  "s": (False, True), "r": (True, False), "rcs": (True, True),
  "rrc": (True, False), "rrs": (True, True), "rrcs": (True, True),
  "nop": (False, False), "cpy": (False, False),
}
# Types that add what arrives to what the rank holds.
_REDUCING = ("rrc", "rrs", "rrcs")


@dataclasses.dataclass(eq=False)
class _Step:
  """One end of a transfer, as a step of a threadblock.

  Attributes:
    transfer: The transfer.
    round: Number of its round.
    sends: Whether this is the sending end.
    after: Steps of the same rank that must be done before this one.
    block: Its threadblock: the peers (send to, receive from), -1 for none.
    place: Its number in the threadblock, nops counted.
    awaited: Whether another threadblock's step waits for it.
  """

  transfer: Transfer
  round: int
  sends: bool
  after: list["_Step"]
  block: tuple[int, int] = (-1, -1)
  place: int = -1
  awaited: bool = False


def export_xml(schedule: Schedule, protocol: str = "Simple") -> str:
  """Writes a schedule as an MSCCL algorithm.

  Args:
    schedule: A schedule that `parallel.schedules.check` has proven.
    protocol: The transport protocol: "Simple", "LL" or "LL128".

  Returns:
    The text of an XML file in MSCCL's old format.

  Raises:
    ValueError: A threadblock would have more than ``MAX_STEPS`` steps, or
      ranks own different numbers of chunks.
  """
  buffer, offsets, sizes = _buffers(schedule)
  blocks = _threadblocks(schedule)
  algorithm = ElementTree.Element("algo", {
    "name": schedule.name, "proto": protocol, "nchannels": "1",
    "nchunksperloop": str(schedule.num_chunks),
    "ngpus": str(schedule.num_ranks), "coll": _NAMES[schedule.collective],
    "inplace": "1", "outofplace": "0",
  })
  for rank in range(schedule.num_ranks):
    gpu = ElementTree.SubElement(
      algorithm, "gpu", {"id": str(rank), **sizes}
    )
    numbers = {peers: i for i, peers in enumerate(sorted(blocks[rank]))}
    for peers, number in numbers.items():
      block = ElementTree.SubElement(gpu, "tb", {
        "id": str(number), "send": str(peers[0]), "recv": str(peers[1]),
        "chan": "0",
      })
      for step in blocks[rank][peers]:
        # A step has one `depid` only. All but the last dependency are waited
        # for by nops, whose buffers mean nothing.
        for before in step.after[:-1]:
          _add_step(block, "nop", ("i", -1, "o", -1, 0), before, numbers)
        # Sender and receiver use the same buffer and offset (in place).
        reduces = step.transfer.operation == "reduce"
        kind = "s" if step.sends else "rrc" if reduces else "r"
        offset = offsets[step.transfer.chunk]
        element = _add_step(
          block, kind, (buffer, offset, buffer, offset, 1),
          step.after[-1] if step.after else None, numbers,
        )
        element.set("hasdep", str(int(step.awaited)))
        element.set("round", str(step.round))
  ElementTree.indent(algorithm)
  return ElementTree.tostring(algorithm, encoding="unicode") + "\n"


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
) -> list[dict[tuple[int, int], list[_Step]]]:
  """Puts both ends of all transfers into threadblocks.

  Returns:
    ``[rank]``: (peer to send to, peer to receive from) -> steps, each with the
    steps that it waits for.
  """
  blocks = [collections.defaultdict(list) for _ in range(schedule.num_ranks)]
  # (rank, chunk) -> the steps that write it, and the ones that read it since
  # the last write.
  writes: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)
  reads: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)

  def add(rank: int, peers: tuple[int, int], step: _Step) -> None:
    # Steps of one threadblock run in order and need not wait for each other.
    step.after = [s for s in step.after if s.block != peers]
    for before in step.after:
      before.awaited = True
    block = blocks[rank][peers]
    step.block = peers
    # Each dependency but the last one is a nop before the step.
    end = block[-1].place + 1 if block else 0
    step.place = end + max(len(step.after) - 1, 0)
    block.append(step)
    if step.place >= MAX_STEPS:
      raise ValueError(
        f"{schedule.name}: rank {rank} has more than {MAX_STEPS} steps with "
        f"rank {max(peers)}, which MSCCL does not take"
      )

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
      add(t.source, (t.destination, -1), step)
    for t in transfers:
      held = (t.destination, t.chunk)
      # Threadblocks run side by side. So a write waits for the last write of
      # the chunk and for everyone who still has to read that value.
      step = _Step(t, number, False, writes[held][-1:] + reads.pop(held, []))
      writes[held].append(step)
      add(t.destination, (-1, t.source), step)
  return blocks


def _add_step(
  block: ElementTree.Element,
  kind: str,
  where: tuple[str, int, str, int, int],
  before: _Step | None,
  numbers: dict[tuple[int, int], int],
) -> ElementTree.Element:
  """Appends a step to a threadblock; it waits for the step `before`, if any."""
  keys = ("srcbuf", "srcoff", "dstbuf", "dstoff", "cnt")
  return ElementTree.SubElement(block, "step", {
    "s": str(len(block)), "type": kind,
    **dict(zip(keys, map(str, where), strict=True)),
    "depid": str(numbers[before.block] if before else -1),
    "deps": str(before.place if before else -1), "hasdep": "0",
  })


def import_xml(text: str, topology: Topology | None = None) -> Schedule:
  """Reads an MSCCL algorithm.

  Rounds are those of the attribute `round` if all steps have it, as in files
  that `export_xml` wrote. In other files, a chunk is sent on in the round after
  it has arrived at the earliest, and a connection sends one message per round.

  Args:
    text: XML in MSCCL's old format, in which steps are ``step`` elements.
    topology: The network, in which messages take shortest paths. None gives
      every pair of ranks a link of its own.

  Returns:
    The schedule. It is not proven yet: `parallel.schedules.check` does that.

  Raises:
    ValueError: The text is not such XML, is another collective, uses scratch
      buffers, copies a chunk to another place, has sends and receives that do
      not match, or has steps that wait for one another in a circle.
  """
  try:
    root = ElementTree.fromstring(text)
  except ElementTree.ParseError as error:
    raise ValueError(f"no XML: {error}") from error
  collectives = {short: name for name, short in _NAMES.items()}
  if root.tag != "algo" or root.get("coll") not in collectives:
    raise ValueError(
      f"<{root.tag} coll={root.get('coll')!r}>: must be <algo> with coll one "
      f"of {', '.join(collectives)}"
    )
  collective = collectives[root.get("coll")]
  num_ranks = _integer(root, "ngpus")
  num_chunks = _integer(root, "nchunksperloop")
  each = num_chunks // num_ranks  # chunks of a rank's slice
  messages = _messages(root, collective, each)
  rounds = [m.round for m in messages]
  if None in rounds:
    rounds = _earliest_rounds(root, messages)
  found: list[list[Transfer]] = [[] for _ in range(max(rounds, default=-1) + 1)]
  for message, number in zip(messages, rounds, strict=True):
    ends = (message.source, message.destination)
    for chunk in message.chunks:
      operation = "reduce" if message.reduces else "copy"
      path = topology.shortest_path(*ends) if topology else ends
      found[number].append(Transfer(*ends, chunk, operation, path))
  owners = () if collective == "all_reduce" else tuple(
    chunk // each for chunk in range(num_chunks)
  )
  return Schedule(
    root.get("name", "msccl"), collective, num_ranks, num_chunks,
    tuple(map(tuple, found)), owners,
  )


@dataclasses.dataclass
class _Message:
  """A send and the receive that it meets; each is a (rank, threadblock, step).

  The round is None if the file does not say.
  """

  source: int
  destination: int
  chunks: range
  reduces: bool
  round: int | None
  send: tuple[int, int, int]
  receive: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Half:
  """A send or a receive of a file; the key is its (rank, threadblock, step).

  The round is None if the file does not say.
  """

  key: tuple[int, int, int]
  chunks: range
  kind: str
  round: int | None


def _messages(
  root: ElementTree.Element, collective: str, each: int
) -> list[_Message]:
  """Matches the sends and receives of a file; slices have `each` chunks."""
  # (source, destination, channel) -> its sends, and its receives. On one
  # connection the i-th send meets the i-th receive.
  sent: dict[tuple[int, int, int], list[_Half]] = {}
  received: dict[tuple[int, int, int], list[_Half]] = {}
  for gpu, block, step in _steps(root):
    rank, kind = _integer(gpu, "id"), step.get("type", "")
    key = (rank, _integer(block, "id"), _integer(step, "s"))
    if kind not in _TYPES:
      raise ValueError(
        f"gpu {rank}: a step of type {kind!r} is not read; types read: "
        f"{', '.join(_TYPES)}"
      )
    if kind == "cpy" and _chunks(step, "src", rank, collective, each) != (
      _chunks(step, "dst", rank, collective, each)
    ):
      raise ValueError(f"gpu {rank}: a local copy moves a chunk elsewhere")
    channel = _integer(block, "chan")
    label = step.get("round")
    for happens, side, peer, halves in zip(
      _TYPES[kind], ("dst", "src"), ("recv", "send"), (received, sent),
      strict=True,
    ):
      if not happens:
        continue
      if kind in ("rcs", "rrcs"):
        side = "dst"  # what it sends is what it has just stored
      ends = (rank, _integer(block, peer))
      ends = ends if peer == "send" else ends[::-1]
      halves.setdefault((*ends, channel), []).append(_Half(
        key, _chunks(step, side, rank, collective, each), kind,
        None if label is None else int(label),
      ))
  messages = []
  for (source, destination, channel), sends in sent.items():
    receives = received.pop((source, destination, channel), [])
    if len(sends) != len(receives):
      raise ValueError(
        f"rank {source} sends {len(sends)} times to rank {destination} on "
        f"channel {channel}, which receives {len(receives)} times"
      )
    for s, r in zip(sends, receives, strict=True):
      if s.chunks != r.chunks:
        raise ValueError(
          f"rank {source} sends chunks {list(s.chunks)}, rank {destination} "
          f"stores them as {list(r.chunks)}"
        )
      messages.append(_Message(
        source, destination, s.chunks, r.kind in _REDUCING, s.round, s.key,
        r.key,
      ))
  if received:
    source, destination, _ = next(iter(received))
    raise ValueError(f"rank {destination} receives from rank {source}, "
                     "which does not send")
  return messages


def _steps(
  root: ElementTree.Element,
) -> Iterator[tuple[ElementTree.Element, ...]]:
  """Yields the gpu, threadblock and step of each step, in file order."""
  for gpu in root.iter("gpu"):
    for block in gpu.iter("tb"):
      for step in block.iter("step"):
        yield gpu, block, step


def _chunks(
  step: ElementTree.Element, side: str, rank: int, collective: str, each: int
) -> range:
  """Returns the chunks of a step's side, "src" or "dst", in any buffer."""
  buffer = step.get(f"{side}buf")
  first = _integer(step, f"{side}off")
  if buffer not in ("i", "o"):
    raise ValueError(
      f"gpu {rank}: the buffer {buffer!r} is not read, only i and o"
    )
  # One of the two buffers is as long as a slice; its offsets start at the
  # rank's own slice.
  short = {"all_gather": "i", "reduce_scatter": "o"}.get(collective)
  if buffer == short:
    first += rank * each
  return range(first, first + _integer(step, "cnt"))


def _earliest_rounds(
  root: ElementTree.Element, messages: list[_Message]
) -> list[int]:
  """Returns the earliest round that each message's dependencies allow."""
  sent = {m.send: i for i, m in enumerate(messages)}
  received = {m.receive: i for i, m in enumerate(messages)}
  # Each step waits for the one before it in its threadblock, and for the one
  # that `depid` and `deps` name; -1 there names none.
  before: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
  for gpu, block, step in _steps(root):
    rank, number = _integer(gpu, "id"), _integer(block, "id")
    place = _integer(step, "s")
    other = (rank, _integer(step, "depid"), _integer(step, "deps"))
    before[rank, number, place] = [
      key for key in ((rank, number, place - 1), other) if key[2] >= 0
    ]
  rounds = [0] * len(messages)
  after = dict.fromkeys(before, 0)  # the first round that may follow a step

  def ready(key: tuple[int, int, int]) -> int:
    """Returns the first round in which a step may happen."""
    return max(
      # A send that follows a send in its threadblock goes one round later:
      # a connection sends one message per round.
      (after[k] + (k[:2] == key[:2] and k in sent and key in sent)
       for k in before[key] if k in after),
      default=0,
    )

  # Both ends of a message are in the same round, so each pushes the other to a
  # later one: there is no order in which one pass would do. Rounds only grow,
  # so passes are repeated until nothing changes. If they never stop changing,
  # steps wait for one another.
  for _ in range(len(messages) + 2):
    old = dict(after)
    for key in before:
      at = ready(key)
      if key in received:
        # What has arrived in a round can be used from the next round on.
        rounds[received[key]] = max(rounds[received[key]], at)
        at = max(at, rounds[received[key]] + 1)
      if key in sent:
        at = rounds[sent[key]] = max(rounds[sent[key]], at)
      after[key] = at
    if after == old:
      return rounds
  raise ValueError("steps wait for one another in a circle")


def _integer(element: ElementTree.Element, key: str) -> int:
  """Reads an attribute that must be an integer."""
  text = element.get(key, "")
  if not text.lstrip("-").isdigit():
    raise ValueError(f"<{element.tag}>: {key}={text!r} must be an integer")
  return int(text)
