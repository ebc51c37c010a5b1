"""Clients of Flower: exact arrays, FedAvg, errors of one line."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from caatnet.config import federated
from caatnet.federated import flower, run
from caatnet.federated.service import Service
from configs.federated import numpy as config_file
from tests.caatnet.federated import numeric, process

SHAPES = ((), (0,), (1,), (3,), (2, 3, 4), (1, 1, 5))
LARGEST = {
  "float32": 3e38, "float16": 6e4, "int64": 2**24, "int32": 2**24,
  "int16": 2**15 - 1, "uint8": 255, "bool": 1, ">f4": 1.0,
}


def arrays_of(draw, dtype):
  values = [
    draw.uniform(-1, 1, shape) * LARGEST[dtype] for shape in SHAPES
  ]
  if np.dtype(dtype).kind in "ub":
    values = [np.abs(x) for x in values]
  if dtype == "bool":
    return [x > 0.5 for x in values]
  return [np.asarray(x).astype(dtype) for x in values]


@pytest.mark.parametrize("dtype", LARGEST)
def test_arrays_are_transmitted_exactly(dtype):
  draw = np.random.default_rng(0)
  vectors = flower.ArrayFlattener(arrays_of(draw, dtype))
  sent = arrays_of(draw, dtype)
  sent[4] = sent[4][::-1].T.copy().T  # neither in C order nor of the template
  vector = vectors.vector(sent)
  assert (vector.dtype, vector.shape) == (np.float32, (vectors.num,))
  found = vectors.arrays(vector)
  assert [x.shape for x in found] == list(SHAPES)
  for x, y in zip(sent, found, strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)
    assert y.flags.writeable
    assert y.flags.owndata or not np.shares_memory(y, vector)


def test_means_are_rounded_to_the_nearest_value_of_their_dtype():
  vectors = flower.ArrayFlattener(
    [np.zeros(2), np.uint8([0, 0, 0]), [True, True]]
  )
  mean = np.float32([1 / 3, 1e-40, -0.6, 255.5, 2.6, 0.5, 0.25])
  doubles, counts, flags = vectors.arrays(mean)
  np.testing.assert_array_equal(doubles, mean[:2].astype(np.float64))
  assert counts.tolist() == [0, 255, 3]
  assert flags.tolist() == [True, False]
  # float64 is rounded to float32.
  sent = vectors.vector([np.float64([0.1, 1e300]), counts, flags])
  assert sent[:2].tolist() == [np.float32(0.1), np.inf]


@pytest.mark.parametrize(("arrays", "message"), [
  ([np.zeros(2)], "1 arrays; it must return 2"),
  ([np.zeros(2), np.zeros((1, 3))], r"array 1 has shape \(1, 3\); it must"),
  ([np.zeros(2), np.zeros(3, complex)], "array 1 has dtype complex128; it"),
  ([np.array(["a", "b"]), np.zeros(3)], "array 0 has dtype <U1; it must be of"),
  ([np.zeros(2), [1, 2, -(2**24) - 1]], r"array 1 of dtype int64 .* above"),
])
def test_arrays_that_differ_are_refused(arrays, message):
  vectors = flower.ArrayFlattener([np.zeros(2), np.zeros(3)])
  with pytest.raises(ValueError, match=message):
    vectors.vector(arrays)


class Bare:
  """Moves to fixed arrays; keeps the configs that it receives.

  It reports its number of examples with its update only.
  """

  def __init__(self, number, examples=None, fault=""):
    self.number, self.fault = number, fault
    self.examples = examples or number + 1
    self.configs = []
    draw = np.random.default_rng(number)
    self.target = [np.float32(draw.normal(size=(2, 3))), draw.normal(size=4)]

  def get_parameters(self, config):
    return [np.zeros((2, 3), np.float32), np.zeros(4)]

  def fit(self, parameters, config):
    self.configs.append(config)
    found = [x / config["server_round"] for x in self.target]
    if self.fault == "raises":
      raise RuntimeError("no\n memory")
    if self.fault == "shape":
      found[1] = found[1][:3]
    if self.fault == "nan":
      found[0][0, 1] = np.nan
    return found, self.examples, {}

  def evaluate(self, parameters, config):
    return float(parameters[0].mean()), 5, {"accuracy": 0.5}


class Fixed(Bare):
  """Reports its number of examples as a property, too."""

  def get_properties(self, config):
    return {"num_examples": self.number + 1}


def federate(workdir, clients, **changes):
  """Runs a server and clients in threads; returns state, lines and errors."""
  vectors, lines, errors = flower.make_flattener(clients[0], 0), [], {}
  rules = numeric.rules(
    clients=len(clients), per_round=len(clients), rounds=2,
    digest=vectors.digest, reconnect_s=0.2, **changes,
  )

  def start(number, client, address):
    try:
      flower.start_client(
        address, client, number, process.SECURITY, {"local_steps": 7}
      )
    except ValueError as error:
      errors[number] = str(error)

  with Service(
    rules, numeric.Plain(), vectors.initial(), process.decode, workdir,
    say=lines.append,
  ) as service:
    service.listen(("127.0.0.1", 0), process.SECURITY)
    address = "{}:{}".format(*service.address)
    threads = [
      threading.Thread(target=start, args=(k, c, address), daemon=True)
      for k, c in enumerate(clients)
    ]
    for thread in threads:
      thread.start()
    service.serve()
    for thread in threads:
      thread.join(10.0)
      assert not thread.is_alive()
  return service.state, lines, errors, vectors


class Unmeasured(Fixed):
  """Has a loss that is not finite, or no validation examples."""

  def evaluate(self, parameters, config):
    return (np.nan, 5, {}) if self.number else (0.5, 0, {})


@pytest.mark.parametrize("number", [0, 1])
def test_loss_of_no_examples_or_that_is_not_finite_is_left_out(number):
  trainer = flower.NumPyTrainer(Unmeasured(number), number)
  found = trainer.train(trainer.vectors.initial(), 0, lambda: False)
  assert (found.loss, found.validated) == (None, 0)


def mean_of(clients, round):
  total = sum(c.examples for c in clients)
  return np.concatenate([
    sum(c.examples / total * np.ravel(c.target[i]) for c in clients) / round
    for i in range(2)
  ])


def test_rounds_equal_the_closed_form_of_fedavg(tmp_path):
  clients = [Fixed(k) for k in range(3)]
  state, _, errors, _ = federate(tmp_path, clients)
  assert errors == {}
  np.testing.assert_allclose(state.params, mean_of(clients, 2), 1e-5, 1e-6)
  for client in clients:
    assert client.configs == [
      {"server_round": r, "local_steps": 7} for r in (1, 2)
    ]
  records = [
    json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()
  ]
  mean = mean_of(clients, 1)[:6].mean()
  assert records[0]["loss"] == 0.0
  assert records[1]["loss"] == pytest.approx(mean, 1e-4, 1e-6)


@pytest.mark.parametrize(("fault", "message"), [
  ("raises", "fit of client 1 in round 0: RuntimeError: no memory"),
  ("shape", "fit of client 1 in round 0: ValueError: array 1 has shape (3,); "
   "it must have shape (4,)"),
])
def test_failed_client_is_named_by_itself_and_by_the_server(
  tmp_path, fault, message
):
  clients = [Fixed(0), Fixed(1, fault=fault), Fixed(2)]
  state, lines, errors, _ = federate(tmp_path, clients)
  assert errors == {1: message}
  (line,) = [x for x in lines if "client 1 has no connection" in x]
  assert line.endswith(f"it has failed: {message!a}")
  assert any("from 2 updates, without 1" in x for x in lines)
  assert state.revision == 2


def test_update_that_is_not_finite_is_refused_and_its_client_continues(
  tmp_path, capsys
):
  clients = [Fixed(0), Fixed(1, fault="nan")]
  state, lines, errors, _ = federate(tmp_path, clients)
  assert errors == {}
  assert state.counts == {"not finite": 2}
  assert "update of client 1 in round 1 refused: not finite" in lines
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].startswith("fit of client 1 in round 0 returned values")
  assert np.isfinite(state.params).all()


def test_number_of_examples_is_that_of_the_client():
  assert flower.NumPyTrainer(Fixed(4), 4).examples == 5
  client = Bare(3, examples=30)
  trainer = flower.NumPyTrainer(client, 3)
  assert (trainer.examples, len(client.configs)) == (30, 1)
  client.examples = 31
  with pytest.raises(ValueError, match="client 3 in round 4 returned 31 exa"):
    trainer.train(trainer.vectors.initial(), 4, lambda: False)
  assert trainer.train(trainer.vectors.initial(), 4, lambda: True) is None


@pytest.mark.parametrize(("text", "message"), [
  ("", r"numpy_client='x.py:make' must be PATH.py:FUNCTION; there is no file"),
  ("def other(context): pass", "client 0: KeyError: 'make'"),
  ("def make(context): return context.run_config['rate']", "KeyError: 'rate'"),
  ("1 +", "SyntaxError: invalid syntax"),
])
def test_file_without_a_client_is_one_line(
  tmp_path, monkeypatch, text, message
):
  monkeypatch.chdir(tmp_path)
  if text:
    (tmp_path / "x.py").write_text(text)
  with pytest.raises(ValueError, match=message) as found:
    flower.load("x.py:make", 0, 2)
  assert "\n" not in str(found.value)


def test_app_finds_its_modules_and_its_configuration(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "path", [*sys.path])
  package = tmp_path / "flower_test_app"
  package.mkdir()
  (package / "task.py").write_text("VALUE = 5\n")
  (package / "flower_test_near.py").write_text("VALUE = 6\n")
  (package / "app.py").write_text(
    "import types\nimport flower_test_near\nfrom flower_test_app import task\n"
    "def make(context):\n"
    "  node, run = context.node_config, context.run_config\n"
    "  own = [*node.values(), task.VALUE, flower_test_near.VALUE, run]\n"
    "  return types.SimpleNamespace(numpy_client=own)\n"
  )
  # Of another tool.
  (package / "pyproject.toml").write_text("[tool.ruff]\nindent-width = 2\n")
  (tmp_path / "pyproject.toml").write_text(
    "[tool.flwr.app.config]\nlocal-epochs = 3\noptimizer.rate = 0.1\n"
  )
  assert flower.load(f"{package}/app.py:make", 1, 4) == [
    1, 4, 5, 6, {"local-epochs": 3, "optimizer.rate": 0.1}
  ]
  (tmp_path / "pyproject.toml").write_text("[tool.flwr")
  with pytest.raises(ValueError, match="client 1: TOMLDecodeError: "):
    flower.load(f"{package}/app.py:make", 1, 4)


def test_example_runs_with_coded_links(tmp_path):
  config = config_file.get_config("test")
  config.federated.uplink = config.federated.downlink = "int8"
  federation = federated.build(config)
  with run.open_service(federation, tmp_path, [].append) as service:
    service.listen(("127.0.0.1", 0), process.SECURITY)
    threads = [
      threading.Thread(target=run.run_client, daemon=True, args=(
        federation, k, "{}:{}".format(*service.address), process.SECURITY
      )) for k in range(2)
    ]
    for thread in threads:
      thread.start()
    service.serve()
    for thread in threads:
      thread.join(10.0)
  text = run.summary(federation, service)
  assert text.startswith("3 rounds have ended: revision 3, validation loss of")
  assert service.state.best < np.log(10) - 0.2
  assert all(row["payload_up"] < 1100 for row in service.rows)

  for key, value in (("test", True), ("split", "even")):
    wrong = config_file.get_config("test")
    wrong.federated[key] = value
    with pytest.raises(ValueError, match="split='own' and test=False"):
      federated.build(wrong)


def test_coded_differences_are_refused_by_a_client_without_jax():
  with pytest.raises(ValueError, match=r'config\.federated\.downlink="none"'):
    flower._reject_difference(b"", 1)


def test_adapter_loads_no_jax():
  code = (
    "import sys; import caatnet.federated.flower; "
    "print({'jax', 'flax', 'optax'} & set(sys.modules))"
  )
  found = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert found.stdout == "set()\n"


def test_address_of_the_server_has_a_port():
  for address in ("127.0.0.1:0", "127.0.0.1"):
    with pytest.raises(ValueError, match="with a port from 1 to 65535"):
      flower.start_client(address, Fixed(3), 0, process.SECURITY)
