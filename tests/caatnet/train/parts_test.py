"""Parts of a training run alone: progress, signals, norms, metrics, records."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
import signal
import threading
import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.train import files, records, summary, sweep, throughput
from caatnet.train.metrics import LateMetrics
from caatnet.train.microbatches import split
from caatnet.train.norms import group_norms, parameter_groups, worker_norms
from caatnet.train.prefetch import PrefetchIterator
from caatnet.train.progress import TrainProgress
from caatnet.train.stop import stop_signals
from caatnet.train.workers import WorkerMetrics
from tests.caatnet.show import terminal
from tests.caatnet.train import linear_model as toy


@pytest.mark.parametrize("num_lead", [0, 1, 2])
def test_microbatches_are_consecutive_examples(num_lead):
  batch = np.arange(2 * 3 * 12 * 5).reshape(2, 3, 12, 5)
  whole = batch.reshape(*batch.shape[2 - num_lead : 2], 12, 5, -1)
  parts = split({"x": jnp.asarray(whole)}, 4, num_lead)["x"]
  for i in range(4):
    expected = np.moveaxis(
      np.moveaxis(whole, num_lead, 0)[3 * i : 3 * i + 3], 0, num_lead
    )
    np.testing.assert_array_equal(parts[i], expected)


def test_line_is_printed_at_the_end_and_every_ten_seconds(capsys, monkeypatch):
  times = iter([100.0, 109.0, 110.0, 110.5, 110.5, 120.5, 121.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(times))
  monkeypatch.setattr("caatnet.train.progress.time", clock)
  progress = TrainProgress("[b]run", 0, 5)
  expected = []
  # A line is printed 10.5 s after the start; 10 s later, none is.
  for step in range(1, 6):
    speed = None if step < 3 else 12_345.6
    progress.update(step, 2.0 / step, speed, "tokens")
    if step in (3, 5):
      expected.append(
        f"[b]run: step {step}/5  loss {2 / step:.4f}  12,346 tokens/s"
      )
  progress.say("[b]" + "x" * 200)
  progress.close()
  out = capsys.readouterr().out
  assert out.splitlines() == [*expected, "[b]" + "x" * 200]
  monkeypatch.undo()
  progress = TrainProgress("run", 0, 1, quiet=True)
  progress.update(1, 2.0, None, "tokens")
  progress.say("x")
  assert capsys.readouterr().out == ""


def test_terminal_has_a_bar_until_the_run_is_closed(monkeypatch):
  out = terminal.attach(monkeypatch, "stdout", width=120)
  progress = TrainProgress("run", 2, 5)
  assert "2/5" in out.text
  assert "compiling" in out.text
  progress.update(4, 0.5, None, "tokens")
  progress.say("a line 12")
  progress.update(5, 0.25, 1000.0, "tokens")
  progress.close()
  assert "a line 12\n" in out.getvalue()  # without colours
  last = out.text.splitlines()[-1]
  assert "5/5 loss 0.2500  1,000 tokens/s" in last
  assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back
  size = len(out.getvalue())
  quiet = TrainProgress("run", 2, 5, quiet=True)
  quiet.update(3, 0.5, None, "tokens")
  quiet.close()
  assert len(out.getvalue()) == size


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop_and_the_second_ends(number):
  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  with stop_signals() as stop:
    assert (stop.requested(), stop.exit_code) == (False, 0)
    signal.raise_signal(number)
    assert (stop.requested(), stop.exit_code) == (True, 128 + number)
    assert signal.getsignal(number) == signal.SIG_DFL
  assert {n: signal.getsignal(n) for n in before} == before


def test_signals_are_left_alone_outside_of_the_main_thread():
  found = []

  def run():
    with stop_signals() as stop:
      found.append(stop.requested())

  before = signal.getsignal(signal.SIGINT)
  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert found == [False]
  assert signal.getsignal(signal.SIGINT) == before


def test_metrics_are_taken_once_and_in_order():
  late = LateMetrics()
  assert late.take() == []
  for step in (1, 2):
    late.add(step, {"loss": jnp.full((2,), float(step))}, due=False)
  found = late.take()
  assert [step for step, _ in found] == [1, 2]
  for step, metrics in found:
    assert isinstance(metrics["loss"], np.ndarray)
    np.testing.assert_array_equal(metrics["loss"], [step, step])
  assert late.take() == []


def test_norms_are_per_parameter_and_per_worker():
  program = toy.make(model=toy.Deep()).program
  tree = {"w": np.full((3, 4), 2.0, "f4"), "b": np.arange(4, dtype="f4"),
          "blocks": {"w": np.ones((2, 3, 3), "f4")}}
  assert parameter_groups(tree) == ["b", "blocks/w", "w"]

  def run(f, tree):
    return jax.jit(jax.shard_map(
      lambda x: f(x, program), mesh=program.layout.mesh, in_specs=P(),
      out_specs=P(),
    ))(tree)

  found = run(group_norms, tree)
  assert {k: float(v) for k, v in found.items()} == {
    "b": pytest.approx(14**0.5), "blocks/w": pytest.approx(18**0.5),
    "w": pytest.approx(48**0.5),
  }
  both = jax.tree.map(lambda x: np.stack([x, 3 * x]), tree)
  norms = run(worker_norms, both)
  np.testing.assert_allclose(norms, [80**0.5, 3 * 80**0.5], rtol=1e-6)
  assert norms.dtype == "float32"


def test_rate_of_products_counts_their_operations(monkeypatch):
  """On a clock that ticks once per reading, at decreasing intervals."""
  mesh = toy.make().program.layout.mesh
  times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
  clock = types.SimpleNamespace(perf_counter=lambda: next(times))
  monkeypatch.setattr(throughput, "time", clock)
  monkeypatch.setitem(throughput._SIZE, "cpu", 16)
  rate = throughput.matmul_rate.__wrapped__(mesh, "float32", 3)
  assert rate == 8 * 2 * 16**3 / 2.0
  with pytest.raises(StopIteration):
    next(times)


def test_prefetching_counts_waiting_and_working(monkeypatch):
  """On a clock that advances by one second per reading."""
  ticks = iter(range(100))
  clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
  monkeypatch.setattr("caatnet.train.prefetch.time", clock)
  layout = toy.make().program.layout

  class Zeros:
    def __next__(self):
      return {"x": np.zeros((8, 2), "f4")}

    def get_state(self):
      return None

  batches = PrefetchIterator(layout, Zeros())
  assert iter(batches) is batches
  for number in (1, 2):
    next(batches)
    # Readings: start of waiting, start and end of drawing, end of waiting.
    assert (batches.waited_s, batches.worked_s) == (3.0 * number, number)
  batches.close()


def test_environment_names_versions_devices_and_commit(monkeypatch):
  program = toy.make(workers=2, devices=(2, 1)).program
  before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
  found = records.environment(program.layout.mesh)
  date = datetime.datetime.fromisoformat(found.pop("date"))
  assert before <= date <= datetime.datetime.now(datetime.UTC)
  assert found.pop("versions") == {
    name: importlib.metadata.version(name) for name in (
      "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"
    )
  }
  commit = found.pop("commit")
  assert commit == "unknown" or len(commit) == 40
  assert found == {
    "python": platform.python_version(), "machine": platform.machine(),
    "devices": "2 x cpu", "processes": 1,
    "mesh": {"worker": 2, "data": 1, "tensor": 1},
  }
  monkeypatch.setattr("caatnet.commands.is_installed", lambda: True)
  assert records.environment(program.layout.mesh)["commit"] == "unknown"


def test_json_of_records_is_indented(tmp_path):
  path = tmp_path / "a.json"
  records.write_json(path, {"a": [1], "b": None})
  assert path.read_text() == '{\n  "a": [\n    1\n  ],\n  "b": null\n}\n'


def test_damaged_or_foreign_config_is_named(tmp_path):
  path = tmp_path / "config.json"
  with pytest.raises(FileNotFoundError, match="holds no run"):
    records.read_config(tmp_path)
  for text, message in (
    ("{", "is damaged: "), ("[]", "it is not the config of a run"),
    ('{"data": 5}', "it is not the config of a run"),
    ('{"train": []}', "it is not the config of a run"),
    ('{"model_type": "llama"}', "is the config of a published model"),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
      records.read_config(tmp_path)
    assert str(path) in str(error.value)


def test_data_are_compared_by_their_hash(tmp_path):
  records.check_data(tmp_path, "a" * 64)  # no run yet
  facts = {"data": {"name": "text", "sha256": "a" * 64}}
  records.write_json(tmp_path / "environment.json", facts)
  records.check_data(tmp_path, "a" * 64)
  with pytest.raises(ValueError, match=(
    rf"trained on other data \(text, sha256 {'a' * 16}, now {'b' * 16}\);"
  )):
    records.check_data(tmp_path, "b" * 64)
  records.write_json(tmp_path / "environment.json", {})
  records.check_data(tmp_path, "b" * 64)


def test_damaged_line_of_metrics_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is damaged: "):
    records.read_metrics(tmp_path)
  path.write_text('{"step": 1}\n{"step": 2}')  # without its line end
  assert records.read_metrics(tmp_path) == [{"step": 1}]


def test_records_are_readable_while_the_run_goes_on(tmp_path):
  """Values that are None are recorded, and not plotted."""
  writer = records.MetricsWriter(tmp_path, 0)
  writer.write(1, {"loss": 2.0, "loss/worker_1": None})
  assert records.read_metrics(tmp_path) == [
    {"step": 1, "loss": 2.0, "loss/worker_1": None}
  ]
  writer.flush()
  (events,) = (tmp_path / "tensorboard").iterdir()
  data = events.read_bytes()
  assert b"loss" in data
  assert b"worker_1" not in data
  writer.close()
  with pytest.raises(ValueError, match="closed"):
    writer.write(2, {"loss": 1.0})
  # A new run overwrites the records of one that was killed at once.
  records.MetricsWriter(tmp_path, 0).close()
  assert records.read_metrics(tmp_path) == []


def test_missing_module_of_a_missing_package_is_not_there():
  assert files._is_there("os.path")
  assert not files._is_there("no_such_module_here")
  assert not files._is_there("no_such_package_here.module")


@pytest.mark.parametrize(("grid", "points"), [
  ("", [""]), ("a=1", ["a=1"]), ("a=1,2  b=3", ["a=1 b=3", "a=2 b=3"]),
  ("a=x=1,y", ["a=x=1", "a=y"]),
])
def test_grid_is_expanded(grid, points):
  assert sweep.expand(grid) == points


@pytest.mark.parametrize("part", ["a", "a=", "=", "b"])
def test_part_of_a_grid_without_values_is_an_error(part):
  with pytest.raises(ValueError, match=f"^--grid: '{part}' is not key=value"):
    sweep.expand(f"c=1 {part}")


def test_sweep_trains_each_point_once(tmp_path):
  """The folder of a long point has a digest in its name."""
  experiment = toy.make(num_steps=2)
  config = {"parallel": {"tensor": 1, "worker": 1},
            "outer": {"algorithm": "none"}}
  experiment = dataclasses.replace(experiment, config=config)
  rows = [
    {"axis": "tensor", "phase": "forward", "bytes": 5.0},
    {"axis": "tensor", "phase": "forward", "bytes": 7.0},
    {"axis": "tensor", "phase": "backward", "bytes": 20.0},
    {"axis": "worker", "phase": "update", "bytes": 30.0},
    {"axis": "data", "phase": "update", "bytes": 40.0},
    {"axis": "data+worker", "phase": "update", "bytes": 50.0},
  ]
  asked = []
  point = "a/b=1 " + "c" * 90

  def count():
    asked.append(1)
    return rows

  row = sweep.run_point(experiment, point, tmp_path, count)
  (folder,) = (tmp_path / "runs").iterdir()
  assert folder.name.startswith("a-b=1_" + "c" * 74 + "_")
  assert folder.name.endswith("_seed3")
  assert len(folder.name) == 80 + 1 + 6 + len("_seed3")
  assert row == json.loads((folder / "result.json").read_text())
  assert row["validation_doubled"] == 2 * row["validation_loss"]
  for key, value in {
    "point": point, "seed": 3, "p": 1.0, "tensor": 1, "worker": 1,
    "private_scale": "none", "algorithm": "none", "forward_bytes": 12.0,
    "backward_bytes": 20.0, "worker_bytes": 30.0, "data_bytes": 40.0,
    "unit": "points", "units_per_step": 24, "num_steps": 2,
    "loss_label": "squared error", "parameters": toy.Toy.num_params,
    "data_sha256": "0" * 64, "workdir": str(folder),
  }.items():
    assert row[key] == value, key
  assert sweep.run_point(experiment, point, tmp_path, count) == row
  assert asked == [1]
  other = dataclasses.replace(experiment, config=config | {"seed": 4})
  with pytest.raises(ValueError, match=r"holds a run with config\.seed=None"):
    sweep.run_point(other, point, tmp_path, count)


def test_summary_has_units_of_its_sizes():
  experiment = toy.make()
  dataset = types.SimpleNamespace(
    name="toy", sha256="a" * 64, tokenizer=None, table=None
  )
  facts = {
    "devices": "1 x cpu", "matmul_flops_per_second": 2.5e10,
    "communication_per_step": [
      {"axis": "data", "phase": "update", "bytes": size, "dtype": "float32"}
      for size in (99_999.0, 1e5, 2_500_000.0)
    ],
  }
  lines = list(summary.summary(experiment, dataset, facts))
  assert lines[0] == f"data      toy  sha256 {'a' * 16}"
  assert lines[1].startswith("axes ")
  assert lines[1].endswith(";  1 x cpu devices")
  assert lines[2:] == [
    "model     0.00M parameters, float32;  matrix rate 25 GFLOP/s",
    *(f"sends     data axis, update: {text} per device and step (float32)"
      for text in ("99.999 kB", "0.100 MB", "2.500 MB")),
  ]
  dataset.tokenizer = types.SimpleNamespace(
    files={"tokenizer.json": ""}, name="bpe", identity="b" * 64
  )
  dataset.table = types.SimpleNamespace(
    summary=lambda devices: f"{len(devices)} tables"
  )
  lines = list(summary.summary(experiment, dataset, facts))
  assert lines[1:3] == [
    f"tokens    bpe (sha256 {'b' * 16})", "features  1 tables"
  ]


def test_notice_of_an_excluded_worker_lists_eight_others():
  norms = [float(i) for i in range(12, 0, -1)]
  (said,) = WorkerMetrics({
    "loss": np.zeros(12), "delta_norm": np.array(norms),
    "left_out": np.arange(12.0), "just_left_out": np.eye(12)[3],
  }).notices(1, set())
  assert "difference 9 (others 1, 2, 3, 4, 5, 6, 7, 8), 3 so far" in said
  assert not list(WorkerMetrics({"loss": np.zeros(3)}).notices(1, set()))


def test_metrics_of_outer_loops_are_recorded_but_not_averaged():
  found = WorkerMetrics({
    "loss": np.array([1.0, np.inf]), "delta_norm": np.array([2.0, np.nan]),
    "left_out": np.array([0.0, 1.0]), "just_left_out": np.array([0.0, 1.0]),
    "grad_norm": np.array([3.0, 4.0]),
  })
  assert found.finite.tolist() == [True, False]
  assert found.means == {"loss": 1.0, "grad_norm": 3.0}
  assert found.of_workers == {
    "loss/worker_0": 1.0, "loss/worker_1": None, "delta_norm/worker_0": 2.0,
    "delta_norm/worker_1": None, "left_out/worker_0": 0.0,
    "left_out/worker_1": 1.0,
  }
  lost = WorkerMetrics({"loss": np.full(2, np.nan), "left_out": np.zeros(2)})
  assert np.isnan(lost.means["loss"])
  assert lost.names() == " (worker 0, 1 of 2)"
