"""Execution traces of programs take the time of the programs' timelines."""

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import pytest

from parallel.ledger import hlo, reading
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.sends import execution
from parallel.ledger.timeline import COMPUTE, timeline
from parallel.plans.network import replay
from tests.parallel.ledger import reading_test, timeline_test

BANDWIDTH = 1e9
DEVICE = timeline_test.DEVICE


def scheduled(module, mesh):
  return ScheduledProgram(
    module, mesh, DEVICE, lambda e: e.wire_bytes_ring / BANDWIDTH
  )


def checked(program):
  """Traces of a program, whose replay takes the time of its timeline."""
  traces = list(execution.traces(program))
  found = replay.replay(traces, replay.make_ring_timer(BANDWIDTH))
  bars = list(timeline(program))
  assert found.finish_s == pytest.approx(max(b.end_s for b in bars), rel=1e-6)
  communicating = replay.covered_s(
    (b.start_s, b.end_s) for b in bars if b.row != COMPUTE
  )
  assert found.communicating_s == pytest.approx(
    [communicating] * len(traces), rel=1e-6
  )
  return traces


def test_training_step_on_three_axes():
  f, args = reading_test.step()
  found = reading.read(f, *args)
  traces = checked(scheduled(found.module, found.mesh))
  assert len(traces) == 8
  for rank, nodes in enumerate(traces):
    sent = [n for n in nodes if n.ranks]
    assert sum(n.bytes for n in sent) == sum(
      e.count * e.bytes for e in found.entries
    )
    # Axes have strides 4, 2 and 1.
    assert {tuple(sorted(n.ranks)) for n in sent} == {
      tuple(sorted((rank, rank ^ stride))) for stride in (4, 2, 1)
    }


@pytest.mark.parametrize("wire", ["f32[1000]", "f32[8000000]"])
def test_compute_overlaps_an_asynchronous_collective(wire):
  text = timeline_test.SCHEDULED.replace("f32[1000]", wire)
  program = scheduled(hlo.parse(text), AbstractMesh((8,), ("a",)))
  (trace, *_) = checked(program)
  assert [(n.kind, n.after) for n in trace] == [
    ("all_reduce", ()), ("compute", ()), ("all_reduce", (1, 0)),
  ]


def test_collectives_over_the_same_axes_wait_for_each_other():
  text = timeline_test.SCHEDULED.replace("  %state = ", (
    "  %second = f32[1000]{0} all-reduce-start(%g), replica_groups="
    "{{0,1,2,3,4,5,6,7}}, to_apply=%add\n"
    "  %end = f32[1000]{0} all-reduce-done(%second)\n  %state = "
  ))
  (trace, *_) = checked(scheduled(hlo.parse(text), AbstractMesh((8,), ("a",))))
  assert [n.after for n in trace[:2]] == [(), (0,)]


@pytest.mark.parametrize("shift", [1, 3])
def test_permute_is_a_send_and_a_receive(shift):
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  pairs = [(i, (i + shift) % 4) for i in range(4)]

  def f(x):
    x = lax.ppermute(x, "a", pairs)
    return lax.ppermute(x * 2, "a", pairs)

  shaped = jax.jit(
    jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
  )
  x = jax.ShapeDtypeStruct((4, 256, 256), "float32")
  found = reading.read(shaped, x, mesh=mesh)
  traces = checked(scheduled(found.module, found.mesh))
  for rank, nodes in enumerate(traces):
    for kind, ranks in (
      ("send", (rank, (rank + 2 * shift) % 8)),
      ("receive", ((rank - 2 * shift) % 8, rank)),
    ):
      ends = [n for n in nodes if n.kind == kind]
      assert [n.ranks for n in ends] == [ranks] * 2
      assert {n.bytes for n in ends} == {256 * 256 * 4}


def test_device_without_a_partner_has_no_message():
  mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
  shaped = jax.jit(jax.shard_map(
    lambda x: lax.ppermute(x, "a", [(0, 1), (1, 2)]), mesh=mesh,
    in_specs=P("a"), out_specs=P("a"),
  ))
  found = reading.read(shaped, jax.ShapeDtypeStruct((8,), "float32"), mesh=mesh)
  traces = list(execution.traces(scheduled(found.module, mesh)))
  kinds = [[n.kind for n in nodes if n.ranks] for nodes in traces]
  assert [sorted(k) for k in kinds] == [
    ["send"], ["receive", "send"], ["receive"], []
  ]


def test_kernel_that_sends_is_refused():
  text = (
    "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
    "  %x = f32[8]{0} parameter(0)\n"
    '  ROOT %k = f32[8]{0} custom-call(%x), custom_call_target="k", '
    'frontend_attributes={kernel_metadata={"sends_over": "a", "messages": "2", '
    '"elements": "8", "dtype": "float32"}}\n}\n'
  )
  program = scheduled(hlo.parse(text), AbstractMesh((2,), ("a",)))
  with pytest.raises(ValueError, match="the kernel k sends messages itself"):
    list(execution.traces(program))


def test_rank_without_a_part_in_a_permute_does_not_forget_its_row():
  """Its next collective waits for the last one that it had a part in."""
  trace = execution._Trace(2)
  whole = execution._GroupedCollective("all_reduce", 8, ((0, 1, 2),))
  pair = execution._GroupedCollective("permute", 8, ((0, 1),))
  for number, part in enumerate((whole, pair, whole)):
    trace.add(
      execution._StartedCollectives(number, "row", str(number), (part,))
    )
  first, last = trace.nodes
  assert (first.after, last.after) == ((), (0,))


def permuted(pairs, times=1):
  """A program of 4 devices that sends along pairs, a number of times."""
  mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))

  def f(x):
    for _ in range(times):
      x = lax.ppermute(x, "a", pairs) @ x
    return x

  shaped = jax.jit(
    jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
  )
  x = jax.ShapeDtypeStruct((4 * 8, 8), "float32")
  found = reading.read(shaped, x, mesh=mesh)
  return list(execution.traces(scheduled(found.module, mesh)))


def test_device_that_keeps_its_data_has_no_message():
  traces = permuted([(0, 0), (1, 2), (2, 1), (3, 3)])
  assert [sum(bool(n.ranks) for n in nodes) for nodes in traces] == [0, 2, 2, 0]


def test_each_execution_has_its_tag_at_both_ends():
  traces = permuted([(0, 1), (1, 0)], times=2)
  tags = [[n.tag for n in nodes if n.kind == "send"] for nodes in traces[:2]]
  assert tags[0] == tags[1]
  assert len(set(tags[0])) == 2
  assert all(
    sorted(n.tag for n in nodes if n.kind == "receive") == sorted(tags[0])
    for nodes in traces[:2]
  )


def test_compute_has_the_flops_of_its_instructions():
  nodes = permuted([(0, 1), (1, 0)])[0]
  # [8, 8] @ [8, 8] on each device.
  assert sum(n.flops for n in nodes if n.kind == "compute") == 2 * 8**3
