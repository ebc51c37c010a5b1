"""Analysis of a compiled step of a small model, and its tables."""

import collections
import dataclasses
import types

import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import partition, programs, report, study
from caatnet.show import render
from configs.caatnet import tiny
from parallel.ledger import compiled, ledger, overlap, targets
from parallel.ledger.roofline import Cost
from parallel.plans.hardware import devices
from parallel.plans.hardware.link_matrix import LinkMatrix
from tests.caatnet.train import linear_model


def test_partition_formula_is_listed_with_the_program(capsys):
  """Two microbatches and two lanes; losses and norms are the remainder."""
  experiment = linear_model.make(
    data=4, devices=(1, 2), scheme="zero3", accumulation=2
  )
  program = experiment.program
  asked = ledger.collectives(
    experiment.lower_step(), program.layout.mesh
  )
  found = partition.analyse(program, 2, asked, asked)
  rows = collections.defaultdict(dict)
  for row in found["bytes"]:
    rows[row["kind"]] = row
    assert row["lowered"] == row["compiled"]
  # 6 elements are padded to 8 and 2 to 4; two lanes have shards of 2 and 1,
  # gathered forward and backward.
  gathers = rows["all_gather"]
  assert (gathers["axes"], gathers["dtype"]) == ("data", "float32")
  assert gathers["formula"] == gathers["lowered"] == 2 * 2 * 2 * (2 + 1) * 4
  scatters = rows["reduce_scatter"]
  assert scatters["formula"] == scatters["lowered"] == 2 * (8 + 4) * 4
  assert rows["all_reduce"]["formula"] == 0 < rows["all_reduce"]["lowered"]
  # A float32 weight and its momentum.
  assert found["memory"]["state (arguments)"] == 2 * 8 * (2 + 1)
  render.show(*report.partition_tables("it", found))
  printed = capsys.readouterr().out
  assert "reduce_scatter" in printed


def test_several_slices_are_refused():
  chips = tuple(types.SimpleNamespace(slice_index=n) for n in (0, 0, 1, 1))
  target = targets.Target("tpu:v5e:1x2:2", chips, None, ())
  with pytest.raises(ValueError, match="must have one slice"):
    programs.compile_for(target, None, None, {})


def test_tables_show_collectives_of_unknown_count(capsys):
  entries = [
    ledger.Collective(
      "all_reduce", ("a",), 8, "float32", (1000,), count, "forward", False,
      "add", "",
    )
    for count in (2, None)
  ]
  (difference,) = compiled.compare(entries[:1], entries)
  assert difference.differs
  render.show(*report.ledger_tables("it", {"collectives": [], "ledger": [{
    "axes": ["a"], "phase": "forward", "differs": True,
    "lowered": programs.ledger_rows(difference.lowered),
    "compiled": programs.ledger_rows(difference.compiled),
  }]}))
  transfers = [
    overlap.ScheduledCollective((e,), e.count, False, 1.0, Cost(), 0.0, ())
    for e in entries
  ]
  for found in (transfers, transfers[1:]):
    rows = overlap.sum_by_axes(found)
    render.show(report.overlap_table(
      {"it": {"overlap": [{"axes": ["a"], **row} for row in rows.values()]}}
    ))
  printed = capsys.readouterr().out
  assert printed.count("2 x all_reduce float32  0.008 MB") == 2
  assert printed.count("? x all_reduce float32  0.004 MB each") == 1
  assert printed.count("1, 0.00 MB each time") == 2


def test_bounds_of_a_step():
  """Axes may send concurrently; as scheduled, exposed communication adds up."""
  entries = [
    ledger.Collective(
      "all_reduce", axes, 8, "float32", (1000,), count, "forward", False,
      "add", "",
    )
    for axes, count in ((("a",), 1), (("b",), 2), (("b",), None))
  ]
  rows = overlap.sum_by_axes([
    overlap.ScheduledCollective((e,), e.count, True, 3.0, Cost(), 1.0, ())
    for e in entries
  ])
  found = programs.step_time_bounds(2.0, rows.values())
  assert found["busiest_axes_seconds"] == 6
  assert found["step_if_all_overlaps"] == 6
  assert found["step_as_scheduled"] == pytest.approx(2 + 3 * 2)
  assert found["step_if_none_overlaps"] == 2 + 3 * 3
  assert found["unknown_transfers"] == 1
  assert programs.step_time_bounds(7.0, rows.values())[
    "step_if_all_overlaps"
  ] == 7


def test_only_asynchronous_transfers_are_hidden():
  """A synchronous one blocks, whatever is scheduled with it."""
  entry = ledger.Collective(
    "all_reduce", ("a",), 8, "float32", (1000,), 1, "forward", False, "add", "",
  )
  found = programs.timeline([
    overlap.ScheduledCollective((entry,), 1, asynchronous, 4.0, Cost(), 1.0, ())
    for asynchronous in (True, False)
  ])
  assert [row["hidden"] for row in found["transfers"]] == [0.25, 0]


def cluster(residuals=(), count=4, family=(("devices", (2, 4)),)):
  return LinkMatrix(
    "c",
    devices.make_measured_device("d", {"float32": 1e9}, 10**9, 1e9, "test"),
    (0,) * count, np.full((count, count), 1e6), np.full((count, count), 1e-3),
    "test", "measured", residuals, dict(family), 0.5,
  )


def test_step_with_measured_rates_has_an_interval(capsys):
  """The step is the sum of compute and of the collectives' rings."""
  experiment = linear_model.make(data=4, devices=(1, 4), scheme="zero3")
  residuals = tuple(np.linspace(-0.1, 0.3, 21))
  target = targets.with_measured_links(
    targets.resolve("cpu:4"), cluster(residuals)
  )
  found = study.analyse(experiment, target)
  bounds, sent = found["roofline"], found["collectives"]
  hops = {"all_reduce": 6, "all_gather": 3, "reduce_scatter": 3}
  assert {c["kind"] for c in sent} == set(hops)
  assert bounds["wire_seconds"] == pytest.approx(sum(
    c["count"] * (hops[c["kind"]] * 1e-3 + c["wire_bytes_ring"] / 1e6)
    for c in sent
  ))
  assert bounds["model_flops"] == experiment.flops_per_step / 4
  assert bounds["model_flops_seconds"] == bounds["model_flops"] / 1e9
  assert bounds["compute_seconds"] >= bounds["model_flops_seconds"]
  step = bounds["step_as_scheduled"]
  assert step == pytest.approx(bounds["compute_seconds"] + (
    bounds["wire_seconds"]
  ))
  assert found["interval"] == pytest.approx({
    "low": step * np.exp(-0.1), "median": step * np.exp(0.1),
    "high": step * np.exp(0.3),
  })
  render.show(report.report({"it": found}))
  printed = capsys.readouterr().out
  assert "median and 90% interval" in printed
  assert "not a measurement" not in printed
  assert found["outside"] == []
  assert "outside" not in printed
  # Of another family, by two keys: both ends move.
  other = cluster(residuals, 4, {"devices": (8,), "zero.scheme": ("zero9",)})
  there = study.analyse(
    experiment, targets.with_measured_links(targets.resolve("cpu:4"), other)
  )
  assert there["interval"] == pytest.approx({
    "low": step * np.exp(-1.1), "median": step * np.exp(0.1),
    "high": step * np.exp(1.3),
  })
  render.show(report.report({"it": there}))
  line = "outside: devices=4 (calibration: 8), zero.scheme="
  assert line in " ".join(capsys.readouterr().out.split())
  plain = targets.with_measured_links(targets.resolve("cpu:4"), cluster())
  assert "interval" not in study.analyse(experiment, plain)


def test_only_devices_with_processors_of_their_own_wait_for_stages():
  """Rates of devices that share processors include the compute of others."""
  config = override(
    tiny.get_config("test"),
    "parallel.stage=2 parallel.tensor=1 train.accumulation=2",
  )
  target = targets.with_measured_links(
    targets.resolve("cpu:2"), cluster(count=2)
  )
  experiment = experiments.build(config, {"stage": 2}, list(target.devices))
  made = programs.compile_for(
    target, experiment.program.layout.mesh,
    lambda: experiment.lower_step(experiment.outer.plan(0)), {},
  )
  steps = []
  for name in ("cpu:2", "gpu:h200:1x2"):
    named = dataclasses.replace(
      made, target=dataclasses.replace(target, name=name)
    )
    bounds = study.analyse_schedule(experiment, named)["roofline"]
    assert ("waiting_seconds" in bounds) == name.startswith("gpu")
    steps.append(
      bounds["step_as_scheduled"] - bounds.get("waiting_seconds", 0)
    )
    assert bounds.get("waiting_seconds", 1) > 0
  assert steps[1] == pytest.approx(steps[0])


def test_measured_cluster_needs_the_devices_of_the_target():
  with pytest.raises(ValueError, match="--cluster: 'c' has 3 devices, but"):
    targets.with_measured_links(targets.resolve("cpu:4"), cluster(count=3))


def test_equal_copies_to_the_host_are_one_row():
  """Each row has the least compute that overlaps; None if synchronous."""
  def copy(seconds, count, asynchronous=True, size=100):
    return overlap.HostCopy(
      True, size, count, asynchronous, Cost(seconds=seconds), "block"
    )

  copies = [
    copy(4.0, 2), copy(2.0, 3), copy(8.0, 1), copy(0.0, 1, asynchronous=False),
    copy(1.0, None, size=60), copy(1.0, 1, size=60), copy(0.0, 1, size=7),
  ]
  program = types.SimpleNamespace(host_copies=lambda: copies)
  found = programs.host_copies(program)
  assert [(
    row["bytes"], row["count"], row["overlapped_seconds"], row["hiding_rate"]
  ) for row in found] == [
    (100, 6, 2.0, 50.0), (100, 1, None, None), (60, None, 1.0, 60.0),
    (7, 1, 0.0, None),
  ]


def test_memory_and_rates_have_their_units_and_places():
  """Sizes in host memory are named, and only where there are some."""
  x = jax.ShapeDtypeStruct(
    (225,), np.float32,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  device = devices.make_measured_device(
    "d", {"float32": 2e12}, 3 * 10**9, 5e9, "a test"
  )
  parts = dict(
    argument_size_in_bytes=800, host_argument_size_in_bytes=124,
    host_temp_size_in_bytes=60, output_size_in_bytes=70,
    alias_size_in_bytes=30, temp_size_in_bytes=500,
    generated_code_size_in_bytes=6,
  )

  def made(**changed):
    analysis = types.SimpleNamespace(**(parts | changed))
    return programs.CompiledProgram(
      targets.Target("cpu:1", (), device, ()), None, None, [], [], {},
      types.SimpleNamespace(memory_analysis=lambda: analysis),
    )

  assert made().memory({"x": x}) == {
    "x": 900, "of these on the host": 124, "padding by layout": 24,
    "outputs": 40, "temporaries": 500, "temporaries on the host": 60,
    "program": 6, "total": 800 + 40 + 500 + 6, "capacity": 3 * 10**9,
  }
  found = made(host_argument_size_in_bytes=0, host_temp_size_in_bytes=0)
  assert not [name for name in found.memory({"x": x}) if "host" in name]
  assert made().constants("float32") == {
    "float32 peak": ["2 TFLOP/s", device.source],
    "memory": ["3 GB, 5 GB/s", device.source],
  }


@pytest.mark.parametrize(("stages", "schedule"), [(1, "none"), (3, "1f1b")])
def test_family_has_the_schedule_of_several_stages(stages, schedule):
  found = study.calibration_features(
    {"parallel": {"stage": stages}, "pipeline": {"schedule": "1f1b"}},
    "gpu:h200:1x2", 2,
  )
  assert (found["target"], found["devices"]) == ("gpu", 2)
  assert found["pipeline.schedule"] == schedule
  assert (found["parallel.stage"], found["model.width"]) == (stages, "none")


def test_each_program_of_a_run_is_that_of_its_first_step():
  outer = types.SimpleNamespace(
    steady_round=range(10, 16),
    plan=lambda step: types.SimpleNamespace(variant=step % 3 == 2),
  )
  assert study.steps_of_programs(outer) == [10, 11]
  run = types.SimpleNamespace(outer=outer)
  assert [*study.programs_of_run("it", run)] == ["it, step 10", "it, step 11"]
  assert [*study.programs_of_run("it", run, 14)] == ["it"]
