"""Comparison with Flower: the client's gradient, measures, failed runs."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from caatnet import commands
from caatnet.benchmarks.foreign import flower, flower_client
from caatnet.benchmarks.harness import kept, processes
from caatnet.config import federated
from caatnet.config.override import override
from configs.benchmark import flower as config_file
from configs.federated import tiny


@pytest.fixture
def network(tmp_path):
  draw = np.random.default_rng(0)
  np.savez(
    tmp_path / "digits.npz", labels=draw.integers(10, size=400),
    images=np.float32(draw.uniform(size=(400, 64))),
  )
  return flower_client.Network(1, 4, {
    "data": str(tmp_path / "digits.npz"), "width": 7, "steps": 1, "seed": 3,
    "folder": str(tmp_path),
  })


def test_gradient_is_that_of_the_loss(network, monkeypatch):
  monkeypatch.setattr(flower_client, "BATCH", network.held_out)
  parameters = [np.float64(x) for x in network.get_parameters({})]
  places = np.arange(network.held_out)
  grads = network._grads(parameters, places)
  draw = np.random.default_rng(1)
  direction = [draw.normal(size=x.shape) for x in parameters]
  step = 1e-6
  losses = [
    network.evaluate(
      [x + sign * step * d for x, d in zip(parameters, direction, strict=True)],
      {"server_round": 0},
    )[0] for sign in (1, -1)
  ]
  slope = sum(np.sum(g * d) for g, d in zip(grads, direction, strict=True))
  assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, 1e-4)


def test_initial_weights_have_the_variance_of_their_inputs(network):
  network.options["width"] = 400
  lower, bias, upper, upper_bias = network.get_parameters({})
  assert lower.std() == pytest.approx(1 / 8, rel=0.02)
  assert upper.std() == pytest.approx(1 / 20, rel=0.05)
  assert not bias.any()
  assert not upper_bias.any()


def test_digits_are_from_0_to_1(tmp_path):
  with np.load(flower._write_digits(tmp_path)) as data:
    assert (data["images"].min(), data["images"].max()) == (0, 1)
    assert data["images"].shape == (len(data["labels"]), 64)
    assert {*data["labels"]} == {*range(10)}


def test_steps_reduce_the_loss_of_the_examples(network):
  """Held-out examples are not trained on: their labels are random."""
  network.options["steps"] = 200
  start = network.get_parameters({})
  trained = network.train([x.copy() for x in start], 1)

  def loss(parameters):
    rows = np.arange(len(network.labels))
    _, logits = flower_client._forward(parameters, network.images)
    return -flower_client._log_softmax(logits)[rows, network.labels]

  before, after = loss(start), loss(trained)
  assert network.held_out == 20
  assert after[20:].mean() < 0.95 * before[20:].mean()
  assert after[:20].mean() > after[20:].mean()
  # Each example is a row of logits of the ten digits.
  assert network.test(trained)[0] == pytest.approx(after[:20].mean())
  assert network.test(trained)[2] == 20


def test_client_is_a_function_of_its_context_and_the_round(network):
  assert len(network.labels) == 100
  start = network.get_parameters({})
  trained = {}
  for number in (1, 2, 1):
    (*_, upper, _), examples, _ = network.fit(
      [x.copy() for x in start], {"server_round": number}
    )
    assert examples == network.get_properties({})["num_examples"] == 80
    np.testing.assert_array_equal(trained.setdefault(number, upper), upper)
  assert not np.array_equal(trained[1], trained[2])


def test_model_is_trained_as_by_the_client_of_a_federated_run(tmp_path):
  config = override(
    tiny.get_config("convolutional,test"),
    "model.widths=(4,) model.blocks=1 model.groups=2",
  )
  client = flower_client.make(1, 2, {
    "config": config.to_json(), "folder": str(tmp_path), "seed": 3, "steps": 2,
  })
  config.seed = 3
  trainer = federated.build(config).trainer(1)
  (start,) = client.get_parameters({})
  (found,), examples, _ = client.fit([start], {"server_round": 5})
  trained = trainer.train(start, 4, lambda: False)
  # Evaluation is a call of its own.
  alone = client._trainer.train(start, 4, lambda: False)
  assert (alone.loss, alone.validated) == (None, 0)
  np.testing.assert_array_equal(found, trained.params)
  assert examples == trainer.examples
  loss, number, scores = client.evaluate([start], {"server_round": 4})
  assert (loss, number) == (pytest.approx(trained.loss), trained.validated)
  assert 0 <= scores["accuracy"] <= 1


def records(shift):
  """Records of two clients: rounds of 0.1 s, but one of 0.5 s."""
  begins = np.cumsum([0.0, 2.0, 2.0, 0.1, 0.5, 0.1])
  return [
    [
      {"call": "fit", "round": i, "begin": begin + 0.02 * client,
       "cpu_s": 5.0 + (2 + client) * i}
      for i, begin in enumerate(begins)
    ] + [
      {"call": "evaluate", "round": i, "begin": 0.0, "cpu_s": 0.0,
       "loss": 1.0 - 0.1 * i + shift * i, "accuracy": 0.1 * client,
       "examples": 1 + 2 * client}
      for i in range(2)
    ] for client in range(2)
  ]


def test_measures_are_of_whole_rounds_after_the_first():
  found = flower.measures(records(0.0), 12_000_000)
  assert found["round_s"] == pytest.approx(0.1)
  assert found["kilobytes"] == 1000.0  # six rounds of two clients
  assert found["client_cpu_s"] == pytest.approx(2.5)
  assert found["accuracy"] == pytest.approx({"0": 0.075, "1": 0.075})
  assert found["loss"] == pytest.approx({"0": 1.0, "1": 0.9})


def test_differences_are_between_equal_revisions():
  ours = flower.measures(records(0.0), 1)
  other = flower.measures(records(0.25), 1)
  del other["loss"]["0"]
  found = flower.differences([ours, ours], [ours, other])
  assert found["compared"] == 3
  assert found["largest_difference_of_loss"] == pytest.approx(0.25)
  assert found["largest_difference_of_accuracy"] == 0.0
  summary = flower.summary([ours, ours, other])
  assert summary["round_s"] == ours["round_s"]
  assert len(summary["loss"]) == 3


@pytest.fixture
def namespace():
  if subprocess.run(
    ["unshare", "-rn", "true"], check=False, capture_output=True
  ).returncode:
    pytest.skip("no namespaces")


def test_run_that_fails_is_one_line(tmp_path, namespace, monkeypatch):
  """From any folder, with the modules of this checkout."""
  assert (flower._ROOT / "caatnet").samefile(
    pathlib.Path(flower.__file__).parents[2]
  )
  monkeypatch.chdir(tmp_path)
  config = config_file.get_config("test")
  cell = {"clients": 2, "link": "loopback"}
  with pytest.raises(ValueError, match=r"run of flower: .*not listen: code 1"):
    flower._session(
      "flower", cell, 0, config, pathlib.Path("/bin/false"),
      tmp_path / "digits.npz",
    )


def running():
  """Returns the parent's id of each running process, by its id."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):  # it has ended
      state, ppid = path.read_text().rpartition(")")[2].split()[:2]
      if state != "Z":
        found[int(path.parent.name)] = int(ppid)
  return found


def test_killed_session_leaves_no_process(tmp_path, namespace):
  flower._write_digits(tmp_path)
  options = {
    "data": str(tmp_path / "digits.npz"), "folder": str(tmp_path),
    "clients": 1, "rounds": 10_000, "seed": 0, "width": 7, "steps": 1,
    "evaluate": False, "link": "", "config": "",
  }
  session = subprocess.Popen(
    ["unshare", "-rn", *processes.module(
      "caatnet.benchmarks.foreign.flower_session", "ours"
    )], env=os.environ | {flower_client.OPTIONS: json.dumps(options)},
  )
  try:
    until(lambda: (tmp_path / "client-0.jsonl").exists())
    mine = {k for k, parent in running().items() if parent == session.pid}
    assert len(mine) == 2
  finally:
    session.kill()
    session.wait()
  until(lambda: not mine & running().keys())


def until(condition):
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.1)


def test_interrupted_comparison_continues_with_the_missing_cell(tmp_path):
  """A cell that is missing needs an environment, whose Python fails here."""
  config, path = config_file.get_config("test"), tmp_path / "flower.json"
  options = config.benchmark
  options.results, options.python = str(path), "/bin/false"
  options.folder = str(tmp_path)
  side = {"round_s": 0.1, "kilobytes": 1.0, "client_cpu_s": 0.5}
  rows = [
    {"clients": 2, "link": "loopback", **idle, "ours": side, "flower": side,
     "compared": 0} for idle in ({}, {"idle": True})
  ]
  of = {"config": kept.described(config), "commit": commands.commit()}
  path.write_text(json.dumps(of | {"rows": rows}))
  found = flower.run(config)
  assert found["rows"] == rows
  assert found["versions"] == {"flwr": "1.42.0"}
  sizes = flower_client.Network.get_parameters(types.SimpleNamespace(
    options={"seed": 0, "width": options.width}
  ), {})
  assert found["parameters"] == sum(x.size for x in sizes)
  for row in rows:
    path.write_text(json.dumps(of | {"rows": [row]}))
    with pytest.raises(ValueError, match="/bin/false"):
      flower.run(config)


def test_environment_finds_packages_of_this_python(tmp_path):
  name = f"python{sys.version_info.major}.{sys.version_info.minor}"
  folder = tmp_path / "lib" / name / "site-packages"
  python = tmp_path / "bin" / "python"
  with pytest.raises(ValueError, match=f"needs an environment of {name}"):
    flower._share_packages(python)
  folder.mkdir(parents=True)
  flower._share_packages(python)
  (line,) = (folder / "shared.pth").read_text().splitlines()
  assert pathlib.Path(np.__file__).parents[1].samefile(line)


def test_table_has_both_systems(capsys):
  side = {"round_s": 0.0125, "kilobytes": 1234.0, "client_cpu_s": 0.5}
  row = {
    "clients": 4, "link": "loopback", "ours": side, "flower": side | {
      "round_s": 0.1
    }, "compared": 6, "largest_difference_of_loss": 1.5e-7,
    "largest_difference_of_accuracy": 0.0,
  }
  assert flower._line(row) == (
    "4 numpy clients, loopback: ours 12 ms, flower 100 ms"
  )
  assert flower._line(row | {"model": "cnn"}).startswith("4 cnn clients, ")
  flower._print({"parameters": 4810, "steps": 7, "rows": [
    row, row | {"idle": True, "compared": 0}
  ]})
  printed = capsys.readouterr().out
  assert "4,810 parameters in numpy, 7 steps" in printed
  assert [
    [cell.strip() for cell in line.strip("│").split("│")]
    for line in printed.splitlines() if line.startswith("│")
  ] == [
    ["4", "loopback", client, "12 / 100", "1,234 / 1,234", "500 / 500",
     *compared]
    for client, compared in (
      ("numpy", ["6", "1.5e-07, 0.0e+00"]), ("idle", ["0", "-"])
    )
  ]


def test_run_of_our_system_has_records_of_all_rounds(tmp_path, namespace):
  """Two clients with numpy on loopback; their bytes are the parameters'."""
  config = config_file.get_config("test")
  config.benchmark.rounds, config.benchmark.width = 2, 7
  data = flower._write_digits(tmp_path)
  found = flower._session(
    "ours", {"clients": 2, "link": "loopback"}, 3, config, pathlib.Path(), data
  )
  assert found.links == []
  assert len(found.records) == 2
  for mine in found.records:
    calls = [(r["call"], r["round"]) for r in mine]
    assert sorted(x for x in calls if x[0] == "fit") == [("fit", 1), ("fit", 2)]
    assert "evaluate" in dict(calls)
  # Each round sends 535 float32 to each client, and back.
  payload = 2 * 2 * 2 * 4 * (75 * 7 + 10)
  assert payload < found.num_bytes < 10 * payload
