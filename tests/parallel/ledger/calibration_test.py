"""Rates fitted to events that follow the model, and to real profiles."""

import dataclasses

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.ledger import calibration, link_times, profiles, reading
from parallel.ledger.calibration import InstructionWork, Message
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
    "true", devices.measured(
      "d", {"float32": rate}, 10**9, bandwidth, "test", overhead_s
    ),
    (0,) * 4, per_s, latency_s, "test", "measured",
  )


def events_of(program, links, steps=3, rest_s=0.0):
  """Events in which every instruction takes the time of the model."""
  scheduled = ScheduledProgram(
    program.module, program.mesh, links.device,
    link_times.seconds(links, program.mesh),
  )
  found = {}
  for device in range(4):
    now, of_device = 0.0, found.setdefault(str(device), {})
    for _ in range(steps):
      for computation, _ in program.module.runs():
        for i in computation.instructions:
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
  observed = calibration.observe(program, events_of(program, links))
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
  assert {row["what"] for row in rows} == {
    "products", "memory", "links over data, 2 devices",
    "links over tensor, 2 devices", "steps",
  }
  assert max(row["residual"] for row in rows) < 1e-6


def test_link_has_the_rates_of_the_smallest_group_that_contains_it():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  observed = calibration.observe(program, events_of(program, links))
  everywhere = Message("all", ((0, 1, 2, 3),), 6, 1e3, 1.0, 1)
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
  observed = calibration.observe(program, events_of(program, links))
  compute_s = sum(w.seconds * w.count for w in observed.work)
  slower = dataclasses.replace(observed, step_s=observed.step_s + compute_s)
  found, _ = calibration.calibrate([slower], "c", 10**9)
  assert found.device.peak("float32") == pytest.approx(1e11, rel=1e-6)
  assert found.device.memory_bandwidth == pytest.approx(2.5e9, rel=1e-6)
  assert sum(calibration._parts(program, found)) == (
    pytest.approx(slower.step_s)
  )


def test_time_between_the_runs_belongs_to_the_step():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  alone = calibration.observe(program, events_of(program, links))
  apart = calibration.observe(program, events_of(program, links, 3, 1e-3))
  assert apart.step_s - alone.step_s == pytest.approx(1e-3 * 2 / 3)


def test_incomplete_run_of_a_program_is_not_counted():
  program, links = reading.read(TEXT, mesh=MESH), cluster()
  events = events_of(program, links)
  events["0"]["product"] *= 2
  assert calibration.observe(program, events).steps == 3


def test_totals_of_rates_and_links_are_the_measured_ones():
  rng = np.random.default_rng(0)
  work = [
    InstructionWork(rng.choice([0, 1e9]) * x, 1e6 * y, s, c)
    for x, y, s, c in rng.uniform(0.5, 2, (40, 4))
  ]
  fitted = calibration.rates(work)
  assert sum(fitted.seconds(w) * w.count for w in work) == (
    pytest.approx(sum(w.seconds * w.count for w in work))
  )
  messages = [
    Message("a", ((0, 1),), 2, 1e3 * x, s, 3)
    for x, s in rng.uniform(0.5, 2, (20, 2))
  ]
  for some in (messages, messages[:1]):  # one size: no latency
    latency_s, bandwidth = calibration.link(some)
    assert sum(m.hops * latency_s + m.bytes / bandwidth for m in some) == (
      pytest.approx(sum(m.seconds for m in some))
    )


def test_profile_without_products_or_events_is_refused():
  with pytest.raises(ValueError, match="needs products, and other"):
    calibration.rates([InstructionWork(0.0, 1.0, 1.0, 1)])
  with pytest.raises(ValueError, match="no events of jit_step"):
    calibration.observe(reading.read(TEXT, mesh=MESH), {})


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
  (found,) = profiles.events(tmp_path)[read.module.name]
  observed = calibration.observe(read, found)
  assert (observed.steps, read.mesh.size) == (5, 4)
  links, _ = calibration.calibrate([observed], "cpu", 10**9)
  assert sum(calibration._parts(read, links)) == (
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

  found = calibration.rates(work)
  for place in range(3):
    for factor in (0.97, 1.03):
      other = list(found)
      other[place] *= factor
      assert error(calibration.Rates(*other)) > error(found)
