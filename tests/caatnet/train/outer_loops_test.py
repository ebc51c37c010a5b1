"""Properties of the outer loops, in the real training loop.

A new algorithm inherits the suite from the table of builders. The loop uses a
model only through the protocol; where sizes do not matter, a deep linear model,
which compiles fast, replaces the language model.
"""

import contextlib
import dataclasses
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.outer import OUTER
from caatnet.config.override import override
from caatnet.config.sections import build_selected
from caatnet.schema import tree
from caatnet.train import loop, traffic
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.evaluate import put_batch
from caatnet.train.records import read_metrics
from caatnet.train.state import check_equal_start, outer_specs
from configs.caatnet import tiny
from parallel.ledger import ledger
from parallel.outer import noloco
from parallel.outer.diloco import DiLoCo
from tests.caatnet.train import linear_model as toy

WORKERS = 4
SMALL = (
  f"parallel.worker={WORKERS} parallel.tensor=2 sync.p=0.5 model.width=16 "
  "model.num_heads=2 model.num_kv_heads=2 model.ffn_width=24 "
  "model.vocab_size=256 data.seq_len=8 data.batch_size=8 "
  "data.validation_windows=8 outer.sync_every=3 outer.chunk=64 "
  "outer.top_k=8 train.num_steps=9 train.checkpoint_every=4 "
  "train.keep_checkpoints=9 train.eval_every=9 optimizer.warmup_steps=2 "
)
# Defaults of each algorithm, with the changes of its row.
ALGORITHMS = dict.fromkeys(OUTER, "") | {
  "fedavg": "outer.weights=(1,2,3,4) outer.clients=3",
  "diloco": "outer.codec=e3m0 outer.block=16 outer.error_feedback=True "
            "outer.stochastic_rounding=True",
  "diloco_all_to_all": "outer.codec=int8 outer.block=16 "
                       "outer.route=all_to_all",
  # Stopped after the first of two pieces.
  "streaming": "outer.sync_every=6 outer.fragment_layers=2 outer.codec=e3m0 "
               "outer.block=16 "
               "outer.overlap=(2,3,3,2) outer.pieces=2 outer.keep=0.5 "
               "outer.error_feedback=True train.checkpoint_every=7",
}


def configured(name, overrides=""):
  """Returns a config, without the keys that the algorithm does not have."""
  algorithm = name if name in OUTER else name.partition("_")[0]
  keys = {f"outer.{key}" for key in tree.defaults("outer", algorithm)}
  parts = f"{SMALL} {ALGORITHMS[name]} {overrides}".split()
  known = [
    part for part in parts
    if not part.startswith("outer.") or part.partition("=")[0] in keys
  ]
  return override(
    tiny.get_config("test"),
    f"outer.algorithm={algorithm} {' '.join(known)}"
  )


def make(name, overrides="", mesh=None):
  return experiments.build(configured(name, overrides), mesh)


def make_linear(name, overrides="", workers=WORKERS, devices=None, **options):
  """Returns the outer loop of a config with a linear model."""
  config = configured(name, f"outer.chunk=9 outer.top_k=4 {overrides}")
  options = {
    "model": toy.Deep(), "learning_rate": 0.02, "num_steps": 9,
    "checkpoint_every": config.train.checkpoint_every, **options,
  }
  experiment = toy.make(workers, devices=(devices or workers, 1), **options)
  outer = build_selected(
    "outer", OUTER, config.outer, experiment.program, config.seed
  )
  return dataclasses.replace(experiment, outer=outer)


def losses(workdir):
  return [
    {k: r[k] for k in ("step", "loss", "grad_norm", "validation_loss",
                       "learning_rate") if k in r}
    for r in read_metrics(workdir)
  ]


def final_state(workdir, experiment):
  checkpointer = Checkpointer(workdir, experiment.program)
  abstract = experiment.abstract_state()
  state, _ = checkpointer.restore(abstract)
  checkpointer.close()
  return jax.device_get(state)


# Reverts the codecs of the rows above.
UNROUNDED = (
  "outer.codec=float32 outer.block=0 outer.error_feedback=False "
  "outer.stochastic_rounding=False "
)
PLAIN = (
  "outer.sync_every=3 outer.fragment_layers=1 outer.overlap=(0,) "
  "outer.pieces=1 "
  f"outer.keep=0.0 {UNROUNDED}"
)


def batches(num_steps):
  return [toy.draw(8, number) for number in range(num_steps)]


class Runner:
  """Steps of an experiment; programs are compiled when first needed."""

  def __init__(self, name, overrides="", options=None, **changes):
    self.options = options
    self.experiment = make_linear(name, overrides, **changes)
    self.state = self.experiment.init_state()
    self.programs = {}

  def step(self, batch):
    outer = self.experiment.outer
    plan = outer.plan(int(self.state.step))
    if plan.variant not in self.programs:
      lowered = self.experiment.lower_step(plan)
      self.programs[plan.variant] = lowered.compile(self.options)
    numbers = jax.tree.map(np.int32, plan.numbers)
    self.state, metrics = self.programs[plan.variant](
      self.state, put_batch(self.experiment.program.layout, batch), numbers
    )
    return metrics

  def run(self, num_steps):
    for batch in batches(num_steps):
      self.step(batch)
    return self

  @property
  def params(self):
    return jax.device_get(self.state.params)

  @property
  def outer(self):
    return jax.device_get(self.state.outer)

  @property
  def evaluated(self):
    evaluated = self.experiment.make_export_params()
    return jax.device_get(evaluated(self.state.params, self.state.outer))


@contextlib.contextmanager
def contract(text):
  """Puts the part of the contract of `OuterLoop` first that does not hold."""
  try:
    yield
  except AssertionError as error:
    raise AssertionError(f"{text}\n{error}") from error


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
  chex.assert_trees_all_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.rotated
@pytest.mark.parametrize(
  # local_sgd and diloco_all_to_all run the code of fedavg and diloco, and
  # loop_test.py resumes data_parallel.
  "name", sorted(
    set(ALGORITHMS) - {"local_sgd", "diloco_all_to_all", "data_parallel"}
  )
)
def test_resumed_run_is_uninterrupted_and_lanes_equal_devices(name, tmp_path):
  """Stops between a send and its arrival for loops with such an interval."""
  def train(folder, devices=WORKERS):
    experiment = make_linear(name, devices=devices)
    loop.train(experiment, tmp_path / folder, quiet=True)

  train("whole")
  shutil.copytree(tmp_path / "whole", tmp_path / "again")
  paths = sorted(
    (tmp_path / "again" / "checkpoints").iterdir(), key=lambda p: int(p.name)
  )
  assert len(paths) > 1
  for path in paths[1:]:
    shutil.rmtree(path)
  shutil.copytree(tmp_path / "again", tmp_path / "lanes")
  train("again")
  assert losses(tmp_path / "again") == losses(tmp_path / "whole")
  whole, again = (
    final_state(tmp_path / folder, make_linear(name))
    for folder in ("whole", "again")
  )
  with contract(
    "a resumed run differs: all that a loop remembers must be in the state "
    "that `init` declares and `finish` returns, or follow from the step"
  ):
    assert_equal(again, whole)
  train("lanes", 2)
  for ours, theirs in zip(
    losses(tmp_path / "lanes"), losses(tmp_path / "whole"), strict=True
  ):
    assert ours.keys() == theirs.keys()
    with contract(
      "two workers per device train otherwise than one: an exchange must be "
      "over the worker axis (`mean_over_workers`), not over a dim of an array"
    ):
      np.testing.assert_allclose(
        list(ours.values()), list(theirs.values()), rtol=1e-3
      )


def _is_close(a, b):
  try:
    assert_close(a, b)
  except AssertionError:
    return False
  return True


@pytest.mark.rotated
@pytest.mark.parametrize("name", sorted(OUTER))
def test_single_worker_trains_without_the_loop_if_it_declares_so(name):
  """Compares a single worker with data parallelism.

  The mean over one worker is that worker, so a loop that averages is the
  identity with outer SGD(1). A loop that rounds, or that pulls towards its own
  center variable, still changes the parameters.
  """
  rate = "outer.learning_rate=1.0 outer.momentum=0.0 outer.keep=0.0"
  changes = (
    "outer.weights=() outer.clients=0 "
    f"outer.overlap=(0,) outer.pieces=1 {UNROUNDED} {rate}"
  )
  alone = Runner(name, changes, workers=1).run(6)
  plain = Runner("data_parallel", workers=1).run(6)
  if not alone.experiment.outer.plain_alone:
    assert not _is_close(alone.params, plain.params), (
      "one worker trains as without the loop: `plain_alone` is not False"
    )
    return
  with contract(
    "one worker trains otherwise than without the loop: the exchange of equal "
    "workers must change nothing, unless the loop declares plain_alone = False"
  ):
    assert_close(alone.params, plain.params)
  if name != "streaming":  # fragments are exported at different steps
    assert_close(alone.evaluated, jax.tree.map(lambda x: x[0], plain.params))


@pytest.mark.rotated
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_equal_workers_with_zero_learning_rate_do_not_move(name):
  """Consensus is a fixed point of the exchange of each loop."""
  runner = Runner(name, learning_rate=0.0)
  start = runner.params
  runner.run(9)  # the last fragment that streaming sends arrives in step 9
  with contract("`finish` moved workers that agree and did not train"):
    assert_close(runner.params, start)
  with contract("`export_params` is not what workers that agree have"):
    assert_close(runner.evaluated, jax.tree.map(lambda x: x[0], start))


def test_averaging_every_step_with_sgd_is_data_parallel_sgd():
  one = Runner("data_parallel", momentum=0.0).run(4)
  for name in ("local_sgd", "diloco"):
    changes = (
      "outer.sync_every=1 outer.learning_rate=1.0 outer.momentum=0.0 "
      f"{UNROUNDED}"
    )
    assert_close(Runner(name, changes, momentum=0.0).run(4).params, one.params)


def test_split_of_a_worker_batch_changes_no_result():
  """Splits the batch over data ranks and microbatches."""
  common, split = (
    Runner("diloco", f"{UNROUNDED} outer.sync_every=1", workers=2, **changes)
    for changes in ({}, {"data": 2, "accumulation": 2})
  )
  assert_close(split.run(2).outer, common.run(2).outer)


def test_local_sgd_is_the_mean_of_workers_trained_alone():
  """Compares one round with a run that never communicates."""
  alone = Runner("local_sgd", "outer.sync_every=99").run(3)
  apart = alone.params
  assert any((x[0] != x[1]).any() for x in jax.tree.leaves(apart))
  together = Runner("local_sgd").run(3)
  mean = jax.tree.map(lambda x: x.mean(axis=0), apart)
  assert_close(together.evaluated, mean)
  assert_equal(
    jax.tree.map(lambda x: x[1], together.params), together.evaluated
  )
  weighted = Runner("fedavg", "outer.clients=0").run(3)
  weights = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
  assert_close(
    weighted.evaluated,
    jax.tree.map(lambda x: np.tensordot(weights, x, 1), apart),
  )


def test_fedavg_averages_a_sample_and_all_workers_receive_it():
  apart = Runner("local_sgd", "outer.sync_every=99").run(3).params
  sampled = Runner("fedavg", "outer.clients=2 outer.weights=()").run(3)
  pairs = [(i, j) for i in range(4) for j in range(i)]
  distances = [
    max(jax.tree.leaves(jax.tree.map(
      lambda x, y, i=i, j=j: np.abs((x[i] + x[j]) / 2 - y).max(),
      apart, sampled.evaluated,
    )))
    for i, j in pairs
  ]
  assert sorted(distances)[0] < 1e-5 < 1e-4 < sorted(distances)[1]
  assert_equal(jax.tree.map(lambda x: x[0], sampled.params), sampled.evaluated)


@pytest.mark.parametrize(("optimizer", "momentum", "step"), [
  ("sgd", 0.0, lambda d: 0.5 * d),
  ("nesterov", 0.8, lambda d: 0.5 * 1.8 * d),
  ("adam", 0.9, lambda d: 0.5 * d / (np.abs(d) + 1e-8)),
])
def test_outer_gradient_is_start_minus_mean(
  optimizer, momentum, step
):
  """phi - theta, not theta - phi: the first step goes towards the mean."""
  start = jax.tree.map(lambda x: x[0], Runner("diloco").params)
  mean = Runner("local_sgd").run(3).evaluated
  far = Runner(
    "diloco", f"{UNROUNDED} outer.optimizer={optimizer} "
    f"outer.learning_rate=0.5 outer.momentum={momentum}"
  ).run(3).evaluated
  for s, m, f in zip(*map(jax.tree.leaves, (start, mean, far)), strict=True):
    # Where the difference is only rounding, Adam still makes a full step.
    told = np.abs(m - s) > 1e-4
    assert told.any()
    np.testing.assert_allclose(
      (f - s)[told], step(m - s)[told], rtol=2e-3, atol=2e-5
    )


def test_streaming_with_one_fragment_is_diloco():
  """Without overlap, mixing or rounding."""
  diloco = Runner("diloco", f"{UNROUNDED} outer.sync_every=3").run(9)
  streaming = Runner("streaming", f"{PLAIN} outer.fragment_layers=0").run(9)
  assert_close(streaming.evaluated, diloco.evaluated)
  assert_close(streaming.params, diloco.params)


def test_streaming_with_keep_1_is_local_training(same_bits):
  alone = Runner("local_sgd", "outer.sync_every=99", options=same_bits).run(7)
  deaf = Runner(
    "streaming", f"{PLAIN} outer.keep=1.0", options=same_bits
  ).run(7)
  assert_equal(deaf.params, alone.params)


@pytest.mark.parametrize("tau", [0, 3])
def test_fragments_are_sent_in_turn_and_arrive_tau_later(tau):
  """Two layers and the rest, H = 6: sends at steps 6, 8 and 10.

  With tau = 3 two fragments are in flight concurrently.
  """
  runner = Runner(
    "streaming",
    f"{PLAIN} outer.sync_every=6 outer.overlap=({tau},)",
  )
  arrivals = []
  before = runner.outer["params"]
  for step, batch in enumerate(batches(13), 1):
    runner.step(batch)
    after = runner.outer["params"]
    changed = jax.tree.map(lambda a, b: a != b, before, after)
    layers = np.any(
      [x.reshape(2, -1).any(1) for x in jax.tree.leaves(changed["blocks"])], 0
    )
    rest = any(
      x.any() for k, v in changed.items() if k != "blocks"
      for x in jax.tree.leaves(v)
    )
    arrivals += [(step, "layer", i) for i in np.flatnonzero(layers)]
    arrivals += [(step, "rest", 0)] * rest
    before = after
  sends = [(6, "layer", 0), (8, "layer", 1), (10, "rest", 0), (12, "layer", 0)]
  expected = [(t + tau, *what) for t, *what in sends if t + tau <= 13]
  assert arrivals == expected


def test_fragment_is_the_mean_at_the_time_of_sending():
  """With tau = 2, the mean is over the parameters two updates ago."""
  options = (
    f"{PLAIN} outer.sync_every=6 outer.learning_rate=1.0 outer.momentum=0.0"
  )
  alone = Runner("local_sgd", "outer.sync_every=99").run(6).params
  late = Runner("streaming", f"{options} outer.overlap=(2,)").run(8)
  first = jax.tree.map(lambda x: x[:, 0].mean(axis=0), alone["blocks"])
  got = jax.tree.map(lambda x: x[0], late.outer["params"]["blocks"])
  assert_close(got, first)
  assert_equal(jax.tree.map(lambda x: x[3, 0], late.params["blocks"]), got)


def test_pieces_of_a_fragment_add_up_to_the_whole():
  """Two pieces, sent in two steps, arrive as one send would."""
  options = (
    f"{PLAIN} outer.sync_every=6 outer.codec=int8 outer.overlap=(2,) "
    "outer.block=16"
  )
  whole = Runner("streaming", options)
  start = whole.outer["params"]["blocks"]
  arrived = whole.run(8).outer["params"]
  pieces = Runner("streaming", f"{options} outer.pieces=2").run(8)
  assert_close(pieces.outer["params"], arrived)
  for before, after in zip(
    *map(jax.tree.leaves, (start, arrived["blocks"])), strict=True
  ):
    assert (before[0] != after[0]).any()


def test_each_worker_merges_at_its_own_time(same_bits):
  """tau = 1 for workers 0 and 3, tau = 2 for the others."""
  apart = Runner("local_sgd", "outer.sync_every=99", options=same_bits)
  apart = apart.run(4).params
  runner = Runner(
    "streaming", f"{PLAIN} outer.overlap=(1,2,2,1)", options=same_bits
  )
  runner.run(4)  # H = 3: layer 0 was sent after update 3
  for worker, merged in enumerate((True, False, False, True)):
    for ours, alone, outer in zip(
      *map(jax.tree.leaves, (runner.params["blocks"], apart["blocks"],
                             runner.outer["params"]["blocks"])),
      strict=True,
    ):
      if merged:
        np.testing.assert_array_equal(ours[worker, 0], outer[0])
      else:  # two programs: some CPUs round a last bit otherwise
        np.testing.assert_allclose(ours[worker, 0], alone[worker, 0], 1e-5)


def test_eager_applies_every_mean_once():
  """With outer SGD(1): phi_m = start - earlier means - own delta / M."""
  runner = Runner(
    "eager", "outer.sync_every=2 outer.learning_rate=1.0 outer.momentum=0.0"
  )
  start = jax.tree.map(lambda x: x[0], runner.params)
  total = jax.tree.map(np.zeros_like, start)
  for number, batch in enumerate(batches(8), 1):
    runner.step(batch)
    if number % 2:
      continue
    deltas = runner.outer["workers"]["delta"]
    expected = jax.tree.map(
      lambda s, t, d: s - t - d / WORKERS, start, total, deltas
    )
    assert_close(runner.outer["workers"]["params"], expected)
    mean = jax.tree.map(lambda d: d.mean(axis=0), deltas)
    total = jax.tree.map(np.add, total, mean)


def test_dc_s3gd_workers_differ_by_their_last_updates_only(same_bits):
  runner = Runner("dc_s3gd", options=same_bits).run(5)
  updates = runner.outer["workers"]["update"]
  common = runner.outer["params"]
  assert_equal(
    runner.params, jax.tree.map(lambda w, u: w + u, common, updates)
  )
  for leaf in jax.tree.leaves(runner.state.outer["params"]):
    first, *others = [np.asarray(s.data) for s in leaf.addressable_shards
                      if s.index == leaf.addressable_shards[0].index]
    assert others  # replicas on other devices
    for other in others:
      np.testing.assert_array_equal(first, other)


def test_dc_s3gd_compensation_has_the_configured_norm():
  """|l g g D| = l_0 |g| for each worker, and zero at first, where D = 0.

  Uses the language model, whose norms also reduce over tensor ranks.
  """
  experiment = make("dc_s3gd", "outer.compensation=0.3")
  program, outer = experiment.program, experiment.outer
  state = experiment.init_state()
  draw = np.random.default_rng(1)
  grads, updates = (
    jax.tree.map(
      lambda x: jnp.asarray(draw.normal(size=x.shape), jnp.float32),
      state.params,
    )
    for _ in range(2)
  )

  def change(grads, params, state):
    state = outer.begin(params, state, outer.plan(3))
    new = outer.gradients(grads, state)
    difference = jax.tree.map(jnp.subtract, new, grads)
    norm = outer.exchange.rule.norm
    return norm(difference), norm(grads)

  specs = program.layout.add_worker_dim(program.specs)
  worker = jax.sharding.PartitionSpec("worker")
  f = jax.jit(jax.shard_map(
    change, mesh=program.layout.mesh,
    in_specs=(specs, specs, outer_specs(program, outer)),
    out_specs=(worker, worker),
  ))
  changed, _ = f(grads, state.params, state.outer)
  np.testing.assert_array_equal(changed, 0)
  workers = state.outer["workers"] | {"update": updates}
  changed, size = f(grads, state.params, state.outer | {"workers": workers})
  np.testing.assert_allclose(changed, 0.3 * np.asarray(size), rtol=1e-3)
  # Norms over all tensor ranks count each element once.
  squares = sum(
    np.square(x).reshape(WORKERS, -1).sum(axis=1)
    for x in jax.tree.leaves(grads)
  )
  np.testing.assert_allclose(size, np.sqrt(squares), rtol=1e-5)


def test_dc_s3gd_without_compensation_is_stale_sgd():
  """w moves by the mean of the updates of the previous step."""
  runner = Runner("dc_s3gd", "outer.compensation=0.0")
  for batch in batches(4):
    before = runner.outer
    runner.step(batch)
    mean = jax.tree.map(lambda u: u.mean(0), before["workers"]["update"])
    assert_close(
      runner.outer["params"], jax.tree.map(np.add, before["params"], mean)
    )


@pytest.mark.parametrize("name", ["diloco", "sparseloco"])
def test_error_feedback_loses_nothing(name):
  """Sent plus remaining error is the total change, summed over rounds."""
  options = "outer.learning_rate=1.0 outer.momentum=0.0 outer.error_decay=1.0"
  runner = Runner(name, options)
  start = jax.tree.map(lambda x: x[0], runner.params)
  gone = jax.tree.map(np.zeros_like, start)
  apart = Runner(name, f"{options} outer.sync_every=99")
  for round_number in range(2):
    outer = runner.outer["params"]
    apart.state = jax.tree.map(jnp.copy, runner.state)
    for batch in batches(6)[3 * round_number : 3 * round_number + 3]:
      apart.step(batch)
      runner.step(batch)
    went = jax.tree.map(
      lambda o, x: (o - x).mean(0), outer, apart.params
    )
    gone = jax.tree.map(np.add, gone, went)
    left = jax.tree.map(
      lambda x: x.mean(0), runner.outer["workers"]["residual"]
    )
    received = jax.tree.map(np.subtract, start, runner.outer["params"])
    assert_close(jax.tree.map(np.add, received, left), gone)


@pytest.mark.parametrize("workers", range(1, 9))
def test_tournament_pairs_each_two_workers_once(workers):
  met = []
  for number in range(noloco.num_pairing_rounds(workers)):
    partners = noloco.partners_of_round(workers, number)
    assert all(partners[partners[i]] == i for i in range(workers))
    met += [(i, p) for i, p in enumerate(partners) if i < p]
  assert sorted(met) == [
    (i, j) for i in range(workers) for j in range(i + 1, workers)
  ]


def test_noloco_pairs_meet_half_way_independently_of_others():
  options = "outer.learning_rate=1.0 outer.momentum=0.0 outer.pull=1.0"
  apart = Runner("local_sgd", "outer.sync_every=99").run(3).params
  runner = Runner("noloco", options).run(3)
  plan = runner.experiment.outer.plan(2)
  partners = noloco.partners_of_round(WORKERS, plan.variant)
  assert_close(
    runner.params,
    jax.tree.map(lambda x: (x + x[np.array(partners)]) / 2, apart),
  )


def test_workers_that_start_with_different_parameters_are_an_error():
  """Differs in one element on one of the two devices of a worker."""
  experiment = make("diloco", mesh={"worker": 4, "tensor": 2})
  program, params = experiment.program, experiment.init_state().params
  check_equal_start(program, params)
  other = params["head"].at[2, 0, 3, 5].add(1e-7)
  with pytest.raises(ValueError, match="worker 2"):
    check_equal_start(program, {**params, "head": other})


def test_workers_whose_parameters_are_exchanged_are_an_error():
  """Two elements, the halves of two devices, and two leaves of equal shape."""
  experiment = make("diloco", mesh={"worker": 4, "tensor": 2})
  program, params = experiment.program, experiment.init_state().params
  head, blocks = params["head"], params["blocks"]
  one, other = blocks["w_qkv"], blocks["w_gate_up"]
  swapped = {
    "w_qkv": one.at[2].set(other[2]), "w_gate_up": other.at[2].set(one[2]),
  }
  for changed in (
    {"head": head.at[2, 0, 3, 5].set(head[2, 0, 3, 6])
                 .at[2, 0, 3, 6].set(head[2, 0, 3, 5])},
    {"head": head.at[2].set(head[2, ::-1])},
    {"blocks": {**blocks, **swapped}},
  ):
    with pytest.raises(ValueError, match="worker 2"):
      check_equal_start(program, {**params, **changed})


@dataclasses.dataclass(frozen=True)
class Longer(DiLoCo):
  """Ends rounds after 2, 4, 8, ... steps."""

  def plan(self, step):
    ends = step > 0 and (step + 1).bit_count() == 1
    return super().plan(step)._replace(variant=ends)


@pytest.mark.parametrize(
  ("name", "sync_every", "kind", "num_steps", "exchanges"),
  [
    ("diloco", 30, None, 12, 0), ("diloco", 5, None, 12, 2),
    ("diloco", 2, Longer, 12, 3), ("eager", 5, None, 12, 2),
    ("eager", 5, None, 9, 1), ("data_parallel", 1, None, 12, 12),
  ],
)
def test_bytes_of_a_run_are_those_of_its_own_exchanges(
  name, sync_every, kind, num_steps, exchanges
):
  experiment = make_linear(
    name, f"outer.sync_every={sync_every}", 2, num_steps=num_steps
  )
  outer = experiment.outer
  if kind:
    outer = kind(**{f.name: getattr(outer, f.name)
                    for f in dataclasses.fields(outer)})
    experiment = dataclasses.replace(experiment, outer=outer)
  rows = traffic.communication_per_step(
    experiment, traffic.lower_steps(experiment)
  )
  sent = sum(row["bytes"] for row in rows if row["axis"] == "worker")
  once = sum(outer.sent_bytes(experiment.program.local_shapes).values())
  assert once
  assert sent * num_steps == pytest.approx(exchanges * once)


@pytest.mark.rotated
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sent_bytes_equal_the_formula(name):
  """Covers every program of a round, on a device per worker and per rank.

  Uses the language model where sizes are rounded to blocks and chunks.
  """
  rounded = name in ("diloco", "streaming", "sparseloco")
  experiment = (make if rounded else make_linear)(name)
  outer = experiment.outer
  expected = outer.sent_bytes(experiment.program.local_shapes)
  mesh = experiment.program.layout.mesh
  assert mesh.shape["worker"] == WORKERS
  found = {}
  plans = [outer.plan(step) for step in outer.steady_round]
  lowered = {
    p: ledger.select(
      ledger.collectives(
        experiment.lower_step(next(q for q in plans if q.variant == p)), mesh
      ),
      axis="worker",
    )
    for p in {plan.variant for plan in plans}
  }
  for plan in plans:
    for c in lowered[plan.variant]:
      assert c.axes == ("worker",), "an exchange is over the worker axis only"
      found[c.dtype] = found.get(c.dtype, 0) + c.bytes
  with contract(
    "`sent_bytes` must return the operand bytes by dtype that the compiled "
    "programs of one `period` send over the worker axis"
  ):
    assert found == expected
  if name == "diloco":
    parameters = sum(x.size for x in jax.tree.leaves(
      experiment.program.local_shapes
    ))
    assert parameters / 2 <= found["uint8"] < 0.55 * parameters
