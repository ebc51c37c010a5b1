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
