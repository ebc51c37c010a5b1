"""Parser of the steps and messages of an MSCCL file."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from xml.etree import ElementTree

# Type of a step -> (whether it receives, whether it sends). In a type's name, r
# is receive, s send, rr receive and reduce, c copy to the destination; re adds
# and cpy copies on the same GPU.
TYPES = {
  "s": (False, True), "r": (True, False), "rcs": (True, True),
  "rrc": (True, False), "rrs": (True, True), "rrcs": (True, True),
  "re": (False, False), "cpy": (False, False), "nop": (False, False),
}


@dataclasses.dataclass(eq=False)
class BlockStep:
  """Step of a threadblock, such as a send, a receive or a reduction.

  Attributes:
    number: Number among all steps of the file.
    rank: GPU that runs the step.
    block: Number of the step's threadblock.
    place: Number of the step in its threadblock.
    kind: Key of ``TYPES``.
    source: Buffer ("i", "o" or "s") and offset that it reads.
    destination: Buffer and offset that it writes.
    count: Number of consecutive chunks, from these offsets on.
    label: Attribute `round`; None without one.
    awaited: Whether it signals its completion (attribute `hasdep`).
    after: Numbers of the steps of the same rank that must complete before it.
    receives: Message that it receives, if any.
    sends: Message that it sends, if any.
  """

  number: int
  rank: int
  block: int
  place: int
  kind: str
  source: tuple[str, int]
  destination: tuple[str, int]
  count: int
  label: int | None
  awaited: bool
  after: list[int]
  receives: "Message | None" = None
  sends: "Message | None" = None

  def __str__(self) -> str:
    return f"gpu {self.rank}, threadblock {self.block}, step {self.place}"


@dataclasses.dataclass(eq=False)
class Message:
  """Matched pair of a send and a receive.

  Attributes:
    number: Number among all messages.
    source: Step that sends it.
    destination: Step that receives it.
    label: Round given by the file; None if it gives none.
    values: Values that are sent; filled when the sending step runs.
  """

  number: int
  source: BlockStep
  destination: BlockStep
  label: int | None
  values: list["Value"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Value:
  """Symbolic content of a buffer position.

  Attributes:
    chunk: Chunk of which it is a copy or a partial sum.
    version: Number of times that the rank's copy of the chunk had changed when
      it was read.
    messages: Messages whose sum it is and that are not received yet, for a
      value in scratch; () for the rank's own copy.
  """

  chunk: int
  version: int
  messages: tuple[Message, ...] = ()


# (step, connection on which it sends or receives, whether it sends). A
# connection is (source, destination, channel).
_ConnectionEnd = tuple[BlockStep, tuple[int, int, int], bool]


def read_steps(root: ElementTree.Element) -> tuple[
  list[BlockStep], list[_ConnectionEnd]
]:
  """Returns all steps, and the connection of each send and receive.

  Raises:
    ValueError: An attribute is missing or wrong, or a step waits for one that
      does not exist.
  """
  steps: list[BlockStep] = []
  ends: list[_ConnectionEnd] = []
  numbers: dict[tuple[int, int, int], int] = {}
  waits: list[tuple[int, int, int]] = []
  for gpu in root.iter("gpu"):
    rank = integer(gpu, "id")
    for block in gpu.iter("tb"):
      number = integer(block, "id")
      for place, element in enumerate(block.iter("step")):
        key = (rank, number, place)
        kind = element.get("type", "")
        if kind not in TYPES:
          raise ValueError(
            f"gpu {rank}: steps of type {kind!r} are not supported; supported "
            f"are {', '.join(TYPES)}"
          )
        if integer(element, "s") != place or key in numbers:
          raise ValueError(
            f"gpu {rank}: the ids of threadblocks must differ, and the steps "
            f"of threadblock {number} must be numbered from 0"
          )
        numbers[key] = len(steps)
        waits.append((
          rank, integer(element, "depid"), integer(element, "deps")
        ))
        step = BlockStep(
          len(steps), *key, kind, _buffer_position(element, "src", rank),
          _buffer_position(element, "dst", rank), integer(element, "cnt"),
          integer(element, "round") if "round" in element.attrib else None,
          kind != "nop" and element.get("hasdep") == "1",
          [len(steps) - 1] if place else [],
        )
        steps.append(step)
        channel = integer(block, "chan")
        receives, sends = TYPES[kind]
        if receives:
          ends.append((step, (integer(block, "recv"), rank, channel), False))
        if sends:
          ends.append((step, (rank, integer(block, "send"), channel), True))
  _add_waits(steps, waits, numbers)
  return steps, ends


def _add_waits(
  steps: Sequence[BlockStep], waits: Sequence[tuple[int, int, int]],
  numbers: Mapping[tuple[int, int, int], int],
) -> None:
  """Adds to each step the step of another threadblock for which it waits.

  ``waits`` has (rank, threadblock, place in it) of the awaited step, with a
  negative threadblock for none; ``numbers`` are the numbers of such steps.
  """
  for step, wait in zip(steps, waits, strict=True):
    if wait[1] < 0:
      continue
    if wait not in numbers:
      raise ValueError(
        f"{step} waits for step {wait[2]} of threadblock {wait[1]}, which does "
        "not exist"
      )
    if not steps[numbers[wait]].awaited:
      raise ValueError(
        f"{step} waits for {steps[numbers[wait]]}, which does not signal its "
        'completion: it must have hasdep="1"'
      )
    step.after.append(numbers[wait])


def _buffer_position(
  element: ElementTree.Element, side: str, rank: int
) -> tuple[str, int]:
  """Returns the buffer and offset that a step reads ("src") or writes ("dst").

  ``element`` is the step's XML, and ``side`` one of the two words.
  """
  buffer = element.get(f"{side}buf")
  if buffer not in ("i", "o", "s"):
    raise ValueError(
      f"gpu {rank}: the buffer {buffer!r} is not supported; use i, o or s"
    )
  return buffer, integer(element, f"{side}off")


def match_messages(ends: Sequence[_ConnectionEnd]) -> list[list[Message]]:
  """Returns the messages of each connection: pairs of i-th send and receive.

  ``ends`` are (step, connection, whether it sends) in the order of steps.
  """
  sent: dict[tuple[int, int, int], list[BlockStep]] = {}
  received: dict[tuple[int, int, int], list[BlockStep]] = {}
  for step, connection, sends in ends:
    (sent if sends else received).setdefault(connection, []).append(step)
  queues = []
  for (source, destination, channel), sends in sent.items():
    receives = received.pop((source, destination, channel), [])
    if len(sends) != len(receives):
      raise ValueError(
        f"rank {source} sends {len(sends)} times to rank {destination} on "
        f"channel {channel}, which receives {len(receives)} times"
      )
    queue = []
    for a, b in zip(sends, receives, strict=True):
      message = a.sends = b.receives = Message(0, a, b, a.label)
      queue.append(message)
    queues.append(queue)
  if received:
    source, destination, _ = next(iter(received))
    raise ValueError(
      f"rank {destination} receives from rank {source}, which does not send to "
      "it"
    )
  return queues


def integer(element: ElementTree.Element, key: str) -> int:
  """Returns an attribute that must be an integer."""
  text = element.get(key, "")
  if not re.fullmatch(r"-?[0-9]{1,9}", text):
    raise ValueError(f"<{element.tag}>: {key}={text!r} must be an integer")
  return int(text)
