"""Import of XML of MSCCL, from `exporter` or another tool, as a schedule.

A file is a program: threadblocks run concurrently, each executes its steps in
order. The program is executed here on symbolic values, and two properties are
checked that a schedule cannot express: no step waits for itself, and if two
steps use the same position of a buffer and one of them writes, one waits for
the other. The result of the program is then deterministic. It is converted to a
schedule, which `parallel.plans.schedules.check` proves.

A connection is assumed to buffer any number of messages that have not been
received yet. In a schedule, a rank has one copy of each chunk, so each chunk
must have its own position in the input and the output buffer. A scratch buffer
may keep chunks that have arrived, and their sums, until a step adds them to the
rank's copy or replaces it; in the schedule, that step receives the chunks.
"""

import collections
from collections.abc import Callable
import dataclasses
import graphlib
import itertools
from xml.etree import ElementTree

import networkx

from parallel.plans.schedules.msccl.exporter import MAX_CHUNKS
from parallel.plans.schedules.msccl.steps import (
  BlockStep,
  Message,
  Value,
  integer,
  match_messages,
  read_steps,
)
from parallel.plans.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.plans.topology.graph import Topology

# Both spellings: one runtime has an underscore in "reduce_scatter".
_COLLECTIVES = {
  text: name for name in COLLECTIVES for text in (name, name.replace("_", ""))
}
_Place = tuple[int, str, int]  # rank, buffer, offset


def import_xml(text: str, topology: Topology | None = None) -> Schedule:
  """Converts an MSCCL algorithm to a schedule.

  If all steps have the attribute `round`, as in files of `export_xml`, it sets
  the rounds. In other files the rounds are the earliest possible ones in which
  a chunk is forwarded in a later round than it arrives, a connection sends one
  message per round, and a message arrives after the steps before its receive.

  Args:
    text: XML in MSCCL's old format, in which steps are ``step`` elements.
    topology: Network in which messages take shortest paths. None stands for a
      network with a link between each pair of ranks.

  Returns:
    The schedule, not checked. `parallel.plans.schedules.check` proves it.

  Raises:
    ValueError: The text is not such XML or names another collective; sends and
      receives do not match; steps wait for one another in a cycle, or use a
      position of a buffer without waiting; a chunk is stored in the position of
      another one; or no sequence of rounds gives the same result.
  """
  try:
    root = ElementTree.fromstring(text)
  except ElementTree.ParseError as error:
    raise ValueError(
      f"the text is not XML ({error}); pass an XML program of MSCCL, not a "
      "JSON plan of MSCCL++"
    ) from error
  program = _Program(root)
  program.run()
  rounds = _earliest_rounds(program)
  found: dict[int, list[Transfer]] = {number: [] for number in sorted(rounds)}
  for message, chunk, operation in program.transfers:
    ends = (message.source.rank, message.destination.rank)
    path = topology.shortest_path(*ends) if topology else ends
    found[rounds[message.number]].append(
      Transfer(*ends, chunk, operation, path)
    )
  owners = () if program.collective == "all_reduce" else tuple(
    chunk // program.each for chunk in range(program.num_chunks)
  )
  return Schedule(
    root.get("name", "msccl"), program.collective, program.num_ranks,
    program.num_chunks,
    # A round of messages that no step adds or copies has no transfer.
    tuple(tuple(transfers) for transfers in found.values() if transfers),
    owners,
  )


class _Program:
  """Steps and messages of a file, and the results of their execution.

  Attributes:
    collective: Name of the collective.
    num_ranks: Number of GPUs.
    num_chunks: Number of chunks in the longer one of input and output buffer.
    each: Number of chunks in each rank's slice.
    steps: All steps, by number.
    messages: All messages, by number.
    connections: Messages of each connection, in order.
    transfers: Result of `run`: (message, chunk, operation).
    writes: (rank, chunk) -> messages that changed the rank's copy, each with
      its operation, in order.
    reads: (rank, chunk, number of earlier writes) -> messages that send the
      value of the rank's copy after these writes.
  """

  def __init__(self, root: ElementTree.Element) -> None:
    if root.tag != "algo" or root.get("coll") not in _COLLECTIVES:
      raise ValueError(
        f"<{root.tag} coll={root.get('coll')!r}>: must be <algo> with coll one "
        f"of {', '.join(_COLLECTIVES)}, as in programs of MSCCL; graphs and "
        "topologies of NCCL are not read"
      )
    self.collective = _COLLECTIVES[root.get("coll")]
    self.num_ranks = integer(root, "ngpus")
    self.num_chunks = integer(root, "nchunksperloop")
    numbers = [integer(gpu, "id") for gpu in root.iter("gpu")]
    if not 1 <= self.num_ranks == len(numbers) or (
      sorted(numbers) != list(range(len(numbers)))
    ):
      raise ValueError(
        f"ngpus={self.num_ranks} must have a <gpu> for each id from 0 to ngpus "
        f"- 1, but the program has {len(numbers)}"
      )
    self.each, rest = divmod(self.num_chunks, self.num_ranks)
    if not 1 <= self.num_chunks <= MAX_CHUNKS or (
      rest and self.collective != "all_reduce"
    ):
      raise ValueError(
        f"nchunksperloop={self.num_chunks} must be from 1 to {MAX_CHUNKS}, and "
        f"a multiple of ngpus={self.num_ranks} unless coll is allreduce"
      )
    # The buffer that has only a rank's slice; None if both have all chunks.
    self._short = {"all_gather": "i", "reduce_scatter": "o"}.get(
      self.collective
    )
    # In place, the short buffer is a part of the long one.
    self._in_place = root.get("inplace", "1") != "0"
    self.steps, ends = read_steps(root)
    self.connections = match_messages(ends)
    self.messages = [m for queue in self.connections for m in queue]
    for number, message in enumerate(self.messages):
      message.number = number
    self.transfers: list[tuple[Message, int, str]] = []
    self.writes: dict[tuple[int, int], list[tuple[Message, str]]] = (
      collections.defaultdict(list)
    )
    self.reads: dict[tuple[int, int, int], list[Message]] = (
      collections.defaultdict(list)
    )
    self._held: dict[_Place, Value] = {}

  def run(self) -> None:
    """Runs the steps in an order that respects all dependencies.

    Raises:
      ValueError: There is no such order, its result is not deterministic, or a
        step has no equivalent in a schedule.
    """
    before = {
      step.number: [
        *step.after, *([step.receives.source.number] if step.receives else [])
      ]
      for step in self.steps
    }
    try:
      order = list(graphlib.TopologicalSorter(before).static_order())
    except graphlib.CycleError as error:
      circle = [str(self.steps[number]) for number in error.args[1]]
      raise ValueError(
        f"steps wait for one another in a cycle: {circle[0]} and {circle[1]}"
      ) from error
    races = _Races(before)
    for number in order:
      races.begin(number)
      self._run_step(self.steps[number], races)
    for rank in range(self.num_ranks):
      for offset in range(
        self.each if self._short == "o" else self.num_chunks
      ):
        chunk = self._chunk(rank, "o", offset)
        value = self._held_at((rank, "o", offset))
        newest = Value(chunk, len(self.writes[rank, chunk]))
        if value != newest:
          raise ValueError(
            f"gpu {rank}: offset {offset} of the output must end with the "
            f"final value of chunk {chunk}"
          )

  def _chunk(self, rank: int, buffer: str, offset: int) -> int | None:
    """Returns the chunk that a position of a rank's buffer is for.

    None for a position in a scratch buffer.
    """
    if buffer == "s":
      return None
    return offset + rank * self.each * (buffer == self._short)

  def _canonical(self, place: _Place) -> _Place:
    """Returns one name for a buffer position that input and output share.

    They share it if the program works in place; else ``place`` is returned.
    """
    if self._in_place and place[1] != "s":
      return place[0], "io", self._chunk(*place)
    return place

  def _held_at(self, place: _Place) -> Value | None:
    """Returns the value at buffer position ``place``; None if it is empty.

    Before any write it is the input.
    """
    rank, buffer, _ = place
    canonical = self._canonical(place)
    if canonical in self._held or buffer == "s":
      return self._held.get(canonical)
    chunk = self._chunk(*place)
    if self.collective == "all_gather" and chunk // self.each != rank:
      return None
    # Out of place, the output is empty initially.
    return Value(chunk, 0) if self._in_place or buffer == "i" else None

  def _run_step(self, step: BlockStep, races: "_Races") -> None:
    """Runs a step on symbolic values; records its sends and receives.

    ``races`` detects unordered uses of a buffer position.
    """
    if step.kind == "nop":
      return
    if step.receives and len(step.receives.values) != step.count:
      raise ValueError(
        f"{step} receives {step.count} chunks, but {step.receives.source} "
        f"sends {len(step.receives.values)}; the numbers must be equal"
      )
    for index in range(step.count):
      source, destination = (
        (step.rank, buffer, offset + index)
        for buffer, offset in (step.source, step.destination)
      )
      arrived = step.receives and dataclasses.replace(
        step.receives.values[index], messages=(step.receives,)
      )
      if step.kind in ("s", "cpy", "re", "rrc", "rrs", "rrcs"):
        self._check_access(races.read, step, source)
        value = self._held_at(source)
        if value is None:
          raise ValueError(f"{step} uses {_text(source)}, which holds nothing")
      if step.kind == "re":
        self._check_access(races.read, step, destination)
        arrived, value = value, self._held_at(destination)
      if step.kind in ("re", "rrc", "rrs", "rrcs"):
        value = self._sum(step, value, arrived)
      elif step.kind in ("r", "rcs"):
        value = arrived
      if step.kind not in ("s", "rrs"):
        self._check_access(races.write, step, destination)
        value = self._store(step, value, destination)
      if step.sends:
        if value.messages:
          raise ValueError(
            f"{step} forwards from scratch a chunk that was neither added nor "
            "copied"
          )
        step.sends.values.append(value)
        self.reads[step.rank, value.chunk, value.version].append(step.sends)

  def _check_access(
    self,
    access: Callable[[int, _Place], int | None],
    step: BlockStep,
    place: _Place,
  ) -> None:
    """Checks that buffer position ``place`` exists and that no race uses it.

    ``access`` is `_Races.read` or `_Races.write`.
    """
    _, buffer, offset = place
    size = self.each if buffer == self._short else self.num_chunks
    if offset < 0 or (buffer != "s" and offset >= size):
      raise ValueError(f"{step} uses {_text(place)}, which does not exist")
    other = access(step.number, self._canonical(place))
    if other is not None:
      raise ValueError(
        f"{step} and {self.steps[other]} both use {_text(place)}, and neither "
        "waits for the other"
      )

  def _sum(
    self, step: BlockStep, value: Value | None, arrived: Value
  ) -> Value:
    """Returns value + arrived, of which at most one is the rank's copy.

    A sum that includes the rank's copy is recorded as a receipt. One without it
    stays in scratch until a later step adds it to the copy or replaces that.
    """
    if value is None or value.chunk != arrived.chunk:
      raise ValueError(
        f"{step} adds chunk {arrived.chunk} to "
        f"{'nothing' if value is None else f'chunk {value.chunk}'}"
      )
    if not value.messages and not arrived.messages:
      raise ValueError(
        f"{step} adds two values of its own gpu; one of them must be received"
      )
    newest = Value(value.chunk, len(self.writes[step.rank, value.chunk]))
    if not all(v.messages or v == newest for v in (value, arrived)):
      raise ValueError(
        f"{step} adds chunk {arrived.chunk} to a value that is not the newest "
        "of that chunk"
      )
    messages = value.messages + arrived.messages
    both = dataclasses.replace(value, messages=messages)
    if value.messages and arrived.messages:
      return both
    return self._record_receipt(step, both, "reduce")

  def _record_receipt(
    self, step: BlockStep, value: Value, operation: str
  ) -> Value:
    """Records that messages change a rank's copy; returns the copy's new value.

    Args:
      step: Step that adds the messages to the copy, or replaces it.
      value: Value with the messages.
      operation: Operation of the first message; the other messages are added.
    """
    writes = self.writes[step.rank, value.chunk]
    for message in value.messages:
      writes.append((message, operation))
      self.transfers.append((message, value.chunk, operation))
      operation = "reduce"
    return Value(value.chunk, len(writes))

  def _store(self, step: BlockStep, value: Value, place: _Place) -> Value:
    """Stores a value at the buffer position ``place``, and returns it.

    Outside scratch it becomes the rank's copy of its chunk, as
    `_record_receipt` records.
    """
    chunk = self._chunk(*place)
    if chunk is not None:
      if chunk != value.chunk:
        raise ValueError(
          f"{step} stores chunk {value.chunk} in the place of chunk {chunk}; "
          "each chunk must have a place of its own"
        )
      if value.messages:
        value = self._record_receipt(step, value, "copy")
    self._held[self._canonical(place)] = value
    return value


def _text(place: _Place) -> str:
  """Formats a buffer position for error messages."""
  return f"place {place[2]} of buffer {place[1]!r}"


class _Races:
  """Detector of data races: conflicting uses that no dependency orders.

  Steps begin in an order in which each follows its dependencies.
  """

  def __init__(self, before: dict[int, list[int]]) -> None:
    self._before = before
    # Step -> bit mask; bit n is set if step n is complete when the step begins.
    # A mask is kept until the last step that waits for its step has begun.
    self._done: dict[int, int] = {}
    self._needed = collections.Counter(
      p for waits in before.values() for p in waits
    )
    # Position -> the step that wrote it last, and steps that have read it
    # since.
    self._written: dict[_Place, int] = {}
    self._read: dict[_Place, set[int]] = collections.defaultdict(set)

  def begin(self, number: int) -> None:
    """Makes step ``number`` the current one; its reads and writes follow."""
    mask = 1 << number  # a step is ordered with itself
    for other in self._before[number]:
      mask |= self._done[other]
      self._needed[other] -= 1
      if not self._needed[other]:
        del self._done[other]
    self._mask = mask
    if self._needed[number]:
      self._done[number] = mask

  def read(self, number: int, place: _Place) -> int | None:
    """Records that step ``number`` reads the buffer position ``place``.

    Returns a step that writes there and is not ordered with it, or None.
    """
    self._read[place].add(number)
    return self._unordered([self._written.get(place, number)])

  def write(self, number: int, place: _Place) -> int | None:
    """Records that step ``number`` writes the buffer position ``place``.

    Returns a step that uses it and is not ordered with the write, or None.
    """
    others = [self._written.get(place, number), *self._read.pop(place, ())]
    self._written[place] = number
    return self._unordered(others)

  def _unordered(self, others: list[int]) -> int | None:
    return next((n for n in others if not self._mask >> n & 1), None)


def _earliest_rounds(program: _Program) -> list[int]:
  """Returns each message's round: the earliest with the program's result.

  Raises:
    ValueError: No such rounds exist: the value that a message overwrites is
      still in transit to a step that must wait for later steps.
  """
  # Nodes: messages, by number, for their rounds; steps, by ~number, for the
  # first round after them. An edge (a, b) of weight w means b >= a + w.
  graph = networkx.DiGraph()
  graph.add_nodes_from(range(len(program.messages)))

  def follows(a: int, b: int, weight: int) -> None:
    if a != b and weight >= graph.get_edge_data(a, b, {"w": 0})["w"]:
      graph.add_edge(a, b, w=weight)

  labels = [message.label for message in program.messages]
  if None in labels:
    labels = [0] * len(labels)
    _add_wait_constraints(program, follows)
  _add_value_constraints(program, follows)
  # All nodes of a cycle are in one round, so its edges must have weight 0.
  whole = networkx.condensation(graph)
  group = whole.graph["mapping"]
  first = dict.fromkeys(whole, 0)
  for number, label in enumerate(labels):
    first[group[number]] = max(first[group[number]], label)
  for a, b, weight in graph.edges(data="w"):
    if group[a] != group[b]:
      edge = whole.edges[group[a], group[b]]
      edge["w"] = max(edge.get("w", 0), weight)
    elif weight:
      raise ValueError("no sequence of rounds gives the result of these steps")
  for node in networkx.topological_sort(whole):
    for _, other, weight in whole.edges(node, data="w"):
      first[other] = max(first[other], first[node] + weight)
  return [first[group[number]] for number in range(len(labels))]


def _add_wait_constraints(
  program: _Program, follows: Callable[[int, int, int], None]
) -> None:
  """Constrains rounds by the order of steps, dependencies and connections.

  ``follows(a, b, w)`` demands that b is at least w rounds after a, where a
  message is given by its number and a step by ~number.
  """
  for step in program.steps:
    messages = [m.number for m in (step.receives, step.sends) if m]
    for before in step.after:
      for number in (*messages, ~step.number):
        follows(~before, number, 0)
    if step.receives:
      # A received chunk is sent in a later round.
      for number in (*messages[1:], ~step.number):
        follows(step.receives.number, number, 1)
  for queue in program.connections:
    for a, b in itertools.pairwise(queue):
      follows(a.number, b.number, 1)


def _add_value_constraints(
  program: _Program, follows: Callable[[int, int, int], None]
) -> None:
  """Constrains rounds: a value is written, then read, and then replaced.

  ``follows`` is that of `_add_wait_constraints`.
  """
  for (rank, chunk), writes in program.writes.items():
    for version, (message, _) in enumerate(writes):
      # Transfers of a round read the state before it, so a value may be read in
      # the round that replaces it.
      for reader in program.reads[rank, chunk, version]:
        follows(reader.number, message.number, 0)
      for reader in program.reads[rank, chunk, version + 1]:
        follows(message.number, reader.number, 1)
    for (a, before), (b, operation) in itertools.pairwise(writes):
      # Sums of one round commute.
      sums = before == operation == "reduce"
      follows(a.number, b.number, 0 if sums else 1)
