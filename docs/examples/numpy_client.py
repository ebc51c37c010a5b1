"""Client of Flower: logistic regression on scikit-learn's digits, in numpy.

  python -m launch.federate --config=configs/federated/numpy.py

With flwr installed, `Client` may derive from ``flwr.client.NumPyClient``, and
Flower runs it by ``ClientApp(client_fn)``.
"""

import numpy as np
from sklearn import datasets

BATCH, RATE, VALIDATION = 32, 0.5, 0.2


class Client:
  """Client with a part of the digits."""

  def __init__(self, number, images, labels):
    held_out = round(VALIDATION * len(labels))
    self.number = number
    self.images, self.labels = images[held_out:], labels[held_out:]
    self.validation = images[:held_out], labels[:held_out]

  def get_properties(self, config):
    return {"num_examples": len(self.labels)}

  def get_parameters(self, config):
    return [np.zeros((64, 10), np.float32), np.zeros(10, np.float32)]

  def fit(self, parameters, config):
    weights, bias = parameters
    draw = np.random.default_rng([self.number, config["server_round"]])
    for _ in range(config["local_steps"]):
      places = draw.integers(len(self.labels), size=BATCH)
      images, labels = self.images[places], self.labels[places]
      grad = np.exp(_log_softmax(images @ weights + bias))
      grad[np.arange(BATCH), labels] -= 1
      weights -= RATE / BATCH * images.T @ grad
      bias -= RATE / BATCH * grad.sum(0)
    return [weights, bias], len(self.labels), {}

  def evaluate(self, parameters, config):
    weights, bias = parameters
    images, labels = self.validation
    found = _log_softmax(images @ weights + bias)
    loss = -found[np.arange(len(labels)), labels].mean()
    accuracy = (found.argmax(1) == labels).mean()
    return float(loss), len(labels), {"accuracy": float(accuracy)}


def _log_softmax(logits):
  logits = logits - logits.max(1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def client_fn(context):
  """Returns the client of a partition; equal for equal contexts."""
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(labels))
  number = context.node_config["partition-id"]
  mine = order[number::context.node_config["num-partitions"]]
  return Client(number, np.float32(images[mine] / 16), labels[mine])
