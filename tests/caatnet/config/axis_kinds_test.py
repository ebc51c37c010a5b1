"""A new kind of axis is a row of a table and a key of a config."""

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.schema import tree
from caatnet.schema.fields import COUNT, field, section
from caatnet.schema.parallel import Parallel
from caatnet.train import traffic
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import put_batch
from configs.pipeline import tiny
from parallel.plans import axis_kinds
from parallel.plans.axis_kinds import AXES, AxisKind

SMALL = (
  "model.width=8 model.num_heads=2 model.num_kv_heads=2 model.ffn_width=8 "
  "model.vocab_size=18 model.num_layers=2 data.seq_len=4 data.batch_size=12 "
  "train.accumulation=2 parallel.tensor=2 parallel.worker=1 "
)


@section
class WithReplicas(Parallel):
  """Axes of a run, and a toy axis."""

  replica: int = field(1, "Ranks with other examples.", COUNT)


@pytest.fixture(autouse=True)
def _toy_axis(monkeypatch):
  """Adds a toy axis inside of the data axis, by its two rows."""
  worker, data, *others = AXES
  toy = AxisKind("replica", "copies", examples=True, optional=True)
  monkeypatch.setattr(axis_kinds, "AXES", (worker, data, toy, *others))
  monkeypatch.setitem(tree._RUN_SECTIONS, "parallel", WithReplicas)


def build(overrides, mesh):
  config = tiny.get_config("test")
  with config.unlocked():
    config.parallel.replica = 1
  return experiments.build(override(config, SMALL + overrides), mesh)


def after_steps(experiment):
  """Returns losses and whole parameters after two steps."""
  state, draw = experiment.init_state(), np.random.default_rng(0)
  step, losses = experiment.lower_step().compile(), []
  for _ in range(2):
    batch = put_batch(
      experiment.program.layout, draw.integers(18, size=(12, 5))
    )
    state, metrics = step(state, batch, ())
    losses.append(metrics["loss"])
  whole = to_whole(experiment.program, state)
  return jax.device_get((losses, whole.params))


TWIN = "parallel.data=3 parallel.stage=1"


@pytest.fixture(scope="module")
def expected():
  config = override(tiny.get_config("test"), SMALL + TWIN)
  return after_steps(experiments.build(config, {}))


@pytest.mark.rotated
@pytest.mark.parametrize(("overrides", "mesh"), [
  ("parallel.stage=1", {}),
  ("parallel.stage=1 zero.scheme=zero3", {"replica": 3, "tensor": 2}),
  ("parallel.stage=2", {"replica": 3, "stage": 2}),
])
def test_lanes_equal_devices_of_a_new_axis(overrides, mesh, expected):
  experiment = build(
    f"parallel.replica=3 parallel.data=1 {overrides}", mesh
  )
  layout = experiment.program.layout
  names = ["worker", "data", "replica", "stage", "tensor"]
  assert [x.name for x in layout.axes] == [
    name for name in names if name != "stage" or "stage=2" in overrides
  ]
  assert layout.batch_spec == jax.P("worker", "data", "replica")
  assert [x.name for x in layout.partition.levels] == ["data", "replica"]
  rows = traffic.communication_per_step(experiment, {
    (): experiment.lower_step()
  })
  axes = {name for row in rows for name in row["axis"].split("+")}
  assert ("replica" in axes) == ("replica" in mesh)
  found = after_steps(experiment)
  chex.assert_trees_all_close(found[0], expected[0], rtol=2e-5)
  chex.assert_trees_all_close(found[1], expected[1], atol=5e-6)


def test_new_axis_is_not_a_name_of_a_level():
  with pytest.raises(ValueError, match="from worker, replica, stage and ten"):
    build("parallel.data=6 zero.levels=replica:2,gpu:3", {})
  with pytest.raises(ValueError, match="--mesh: replica:2 does not divide"):
    build("parallel.replica=3 parallel.data=1 parallel.stage=1", {"replica": 2})
