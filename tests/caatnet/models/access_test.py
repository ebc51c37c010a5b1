"""Dtypes of parameters as models read them, with and without a partition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.models.access import DEFAULT_ACCESS
from caatnet.train.evaluate import make_evaluate, put_batch
from tests.caatnet.train.linear_model import Deep, draw, make


@dataclasses.dataclass(frozen=True)
class Narrow(Deep):
  """Linear model that declares bfloat16 matrices and casts only its input."""

  dtype: str = "bfloat16"
  seen: list = dataclasses.field(default_factory=list, compare=False)

  @property
  def parameters(self):
    def narrow(p):
      return dataclasses.replace(p, dtype=self.dtype)

    wide = super().parameters
    return wide | {
      "w": narrow(wide["w"]), "blocks": {"w": narrow(wide["blocks"]["w"])}
    }

  def scores(self, params, batch, access=DEFAULT_ACCESS):
    def layer(p, x):
      self.seen.append(p["w"].dtype.name)
      return x + x @ p["w"]  # the carry keeps its dtype

    def head(p, x):
      self.seen.extend(p[key].dtype.name for key in ("w", "b"))
      return (x @ p["w"]).astype("f4") + p["b"][None]

    x = jax.lax.pcast(batch["x"].astype(self.dtype), "tensor", to="varying")
    x = access.scan(layer, params["blocks"], x, 1, None)
    y = access.apply(head, {key: params[key] for key in ("w", "b")}, x)
    losses = access.apply(
      lambda _, y, truth: jnp.square(y - truth), None, y, batch["y"]
    )
    return {"loss": jax.lax.psum(losses, "tensor")}


def trained(scheme, devices, num_steps=4):
  model = Narrow()
  experiment = make(
    model=model, scheme=scheme, data=4, devices=(1, devices), clip_norm=1.0
  )
  step = experiment.lower_step().compile()
  state, losses = experiment.init_state(), []
  for number in range(num_steps):
    batch = put_batch(experiment.program.layout, draw(8, number))
    state, metrics = step(state, batch, ())
    losses.append(float(metrics["loss"][0]))
  assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
  return losses, set(model.seen)


@pytest.mark.parametrize("devices", [1, 4])
def test_parameters_are_read_in_their_declared_dtype(devices):
  """Reads bfloat16 by every scheme; only the order of sums differs."""
  plain, seen = trained("ddp", devices)
  parts, seen_in_parts = trained("zero3", devices)
  assert seen == seen_in_parts == {"bfloat16", "float32"}
  np.testing.assert_allclose(plain, parts, rtol=0.02)


def test_gradients_are_stored_in_float32():
  """Differentiates the cast."""
  experiment = make(model=Narrow())
  program = experiment.program
  params = program.init_params(jax.random.key(0))
  found = make_evaluate(program, 8)(params, draw(8)).loss
  rounded = jax.tree.map(
    lambda x, p: x.astype(p.dtype).astype("f4"), params,
    program.model.parameters,
  )
  assert found == make_evaluate(program, 8)(rounded, draw(8)).loss
