"""Properties of `config.memory.optimizer`: AdamW on the host in a run."""

import collections
import importlib
import json
import re
import shutil
import signal
import tracemalloc

import chex
import jax
import numpy as np
import optax
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import results
from caatnet.studies.placement import of_run, study
from caatnet.studies.planner.study import training_step
from caatnet.train import loop
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.evaluate import put_batch
from configs.caatnet import tiny
from configs.images import tiny as images
from parallel.memory import host_memory, host_optimizer
from parallel.memory.offload import ActivationPlacement
from parallel.plans.hardware import tiers
from parallel.plans.hardware.devices import DEVICES
from tests import users
from tests.caatnet.train.loop_test import (
  assert_resumes,
  facts,
  send_at_random_step,
)
from tests.launch.processes_test import JOIN, pair_of

CLIP_NORM = 0.1  # below the norms of all steps
SMALL = (
  "model.width=16 model.num_heads=2 model.num_kv_heads=2 model.ffn_width=24 "
  "model.vocab_size=64 data.seq_len=8 data.batch_size=8 "
  f"optimizer.clip_norm={CLIP_NORM}"
)
SMALLER = "model.widths=(4,) model.blocks=1 model.groups=2"  # a classifier
HOST = "memory.optimizer=host"
DRAM = 'memory.tiers=(("0",1.0),)'
DISK = 'memory.tiers=(("{}",1.0),)'
STRIPED = 'memory.tiers=(("0",0.3),("{}",0.7))'


def make(overrides, mesh=None):
  config = override(tiny.get_config("test"), f"{SMALL} {overrides}")
  return experiments.build(config, mesh)


def batch_of(experiment, number):
  tokens = np.random.default_rng(number).integers(64, size=(8, 9))
  return put_batch(experiment.program.layout, tokens)


def opened(experiment):
  return experiment.update.open(experiment.program, experiment.learning_rate)


def placed(experiment, state):
  """Returns a state on the devices of an experiment."""
  return jax.device_put(
    state, jax.tree.map(lambda x: x.sharding, experiment.abstract_state())
  )


def advance(experiment, program, num_steps, start=None):
  """Returns metrics and state after steps, as copies on the host.

  The steps start from ``start``, a state on the host, or from the initial one.
  """
  steps = opened(experiment)
  # On the device, the step donates the state.
  state = steps.load(
    experiment.init_state() if start is None else placed(experiment, start)
  )
  metrics = []
  for _ in range(num_steps):
    batch = batch_of(experiment, int(state.step))
    state, found = steps.run(program, state, batch, ())
    metrics.append(found)
  return jax.tree.map(np.array, (metrics, steps.whole(state)))


def test_an_update_holds_the_bytes_that_a_placement_counts():
  """Placed arrays, and one copy of the weights that are sent to the device."""
  keys = f"{SMALL} {HOST} {DRAM} parallel.tensor=1 model.remat=full"
  config = override(
    tiny.get_config("test"), f"{keys} model.width=256 model.ffn_width=512"
  )
  experiment = experiments.build(config, {})
  config = config.to_dict()
  counted = {
    tensor.name: tensor.size_bytes for _, _, tensor in of_run.problem(
      config, training_step(config), DEVICES["h200"],
      tiers.HOSTS["large-dram"], 0.5, 1.0,
    ).tensors()
  }
  steps = opened(experiment)
  state = steps.load(experiment.init_state())
  program = experiment.lower_step().compile()
  batch = batch_of(experiment, 0)
  state, _ = steps.run(program, state, batch, ())  # compiles its loops
  tracemalloc.start()
  try:
    state, _ = steps.run(program, state, batch, ())
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  held = sum(counted[name] for name in (
    "master weights", "gradients", "first moments", "second moments"
  ))
  assert steps.optimizer.buffer.array.nbytes <= held + 4 * host_memory.PAGE
  # On a CPU, gradients that arrive are the device's arrays.
  assert counted["arrived gradients"] == counted["staged weights"]
  # Weights of the step before may be freed meanwhile; there is no second copy.
  assert 0.3 < peak / counted["staged weights"] < 1.3


# On some days two tests run the same one of these rows: the second test finds
# its program in the cache of compiled programs.
ROWS = [
  ("parallel.tensor=1", {}),
  ("parallel.tensor=2 sync.p=0.5 parallel.data=4", None),
  ("parallel.data=2 parallel.tensor=2 parallel.stage=2 train.accumulation=2 "
   "zero.scheme=zero2", {"stage": 2}),
]


@pytest.mark.rotated(6)
@pytest.mark.parametrize(("overrides", "mesh"), [
  *ROWS,
  ("parallel.tensor=2 sync.p=0.5 parallel.data=4", {"data": 2, "tensor": 2}),
  ("parallel.tensor=1 parallel.data=8 model.remat=reduced "
   "memory.activations=pinned_host", None),
  ("parallel.tensor=2 sync.p=0.5 parallel.data=4 zero.scheme=zero3",
   {"data": 2, "tensor": 2}),
], ids=str)
def test_five_steps_have_the_same_bits(overrides, mesh, same_bits, tmp_path):
  experiment = make(f"{overrides} {HOST}", mesh)
  # The program does not depend on the placement, and neither does the start.
  program = experiment.lower_step().compile(same_bits)
  start = jax.device_get(experiment.init_state())
  reference = advance(experiment, program, 5, start)
  for other in (
    f"{DRAM} memory.threads=1", DISK.format(tmp_path),
    f"{STRIPED.format(tmp_path)} memory.threads=3",
  ):
    found = advance(
      make(f"{overrides} {HOST} {other}", mesh), program, 5, start
    )
    chex.assert_trees_all_equal(found, reference)


# A leaf of two million elements has several threads and stripes.
LARGE = f"parallel.tensor=1 model.vocab_size=131072 {HOST}"


@pytest.fixture(scope="module")
def large():
  """The program of LARGE, an initial state, and two steps by one thread."""
  experiment = make(f"{LARGE} {DRAM} memory.threads=1", {})
  program = experiment.lower_step().compile(users.OPTIONS)
  start = jax.device_get(experiment.init_state())
  return program, start, advance(experiment, program, 2, start)


def test_several_threads_and_many_stripes_have_the_same_bits(large, tmp_path):
  program, start, one = large
  where = f"{STRIPED.format(tmp_path)} memory.threads=2"
  two = advance(make(f"{LARGE} {where}", {}), program, 2, start)
  chex.assert_trees_all_equal(one, two)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
  """A file of launch.place for 7B on two tiers of this machine."""
  disk = tmp_path_factory.mktemp("disk")
  host = tiers.HOSTS["one-cxl"]

  def sized(index, size, **fields):
    tier = host.tiers[index]
    capacity = tier.capacity_bytes.model_copy(
      update=dict.fromkeys(("value", "low", "high"), size)
    )
    return tier.model_copy(update={"capacity_bytes": capacity} | fields)

  file = disk / "tiers.json"
  file.write_text(tiers.to_json(host.model_copy(update={"tiers": (
    sized(0, 60e9, node=host_memory.nodes()[0]),
    sized(1, 200e9, kind="file", node=None, path=str(disk / "tier")),
  )})))
  config = importlib.import_module("configs.memory.12b_32k").get_config("7b")
  config = config.to_dict()
  config["placement"] |= {
    "tiers": str(file), "policies": ("latency_first", "optimum"),
    "longest": 4096, "contexts": (), "targets": (),
  }
  path = disk / "placement.json"
  results.write(path, study.run(config))
  return path


def test_planned_placement_is_executed_with_the_same_bits(planned, large):
  program, start, reference = large
  experiment = make(f"{LARGE} memory.placement={planned}", {})
  rows = {row["policy"]: row for row in results.read(planned)["policies"]}
  wanted = rows["latency_first"]["host_optimizer"]
  steps = opened(experiment)
  steps.optimizer.buffer.check()  # pages are on the tiers of the pieces
  array_bytes = len(steps.optimizer.buffer.array) // len(wanted)
  found = {name: collections.Counter() for name in wanted}
  for piece in steps.optimizer.buffer.pieces:
    name = host_optimizer.ARRAYS[piece.start // array_bytes]
    found[name][str(piece.tier)] += (piece.stop - piece.start) / array_bytes
  assert set(wanted) == set(host_optimizer.ARRAYS)
  assert len(wanted["second"]) == 2  # the placement divides an array
  for name, shares in wanted.items():
    assert dict(found[name]) == pytest.approx(shares, abs=1e-2)
  chex.assert_trees_all_equal(
    advance(experiment, program, 2, start), reference
  )
  # Gradients arrive on their tiers: first moments are 0.1 times the first ones.
  state = steps.load(placed(experiment, start))
  steps.run(program, state, batch_of(experiment, 0), ())
  host = steps.optimizer
  assert host.gradients.any()
  np.testing.assert_allclose(host.first, 0.1 * host.gradients, rtol=1e-5)


def test_planned_activations_are_executed(planned):
  rows = {row["policy"]: row for row in results.read(planned)["policies"]}
  for policy in ("latency_first", "optimum"):
    experiment = make(
      "parallel.tensor=1 model.remat=named memory.activations=placement "
      f"memory.placement={planned} memory.policy={policy}", {},
    )
    shares, placed = (rows[policy][key] for key in ("activations", "placed"))
    for tiers_of in placed.values():
      assert sum(tiers_of.values()) == pytest.approx(1)
    for way, tensor in (
      ("saved", "activations"), ("recomputed", "layer inputs")
    ):
      assert shares.get(way, {}).get("device") == placed.get(
        tensor, {}
      ).get("device")
    assert sum(
      x for way in shares.values() for x in way.values()
    ) == pytest.approx(1)
    found = experiment.program.layout.activations
    assert found == ActivationPlacement(*(
      shares.get(way, {}).get(memory, 0.0) for way, memory in (
        ("saved", "device"), ("recomputed", "device"), ("saved", "host"),
      )
    ))
    assert "master weights on" in experiment.unexecuted  # no host optimizer


def test_tiers_of_the_host_optimizer_are_executed(planned):
  found = make(
    f"parallel.tensor=1 {HOST} memory.placement={planned}", {}
  ).unexecuted
  assert "activations on" in found or "layer inputs on" in found
  for executed in ("master weights", "moments", "gradients"):
    assert executed not in found


def test_tiers_of_gradients_without_an_array_are_named(planned, tmp_path):
  """A file that launch.place wrote before it had the array of gradients."""
  result = json.loads(planned.read_text())
  for row in result["policies"]:
    if row["host_optimizer"]:
      del row["host_optimizer"]["gradients"]
  old = tmp_path / "old.json"
  old.write_text(json.dumps(result))
  found = make(f"parallel.tensor=1 {HOST} memory.placement={old}", {})
  assert re.search(
    r"gradients on .* \(in memory of any node\)", found.unexecuted
  )


def test_placement_that_the_host_cannot_execute_is_an_error(planned, tmp_path):
  notes = tmp_path / "notes.json"
  notes.write_text("[1]")
  for keys, message in (
    (f"{HOST} memory.placement={planned} memory.policy=optimum",
     "policy='optimum' must be one of 'latency_first', the policies of"),
    (f"{HOST} memory.placement={notes}", "is not a file that launch.place"),
    (f"{HOST} {DRAM} memory.placement={planned}", "cannot be combined with"),
    (f"memory.placement={planned}", "has no effect with config.memory.opti"),
  ):
    with pytest.raises(ValueError, match=message):
      make(f"parallel.tensor=1 {keys}", {})


@pytest.mark.rotated
@pytest.mark.parametrize(("overrides", "mesh"), ROWS, ids=str)
def test_a_step_agrees_with_that_on_the_device(overrides, mesh, same_bits):
  """Moments within one ulp of the larger summand, since the sum may cancel."""
  both = [make(f"{overrides} {where}", mesh) for where in (HOST, "")]
  programs = [x.lower_step().compile(same_bits) for x in both]
  state = jax.device_get(both[0].init_state())
  # The second loss is that of the first step's weights.
  on_host, on_device = (
    advance(experiment, program, 2, state)[0][1]["loss"]
    for experiment, program in zip(both, programs, strict=True)
  )
  assert abs(on_host - on_device) <= 1e-6
  for step in range(4):
    (metrics, ours), (_, theirs) = (
      advance(experiment, program, 1, state)
      for experiment, program in zip(both, programs, strict=True)
    )
    assert metrics[0]["grad_norm"] > CLIP_NORM
    assert ours.step == theirs.step == step + 1
    for name in ("mu", "nu"):
      old, x, y = (
        jax.tree.leaves(optax.tree_utils.tree_get(tree.opt_state, name))
        for tree in (state, ours, theirs)
      )
      for before, a, b in zip(old, x, y, strict=True):
        assert (abs(a - b) <= np.spacing(np.maximum(abs(a), abs(before)))).all()
    chex.assert_trees_all_close(ours.params, theirs.params, atol=1e-6)
    for x, y in zip(*(
      optax.tree_utils.tree_get_all_with_path(tree.opt_state, "count")
      for tree in (ours, theirs)
    ), strict=True):
      chex.assert_trees_all_equal(x, y)
    state = theirs


@pytest.mark.rotated  # compiles two programs
def test_classifier_has_the_same_bits_and_the_loss_of_the_device(
  tmp_path, same_bits
):
  device, host, striped = (
    experiments.build(override(
      images.get_config("data_parallel,test"),
      f"parallel.worker=1 parallel.data=4 {SMALLER} {where}",
    )) for where in ("", HOST, f"{HOST} {STRIPED.format(tmp_path)}")
  )
  on_host = host.lower_step().compile(same_bits)

  def losses(experiment, program):
    batches = iter(experiment.data.load(experiment.seed).batches)
    steps, found = opened(experiment), []
    state = steps.load(experiment.init_state())
    for _ in range(5):
      batch = put_batch(experiment.program.layout, next(batches))
      state, metrics = steps.run(program, state, batch, ())
      found.append(float(metrics["loss"][0]))
    return found

  device = losses(device, device.lower_step().compile(same_bits))
  host, striped = losses(host, on_host), losses(striped, on_host)
  assert host == striped
  assert device[0] == host[0]
  np.testing.assert_allclose(host[1], device[1], atol=1e-6)
  np.testing.assert_allclose(host, device, atol=1e-4)


def test_steps_change_neither_earlier_weights_nor_a_checkpoint(
  tmp_path, same_bits
):
  """Arrays of a checkpoint are written while the following steps run."""
  experiment = make(f"parallel.tensor=2 parallel.data=2 {HOST}", {})
  steps, program = opened(experiment), experiment.lower_step().compile()
  state, _ = steps.run(
    program, steps.load(experiment.init_state()), batch_of(experiment, 0), ()
  )
  saved = steps.whole(state)
  expected = jax.tree.map(np.array, saved)
  checkpointer = Checkpointer(tmp_path, experiment.program, 1)
  checkpointer.save(saved, {})
  params = state.params
  for number in range(3):
    state, _ = steps.run(program, state, batch_of(experiment, number), ())
  checkpointer.wait()
  chex.assert_trees_all_equal(jax.device_get(params), expected.params)
  restored, _ = checkpointer.restore(experiment.abstract_state())
  checkpointer.close()
  chex.assert_trees_all_equal(jax.device_get(restored), expected)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Runs of 12 steps on the device and on the host, by name."""
  found = tmp_path_factory.mktemp("finished")
  for name, where in (("device", ""), ("host", HOST)):
    train(found / name, where)
  return found


def train(workdir, overrides):
  config = override(
    tiny.get_config("test"),
    "parallel.data=2 parallel.tensor=4 train.keep_checkpoints=9 " + overrides,
  )
  return loop.train(experiments.build(config, {}), workdir, quiet=True)


@pytest.mark.rotated  # trains three times
@pytest.mark.parametrize(("before", "after"), [
  ("device", "host"), ("host", "device"),
])
def test_run_resumes_with_the_other_update(finished, before, after, tmp_path):
  shutil.copytree(finished / before, tmp_path / "run")
  for step in ("8", "12"):
    shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
  train(tmp_path / "run", HOST if after == "host" else "")
  found = facts(tmp_path / "run")
  # Records of the first four steps are those of the first run.
  for ours, theirs in zip(found, facts(finished / after), strict=True):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
      np.testing.assert_allclose(value, theirs[key], rtol=1e-4)


@pytest.mark.rotated  # starts a process
def test_killed_run_resumes_with_another_placement(tmp_path):
  assert_resumes(
    tmp_path, HOST, f"{HOST} {STRIPED.format(tmp_path)} memory.threads=1", HOST
  )


PAIR = JOIN + """
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train import loop
from configs.caatnet import tiny
for workdir, keys in zip(sys.argv[3::2], sys.argv[4::2]):
  config = override(tiny.get_config("test"), keys)
  loop.train(
    experiments.build(config, {"data": 2}), workdir, quiet=True
  )
"""


@pytest.mark.rotated(12)  # starts four processes
@pytest.mark.parametrize("partition", ["zero3", "ddp"])
def test_two_processes_resume_with_another_placement(partition, tmp_path):
  keys = (
    "parallel.tensor=2 parallel.data=2 train.num_steps=24 "
    f"zero.scheme={partition} {HOST}"
  )
  with pair_of(PAIR, tmp_path / "again", f"{keys} {DRAM}") as killed:
    send_at_random_step(
      killed[0], tmp_path / "again", signal.SIGKILL, 6, 16
    )
    assert killed[0].returncode == -signal.SIGKILL
  again = keys + f" {STRIPED.format(tmp_path)} memory.threads=1"
  runs = tmp_path / "again", again, tmp_path / "whole", keys
  with pair_of(PAIR, *runs) as pair:
    for process in pair:
      error = process.communicate(timeout=400)[1]
      assert process.returncode == 0, error
  whole = facts(tmp_path / "whole")
  assert [r["step"] for r in whole if "loss" in r] == list(range(1, 25))
  assert facts(tmp_path / "again") == whole


@pytest.mark.parametrize(("overrides", "message"), [
  (f"{HOST} optimizer.name=sgd optimizer.warmup_steps=2",
   "needs config.optimizer.name='adamw', not 'sgd'"),
  (f"{HOST} outer.algorithm=diloco", "needs config.outer.algorithm='data_par"),
  (f"{HOST} parallel.worker=2", "needs config.parallel.worker=1, not 2"),
  (f"{HOST} memory.moments=pinned_host", "config.memory.moments='device'"),
  ("memory.threads=2", "threads=2 has no effect with config.memory.optimizer"),
  (DRAM, "tiers=.* has no effect with config.memory.optimizer='device'"),
  (f'{HOST} memory.tiers=(("0",0.5),)', "sum to 0.5; they must sum to 1"),
  (f'{HOST} memory.tiers=(("0",0.5),("0",0.5))', "name each tier once"),
  (f'{HOST} memory.tiers=(("99",1.0),)', "node=99 does not exist; the nodes"),
  (f'{HOST} memory.tiers=(("/nowhere",1.0),)', "a folder that exists"),
])
def test_invalid_update_is_an_error_before_the_run(
  overrides, message, tmp_path
):
  with pytest.raises(ValueError, match=message) as error:
    loop.train(
      make(f"parallel.tensor=1 model.vocab_size=256 {overrides}", {}),
      tmp_path / "run", quiet=True,
    )
  assert "\n" not in str(error.value)
  assert not (tmp_path / "run").exists()
