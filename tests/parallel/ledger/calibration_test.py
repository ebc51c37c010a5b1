"""Rates fitted to events that follow the model, and to real profiles."""

import dataclasses

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.ledger import calibration, link_times, profiles, reading
from parallel.ledger.calibration import CollectiveSample, InstructionWork
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.profiles import Interval
from parallel.plans.hardware import devices
from parallel.plans.hardware.link_matrix import LinkMatrix

MESH = AbstractMesh((2, 2), ("data", "tensor"))
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[512,512], y: f32[4000]) -> f32[512,512] {
  %x = f32[512,512] parameter(0)
  %y = f32[4000] parameter(1)
  %product = f32[512,512] dot(%x, %x), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  %sum = f32[512,512] add(%product, %x)
  %tiny = f32[4000] negate(%y)
  %small = f32[4000] all-reduce(%y), \
replica_groups={{0,1},{2,3}}, to_apply=%add
  %large = f32[512,512] all-reduce(%sum), \
replica_groups={{0,1},{2,3}}, to_apply=%add
  %other = f32[4000] all-reduce(%small), \
replica_groups={{0,2},{1,3}}, to_apply=%add
  %last = f32[512,512] all-reduce(%large), \
replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %copy = f32[512,512] copy(%last)
}
"""


def cluster(rate=2e11, bandwidth=5e9, overhead_s=0.0):
  """A cluster whose links over "data" are slower than those over "tensor"."""
  per_s, latency_s = np.full((4, 4), 1e8), np.full((4, 4), 3e-4)
  for pair in ((0, 1), (1, 0), (2, 3), (3, 2)):
    per_s[pair], latency_s[pair] = 1e9, 1e-4
  return LinkMatrix(
    "true", devices.make_measured_device(
      "d", {"float32": rate}, 10**9, bandwidth, "test", overhead_s
    ),
    (0,) * 4, per_s, latency_s, "test", "measured",
  )


def events_of(program, links, steps=3, rest_s=0.0):
  """Events in which every instruction takes the time of the model."""
  scheduled = ScheduledProgram(
    program.module, program.mesh, links.device,
    link_times.build_time_model(links, program.mesh),
  )
  found = {}
  for device in range(4):
    now, of_device = 0.0, found.setdefault(str(device), {})
    for _ in range(steps):
      for computation, count in program.module.runs():
        for i in computation.instructions * count:
          seconds = scheduled.cost(computation, i).seconds + sum(
            map(scheduled.wire_seconds,
                scheduled.reader.entries(computation, i))
          )
          if seconds:
            of_device.setdefault(i.name, []).append(
              Interval(now * 1e9, (now + seconds) * 1e9)
            )
          now += seconds
      now += rest_s
  return found


def test_rates_that_made_the_events_are_found():
  program, links = reading.read(TEXT, mesh=MESH), cluster(overhead_s=1e-5)
  observed = calibration.join_profile(program, events_of(program, links))
  assert (observed.steps, len(observed.work), len(observed.messages)) == (
    3, 4, 4
  )
  assert observed.dtype == "float32"
  found, rows = calibration.calibrate([observed], "c", 10**9)
  assert found.device.memory_bytes == 10**9 // 4
  assert found.device.peak("float32") == pytest.approx(2e11, rel=1e-6)
  assert found.device.memory_bandwidth == pytest.approx(5e9, rel=1e-6)
  assert found.device.overhead_s == pytest.approx(1e-5, rel=1e-6)
  measured = [(0, 1), (2, 3), (3, 2), (0, 2), (3, 1)]
  for pair in measured:
    assert found.latency_s[pair] == pytest.approx(links.latency_s[pair])
    assert found.bandwidth[pair] == pytest.approx(links.bandwidth[pair])
  # Not measured: as the slowest one.
  assert found.bandwidth[0, 3] == pytest.approx(1e8)
  assert found.latency_s[0, 3] == pytest.approx(3e-4)
  assert {row["what"] for row in rows} == {
    "products", "memory", "links over data, 2 devices",
    "links over tensor, 2 devices", "steps",
  }
  assert max(row["residual"] for row in rows) < 1e-6


def test_link_has_the_rates_of_the_smallest_group_that_contains_it():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  observed = calibration.join_profile(program, events_of(program, links))
  everywhere = CollectiveSample("all", ((0, 1, 2, 3),), 6, 1e3, 1.0, 1)
  more = dataclasses.replace(
    observed, messages=(everywhere, *observed.messages),
    step_s=observed.step_s + 1.0,
  )
  found, _ = calibration.calibrate([more], "c", 10**9)
  assert found.bandwidth[0, 1] == pytest.approx(1e9)
  assert found.bandwidth[0, 3] == pytest.approx(1e3)  # in no smaller group


def test_rest_of_a_step_is_spread_over_compute():
  """The predicted step is the measured one; rates keep their ratio."""
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  observed = calibration.join_profile(program, events_of(program, links))
  compute_s = sum(w.seconds * w.count for w in observed.work)
  slower = dataclasses.replace(observed, step_s=observed.step_s + compute_s)
  found, _ = calibration.calibrate([slower], "c", 10**9)
  assert found.device.peak("float32") == pytest.approx(1e11, rel=1e-6)
  assert found.device.memory_bandwidth == pytest.approx(2.5e9, rel=1e-6)
  assert sum(calibration._compute_and_exposed_s(program, found)) == (
    pytest.approx(slower.step_s)
  )


def test_time_between_the_runs_belongs_to_the_step():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  alone = calibration.join_profile(program, events_of(program, links))
  apart = calibration.join_profile(program, events_of(program, links, 3, 1e-3))
  assert apart.step_s - alone.step_s == pytest.approx(1e-3 * 2 / 3)


def test_incomplete_run_of_a_program_is_not_counted():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  events = events_of(program, links)
  events["0"]["product"] *= 2
  assert calibration.join_profile(program, events).steps == 3


def test_totals_of_rates_and_links_are_the_measured_ones():
  rng = np.random.default_rng(0)
  work = [
    InstructionWork(rng.choice([0, 1e9]) * x, 1e6 * y, s, c)
    for x, y, s, c in rng.uniform(0.5, 2, (40, 4))
  ]
  fitted = calibration.fit_rates(work)
  assert sum(fitted.seconds(w) * w.count for w in work) == (
    pytest.approx(sum(w.seconds * w.count for w in work))
  )
  messages = [
    CollectiveSample("a", ((0, 1),), int(rng.integers(1, 7)), 1e3 * x, s, c)
    for x, s, c in rng.uniform(0.5, 2, (20, 3))
  ]
  for some in (messages, messages[:1]):  # one size: no latency
    latency_s, bandwidth = calibration.fit_link(some)
    assert sum(
      m.count * (m.hops * latency_s + m.bytes / bandwidth) for m in some
    ) == pytest.approx(sum(m.count * m.seconds for m in some))
  assert latency_s == 0
  exact = [m._replace(seconds=m.hops * 3e-4 + m.bytes / 2e8) for m in messages]
  assert calibration.fit_link(exact) == pytest.approx((3e-4, 2e8))


def test_profile_without_products_or_events_is_refused():
  with pytest.raises(ValueError, match="both matrix products and other"):
    calibration.fit_rates([InstructionWork(0.0, 1.0, 1.0, 1)])
  with pytest.raises(ValueError, match="no events of the program jit_step"):
    calibration.join_profile(reading.read(TEXT, mesh=MESH), {})


def test_step_of_a_real_profile_is_the_predicted_one(tmp_path):
  mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

  def step(x):
    y = jax.lax.psum(x @ x, "x")
    return jax.lax.psum(y[:8, :8], "x").sum() + jax.numpy.sin(y).sum()

  x = np.ones((256, 256), np.float32)
  program = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
  ).lower(x).compile()
  jax.block_until_ready(program(x))
  with jax.profiler.trace(str(tmp_path)):
    for _ in range(5):
      jax.block_until_ready(program(x))
  read = reading.read(program, mesh=mesh)
  (found,) = profiles.read_events(tmp_path)[read.module.name]
  observed = calibration.join_profile(read, found)
  assert (observed.steps, read.mesh.size) == (5, 4)
  links, _ = calibration.calibrate([observed], "cpu", 10**9)
  assert sum(calibration._compute_and_exposed_s(read, links)) == (
    pytest.approx(observed.step_s, rel=1e-6)
  )


def test_rates_minimise_squared_errors_over_measured_seconds():
  """Exact data cannot distinguish the weights of a fit: these are not exact."""
  true, draw = calibration.Rates(2e10, 1e9, 1e-5), np.random.default_rng(0)
  work = [
    w._replace(seconds=true.seconds(w) * draw.uniform(0.5, 1.5))
    for flops, size in (
      (1e9, 1e3), (4e9, 1e3), (9e9, 1e3), (0, 1e3), (0, 1e4), (0, 1e6), (0, 1e8)
    )
    for w in [InstructionWork(flops, size, 0.0, int(draw.integers(1, 9)))]
  ]

  count, seconds = np.array([(w.count, w.seconds) for w in work]).T

  def error(rates):
    model = np.array([rates.seconds(w) for w in work])
    # The fit scales all rates, so that the total is the measured one.
    scale = np.sum(count * model) / np.sum(count * model**2 / seconds)
    return np.sum(count * (scale * model - seconds) ** 2 / seconds)

  found = calibration.fit_rates(work)
  for place in range(3):
    for factor in (0.97, 1.03):
      other = list(found)
      other[place] *= factor
      assert error(calibration.Rates(*other)) > error(found)


# The reduction of %tiny runs three times, in a loop; most products are float32.
LOOP = TEXT.replace("ENTRY", """%again (a: (s32[], f32[4000])) -> (s32[], f32[4000]) {
  %a = (s32[], f32[4000]) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %z = f32[4000] get-tuple-element(%a), index=1
  %inner = f32[4000] all-reduce(%z), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %pair = (s32[], f32[4000]) tuple(%next, %inner)
}

%less (q: (s32[], f32[4000])) -> pred[] {
  %q = (s32[], f32[4000]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %three = s32[] constant(3)
  ROOT %d = pred[] compare(%j, %three), direction=LT
}

ENTRY""").replace("  %small =", """  %bits = bf16[8,8] constant({...})
  %also = bf16[8,8] dot(%bits, %bits), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  %zero = s32[] constant(0)
  %state = (s32[], f32[4000]) tuple(%zero, %tiny)
  %loop = (s32[], f32[4000]) while(%state), condition=%less, body=%again
  %small =""")  # noqa: E501


def test_executions_in_a_loop_and_idle_time_are_counted():
  program, links = reading.read(LOOP, mesh=MESH), cluster(overhead_s=1e-5)
  observed = calibration.join_profile(program, events_of(program, links))
  assert observed.dtype == "float32"  # that of most FLOPs
  counts = [(m.bytes, m.count) for m in observed.messages]
  assert sorted(c for size, c in counts if size == 16000) == [1, 1, 3]
  compute_s = sum(w.seconds * w.count for w in observed.work)
  slower = dataclasses.replace(observed, step_s=observed.step_s + compute_s)
  found, rows = calibration.calibrate([slower], "c", 10**9)
  assert found.device.peak("float32") == pytest.approx(1e11, rel=1e-3)
  assert found.device.overhead_s == pytest.approx(2e-5, rel=1e-3)
  # Compute, idle time as long, and the collectives.
  shares = {row["what"]: row["share"] for row in rows}
  total_s = shares.pop("steps") * slower.step_s
  assert sum(shares.values()) * slower.step_s == (
    pytest.approx(total_s - compute_s, rel=1e-6)
  )
  assert {row["what"]: row["samples"] for row in rows} == {
    "products": 1, "memory": 6, "links over data, 2 devices": 2,
    "links over tensor, 2 devices": 3, "steps": 1,
  }


def test_residuals_are_medians_of_relative_errors():
  """One sample of three is off; groups of four have six hops."""
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  observed = calibration.join_profile(program, events_of(program, links))
  messages = tuple(
    CollectiveSample(
      "all", ((0, 1, 2, 3),), 6, size, 6e-4 + size / 1e8 * off, 2
    )
    for size, off in ((1e5, 1.0), (2e5, 1.5), (4e5, 1.0))
  )
  step_s = observed.step_s * 2
  found, rows = calibration.calibrate(
    [dataclasses.replace(observed, messages=messages, step_s=step_s)], "c", 1
  )
  (row,) = (row for row in rows if row["what"].startswith("links"))
  assert row["what"] == "links over all, 4 devices"
  assert (row["rate"], row["latency_s"]) == (
    found.bandwidth[2, 1], found.latency_s[2, 1]
  )
  assert row["share"] == pytest.approx(
    sum(2 * m.seconds for m in messages) / step_s
  )
  errors = [
    abs((6 * row["latency_s"] + m.bytes / row["rate"]) / m.seconds - 1)
    for m in messages
  ]
  assert row["residual"] == pytest.approx(sorted(errors)[1])
  assert np.mean(errors) != pytest.approx(sorted(errors)[1])
  # The step with links that are slower than its own.
  predicted_s = sum(calibration._compute_and_exposed_s(program, found))
  assert rows[-1]["residual"] == pytest.approx(abs(predicted_s / step_s - 1))
