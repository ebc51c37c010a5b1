"""Schedules as MSCCL's XML, which its runtime executes on GPUs, and back.

A threadblock of a rank sends to one peer or receives from one, in the order
of the rounds; `depid` and `deps` make a step wait for one of another
threadblock, a "nop" for one more. All three collectives work in place: an
all-gather in the output buffer, the others in the input buffer. Paths are not
part of the format: the network takes the message where it will. The attribute
`round` of a step is ours; MSCCL looks attributes up by their names.

Source: microsoft/msccl-tools, msccl/language/ir.py (old format), and the
files of Azure/msccl-scheduler. Written files were not run on GPUs.
"""

import collections
from collections.abc import Iterator
import dataclasses
from xml.etree import ElementTree

from parallel.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.topology import Topology

MAX_STEPS = 256  # of a threadblock: MSCCL_MAX_NUM_STEPS

_NAMES = {name: name.replace("_", "") for name in COLLECTIVES}
# Type of a step -> whether it receives, and whether it sends.
_TYPES = {
  "s": (False, True), "r": (True, False), "rcs": (True, True),
  "rrc": (True, False), "rrs": (True, True), "rrcs": (True, True),
  "nop": (False, False), "cpy": (False, False),
}
_REDUCING = ("rrc", "rrs", "rrcs")


@dataclasses.dataclass(eq=False)
class _Step:
  """One end of a transfer."""

  transfer: Transfer
  round: int
  sends: bool
  after: list["_Step"]
  block: tuple[int, int] = (-1, -1)  # peers: (send, recv)
  place: int = -1  # in its threadblock, nops counted
  awaited: bool = False


def export_xml(schedule: Schedule, protocol: str = "Simple") -> str:
  """An MSCCL algorithm.

  Args:
    schedule: One that `parallel.schedules.check` has proven.
    protocol: "Simple", "LL" or "LL128".

  Raises:
    ValueError: A threadblock would have more steps than MSCCL takes.
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
        for before in step.after[:-1]:
          _add_step(block, "nop", ("i", -1, "o", -1, 0), before, numbers)
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
  """The buffer in use, the place of each chunk in it, sizes in chunks."""
  chunks = schedule.num_chunks
  offsets = list(range(chunks))
  if schedule.owners:  # slices lie in the order of the ranks
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
  """Per rank: (send peer, receive peer) -> steps, with what they wait for."""
  blocks = [collections.defaultdict(list) for _ in range(schedule.num_ranks)]
  writes: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)
  reads: dict[tuple[int, int], list[_Step]] = collections.defaultdict(list)

  def add(rank: int, peers: tuple[int, int], step: _Step) -> None:
    step.after = [s for s in step.after if s.block != peers]
    for before in step.after:
      before.awaited = True
    block = blocks[rank][peers]
    step.block = peers
    # A dependency takes a step of its own, but for the last one.
    end = block[-1].place + 1 if block else 0
    step.place = end + max(len(step.after) - 1, 0)
    block.append(step)
    if step.place >= MAX_STEPS:
      raise ValueError(
        f"{schedule.name}: rank {rank} has more than {MAX_STEPS} steps with "
        f"rank {max(peers)}, which MSCCL does not take"
      )

  for number, unordered in enumerate(schedule.rounds):
    transfers = sorted(unordered)
    for t in transfers:
      held = (t.source, t.chunk)
      step = _Step(t, number, True, list(writes[held][-1:]))
      reads[held].append(step)
      add(t.source, (t.destination, -1), step)
    for t in transfers:
      held = (t.destination, t.chunk)
      # Threadblocks run side by side: one writes after the other.
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
  keys = ("srcbuf", "srcoff", "dstbuf", "dstoff", "cnt")
  return ElementTree.SubElement(block, "step", {
    "s": str(len(block)), "type": kind,
    **dict(zip(keys, map(str, where), strict=True)),
    "depid": str(numbers[before.block] if before else -1),
    "deps": str(before.place if before else -1), "hasdep": "0",
  })


def import_xml(text: str, topology: Topology | None = None) -> Schedule:
  """Reads an MSCCL algorithm.

  Steps that carry `round` keep it; for files of others a chunk moves a round
  after it has arrived, and a connection sends once a round.

  Args:
    text: XML in MSCCL's old format (``step``).
    topology: Of the paths, shortest ones; None: every rank reaches every
      other over a link of their own.

  Raises:
    ValueError: Not such XML, another collective, scratch buffers or local
      steps, or sends and receives that do not match.
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
  each = num_chunks // num_ranks
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
  """A send and the receive that it meets."""

  source: int
  destination: int
  chunks: range
  reduces: bool
  round: int | None
  send: tuple[int, int, int]  # (rank, threadblock, step)
  receive: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Half:
  """A send or a receive of an XML file."""

  key: tuple[int, int, int]
  chunks: range
  kind: str
  round: int | None


def _messages(
  root: ElementTree.Element, collective: str, each: int
) -> list[_Message]:
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
  for gpu in root.iter("gpu"):
    for block in gpu.iter("tb"):
      for step in block.iter("step"):
        yield gpu, block, step


def _chunks(
  step: ElementTree.Element, side: str, rank: int, collective: str, each: int
) -> range:
  """The chunks that a step names, whichever buffer it means."""
  buffer = step.get(f"{side}buf")
  first = _integer(step, f"{side}off")
  if buffer not in ("i", "o"):
    raise ValueError(
      f"gpu {rank}: the buffer {buffer!r} is not read, only i and o"
    )
  short = {"all_gather": "i", "reduce_scatter": "o"}.get(collective)
  if buffer == short:  # it has the rank's own slice only
    first += rank * each
  return range(first, first + _integer(step, "cnt"))


def _earliest_rounds(
  root: ElementTree.Element, messages: list[_Message]
) -> list[int]:
  """Rounds as early as threadblocks and dependencies allow."""
  sent = {m.send: i for i, m in enumerate(messages)}
  received = {m.receive: i for i, m in enumerate(messages)}
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
    return max(
      # One message of a connection in a round.
      (after[k] + (k[:2] == key[:2] and k in sent and key in sent)
       for k in before[key] if k in after),
      default=0,
    )

  # Ends of a message are in one round, so exchanges are circles: repeat until
  # nothing moves.
  for _ in range(len(messages) + 2):
    old = dict(after)
    for key in before:
      at = ready(key)
      if key in received:
        rounds[received[key]] = max(rounds[received[key]], at)
        at = max(at, rounds[received[key]] + 1)
      if key in sent:
        at = rounds[sent[key]] = max(rounds[sent[key]], at)
      after[key] = at
    if after == old:
      return rounds
  raise ValueError("steps wait for one another in a circle")


def _integer(element: ElementTree.Element, key: str) -> int:
  text = element.get(key, "")
  if not text.lstrip("-").isdigit():
    raise ValueError(f"<{element.tag}>: {key}={text!r} must be an integer")
  return int(text)
