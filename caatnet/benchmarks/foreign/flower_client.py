"""Client of the comparison with Flower, in both systems.

  python -m caatnet.benchmarks.foreign.flower_client ours --client=0
  PYTHON_WITH_FLWR flower_client.py flower --client=0

It is one `NumPyClient`: a network in numpy, which imports nothing else, or a
model of a config (`flower_model.py`). Each call of ``fit`` and
``evaluate`` appends a line of JSON to the client's file: its begin on the
machine's monotonic clock, and the processor time of this process until then.
"""

import abc
import argparse
import json
import os
import pathlib
import time

import numpy as np

# Name of a variable with the `Network`'s options, JSON.
OPTIONS = "FEDERATED_BENCHMARK"
BATCH, RATE, VALIDATION = 32, 0.02, 0.2


class Recorded(abc.ABC):
  """Client that records its calls.

  Attributes:
    num_examples: Number of training examples.
  """

  num_examples: int

  def __init__(self, number: int, options: dict) -> None:
    self.number, self.options = number, options
    self._path = pathlib.Path(options["folder"], f"client-{number}.jsonl")

  @abc.abstractmethod
  def get_parameters(self, config: dict) -> list[np.ndarray]:
    """Returns the initial parameters."""

  @abc.abstractmethod
  def train(self, parameters: list, server_round: int) -> list:
    """Returns trained parameters."""

  @abc.abstractmethod
  def test(self, parameters: list) -> tuple[float, float, int]:
    """Returns loss, accuracy and the number of validation examples."""

  def get_properties(self, config: dict) -> dict:
    return {"num_examples": self.num_examples}

  def fit(self, parameters: list, config: dict) -> tuple[list, int, dict]:
    begin, cpu_s = time.monotonic(), time.process_time()
    if self.options["steps"]:
      parameters = self.train(parameters, config["server_round"])
    self._record("fit", config, begin, cpu_s)
    return parameters, self.num_examples, {}

  def evaluate(self, parameters: list, config: dict) -> tuple[float, int, dict]:
    begin, cpu_s = time.monotonic(), time.process_time()
    loss, accuracy, examples = self.test(parameters)
    self._record(
      "evaluate", config, begin, cpu_s, loss=loss, accuracy=accuracy,
      examples=examples,
    )
    return loss, examples, {"accuracy": accuracy}

  def _record(
    self, call: str, config: dict, begin: float, cpu_s: float, **more: float
  ) -> None:
    line = {
      "call": call, "round": config["server_round"], "begin": begin,
      "cpu_s": cpu_s, **more,
    }
    with open(self._path, "a") as file:
      file.write(json.dumps(line) + "\n")


class Network(Recorded):
  """Classifier of digits with one hidden layer, on a part of the digits."""

  def __init__(self, number: int, num: int, options: dict) -> None:
    """Reads the digits.

    Args:
      number: Id of the client.
      num: Number of clients.
      options: "data", an .npz file with images ``[n, 64]`` and labels; "width",
        the number of hidden channels; "steps" of ``fit``; "seed"; "folder" for
        records.
    """
    super().__init__(number, options)
    with np.load(options["data"]) as data:
      images, labels = data["images"], data["labels"]
    order = np.random.default_rng(options["seed"]).permutation(len(labels))
    mine = order[number::num]
    self.held_out = round(VALIDATION * len(mine))
    self.images, self.labels = images[mine], labels[mine]
    self.num_examples = len(mine) - self.held_out

  def get_parameters(self, config: dict) -> list[np.ndarray]:
    draw = np.random.default_rng(self.options["seed"])
    width = self.options["width"]
    return [
      np.float32(draw.normal(size=(64, width)) / 8),
      np.zeros(width, np.float32),
      np.float32(draw.normal(size=(width, 10)) / width**0.5),
      np.zeros(10, np.float32),
    ]

  def train(self, parameters: list, server_round: int) -> list:
    draw = np.random.default_rng([
      self.options["seed"], self.number, server_round
    ])
    for _ in range(self.options["steps"]):
      places = self.held_out + draw.integers(self.num_examples, size=BATCH)
      grads = self._grads(parameters, places)
      for x, grad in zip(parameters, grads, strict=True):
        x -= np.float32(RATE) * grad
    return parameters

  def test(self, parameters: list) -> tuple[float, float, int]:
    places = np.arange(self.held_out)
    _, logits = _forward(parameters, self.images[places])
    labels = self.labels[places]
    loss = -float(_log_softmax(logits)[places, labels].mean())
    return loss, float((logits.argmax(1) == labels).mean()), len(places)

  def _grads(self, parameters: list, places: np.ndarray) -> list[np.ndarray]:
    """Returns the gradient of the mean loss of a batch."""
    images = self.images[places]
    hidden, logits = _forward(parameters, images)
    upper = np.exp(_log_softmax(logits))
    upper[np.arange(BATCH), self.labels[places]] -= 1
    upper /= BATCH
    lower = (upper @ parameters[2].T) * (hidden > 0)
    return [images.T @ lower, lower.sum(0), hidden.T @ upper, upper.sum(0)]


def _forward(
  parameters: list, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns hidden values ``[B, width]`` and logits ``[B, 10]``."""
  lower, bias, upper, upper_bias = parameters
  hidden = np.maximum(images @ lower + bias, 0)
  return hidden, hidden @ upper + upper_bias


def _log_softmax(logits: np.ndarray) -> np.ndarray:
  logits = logits - logits.max(1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def make(number: int, num: int, options: dict) -> Recorded:
  """Returns a client: a `Network`, or with the option "config" a model."""
  if not options["config"]:
    return Network(number, num, options)
  from caatnet.benchmarks.foreign import flower_model

  return flower_model.Model(number, num, options)


def client_fn(context) -> Recorded:
  """Returns the client of a partition, with the options of this process."""
  return make(
    context.node_config["partition-id"], context.node_config["num-partitions"],
    json.loads(os.environ[OPTIONS]),
  )


def main() -> None:
  """Runs one client in one of the systems, until the server ends the run."""
  parser = argparse.ArgumentParser()
  parser.add_argument("system", choices=["ours", "flower"])
  parser.add_argument("--client", type=int, required=True)
  given = parser.parse_args()
  options = json.loads(os.environ[OPTIONS])
  client = make(given.client, options["clients"], options)
  if given.system == "flower":
    import flwr.client

    methods = {
      name: staticmethod(getattr(client, name))
      for name in ("get_properties", "get_parameters", "fit", "evaluate")
    }
    kind = type("Client", (flwr.client.NumPyClient,), methods)
    flwr.client.start_client(
      server_address=options["address"], client=kind().to_client()
    )
    return
  from caatnet.federated import flower
  from parallel.elastic.transport import handshake

  flower.start_client(
    options["address"], client, given.client, handshake.from_files(),
    validate=options["evaluate"],
  )


if __name__ == "__main__":
  main()
