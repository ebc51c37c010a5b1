"""Collectives of a jax program, read from any of its forms.

`read` takes a jitted function and its arguments, a stage of its compilation,
the text of a program, or a folder that XLA has dumped. It needs nothing else of
this package: the program may be written with automatic or explicit sharding.

Information in each form:

| form | executed collectives | requested dtypes | names of mesh axes |
|---|---|---|---|
| function, traced or lowered | it is compiled for them | yes | yes |
| `jax.stages.Compiled` | yes | no | those of its arguments' shardings |
| optimized HLO, text or file | yes | no | if its first line names a mesh |
| folder of `--xla_dump_to` | yes | with `before_optimizations` | likewise |
| StableHLO, text or file | only explicit ones, as requested | yes | yes |

Without names, axes are inferred from the groups of devices and named by their
sizes (`parallel.ledger.groups.inferred_axes`).
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import pathlib
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh
import numpy as np

from parallel.ledger import hlo, ledger
from parallel.ledger.compiled import (
  SOURCE_TARGET_PAIRS,
  Reader,
  groups_list_replicas,
)
from parallel.ledger.dumps import Dump, read_dumps
from parallel.ledger.entries import Collective, UnknownInstruction
from parallel.ledger.groups import inferred_axes, replica_groups
from parallel.ledger.sources import RequestedDtypes, SourceLines, mesh_named_in

# Limit, since the device groups of all sets of axes are kept in memory.
_MAX_DEVICES = 1 << 17
_INFERRED_NOTE = (
  "The program does not name its mesh: axes are SIZE@STRIDE, inferred from the "
  "groups of devices."
)
# Text that occurs only in HLO before partitioning.
_UNPARTITIONED_TEXT = re.compile(
  r'xla\.sdy\.|custom_call_target="(Sharding|SPMD\w+)"|sharding=\{devices='
)
# Instructions that take no time.
_FREE_OPCODES = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota",
  "partition-id", "replica-id", "after-all",
}


@dataclasses.dataclass(frozen=True)
class Executed:
  """Operand of a collective, as compiled.

  Attributes:
    entry: The ledger's entry: kind, axes, dtype, shape and executions.
    requested: NumPy name of the dtype that the program requests; None if it is
      not known.
    source: FILE:LINE of the operation that made it, or else of the first use of
      its result; "" if neither is known.
    instruction: Name of the instruction, or of the start of an asynchronous
      pair; unique in the module.
    done: Name of the done of an asynchronous pair, else of the instruction.
    operand: Index of the operand.
    promoted: Whether the compiler marks it as widened.
    asynchronous: Whether it consists of a start and a done.
    between: Names of the instructions between its start and its done, in the
      order of execution, without those that take no time.
    inserted: Whether XLA marks it as made by the partitioner. Newer versions of
      XLA (jaxlib 0.12, not 0.10) mark some of these collectives.
  """

  entry: Collective
  requested: str | None
  source: str
  instruction: str = ""
  done: str = ""
  operand: int = 0
  promoted: bool = False
  asynchronous: bool = False
  between: tuple[str, ...] = ()
  inserted: bool = False

  @property
  def dtype_differs(self) -> bool:
    """Whether another dtype is sent than was requested."""
    return self.promoted or self.requested not in (None, self.entry.dtype)


@dataclasses.dataclass(frozen=True)
class HostTransfer:
  """Copy between device and host memory.

  Attributes:
    to_host: Whether it copies to the host, else to the device.
    bytes: Bytes of one execution on one device.
    count: Executions per execution of the program; None if unknown.
    source: FILE:LINE that made it; "" if it is not known.
    instruction: Name of its instruction, or of the start of a pair.
    asynchronous: Whether it consists of a start and a done.
  """

  to_host: bool
  bytes: int
  count: int | None
  source: str
  instruction: str
  asynchronous: bool


@dataclasses.dataclass(frozen=True)
class Reading:
  """Result of `read`.

  Attributes:
    axes: Mesh axis -> size, outermost first. If each TPU slice has a program,
      these are the sizes within a slice.
    executed: Operands of collectives in the order of execution, without those
      of zero bytes.
    unknown: Instructions that may communicate and are not in ``executed``.
      Only if there are none, a program without ``executed`` sends nothing.
    host: Copies between device and host in the order of execution.
    memory: "arguments", "results", "temporaries" and "program" (its code) ->
      bytes on one device; {} if the form of input has no sizes.
    notes: Sentences about information that the form of input lacks.
    module: The compiled program; None if it was not compiled.
  """

  axes: Mapping[str, int]
  executed: tuple[Executed, ...]
  unknown: tuple[UnknownInstruction, ...] = ()
  host: tuple[HostTransfer, ...] = ()
  memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()
  module: hlo.Module | None = dataclasses.field(default=None, repr=False)

  @property
  def mesh(self) -> AbstractMesh:
    """Mesh of the axes, without devices."""
    return _mesh(self.axes)

  @property
  def entries(self) -> list[Collective]:
    """Entries for `parallel.ledger.ledger.total` and `select`."""
    return [e.entry for e in self.executed]

  def check_timed(self, flag: str) -> None:
    """Raises ValueError, naming ``flag``, if collectives have unknown times."""
    if self.module is None:
      raise ValueError(
        f"{flag} needs a compiled program, but this program is not compiled"
      )
    if any(e.wire_bytes_ring is None for e in self.entries):
      raise ValueError(
        f"{flag} needs the number of devices: the program's first line must "
        "have num_partitions=N or replica_count=N"
      )


def read(
  program: Any, *args: Any,
  mesh: jax.sharding.Mesh | AbstractMesh | None = None, **kwargs: Any,
) -> Reading:
  """Reads what a program sends.

  Args:
    program: Function made by `jax.jit`, with its arguments in ``args`` and
      ``kwargs``; `jax.stages.Traced`, ``Lowered`` or ``Compiled``; text of
      optimized HLO or of StableHLO; or a path of a file with such text, or of a
      folder that XLA has dumped.
    *args: Arguments of a function, arrays or `jax.ShapeDtypeStruct`.
    mesh: Mesh that names the axes; None to find them in the program.
    **kwargs: Keyword arguments of a function.

  Raises:
    ValueError: The program is none of these, a file is incomplete, a folder has
      no program or several, or ``mesh`` is not the program's.

  Example:
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> data = NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))
    >>> x = jax.ShapeDtypeStruct([8], "float32", sharding=data)
    >>> dict(read(jax.jit(jax.numpy.sum), x).axes)
    {'data': 1}
  """
  if isinstance(program, (str, pathlib.Path)):
    return _read_text(program, mesh)
  if isinstance(program, jax.stages.Compiled):
    return _of_compiled(program, mesh)
  if callable(getattr(program, "lower", None)):  # a function, or Traced
    program = program.lower(*args, **kwargs)
  if not isinstance(program, jax.stages.Lowered):
    raise ValueError(
      f"the program is of type {type(program).__name__}; it must be a jitted "
      "function, one of its stages (traced, lowered, compiled), a text or a "
      "path"
    )
  try:
    compiled = _compile(program)
  except jax.errors.JaxRuntimeError as error:
    found = _of_text(program.as_text(debug_info=True), "the program", mesh)
    why = f"XLA cannot compile it here: {str(error).splitlines()[0]}"
    return dataclasses.replace(found, notes=(*found.notes, why))
  return _of_compiled(compiled, mesh, _unoptimized(program))


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  """Compiles a program with source lines in the key of the persistent cache.

  Otherwise the cache may return an equal program compiled from other lines, by
  which requested dtypes cannot be found.
  """
  key = "jax_compilation_cache_include_metadata_in_key"
  before = getattr(jax.config, key)
  jax.config.update(key, True)
  try:
    return lowered.compile()
  finally:
    jax.config.update(key, before)


def read_all(
  folder: str | pathlib.Path,
  mesh: jax.sharding.Mesh | AbstractMesh | None = None,
) -> dict[str, Reading]:
  """Returns name -> reading of each program in a folder of `--xla_dump_to`."""
  return {d.name: _of_dump(d, mesh) for d in read_dumps(pathlib.Path(folder))}


def _read_text(program: str | pathlib.Path, mesh: Any) -> Reading:
  if isinstance(program, str) and ("\n" in program or not program):
    return _of_text(program, "the text", mesh)
  path = pathlib.Path(program)
  try:
    found = read_dumps(path) if path.is_dir() else []
    text = "" if found else path.read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{str(path)[:80]}: {error}") from error
  if not found:
    return _of_text(text, str(path), mesh)
  if len(found) > 1:
    raise ValueError(
      f"{path} must have one program, but has {len(found)}: "
      f"{', '.join(d.name for d in found)}"
    )
  return _of_dump(found[0], mesh)


def _of_text(text: str, name: str, mesh: Any) -> Reading:
  if not re.search(r"^module\b", text, re.MULTILINE):
    return _of_dump(Dump(name, text, None), mesh)
  named = dict(mesh.shape) if mesh else mesh_named_in([text])
  try:
    found, unknown, axes = ledger.of_text(text, named)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
  return Reading(
    axes, tuple(Executed(e, e.dtype, e.where) for e in found if e.bytes),
    tuple(unknown), notes=(
      "Not compiled: collectives of automatic partitioning are not included.",
      *[_INFERRED_NOTE] * (not named),
    ),
  )


def _of_dump(dump: Dump, mesh: Any) -> Reading:
  try:
    module = hlo.parse(dump.optimized)
    return _of_module(module, dump.optimized, dump.unoptimized, mesh)
  except ValueError as error:
    raise ValueError(f"{dump.name}: {error}") from error
  except LookupError as error:  # a missing operand or callee
    raise ValueError(
      f"{dump.name} is damaged: an instruction refers to a part that is "
      f"missing ({type(error).__name__}: {error})"
    ) from error


def _of_compiled(
  compiled: jax.stages.Compiled, mesh: Any, unoptimized: str | None = None
) -> Reading:
  text = compiled.as_text()
  if mesh is None:
    meshes = [
      s.mesh for s in jax.tree.leaves(compiled.input_shardings)
      if isinstance(s, jax.sharding.NamedSharding) and not s.mesh.empty
    ]
    mesh = max(meshes, key=lambda m: m.size, default=None)
  reading = _of_module(hlo.parse(text), text, unoptimized, mesh)
  analysis = compiled.memory_analysis()
  sizes = {} if analysis is None else {
    "arguments": analysis.argument_size_in_bytes,
    "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    "temporaries": analysis.temp_size_in_bytes,
    "program": analysis.generated_code_size_in_bytes,
  }
  return dataclasses.replace(reading, memory=sizes)


def _unoptimized(lowered: jax.stages.Lowered) -> str:
  """Returns the HLO text before XLA's optimizations, with source lines."""
  return lowered.compiler_ir("hlo").as_hlo_module().to_string()


def _of_module(
  module: hlo.Module, text: str, unoptimized: str | None, mesh: Any
) -> Reading:
  """Reads an optimized module.

  Args:
    module: The module.
    text: Its text.
    unoptimized: Text before XLA's optimizations; None if it is not known.
    mesh: Mesh that names the axes; None to find them.
  """
  axes, counted, notes = _axes(module, text, unoptimized, mesh)
  reader, lines = Reader(module, _mesh(axes), False, counted), SourceLines(text)
  requested = None if unoptimized is None else RequestedDtypes(unoptimized)
  if requested is None:
    notes.append(
      "Requested dtypes are not known: they need the program before XLA's "
      "optimizations."
    )
  if not module.scheduled:
    notes.append("The program is not scheduled: nothing is known of overlap.")
  executed, host = [], []
  for computation, count in reader.runs():
    for index, instruction in enumerate(computation.instructions):
      executed += (
        dataclasses.replace(
          found, entry=dataclasses.replace(found.entry, count=count)
        )
        for found in _operands_of_collective(
          reader, computation, index, lines, requested
        )
        if found.entry.bytes
      )
      if copied := reader.host_copy(computation, index):
        host.append(HostTransfer(
          *copied, count, lines.of(instruction), instruction.name,
          reader.done(computation, index) > index,
        ))
  if any(e.dtype_differs for e in executed):
    notes.append("The compiler sends other dtypes than the program requests.")
  unknown = [*reader.all_unknown(lines)]
  if not module.scheduled and _UNPARTITIONED_TEXT.search(text):
    unknown.append(UnknownInstruction("", "automatic partitioning by XLA"))
  return Reading(
    axes, tuple(executed), tuple(unknown), tuple(host), notes=tuple(notes),
    module=module,
  )


def _axes(
  module: hlo.Module, text: str, unoptimized: str | None, mesh: Any
) -> tuple[dict[str, int], bool, list[str]]:
  """Returns the mesh axes, whether the number of devices is known, and notes.

  Arguments are those of `_of_module`; notes are those of `Reading`.
  """
  head = text.split("\n", 1)[0]
  counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)
  # The text omits a count of 1, and a part of a module may have no first line.
  num_devices = math.prod(map(int, counts))
  named = mesh_named_in([unoptimized or "", head]) if mesh is None else {}
  if isinstance(mesh, jax.sharding.Mesh):
    named = _slice_axis_sizes(mesh, num_devices)
  elif mesh is not None:
    named = dict(mesh.shape)
  # The text before optimizations names the mesh of all slices.
  if named and (
    mesh is not None or not counts
    or math.prod(named.values()) == num_devices
  ):
    if counts and math.prod(named.values()) != num_devices:
      raise ValueError(
        f"the program is for {num_devices} devices, and the mesh {named} has "
        f"{math.prod(named.values())}: it is not the program's mesh; pass the "
        "mesh that it was lowered for"
      )
    whole = mesh is None or named == dict(mesh.shape)
    return named, True, [] if whole else [
      "The program is that of one TPU slice: axes have their sizes in it."
    ]
  listed = [
    instruction.attribute("replica_groups")
    for computation in module.computations.values()
    for instruction in computation.instructions
    if not groups_list_replicas(instruction)
  ]
  if "1" not in counts and len(counts) > 1 and (
    "use_global_device_ids=true" not in text
  ):
    raise ValueError(
      f"the program combines groups of {' and '.join(counts)} partitions and "
      "replicas, which is not supported"
    )
  groups = [replica_groups(x, num_devices) for x in listed if x and x != "{}"]
  numbers = [n for each in groups for group in each for n in group]
  counted = bool(counts or numbers)
  numbers += [
    int(n)
    for each in SOURCE_TARGET_PAIRS.findall(text)
    for n in re.findall(r"\d+", each)
  ]
  num_devices = max(num_devices, 1 + max(numbers, default=0))
  axes = inferred_axes(groups, num_devices)
  return axes, counted, [_INFERRED_NOTE]


def _slice_axis_sizes(
  mesh: jax.sharding.Mesh, num_devices: int
) -> dict[str, int]:
  """Returns the axis sizes of the part of a mesh that one program covers.

  Args:
    mesh: The mesh.
    num_devices: Number of devices of the program: all, or those of one TPU
      slice, since XLA:TPU compiles a program per slice.
  """
  slices = np.array([getattr(d, "slice_index", 0) for d in mesh.devices.flat])
  places = np.argwhere(slices.reshape(mesh.devices.shape) == slices[0])
  sizes = [len(set(column)) for column in places.T.tolist()]
  if num_devices == len(places) == math.prod(sizes):
    return dict(zip(mesh.axis_names, sizes, strict=True))
  return dict(mesh.shape)


def _operands_of_collective(
  reader: Reader, computation: hlo.Computation, index: int, lines: SourceLines,
  requested: RequestedDtypes | None,
) -> Iterator[Executed]:
  """Yields the operands of the collective at ``index``, with counts of one.

  ``lines`` and ``requested`` look up source lines and requested dtypes.
  """
  outer = computation.instructions[index]
  collectives = list(reader.find(computation, outer))
  if not collectives:
    return
  done = reader.done(computation, index)
  last = computation.instructions[done].name
  between = tuple(
    x.name for x in computation.instructions[index + 1 : done]
    if x.opcode not in _FREE_OPCODES
  )
  for owner, found in collectives:
    operands = owner.operands(found)
    entries = list(reader.entry(owner, found, outer.op_name))
    # Operands of a merged collective have source lines of their own; operands
    # that XLA has split off (all-to-all) have none.
    single = len(operands) == 1 or len(entries) == 1
    of_use = functools.cache(lambda: _line_of_use(computation, index, lines))
    for number, entry in enumerate(entries):
      made = found if single else operands[number]
      made = made if lines.of(made) else found
      line = lines.of(made) or lines.of(outer) or of_use()
      yield Executed(
        entry,
        requested and requested.dtype(made, line, entry.reduction is not None),
        line, outer.name, last, number,
        "promoted" in found.attribute("to_apply"), done > index, between,
        found.attribute("is_spmd_generated") == "true",
      )


def _line_of_use(
  computation: hlo.Computation, index: int, lines: SourceLines
) -> str:
  """Returns the source line of the first use of instruction ``index``'s result.

  The line is "" if it is not known.

  A gather of an argument may have the name of the argument, without a line.
  """
  order = computation.instructions
  names = {order[index].name}
  for instruction in order[index + 1 :]:
    if not names.isdisjoint(instruction.operands):
      if line := lines.of(instruction):
        return line
      names.add(instruction.name)
  return ""


def _mesh(axes: Mapping[str, int]) -> AbstractMesh:
  num_devices = math.prod(axes.values())
  if num_devices > _MAX_DEVICES:
    raise ValueError(
      f"the program is for {num_devices:,} devices, but at most "
      f"{_MAX_DEVICES:,} devices are supported"
    )
  return AbstractMesh(tuple(axes.values()), tuple(axes))
