"""Events of the profiler joined with the instructions of a program."""

import os

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import pytest

from parallel.ledger import profiles, reading
from parallel.ledger.profiles import Interval, measure_collectives

ASYNC = """HloModule jit_f, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000] parameter(0)
  %start = f32[1000] all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %product = f32[1000] multiply(%x, %x)
  %done = f32[1000] all-reduce-done(%start)
  ROOT %sum = f32[1000] add(%done, %product)
}
"""


def test_asynchronous_pair_is_measured_from_start_to_done():
  # The second device is 40 ns late; its execution has no waiting.
  events = {
    "0": {
      "start": [Interval(0, 5)], "product": [Interval(10, 40)],
      "done": [Interval(90, 100)], "sum": [Interval(100, 110)],
    },
    "1": {
      "start": [Interval(40, 45)], "product": [Interval(50, 80)],
      "done": [Interval(90, 100)], "sum": [Interval(100, 110)],
    },
  }
  (found,) = measure_collectives(reading.read(ASYNC), events)
  assert (found.instruction, found.executions) == ("start", 1)
  assert found.transfer_s == pytest.approx(60e-9)
  assert found.waiting_s == pytest.approx((40 + 0) / 2 * 1e-9)
  assert found.hidden == pytest.approx((30 + 30) / (100 + 60))
  assert found.bytes == 4000  # 2 (n - 1) / n of the operand
  assert found.bandwidth == pytest.approx(4000 / 60e-9)


def test_executions_that_a_trace_cuts_off_are_left_out():
  pair = {"start": [Interval(0, 5)], "done": [Interval(9, 17)]}
  late = {"start": [Interval(20, 25)], "done": [Interval(29, 30)]}
  both = {k: pair[k] + late[k] for k in pair}
  (found,) = measure_collectives(reading.read(ASYNC), {"0": both, "1": late})
  assert found.executions == 1
  assert found.waiting_s == 0
  assert found.transfer_s == pytest.approx(10e-9)  # the late one's
  assert measure_collectives(reading.read(ASYNC), {"0": both, "1": {}}) == []


def test_trace_that_begins_within_a_pair_leaves_it_out():
  events = {"0": {
    "start": [Interval(20, 25)],
    "done": [Interval(9, 10), Interval(60, 70)],
  }}
  (found,) = measure_collectives(reading.read(ASYNC), events)
  assert (found.executions, found.transfer_s) == (1, pytest.approx(50e-9))


def test_events_of_no_length_and_no_device():
  nothing = {"0": {"start": [Interval(5, 5)], "done": [Interval(5, 5)]}}
  (found,) = measure_collectives(reading.read(ASYNC), nothing)
  assert (found.transfer_s, found.hidden) == (0, 0)
  assert found.bandwidth == float("inf")
  assert measure_collectives(reading.read(ASYNC), {}) == []


def test_programs_of_one_name_are_told_apart_by_their_instructions():
  """The profiler also names a few operations that are no instructions."""
  mine = {"0": {"start": [], "product": [], "barrier": []}}
  other = {"0": {"start": [], "fusion.7": [], "barrier": []}}
  program = reading.read(ASYNC)
  assert profiles.select_program_events(program, [other, mine]) is mine
  assert profiles.select_program_events(program, [other]) is other
  assert profiles.select_program_events(program, []) is None
  with pytest.raises(ValueError, match="2 programs named jit_f, whose"):
    profiles.select_program_events(program, [mine, mine])


def test_loop_around_a_collective_does_not_hide_it():
  text = ASYNC.replace("%product = f32[1000] multiply(%x, %x)", (
    "%product = f32[1000] call(%x), to_apply=%square"
  )).replace("ENTRY", (
    "%square (s: f32[1000]) -> f32[1000] {\n  %s = f32[1000] parameter(0)\n"
    "  ROOT %t = f32[1000] multiply(%s, %s)\n}\n\nENTRY"
  ))
  # The call's event contains that of its instruction.
  events = {"0": {
    "start": [Interval(0, 5)], "product": [Interval(0, 100)],
    "t": [Interval(10, 20), Interval(12, 15)], "done": [Interval(90, 100)],
  }}
  (found,) = measure_collectives(reading.read(text), events)
  assert found.hidden == pytest.approx(0.1)


def test_trace_of_a_run_has_each_execution(tmp_path):
  mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))

  def f(x):
    def body(x, _):
      return lax.psum(jnp.sin(x), "a") / 4, None

    return lax.scan(body, x, length=5)[0]

  jitted = jax.jit(jax.shard_map(
    f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  ))
  x = jnp.ones((64, 64))
  compiled = jitted.lower(x).compile()
  jax.block_until_ready(compiled(x))
  with jax.profiler.trace(str(tmp_path)):
    for _ in range(3):
      jax.block_until_ready(compiled(x))
  program = reading.read(compiled)
  events, = profiles.read_events(tmp_path)[program.module.name]
  assert len(events) == 4  # devices
  (found,) = measure_collectives(program, events)
  assert found.executions == 3 * 5
  assert found.bytes == 2 * 3 / 4 * 64 * 64 * 4
  assert found.transfer_s > 0
  assert found.waiting_s >= 0


def test_folder_without_a_trace_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no file"):
    profiles.read_events(tmp_path)


def test_damaged_trace_is_named(tmp_path):
  path = tmp_path / "a.xplane.pb"
  path.write_bytes(b"{" * 100)
  older = tmp_path / "b.xplane.pb"
  older.write_bytes(b"{" * 100)
  os.utime(older, (1, 1))
  with pytest.raises(ValueError, match=r"a\.xplane\.pb is damaged"):
    profiles.read_events(tmp_path)  # the newest


def test_times_are_means_and_bytes_are_those_of_all_operands():
  text = ASYNC.replace("%x = f32[1000] parameter(0)", (
    "%x = f32[1000] parameter(0)\n  %y = f32[500] parameter(1)"
  )).replace("f32[1000] all-reduce-start(%x)", (
    "(f32[1000], f32[500]) all-reduce-start(%x, %y)"
  ))
  events = {
    str(device): {
      "start": [Interval(a, a), Interval(b, b)],
      "done": [Interval(90, 100), Interval(290, 300)],
    } for device, (a, b) in enumerate([(0, 200), (40, 220)])
  }
  (found,) = measure_collectives(reading.read(text), events)
  assert (found.executions, found.bytes) == (2, 4000 + 2000)
  assert found.transfer_s == pytest.approx((60 + 80) / 2 * 1e-9)
  assert found.waiting_s == pytest.approx((40 + 20) / 2 / 2 * 1e-9)
