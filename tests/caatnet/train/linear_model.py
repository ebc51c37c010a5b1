"""Linear model and data: an experiment that trains within seconds.

``loss = (x @ w + b - y)^2`` for each of T targets. `judged` and `gradients` are
the same in NumPy, so that tests of training need no second program.
"""

import collections
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.data import pipeline
from caatnet.data.protocol import Dataset
from caatnet.models.access import DEFAULT_ACCESS
from caatnet.models.protocol import Parameter
from caatnet.program import Layout, Program
from caatnet.schema.train import Train
from caatnet.train.experiment import Experiment
from parallel.axes import Axis, make_mesh
from parallel.outer.base import OuterLoop
from parallel.plans.zero import partition

INPUTS, TARGETS = 3, 2


@dataclasses.dataclass(frozen=True)
class Toy:
  """Linear `caatnet.models.protocol.Model`."""

  dtype: str = "float32"
  num_params: int = INPUTS * TARGETS + TARGETS

  @property
  def stacks(self):
    return {}

  @property
  def parameters(self):
    return {"w": Parameter(P(), 0, "float32"),
            "b": Parameter(P(), 0, "float32", decays=False)}

  def init(self, key):
    return {"w": jax.random.normal(key, (INPUTS, TARGETS)),
            "b": jnp.zeros(TARGETS)}

  def scores(self, params, batch, access=DEFAULT_ACCESS):
    y = access.apply(lambda p, x: x @ p["w"] + p["b"][None], params, batch["x"])
    losses = access.apply(
      lambda _, y, truth: jnp.square(y - truth), None, y, batch["y"]
    )
    return {"loss": lax.psum(losses, "tensor")}

  def flops(self, example):
    return 6.0 * INPUTS * TARGETS

  def reductions(self, example, **_):
    return collections.Counter()


@dataclasses.dataclass(frozen=True)
class Deep(Toy):
  """Linear model after a stack of two residual layers ``x + x @ w``."""

  num_params: int = Toy.num_params + 2 * INPUTS * INPUTS

  @property
  def stacks(self):
    return {"blocks": 2}

  @property
  def parameters(self):
    return super().parameters | {"blocks": {"w": Parameter(P(), 1, "float32")}}

  def init(self, key):
    w = 0.3 * jax.random.normal(key, (2, INPUTS, INPUTS))
    return super().init(key) | {"blocks": {"w": w}}

  def scores(self, params, batch, access=DEFAULT_ACCESS):
    head = {key: params[key] for key in ("w", "b")}
    # Varies over tensor ranks, as after a layer with their parameters.
    x = lax.pcast(batch["x"], "tensor", to="varying")
    x = access.scan(lambda p, x: x + x @ p["w"], params["blocks"], x, 1, None)
    return super().scores(head, batch | {"x": x}, access)


class _Rows:
  def __init__(self, examples):
    self.examples = examples

  def __len__(self):
    return len(self.examples["x"])

  def __getitem__(self, index):
    return {key: value[index] for key, value in self.examples.items()}


def draw(num_examples, seed=0):
  rng = np.random.default_rng(seed)
  return {"x": rng.normal(size=(num_examples, INPUTS)).astype("f4"),
          "y": rng.normal(size=(num_examples, TARGETS)).astype("f4")}


@dataclasses.dataclass(frozen=True)
class ToyData:
  """Linear `caatnet.data.protocol.Data`: 40 training, 7 validation examples."""

  batch_size: int = 8
  unit: str = "points"
  units_per_example: int = 3

  @property
  def example(self):
    return {"x": jax.ShapeDtypeStruct((INPUTS,), "float32"),
            "y": jax.ShapeDtypeStruct((TARGETS,), "float32")}

  @property
  def labels(self):
    return {"loss": "squared error"}

  def load(self, seed):
    batches = pipeline.shuffled_batches(_Rows(draw(40)), self.batch_size, seed)
    examples = pipeline.shuffled_examples(_Rows(draw(40)), seed)
    return Dataset(
      "toy", "0" * 64, batches, draw(7, 1), measures, dict, examples=examples
    )


def measures(means):
  return {"loss": means["loss"], "doubled": 2 * means["loss"]}


def make(
  workers=1, data=1, devices=None, scheme="ddp", outer=None,
  learning_rate=0.1, momentum=0.9, clip_norm=0.0, num_steps=6, batch_size=8,
  levels=None, moments="device", model=Toy(), tensor=1, optimizer=None,
  arrays=(("trace", "same"),), **options,
):
  """Returns an experiment.

  Args:
    devices: Number of devices of the worker axis and of the data axis.
    levels: Axes that replace the data axis.
    tensor: Number of tensor ranks and of their devices.
    optimizer: Inner optimizer; by default SGD with momentum.
    arrays: Its arrays, as in `Program.moments`.
  """
  devices = devices or (1, 1)
  levels = levels or (Axis("data", data, devices[1]),)
  worker = Axis("worker", workers, devices[0])
  tensor = Axis("tensor", tensor, tensor)
  sizes = [partition.Level(axis.name, axis.size) for axis in levels]
  axes = (worker, *levels, tensor)
  layout = Layout(
    axes, make_mesh({axis.name: axis for axis in axes}),
    partition.named(scheme, sizes), moments=moments,
  )
  rate = learning_rate
  if not callable(rate):
    rate = optax.constant_schedule(learning_rate)
  train = dict(
    num_steps=num_steps, accumulation=1, log_every=1, eval_every=num_steps,
    checkpoint_every=2, keep_checkpoints=9, init_from="",
  )
  return Experiment(
    config={"name": "toy"},
    program=Program(model, layout, arrays),
    optimizer=optimizer or optax.sgd(rate, momentum),
    outer=outer or OuterLoop(worker),
    learning_rate=rate,
    clip_norm=clip_norm,
    data=ToyData(batch_size),
    train=Train(**(train | options)),
    seed=3,
  )


def judged(params, batch):
  """Returns the losses, float64 ``[B, T]``."""
  x, y = (np.asarray(batch[key], "f8") for key in ("x", "y"))
  return np.square(x @ params["w"] + params["b"] - y)


def gradients(params, batch):
  """Returns the gradients of the mean loss, float64."""
  x, y = (np.asarray(batch[key], "f8") for key in ("x", "y"))
  error = 2 * (x @ params["w"] + params["b"] - y) / y.size
  return {"w": x.T @ error, "b": error.sum(axis=0)}
