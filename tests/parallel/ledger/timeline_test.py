"""Timelines of scheduled programs, and the files that show them."""

import dataclasses
import pathlib

import jax
from jax.sharding import AbstractMesh
import pytest

from parallel.ledger import hlo, reading
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.timeline import COMPUTE, timeline
from parallel.plans.hardware.devices import DEVICES
from tests.parallel.ledger import reading_test

SCHEDULED = (pathlib.Path(__file__).parent / "scheduled.hlo.txt").read_text()
DEVICE = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
# Seconds of the loop's product, and of each of the two reductions.
PRODUCT = 4 * 2 * 512 * 256 * 128 / DEVICE.peak("bfloat16")


def scheduled(wire):
  return ScheduledProgram(
    hlo.parse(SCHEDULED), AbstractMesh((8,), ("a",)), DEVICE, lambda _: wire
  )


def checked(bars):
  """Bars of a row do not overlap; returns them by row."""
  rows = {}
  for bar in bars:
    row = rows.setdefault(bar.row, [])
    assert bar.end_s >= bar.start_s >= (row[-1].end_s if row else 0)
    row.append(bar)
  return rows


@pytest.mark.quick
@pytest.mark.parametrize("times", [0.5, 4])
def test_asynchronous_transfer_runs_beside_the_loop(times):
  wire = times * PRODUCT
  rows = checked(timeline(scheduled(wire)))
  first, last = rows["a"]
  waits = [b for b in rows[COMPUTE] if b.name.startswith("wait for")]
  products = [b for b in rows[COMPUTE] if b.flops]
  assert len(products) == 4  # trips
  assert sum(b.end_s - b.start_s for b in products) == pytest.approx(PRODUCT)
  # The first one is hidden under the loop, the second one has no done.
  exposed = max(0, wire - PRODUCT) + wire
  assert sum(b.end_s - b.start_s for b in waits) == (
    pytest.approx(exposed, rel=1e-3)
  )
  assert last.start_s >= max(first.end_s, products[-1].end_s)
  assert rows[COMPUTE][-1].end_s == pytest.approx(PRODUCT + exposed, rel=1e-3)


def test_transfers_over_the_same_axes_wait_for_each_other():
  text = SCHEDULED.replace("  %state = ", (
    "  %second = f32[1000]{0} all-reduce-start(%g), replica_groups="
    "{{0,1,2,3,4,5,6,7}}, to_apply=%add\n"
    "  %end = f32[1000]{0} all-reduce-done(%second)\n  %state = "
  ))
  program = ScheduledProgram(
    hlo.parse(text), AbstractMesh((8,), ("a",)), DEVICE, lambda _: 1.0
  )
  first, second, _ = checked(timeline(program))["a"]
  assert second.start_s == first.end_s == 1.0


def test_rows_add_up_to_the_program():
  f, args = reading_test.step()
  found = reading.read(f, *args)
  program = ScheduledProgram(
    found.module, found.mesh, DEVICE, lambda e: e.wire_bytes_ring / 1e9
  )
  rows = checked(timeline(program))
  assert set(rows) == {COMPUTE, "data", "fsdp", "tensor"}
  compute = [b for b in rows[COMPUTE] if not b.name.startswith("wait")]
  assert sum(b.end_s - b.start_s for b in compute) == (
    pytest.approx(program.total().seconds)
  )
  for axis in ("data", "fsdp", "tensor"):
    entries = [e for e in found.entries if e.axes == (axis,)]
    assert sum(b.end_s - b.start_s for b in rows[axis]) == pytest.approx(
      sum(e.count * e.wire_bytes_ring for e in entries) / 1e9
    )
    assert sum(b.bytes for b in rows[axis]) == (
      sum(e.count * e.bytes for e in entries)
    )


def test_longest_branch_runs():
  mesh = jax.make_mesh((1,), ("a",))
  big = jax.ShapeDtypeStruct((256, 256), "float32")

  @jax.jit
  def f(i, x):
    return jax.lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x + 1], x)

  found = reading.read(f, jax.ShapeDtypeStruct((), "int32"), big, mesh=mesh)
  program = ScheduledProgram(found.module, mesh, DEVICES["h100"], lambda _: 0)
  assert sum(b.flops for b in timeline(program)) == 2 * 256**3


BRANCHES = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%both (x: f32[64]) -> f32[64] {
  %x = f32[64] parameter(0)
  %one = f32[64] all-reduce-start(%x), replica_groups=OUTER, to_apply=%add
  %two = f32[64] all-reduce-start(%x), replica_groups=INNER, to_apply=%add
  %first = f32[64] all-reduce-done(%one)
  ROOT %second = f32[64] all-reduce-done(%two)
}

%none (y: f32[64]) -> f32[64] {
  ROOT %y = f32[64] parameter(0)
}

%long (z: f32[96]) -> f32[96] {
  %z = f32[96] parameter(0)
  ROOT %r = f32[96] all-reduce(%z), replica_groups=OUTER, to_apply=%add
}

ENTRY %main (i: s32[], w: f32[64]) -> f32[64] {
  %i = s32[] parameter(0)
  %w = f32[64] parameter(1)
  ROOT %c = f32[64] conditional(%i, %w, %w, %w), ORDER
}
""".replace("OUTER", "{{0,3},{1,4},{2,5}}").replace(
  "INNER", "{{0,1,2},{3,4,5}}"
)


@pytest.mark.parametrize("order", ["both, none, long", "long, both, none"])
def test_transfers_over_different_axes_run_at_once(order):
  """Two of 1 s end before one of 1.5 s, which is therefore the longest."""
  names = ", ".join(f"%{name}" for name in order.split(", "))
  text = BRANCHES.replace("ORDER", f"branch_computations={{{names}}}")
  program = ScheduledProgram(
    hlo.parse(text), AbstractMesh((2, 3), ("a", "b")), DEVICE,
    lambda entry: entry.elements / 64,
  )
  one, two = (x for x in timeline(program, "both") if x.row != COMPUTE)
  assert [(x.row, x.start_s, x.end_s) for x in (one, two)] == [
    ("a", 0, 1), ("b", 0, 1)
  ]
  (bar,) = (x for x in timeline(program) if x.row != COMPUTE)
  assert (bar.name, bar.row, bar.end_s) == ("r", "a", 1.5)
