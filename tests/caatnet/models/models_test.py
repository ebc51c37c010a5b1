"""Properties of every model: a new model inherits them by one row of MODELS."""

import collections
import dataclasses
import functools
import importlib
import math
import shutil

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.model import MODELS as BUILDERS
from caatnet.config.override import override
from caatnet.models.protocol import Reduction
from caatnet.program import Leaf
from caatnet.train import loop
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import put_batch
from caatnet.train.records import read_metrics
from parallel.ledger import ledger
from tests import users


@dataclasses.dataclass(frozen=True)
class Row:
  """A model, by a small config.

  Attributes:
    config: Module of the config and its argument.
    changes: Overrides that make it small.
    ranks: Tensor ranks of most tests.
    wide: Overrides that give it one layer whose products outweigh all other
      operations, without a loop: a compiler counts one iteration of a loop.
    flops: Smallest and largest ratio of compiled to declared operations. A
      model whose first layer reads data differentiates no input there.
    parts: Reason why the model has no parts for pipeline stages; "" if it has.
    undecayed: Names of matrices that the model declares without weight decay
      (`Parameter.decays`), such as the decay rates of a state.
  """

  config: tuple[str, str]
  changes: str = ""
  ranks: int = 1
  wide: str = ""
  flops: tuple[float, float] = (0.95, 1.15)
  parts: str = ""
  undecayed: tuple[str, ...] = ()


VALIDATION = "validation_"
_TEXT = "data.seq_len=16 data.validation_windows=8"
MODELS = {
  "transformer": Row(
    ("configs.caatnet.tiny", "test"),
    f"{_TEXT} sync.p=0.5 model.num_heads=4 model.num_kv_heads=4 "
    "model.ffn_width=24", 4,
    "model.num_layers=1 model.width=128 model.ffn_width=320 model.vocab_size="
    "512",
  ),
  "recurrent": Row(
    ("configs.recurrent.tiny", "test"),
    f"{_TEXT} model.num_heads=4 model.ffn_width=24", 4,
    "model.num_layers=1 model.width=128 model.ffn_width=320 model.vocab_size="
    "512 model.rnn_width=128",
  ),
  "convolutional": Row(
    ("configs.images.tiny", "data_parallel,test"),
    "model.widths=(4,) model.blocks=2 model.groups=2",
    wide="model.widths=(32,64) model.blocks=1",
    # Taps on the padding of a small image are not multiplied.
    flops=(0.75, 1.15),
  ),
  "squeezenet": Row(
    ("configs.federated.tiny", "squeezenet,test"),
    "data.shape=(24,24,3)",
    # Its smallest maps have one position, where eight of nine taps of a 3 x 3
    # convolution are on padding and not multiplied.
    flops=(0.6, 1.15),
    parts="no stack of equal layers",
  ),
  "graph": Row(
    ("configs.graphs.tiny", "data_parallel,test"),
    wide="model.width=256",
    # The first layer, the widest one, has no input gradients.
    flops=(0.6, 1.15),
    parts="each layer reads one level less",
  ),
}


def test_every_model_has_a_row():
  assert MODELS.keys() == BUILDERS.keys()


def make(name, changes="", mesh=None):
  """Returns an experiment of one worker, two data ranks and tensor ranks."""
  row = MODELS[name]
  module, argument = row.config
  config = importlib.import_module(module).get_config(argument)
  if "federated" in config:  # its clients train the same model
    with config.unlocked():
      del config.federated
  shared = (
    "parallel.worker=1 parallel.data=2 outer.algorithm=data_parallel "
    f"parallel.tensor={row.ranks} data.batch_size=4 train.num_steps=4 "
    "train.eval_every=4 train.checkpoint_every=2 optimizer.warmup_steps=1 "
  )
  return experiments.build(
    override(config, f"{shared} {row.changes} {changes}"),
    mesh,
  )


@functools.cache
def batches(name):
  """Returns the first batches, which depend on no mesh."""
  found = make(name).data.load(0).batches
  return [next(found) for _ in range(3)]


def whole(experiment, state):
  """Returns the parameters with logical shapes."""
  return jax.device_get(to_whole(experiment.program, state).params)


@functools.cache
def trained(name, changes="", mesh=()):
  """Returns parameters and losses of a few steps."""
  experiment = make(name, changes, dict(mesh))
  step = experiment.lower_step().compile()
  state, losses = experiment.init_state(), []
  for batch in batches(name):
    placed = put_batch(experiment.program.layout, batch)
    state, metrics = step(state, placed, ())
    losses.append(float(metrics["loss"].mean()))
  return whole(experiment, state), losses


def meshes(name):
  """Returns two meshes: all ranks on one device, and two devices per axis."""
  tensor = 2 if MODELS[name].ranks > 1 else 1
  return {}, {"data": 2, "tensor": tensor}


@pytest.mark.parametrize("name", MODELS)
def test_initial_parameters_are_equal_on_all_meshes(name):
  one, more = (
    whole(e, e.init_state())
    for e in (make(name, mesh={"data": 1}), make(name, mesh=meshes(name)[1]))
  )
  jax.tree.map(np.testing.assert_array_equal, one, more)


@pytest.mark.rotated
@pytest.mark.parametrize("name", MODELS)
def test_lanes_equal_devices_and_partitions_change_no_result(name):
  mesh = tuple(meshes(name)[1].items())
  lanes, losses = trained(name, mesh=(("data", 1),))
  for changes in ("", "zero.scheme=zero3"):
    devices, more = trained(name, changes, mesh)
    np.testing.assert_allclose(losses, more, rtol=1e-4)
    chex.assert_trees_all_close(lanes, devices, rtol=1e-2, atol=1e-4)
  first = make(name)
  before = whole(first, first.init_state())
  moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, lanes)
  assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_compiled_program(name):
  row = MODELS[name]
  experiment = make(
    name, f"{row.wide} parallel.tensor=1 parallel.data=1", {"data": 1}
  )
  found = users.compiled(experiment.lower_step()).cost_analysis()["flops"]
  examples = experiment.data.batch_size
  # The optimizer and clipping execute a few operations per parameter.
  found -= 20 * experiment.program.model.num_params
  declared = examples * experiment.program.model.flops(experiment.data.example)
  low, high = row.flops
  assert low <= found / declared <= high, found / declared


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_reductions_are_those_of_the_lowered_program(name, accumulation):
  row = MODELS[name]
  experiment = make(
    name, f"train.accumulation={accumulation}", {"tensor": row.ranks}
  )
  layout, model = experiment.program.layout, experiment.program.model
  entries = ledger.collectives(experiment.lower_step(), layout.mesh)
  found = collections.Counter()
  for e in ledger.select(entries, axis="tensor"):
    if e.bytes:
      found[Reduction(e.phase, e.dtype, e.shape, e.kind)] += e.count
  lanes = layout.data[0].lanes
  expected = model.reductions(
    experiment.data.example, batch_size=4 // 2 // accumulation,
    data_lanes=lanes, accumulation=accumulation,
  )
  assert found == expected
  assert bool(found) == (row.ranks > 1)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_and_matrices_decay(name):
  """Uses sizes without padding."""
  program = make(name).program
  leaves = jax.tree.leaves_with_path(
    program.leaves, is_leaf=lambda x: isinstance(x, Leaf)
  )
  assert program.model.num_params == sum(math.prod(x.shape) for _, x in leaves)
  matrices = {p[-1].key: x.parameter.decays for p, x in leaves
              if len(x.tensor.shape) > 1}
  assert {n for n, decays in matrices.items() if not decays} == {
    *MODELS[name].undecayed
  }
  vectors = [x for _, x in leaves if len(x.tensor.shape) <= 1]
  assert not any(x.parameter.decays for x in vectors)
  assert any(matrices.values())
  assert vectors


@pytest.mark.rotated
@pytest.mark.parametrize("name", MODELS)
def test_stages_train_as_one_piece_does(name):
  """Models with parts run in stages; others give the reason."""
  changes = "parallel.stage=2 parallel.data=1 train.accumulation=2"
  mesh = (("stage", 2), ("tensor", meshes(name)[1]["tensor"]))
  if MODELS[name].parts:
    with pytest.raises(ValueError, match=MODELS[name].parts):
      make(name).program.model.parts()
    return
  alone, losses = trained(
    name, "parallel.data=1 train.accumulation=2", (("data", 1),)
  )
  staged, more = trained(name, changes, mesh)
  np.testing.assert_allclose(losses, more, rtol=1e-4)
  chex.assert_trees_all_close(alone, staged, rtol=1e-2, atol=1e-4)


@pytest.mark.rotated
@pytest.mark.parametrize("name", MODELS)
def test_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
  mesh = meshes(name)[1]
  run = functools.partial(loop.train, workdir=tmp_path / "run", quiet=True)
  expected = run(make(name, mesh=mesh))
  *_, last = (
    r for r in read_metrics(tmp_path / "run") if f"{VALIDATION}loss" in r
  )
  assert {k: last[f"{VALIDATION}{k}"] for k in expected.measures} == (
    expected.measures
  )
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
  again = run(make(name, mesh=mesh))
  assert again.measures == expected.measures
