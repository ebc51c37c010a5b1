"""Execution traces in files: every field survives, as simulators expect it."""

import json
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from parallel.plans.network import chakra
from parallel.plans.network.chakra import Node

et_def_pb2 = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
KINDS = [*chakra._COLLECTIVES, "compute", "send", "receive"]


@st.composite
def nodes(draw):
  made = []
  for number in range(draw(st.integers(0, 6))):
    after = draw(st.sets(st.integers(0, max(0, number - 1)), max_size=3))
    kind = draw(st.sampled_from(KINDS))
    size = draw(st.integers(1, 2**40))
    node = Node(kind, f"n.{number}", tuple(after) if number else (), size)
    if kind == "compute":
      micros = draw(st.integers(0, 10**7))
      node = node._replace(seconds=micros / 1e6, flops=draw(st.integers(0, 9)))
    elif kind in ("send", "receive"):
      node = node._replace(ranks=draw(st.sampled_from([(0, 1), (3, 2)])), tag=7)
    else:
      node = node._replace(ranks=draw(st.sampled_from([(0, 1), (2, 0, 1)])))
    made.append(node)
  return made


@given(st.lists(nodes(), min_size=1, max_size=3))
@settings(max_examples=30)
def test_traces_are_read_as_they_were_written(tmp_path_factory, traces):
  folder = tmp_path_factory.mktemp("traces")
  chakra.write(traces, folder)
  for found, nodes in zip(chakra.read(folder), traces, strict=True):
    assert [n._replace(seconds=0) for n in found] == [
      n._replace(seconds=0) for n in nodes
    ]
    for one, other in zip(found, nodes, strict=True):
      assert one.seconds == pytest.approx(other.seconds, abs=2e-6)


def test_rounded_durations_do_not_drift(tmp_path):
  short = [Node("compute", "c", (), 1, seconds=0.4e-6)] * 1000
  chakra.write([short], tmp_path)
  (found,) = chakra.read(tmp_path)
  assert sum(n.seconds for n in found) == pytest.approx(400e-6)


def test_fields_are_those_of_the_format(tmp_path):
  from chakra.src.third_party.utils import protolib

  chakra.write([[
    Node("reduce_scatter", "r", (), 48, ranks=(0, 2)),
    Node("receive", "p", (0,), 5, ranks=(2, 0), tag=3),
  ]], tmp_path)
  assert json.loads((tmp_path / "groups.json").read_text()) == {"1": [0, 2]}
  messages = []
  with (tmp_path / "trace.0.et").open("rb") as file:
    head = et_def_pb2.GlobalMetadata()
    assert protolib.decodeMessage(file, head)
    message = et_def_pb2.Node()
    while protolib.decodeMessage(file, message):
      fields = {a.name: getattr(a, a.WhichOneof("value")) for a in message.attr}
      messages.append((message.id, message.type, [*message.data_deps], fields))
  assert messages == [
    (0, et_def_pb2.COMM_COLL_NODE, [], {
      "is_cpu_op": False, "comm_size": 48, "pg_name": "1",
      "comm_type": et_def_pb2.REDUCE_SCATTER,
    }),
    (1, et_def_pb2.COMM_RECV_NODE, [0], {
      "is_cpu_op": False, "comm_size": 5, "comm_src": 2, "comm_dst": 0,
      "comm_tag": 3,
    }),
  ]


def test_damaged_traces_are_one_line(tmp_path):
  with pytest.raises(ValueError, match=r"has no file trace\.0\.et"):
    chakra.read(tmp_path)
  chakra.write([[Node("send", "s", (), 5, ranks=(0, 1))]], tmp_path)
  path = tmp_path / "trace.0.et"
  path.write_bytes(path.read_bytes()[:-3])
  with pytest.raises(
    ValueError, match="damaged traces, or those of another tool"
  ) as error:
    chakra.read(tmp_path)
  assert "\n" not in str(error.value)


def test_traces_of_an_earlier_program_are_removed(tmp_path):
  node = Node("compute", "c", (), 1, seconds=1e-6)
  chakra.write([[node]] * 3, tmp_path)
  chakra.write([[node]] * 2, tmp_path)
  assert chakra.read(tmp_path) == [[node]] * 2


def test_interrupted_write_is_rejected(tmp_path):
  node = Node("compute", "c", (), 1, seconds=1e-6)
  chakra.write([[node]], tmp_path)

  def interrupted():
    yield [node]
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    chakra.write(interrupted(), tmp_path)
  with pytest.raises(ValueError, match=r"groups\.json"):
    chakra.read(tmp_path)


def test_missing_package_is_one_line_that_names_the_extra(
  tmp_path, monkeypatch
):
  monkeypatch.setitem(sys.modules, "chakra.schema.protobuf", None)
  for call in (lambda: chakra.write([[]], tmp_path),
               lambda: chakra.read(tmp_path)):
    with pytest.raises(ValueError, match=r"install 'caatnet\[chakra\]'$"):
      call()
