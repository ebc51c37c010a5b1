"""Programs of other people, by name, and the tables of their collectives."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from caatnet.show import render
from parallel.ledger import reading
from parallel.ledger.sends import foreign, report, trace
from parallel.ledger.timeline import COMPUTE, timeline
from parallel.plans.hardware import cluster_files
from parallel.plans.hardware.devices import DEVICES
from tests import traces

EXAMPLE = "docs/examples/mlp.py:step"
ROOT = pathlib.Path(__file__).parents[3]

WHOLE = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(
  jax.make_mesh((8,), ("x",)), PartitionSpec("x")
))

SUM = """
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

def whole(scale=1):
  mesh = jax.make_mesh((2, 2), ("a", "b"))
  f = jax.shard_map(
    lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P(), out_specs=P(),
    check_vma=False,
  )
  x = jax.ShapeDtypeStruct((3 * scale,), jnp.float32)
  return jax.jit(lambda x: f(x)), {"x": x}

def twice():
  return whole(2)

train_step, example_args = whole()[0], lambda: whole()[1]

def plain():
  return (lambda x: x), (1.0,)

def nothing():
  pass
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "sums.py"
  path.write_text(SUM)
  return path


def test_example_is_read_with_its_lines(monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  readings = foreign.read(EXAMPLE, jax.devices()[:8])
  rows = report.readings_as_data(readings)[EXAMPLE]["collectives"]
  # Gradients of two weights: layers x 512 x 2,048 x 4 bytes each.
  data = [r for r in rows if r["axes"] == ["data"]]
  assert [r["bytes"] for r in data] == 2 * [4 * 512 * 2048 * 4]
  assert {r["requested"] for r in rows} == {"bfloat16"}
  render.show(report.report(readings))
  shown = capsys.readouterr().out
  line, mesh = "docs/examples/mlp.py:18", "data 2, fsdp 2, tensor 2"
  for text in (line, mesh, "16.78 MB"):
    assert text in shown
  # A total per axes and phase; they add up to that of the program.
  (row,) = report.readings_as_data(readings).values()
  sums = {(r["over"], r["phase"]): r["bytes"] for r in row["by_axes"]}
  assert sums == {
    ("data", "backward"): 2 * 4 * 512 * 2048 * 4,
    ("fsdp", "forward"): 4 * 2**20, ("fsdp", "backward"): 4 * 2**20,
    ("tensor", "forward"): 2**20, ("tensor", "backward"): 2**20,
  }
  for key in ("number", "bytes", "wire_bytes"):
    assert sum(r[key] for r in row["by_axes"]) == row["totals"]["counted"][key]
  # Times are those of bfloat16, and no less than those of products alone.
  for row in rows:
    assert row["seconds"] == pytest.approx(row["wire_bytes"] / 2 / 450e9)
  (row,) = report.readings_as_data(readings, rates="a100").values()
  sent_s = row["totals"]["counted"]["wire_bytes"] / 2 / 300e9
  assert row["totals"]["counted"]["seconds"] == pytest.approx(sent_s)
  products = 3 * 2 * 2 * 4 * 1024 * 4096 * 256 / 8 - 2 * 1024 * 4096 * 256 / 8
  assert row["step_s"] - sent_s > products / 312e12
  # Sums of activations, and sums of gradients only.
  by_p, by_rounds = (
    part for part in report.report(readings).parts if "at most" in str(part)
  )
  assert "5.243 MB of 44.04 MB" in by_p
  assert "in the sums over fsdp, tensor, and 4% of the step" in by_p
  assert f"{29 / 30 * 33.5544:.2f} MB of 44.04 MB" in by_rounds
  assert "in the sums over data, and 25% of the step" in by_rounds
  # Parts of the memory have units.
  (line,) = (
    part for part in report.report(readings).parts
    if str(part).startswith("memory of a device: ")
  )
  sizes = dict(
    word.split(" ", 1)
    for word in line.removeprefix("memory of a device: ").split(", ")
  )
  units = {"0": 1, "B": 1, "kB": 1e3, "MB": 1e6}
  for name, size in readings[EXAMPLE].memory.items():
    number, unit = sizes[name].split()[0], units[sizes[name].split()[-1]]
    assert float(number) * unit == pytest.approx(size, rel=6e-4)


def test_function_of_a_module_and_named_arguments(file, monkeypatch):
  monkeypatch.syspath_prepend(file.parent)
  for name in (f"{file}:whole", "sums:whole", "sums:train_step"):
    (found,) = foreign.read(name, jax.devices()[:4]).values()
    assert dict(found.axes) == {"a": 2, "b": 2}
    assert [(e.axes, e.bytes) for e in found.entries] == [(("b",), 12)]
  assert jax.devices()[:4] != jax.devices()  # devices are those of before


def test_mesh_of_a_module_is_that_of_the_target(tmp_path):
  text = SUM.replace("def whole(scale=1):\n  mesh =", "mesh =", 1).replace(
    "  f = jax.shard_map(", "def whole(scale=1):\n  f = jax.shard_map(", 1
  ).replace("(2, 2), (", "(jax.device_count() // 2, 2), (")
  (tmp_path / "m.py").write_text(text)
  (found,) = foreign.read(f"{tmp_path}/m.py:whole", jax.devices()[:4]).values()
  assert dict(found.axes) == {"a": 2, "b": 2}


def test_other_devices_than_those_of_the_target_are_refused(tmp_path):
  (tmp_path / "o.py").write_text(
    "import jax\nfrom tests.caatnet.studies.sends_test import WHOLE\n"
    "def f():\n  return jax.jit(lambda x: x), (WHOLE,)\n"
  )
  with pytest.raises(ValueError, match="must use the devices of --target"):
    foreign.read(f"{tmp_path}/o.py:f", jax.devices()[:2])


def test_difference_of_two_programs(file, capsys):
  readings = foreign.read(f"{file}:whole", jax.devices()[:4])
  readings |= foreign.read(f"{file}:twice", jax.devices()[:4])
  render.show(report.report(readings))
  shown = capsys.readouterr().out
  assert "differs" in shown
  same = {"one": readings[f"{file}:whole"], "two": readings[f"{file}:whole"]}
  render.show(report.report(same))
  assert "differs" not in capsys.readouterr().out


MIXED = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %r = f32[1000]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %u = f32[1000]{0} all-reduce(%x), replica_groups={{0,1,2},{3}}, to_apply=%add
  ROOT %k = f32[1000]{0} custom-call(%r), custom_call_target="mystery"
}
"""


def test_known_bounded_and_unknown_traffic_have_totals(tmp_path):
  """In JSON, in tables, in the difference of two programs and in a trace."""
  readings = {"it": reading.read(MIXED)}
  (row,) = report.readings_as_data(readings).values()
  assert row["step_s"] is None
  assert {total.pop("seconds") for total in row["totals"].values()} == {
    6000 / 450e9, 2 * 2 / 3 * 4000 / 450e9, None,
  }
  assert row["totals"] == {
    "counted": {"number": 1, "bytes": 4000, "wire_bytes": 6000.0},
    "at_most": {"number": 1, "bytes": 4000, "wire_bytes": 2 * 2 / 3 * 4000},
    "unknown": {"number": 1, "bytes": None, "wire_bytes": None},
  }
  assert row["unknown"] == [{
    "name": "k", "what": "custom call of 'mystery'", "source": "",
    "target": "mystery",
  }]
  cells = [
    cell for part in report.report(readings).parts if not isinstance(part, str)
    for line in part.cells() for cell in line
  ]
  assert {"1 to 3 devices", "at most 4 kB", "unknown", "?"} <= set(cells)
  same = report.report({**readings, "again": readings["it"]}).parts[-1]
  assert same.cells()[-1] == [
    "unknown", "", *["k: custom call of 'mystery'"] * 2, "may differ",
  ]
  # Of an unknown number of devices.
  alone = MIXED.replace(", num_partitions=4", "").replace("{{0,1,2},{3}}", "{}")
  (row,) = report.readings_as_data({"it": reading.read(alone)}).values()
  assert row["totals"]["counted"]["number"] == 0
  assert row["totals"]["unknown"]["number"] == 2
  assert [r["wire_bytes"] for r in row["collectives"]] == [None]
  path = tmp_path / "step.perfetto-trace"
  assert "without 1 instructions that may communicate" in trace.write(
    readings, path, "h100"
  )


def test_trace_has_a_row_per_resource(tmp_path):
  readings = foreign.read(EXAMPLE, jax.devices()[:8])
  path = tmp_path / "step.perfetto-trace"
  line = trace.write(readings, path, "h100")
  title, rows, found = traces.read(path)
  assert (title, rows) == (EXAMPLE, [COMPUTE, "fsdp", "tensor", "data"])
  _, program = trace._only_program("--trace", readings, "h100")
  expected = {row: [] for row in rows}
  for bar in timeline(program):
    expected[bar.row].append((
      bar.name, round(bar.start_s * 1e9), round(bar.end_s * 1e9),
      {"where": bar.where, "bytes": bar.bytes, "flops": bar.flops},
    ))
  assert found == expected
  last = max(bar.end for bars in found.values() for bar in bars)
  assert f": {last / 1e6:,.3f} ms with the peak rates of h100" in line


def test_execution_traces_are_replayed(file, tmp_path):
  pytest.importorskip("chakra")
  readings = foreign.read(f"{file}:whole", jax.devices()[:4])
  line = trace.write_chakra(readings, tmp_path / "traces", "h100")
  assert "4 traces of " in line
  # 12 bytes over rings of two: 6 bytes each way.
  seconds = 2 * 6 / DEVICES["h100"].link.bandwidth
  assert f"communication during {seconds * 1e3:,.6f} ms" in line
  with pytest.raises(ValueError, match="--chakra needs exactly one program"):
    trace.write_chakra({**readings, "b": None}, tmp_path, "h100")


def test_measured_times_have_source_lines(file, tmp_path, capsys):
  readings = foreign.read(f"{file}:whole", jax.devices()[:4])
  names = runpy.run_path(str(file))
  f, _ = names["whole"]()
  with jax.profiler.trace(str(tmp_path / "trace")):
    jax.block_until_ready(f(jnp.ones(3)))
  measured = foreign.measure_collectives(readings, str(tmp_path / "trace"))
  (row,) = report.readings_as_data(readings, measured)[
    f"{file}:whole"
  ]["measured"]
  # jax's cache of compiled programs ignores the names of files.
  assert row["source"].endswith("sums.py:10")
  assert (row["axes"], row["executions"], row["bytes"]) == (["b"], 1, 12)
  render.show(report.report(readings, measured))
  shown = capsys.readouterr().out
  assert "transfer ms" in shown
  assert "no complete event" not in shown
  # A collective without events, as in a GPU's command buffer, is named.
  missing = {name: [] for name in measured}
  (found,) = report.readings_as_data(readings, missing).values()
  (name,) = {e.instruction for e in readings[f"{file}:whole"].executed}
  assert found["not_measured"] == [name]
  render.show(report.report(readings, missing))
  shown = capsys.readouterr().out
  assert f"no complete event of 1 collectives, such as {name}." in shown
  with pytest.raises(ValueError, match=r"no file \*\.xplane\.pb"):
    foreign.measure_collectives(readings, str(tmp_path / "other"))


def test_rates_of_a_profile_are_written_as_a_cluster(tmp_path):
  file = tmp_path / "products.py"
  file.write_text(
    "import jax\n\n"
    "def step():\n"
    "  f = jax.jit(lambda x: jax.numpy.sin(x @ x))\n"
    "  return f, (jax.ShapeDtypeStruct((64, 64), 'float32'),)\n"
  )
  readings = foreign.read(f"{file}:step")
  f, _ = runpy.run_path(str(file))["step"]()
  x = jnp.ones((64, 64))
  jax.block_until_ready(f(x))
  with jax.profiler.trace(str(tmp_path / "trace")):
    jax.block_until_ready(f(x))
  path = tmp_path / "cluster.json"
  line = foreign.calibrate(readings, str(tmp_path / "trace"), path)
  assert line.startswith(f"{path}: products ")
  links = cluster_files.cluster(str(path))
  assert (links.num_devices, links.mark) == (1, "measured")
  assert links.device.peak("float32") > 1e6
  with pytest.raises(ValueError, match="--calibrate needs --profile"):
    foreign.calibrate(readings, "", path)
  with pytest.raises(ValueError, match=r"rates.txt must end in \.json"):
    foreign.calibrate(
      readings, str(tmp_path / "trace"), path.with_name("rates.txt")
    )


@pytest.mark.parametrize(("name", "message"), [
  ("FILE:missing", "has no function 'missing'; it has .*whole"),
  ("FILE", "must name a function, as in .*:step"),
  (".x:f", "must have the form package.module:function"),
  ("FILE:plain", "must return a function made by jax.jit"),
  ("FILE:nothing", r"\(jitted function, arguments\), but returns NoneType"),
  ("no_such_module:f", "No module named 'no_such_module'"),
  ("missing.py:f", "the file missing.py does not exist"),
  ("missing.txt", "No such file"),
  ("json:dumps", "json:dumps must be a function without arguments: missing"),
  ("builtins:min", "must be a function without arguments: no signature found"),
  ("BROKEN:f", "invalid syntax"),
])
def test_mistake_is_one_line(file, name, message):
  broken = file.with_name("broken.py")
  broken.write_text("def f(:\n")
  with pytest.raises(ValueError, match=message) as error:
    foreign.read(
      name.replace("FILE", str(file)).replace("BROKEN", str(broken))
    )
  assert "\n" not in str(error.value)
