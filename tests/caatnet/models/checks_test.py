"""Errors of models that break the protocol: one line that names the member."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import pytest

from caatnet.models.protocol import Parameter
from caatnet.train.evaluate import make_evaluate
from tests.caatnet.train.linear_model import Deep, draw, make


def changed(parameter):
  """Returns a model with another `Parameter` of its stack."""

  @dataclasses.dataclass(frozen=True)
  class Model(Deep):
    @property
    def parameters(self):
      return super().parameters | {"blocks": {"w": parameter}}

  return Model()


def stacked(**stacks):

  @dataclasses.dataclass(frozen=True)
  class Model(Deep):
    @property
    def stacks(self):
      return stacks

  return Model()


@dataclasses.dataclass(frozen=True)
class Lacking(Deep):
  @property
  def parameters(self):
    whole = super().parameters
    return {key: whole[key] for key in ("w", "blocks")}


@dataclasses.dataclass(frozen=True)
class Misspelt(Deep):
  @property
  def parameters(self):
    return super().parameters | {"bais": super().parameters["b"]}


@dataclasses.dataclass(frozen=True)
class Narrow(Deep):
  def init(self, key):
    return jax.tree.map(lambda x: x.astype("bfloat16"), super().init(key))


@pytest.mark.parametrize(
  ("model", "message"),
  [
    (Lacking(), "Lacking.parameters lacks 'b', which Lacking.init returns"),
    (Misspelt(), "Misspelt.parameters has 'bais', which is not a parameter"),
    (Narrow(), "Narrow.init: 'b' is bfloat16, but parameters are stored as"),
    (stacked(block=2), "Model.stacks has 'block', which is none of the top"),
    (stacked(blocks=3), "Model.stacks: 'blocks' has 3 layers, so the first"),
    (changed(Parameter(P(), 0, "float32")),
     "Model.parameters: 'blocks/w' has num_lead=0, but its first dim is the"),
    (changed(Parameter(P(), 4, "float32")),
     "Model.parameters: 'blocks/w' has num_lead=4, but its shape (2, 3, 3)"),
    (changed(Parameter(P(), 1, "float32", form="row")),
     "Model.parameters: 'blocks/w' has form='row', not flat or rows or whole"),
    (changed(Parameter(P(), 1, "bfloat16", update=lambda x, y: x)),
     "Model.parameters: 'blocks/w' has dtype='bfloat16', but explicit tr"),
    (changed(Parameter(P(), 1, "int32")),
     "Model.parameters: 'blocks/w' has dtype='int32', which is no floating"),
    (changed(Parameter(P(), 1, "float9")),
     "Model.parameters: 'blocks/w' has dtype='float9', which is no floating"),
    (changed(Parameter(P(None, "tensor"), 1, "float32")),
     "Model.parameters: 'blocks/w' has num_lead=1, but its spec"),
    (changed(Parameter(P(None, "tensor"), 2, "float32")),
     "but dim 1 of its shape (2, 3, 3) is not the number of tensor ranks, 1"),
    (changed(Parameter(P(None, "data"), 2, "float32")),
     "which may name 'tensor' only"),
    (changed(Parameter(P(), 1, "float32", stage_dim=3)),
     "Model.parameters: 'blocks/w' has stage_dim=3, but its shape"),
    (changed("float32"),
     "Model.parameters: 'blocks/w' is a str, not a Parameter"),
  ],
)
def test_contradiction_names_the_member(model, message):
  with pytest.raises(ValueError) as error:
    make(model=model)
  assert message in str(error.value)
  assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Scored(Deep):
  """Model that changes its scores before it returns them."""

  change: object = None

  def scores(self, params, batch, access=None):
    args = (params, batch) if access is None else (params, batch, access)
    found = super().scores(*args)
    return self.change(found, batch)


def ranks_apart(scores, batch):
  own = jax.lax.pcast(batch["y"], "tensor", to="varying")
  return scores | {"loss": scores["loss"] + own}


def train(experiment):
  experiment.lower_step()


def evaluate(experiment):
  params = experiment.program.init_params(jax.random.key(0))
  make_evaluate(experiment.program, 8)(params, draw(8))


@pytest.mark.parametrize("scheme", ["ddp", "zero3"])
@pytest.mark.parametrize("trace", [train, evaluate])
@pytest.mark.parametrize(
  ("change", "message"),
  [
    (ranks_apart,
     "Scored.scores: 'loss' differs between tensor ranks; sum it over the "
     "axis with jax.lax.psum(x, 'tensor')"),
    (lambda scores, _: {"los": scores["loss"]},
     "Scored.scores must return a dict with the key 'loss', not los"),
    (lambda scores, _: scores["loss"],
     "Scored.scores must return a dict with the key 'loss', not "),
    (lambda scores, _: scores | {"right": scores["loss"] > 0},
     "Scored.scores: 'right' is bool, but must be float32"),
  ],
)
def test_scores_that_break_the_protocol_are_named(
  scheme, trace, change, message
):
  """Refuses wrong scores when training or evaluation is traced."""
  experiment = make(model=Scored(change=change), scheme=scheme, data=2)
  with pytest.raises(ValueError) as error:
    trace(experiment)
  assert str(error.value).startswith(message)
  assert "\n" not in str(error.value)
