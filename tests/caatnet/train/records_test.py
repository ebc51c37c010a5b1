"""Properties of a run's records: config, metrics and traffic of a step."""

import datetime
import importlib.metadata
import json
import math
import platform
import types

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from caatnet.train import records, traffic
from caatnet.train.records import MetricsWriter, read_metrics
from parallel.ledger.ledger import Collective
from tests.caatnet.train import linear_model as toy

CONFIG = {
  "parallel": {"device_order": [], "xla_options": ""},
  "name": "a", "seed": 1, "model": {"width": 8}, "zero": {"scheme": "ddp"},
  "train": {"num_steps": 5, "log_every": 1},
  "optimizer": {"name": "adamw", "decay_steps": 0},
}


def test_metrics_after_the_checkpoint_are_rewritten(tmp_path):
  """Drops the records of steps that the resumed run repeats."""
  writer = MetricsWriter(tmp_path, 0)
  for step in (1, 2, 3, 4):
    writer.write(step, {"loss": float(step)})
  writer.close()
  path = tmp_path / "metrics.jsonl"
  path.write_text(path.read_text() + '{"step": 5, "lo')  # killed while writing
  writer = MetricsWriter(tmp_path, 2)
  writer.write(3, {"loss": 30.0})
  writer.close()
  assert read_metrics(tmp_path) == [
    {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0},
    {"step": 3, "loss": 30.0},
  ]


@pytest.mark.parametrize(
  ("change", "key"),
  [
    ({"seed": 2}, "config.seed=1, but this run has 2"),
    ({"model": {"width": 9}}, "config.model.width=8"),
    ({"train": {"num_steps": 4, "log_every": 1}}, "config.train.num_steps=5"),
    ({"optimizer": {"name": "adamw", "decay_steps": 9}},
     "config.optimizer.decay_steps=0, but this run has 9"),
    ({"data": {"path": ""}}, "config.data.path=None, but this run has ''"),
    ({"name": "b", "zero": {"scheme": "zero3"},
      "memory": {"moments": "pinned_host", "activations": "pinned_host"},
      "parallel": {"device_order": [1, 0], "xla_options": "xla_x=1"},
      "train": {"num_steps": 5, "log_every": 7}}, ""),
  ],
)
def test_folder_resumes_with_its_own_config_only(change, key, tmp_path):
  records.write_config(tmp_path, CONFIG)
  if not key:  # keys that a resumed run may change
    records.write_config(tmp_path, CONFIG | change)
    return
  with pytest.raises(ValueError, match=key):
    records.write_config(tmp_path, CONFIG | change)


@pytest.mark.parametrize(
  ("offload", "moments"), [(True, "pinned_host"), (False, "device")]
)
def test_older_run_has_its_moments_where_they_were(offload, moments, tmp_path):
  zero = {"scheme": "zero1", "offload": offload}
  (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"zero": zero}))
  config = records.read_config(tmp_path)
  assert config["memory"]["moments"] == moments
  assert config["memory"]["activations"] == "device"
  assert "offload" not in config["zero"]


@pytest.mark.parametrize(
  ("steps", "decay", "notice"),
  [
    ((5, 5), (0, 0), ""),
    # Schedule of the longer run, unless decay_steps is set.
    ((5, 8), (0, 0), "now decays over 8 steps instead of 5"),
    ((5, 8), (0, 5), ""),
    ((5, 8), (9, 9), ""),
    ((5, 5), (5, 0), ""),
  ],
)
def test_run_may_be_extended(steps, decay, notice, tmp_path):
  for num_steps, decay_steps in zip(steps, decay, strict=True):
    found = records.write_config(tmp_path, CONFIG | {
      "train": {"num_steps": num_steps},
      "optimizer": {"decay_steps": decay_steps},
    })
  assert notice in found
  assert bool(notice) == bool(found)
  stored = records.read_config(tmp_path)
  assert stored["train"]["num_steps"] == steps[1]


def entry(axes, group_size, phase="update", dtype="float32", count=1, **fields):
  return Collective(
    fields.get("kind", "all_reduce"), axes, group_size, dtype,
    fields.get("shape", (100,)), count, phase, False, "add", "",
  )


def test_summary_adds_up_collectives_over_the_same_axes():
  mesh = types.SimpleNamespace(axis_names=("worker", "data", "tensor"))
  rows = traffic.sum_bytes_by_axis([
    entry(("tensor",), 4, "backward", count=3),
    entry(("tensor",), 4, "backward", shape=(50,)),
    entry(("tensor",), 4, "forward", "bfloat16"),
    entry(("worker", "data"), 8),
    entry((), 1), entry(("data",), 2, "forward", shape=(0,)),
  ], mesh)
  assert rows == [
    {"axis": "worker+data", "phase": "update", "dtype": "float32",
     "bytes": 400, "wire_bytes": 2 * 7 / 8 * 400},
    {"axis": "tensor", "phase": "forward", "dtype": "bfloat16",
     "bytes": 200, "wire_bytes": 2 * 3 / 4 * 200},
    {"axis": "tensor", "phase": "backward", "dtype": "float32",
     "bytes": 1400, "wire_bytes": 2 * 3 / 4 * 1400},
  ]


def test_custom_call_that_may_communicate_is_named():
  """It stops a sweep, which compares bytes, and no run."""
  experiment = toy.make()
  call = jax.ffi.ffi_call("mystery", jax.ShapeDtypeStruct((4,), np.float32))
  lowered = jax.jit(call).lower(np.ones(4, np.float32))
  programs = {plan: lowered for plan in traffic.lower_steps(experiment)}
  assert traffic.uncounted_operations(experiment, programs) == [
    "custom call of 'mystery'"
  ]
  assert traffic.communication_per_step(experiment, programs, False) == []
  with pytest.raises(NotImplementedError, match="custom call of 'mystery'"):
    traffic.communication_per_step(experiment, programs)


@pytest.mark.parametrize("workers", [2, 4])
def test_saving_of_an_outer_loop_is_reported(workers):
  """A tenth of 8 float32 on two devices; a ring all-reduce sends them once.

  Workers of one device are summed before anything is sent.
  """
  program = toy.make(workers=workers, devices=(2, 1)).program
  row = {"axis": "worker", "bytes": 3.2, "wire_bytes": 1.6}
  text = traffic.format_saving(program, [row, {**row, "axis": "data"}])
  assert "10.0x fewer operand bytes" in text
  assert "5.0x than bfloat16" in text
  assert "20.0x and 10.0x on the links" in text
  assert not traffic.format_saving(program, [{**row, "axis": "data"}])


def test_resumed_run_may_change_keys_without_effect_on_results(tmp_path):
  """Intervals, transfers, limits of a server, and places of arrays."""
  free = {
    "train": ("log_every", "eval_every", "checkpoint_every",
              "keep_checkpoints"),
    "data": ("access", "ahead", "cache", "cache_rows", "sampler", "threads"),
    "federated": ("rounds", "reconnect_s", "silence_s", "alone_s", "hang_s",
                  "max_examples"),
    "parallel": ("stage", "device_order"), "pipeline": ("schedule",),
    "inference": ("page",), "zero": ("scheme",), "memory": ("moments",),
  }

  def write(value, **more):
    config = {
      name: dict(CONFIG.get(name, {})) | dict.fromkeys(keys, value)
      for name, keys in free.items()
    }
    for name, keys in more.items():
      config[name] |= keys
    records.write_config(tmp_path, CONFIG | config)

  write(1)
  write(2)
  assert records.read_config(tmp_path)["data"]["threads"] == 2
  for name, key in (
    ("data", "batch_size"), ("train", "accumulation"),
    ("federated", "fraction"), ("parallel", "tensor"),
  ):
    with pytest.raises(ValueError, match=rf"config\.{name}\.{key}="):
      write(2, **{name: {key: 3}})


def test_keys_per_worker_change_only_with_the_number_of_workers(tmp_path):
  def write(*weights):
    records.write_config(tmp_path, CONFIG | {
      "parallel": {"worker": len(weights)}, "outer": {"weights": weights},
    })

  write(1.0, 2.0)
  with pytest.raises(ValueError, match=r"config\.outer\.weights=\[1"):
    write(1.0, 3.0)
  write(1.0, 2.0, 3.0)


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


def test_records_without_a_number_are_null(tmp_path, capsys):
  """A validation loss may overflow; other readers of JSON refuse Infinity."""
  records.write_json(tmp_path / "a.json", {"loss": math.nan})
  writer = MetricsWriter(tmp_path, 0)
  writer.write(1, {"loss": 2.0, "validation_loss": math.inf})
  writer.close()
  for name, found in (
    ("a.json", {"loss": None}),
    ("metrics.jsonl", {"step": 1, "loss": 2.0, "validation_loss": None}),
  ):
    text = (tmp_path / name).read_text()
    assert json.loads(text, parse_constant=pytest.fail) == found
  assert capsys.readouterr().err == (
    "warning: loss: no finite number; null in JSON\n"
    "warning: validation_loss: no finite number; null in JSON\n"
  )


def test_damaged_or_foreign_config_is_named(tmp_path):
  path = tmp_path / "config.json"
  with pytest.raises(FileNotFoundError, match="holds no run"):
    records.read_config(tmp_path)
  for text, message in (
    ("{", "is damaged: "), ("[]", "it must contain a JSON object"),
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


def board_events(path):
  """Returns the events of a file: lengths, records and their checksums."""
  data, found = path.read_bytes(), []
  while data:
    size = int.from_bytes(data[:8], "little")
    found.append(Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
  assert found[0].file_version
  return found[1:]


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
  # TensorBoard hides what an earlier process has written after step 0.
  start, *scalars = board_events(events)
  assert (start.step, start.session_log.status) == (1, SessionLog.START)
  assert [(x.step, x.summary.value[0].tag, x.summary.value[0].simple_value)
          for x in scalars if x.HasField("summary")] == [(1, "loss", 2.0)]
  with pytest.raises(ValueError, match="closed"):
    writer.write(2, {"loss": 1.0})
  # A new run overwrites the records of one that was killed at once.
  records.MetricsWriter(tmp_path, 0).close()
  assert records.read_metrics(tmp_path) == []
