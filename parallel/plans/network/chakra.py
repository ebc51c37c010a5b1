"""Execution traces in the format of Chakra, one file per rank.

Simulators such as ASTRA-sim replay them. `parallel.ledger.sends.execution`
makes them from a compiled program, and `parallel.plans.network.replay` times
them.

`comm_size` is the number of bytes of the operand on one rank, for all kinds:

| kind | comm_size | a rank's result |
|---|---|---|
| all-reduce | the whole array | comm_size |
| all-gather | a rank's slice | comm_size x ranks of the group |
| reduce-scatter | the whole array, before it is summed | comm_size / ranks |
| all-to-all | a rank's rows, its own part included | comm_size |
| broadcast | the whole array, from the first rank of the group | comm_size |
| send, receive | the message | comm_size |

Source: Sridharan et al., "Chakra: Advancing Performance Benchmarking and
Co-design using Standardized Execution Traces", 2023; et_def.proto of mlc-chakra
1.0. The sizes are those that ASTRA-sim's ring expects (Ring.cc). ASTRA-sim's
workload layer has no broadcast.
"""

from collections.abc import Iterable, Iterator, Sequence
import json
import pathlib
from typing import Any, NamedTuple

# Kind of a node -> name in CollectiveCommType.
_COLLECTIVES = {
  "all_reduce": "ALL_REDUCE", "all_gather": "ALL_GATHER",
  "reduce_scatter": "REDUCE_SCATTER", "all_to_all": "ALL_TO_ALL",
  "broadcast": "BROADCAST",
}
_GROUPS_FILE = "groups.json"


class Node(NamedTuple):
  """Node of a rank's trace: compute, a collective or one end of a message.

  Attributes:
    kind: "compute", "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
      "broadcast", "send" or "receive".
    name: Name of the instruction; for merged compute, of the first one.
    after: Indices of the rank's nodes that it waits for.
    bytes: Operand bytes on a rank; for compute, bytes read and written.
    seconds: Time of compute; 0 for communication.
    flops: FLOPs of compute.
    ranks: Group of a collective in the order of its ranks; for a message, the
      sender and the receiver.
    tag: Number of the message, equal at both ends.
  """

  kind: str
  name: str
  after: tuple[int, ...]
  bytes: int
  seconds: float = 0.0
  flops: int = 0
  ranks: tuple[int, ...] = ()
  tag: int = 0


def write(traces: Iterable[Sequence[Node]], folder: pathlib.Path) -> None:
  """Writes ``trace.RANK.et`` per rank and ``groups.json``.

  Old traces in the folder are removed first, since they may be of more ranks.
  ``groups.json`` maps the number of each group, from 1 (the ``pg_name`` of its
  collectives), to the group's ranks. It is written last, so that `read` rejects
  an incomplete folder. Durations are whole microseconds: their running sum is
  rounded, so that rounding errors do not accumulate.

  Args:
    traces: Nodes of each rank, which may be generated one rank at a time.
    folder: Folder to write to; it is created.

  Raises:
    ValueError: The package mlc-chakra is not installed.
    OSError: A file cannot be written.
  """
  proto, lib = _import_chakra()
  folder.mkdir(parents=True, exist_ok=True)
  for old in (folder / _GROUPS_FILE, *folder.glob("trace.*.et")):
    old.unlink(missing_ok=True)
  groups: dict[tuple[int, ...], int] = {}
  for rank, nodes in enumerate(traces):
    computed = 0.0
    with (folder / f"trace.{rank}.et").open("wb") as file:
      lib.encodeMessage(file, proto.GlobalMetadata(version="1.0.0"))
      for number, node in enumerate(nodes):
        message = proto.Node(id=number, name=node.name, data_deps=node.after)
        before, computed = computed, computed + node.seconds
        message.duration_micros = round(computed * 1e6) - round(before * 1e6)
        message.type, attributes = _attributes(proto, node, groups)
        for name, (field, value) in attributes.items():
          message.attr.add(name=name, **{field: value})
        lib.encodeMessage(file, message)
  (folder / _GROUPS_FILE).write_text(
    json.dumps({str(number): ranks for ranks, number in groups.items()})
  )


def _attributes(
  proto: Any, node: Node, groups: dict[tuple[int, ...], int]
) -> tuple[int, dict[str, tuple[str, Any]]]:
  """Returns a node's type and attributes: name -> (protobuf field, value)."""
  found: dict[str, tuple[str, Any]] = {"is_cpu_op": ("bool_val", False)}
  if node.kind == "compute":
    return proto.COMP_NODE, found | {
      "num_ops": ("int64_val", node.flops),
      "tensor_size": ("uint64_val", node.bytes),
    }
  found["comm_size"] = "int64_val", node.bytes
  if node.kind in _COLLECTIVES:
    kind = proto.CollectiveCommType.Value(_COLLECTIVES[node.kind])
    # ASTRA-sim reserves group 0 for all ranks.
    number = groups.setdefault(node.ranks, len(groups) + 1)
    return proto.COMM_COLL_NODE, found | {
      "comm_type": ("int64_val", kind), "pg_name": ("string_val", str(number)),
    }
  sends = node.kind == "send"
  return proto.COMM_SEND_NODE if sends else proto.COMM_RECV_NODE, found | {
    "comm_src": ("int32_val", node.ranks[0]),
    "comm_dst": ("int32_val", node.ranks[1]),
    "comm_tag": ("int32_val", node.tag),
  }


def read(folder: pathlib.Path) -> list[list[Node]]:
  """Returns the nodes of each rank from the files that `write` has written.

  Raises:
    ValueError: The package mlc-chakra is not installed, the folder has no
      traces, or one is damaged.
  """
  proto, lib = _import_chakra()
  paths = [
    folder / f"trace.{n}.et" for n in range(len([*folder.glob("trace.*.et")]))
  ]
  if not paths:
    raise ValueError(
      f"{folder} has no file trace.0.et; pass a folder that launch.sends "
      "--chakra has written"
    )
  try:
    stored = json.loads((folder / _GROUPS_FILE).read_text())
    groups = {number: tuple(ranks) for number, ranks in stored.items()}
    return [[*_nodes(path, proto, lib, groups)] for path in paths]
  except (KeyError, OSError, ValueError) as error:
    raise ValueError(
      f"{folder}: damaged traces, or those of another tool than launch.sends "
      f"--chakra: {error}"
    ) from error


def _nodes(
  path: pathlib.Path, proto: Any, lib: Any, groups: dict[str, tuple[int, ...]]
) -> Iterator[Node]:
  from google.protobuf.message import DecodeError

  kinds = {
    proto.CollectiveCommType.Value(name): kind
    for kind, name in _COLLECTIVES.items()
  }
  message = proto.GlobalMetadata()
  with path.open("rb") as file:
    try:
      found = lib.decodeMessage(file, message)
      message = proto.Node()
      while found and lib.decodeMessage(file, message):
        yield _node(proto, message, kinds, groups)
    except DecodeError as error:
      raise ValueError(f"{path.name}: {error}") from error


def _node(
  proto: Any, message: Any, kinds: dict[int, str],
  groups: dict[str, tuple[int, ...]],
) -> Node:
  known = {a.name: getattr(a, a.WhichOneof("value")) for a in message.attr}
  name, after = message.name, tuple(message.data_deps)
  if message.type == proto.COMP_NODE:
    return Node(
      "compute", name, after, known["tensor_size"],
      message.duration_micros / 1e6, known["num_ops"],
    )
  if message.type == proto.COMM_COLL_NODE:
    return Node(
      kinds[known["comm_type"]], name, after, known["comm_size"],
      ranks=groups[known["pg_name"]],
    )
  sends = message.type == proto.COMM_SEND_NODE
  return Node(
    "send" if sends else "receive", name, after, known["comm_size"],
    ranks=(known["comm_src"], known["comm_dst"]), tag=known["comm_tag"],
  )


def _import_chakra() -> tuple[Any, Any]:
  """Returns mlc-chakra's modules: message classes, and file encoding."""
  try:
    from chakra.schema.protobuf import et_def_pb2
    from chakra.src.third_party.utils import protolib
  except ImportError as error:
    raise ValueError(
      "execution traces need mlc-chakra: pip install 'caatnet[chakra]'"
    ) from error
  return et_def_pb2, protolib
