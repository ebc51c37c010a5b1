"""Training step and run of a linear model, against NumPy in float64."""

import dataclasses
import json
import signal

import jax
import numpy as np
import optax
import pytest

from caatnet.train import loop
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.evaluate import put_batch
from caatnet.train.records import read_metrics
from caatnet.train.state import check_equal_start, make_count_non_finite
from parallel.axes import Axis
from parallel.outer import health
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import Nesterov
from parallel.wire import Wire
from tests.caatnet.train import linear_model as toy

RATE, MOMENTUM = 0.1, 0.9
ORDERED = health.ExclusionRule(ordered=True)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 99.0])
@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3"])
def test_step_is_sgd_on_the_mean_of_each_worker(scheme, clip_norm):
  """Two workers of two ranks of two microbatches of two examples."""
  experiment = toy.make(
    2, 2, (2, 2), scheme, clip_norm=clip_norm, batch_size=16, accumulation=2,
    learning_rate=RATE, momentum=MOMENTUM,
  )
  program, layout = experiment.program, experiment.program.layout
  step = experiment.lower_step().compile()
  state = experiment.init_state()
  start = jax.device_get(jax.jit(program.model.init)(
    jax.random.split(jax.random.key(experiment.seed))[0]
  ))
  params = [{k: v.astype("f8") for k, v in start.items()} for _ in range(2)]
  speeds = [dict.fromkeys(start, 0.0) for _ in range(2)]
  for number in range(2):
    batch = toy.draw(16, number)
    state, metrics = step(state, put_batch(layout, batch), ())
    for worker, half in enumerate((slice(8), slice(8, None))):
      mine = {key: value[half] for key, value in batch.items()}
      grads = toy.gradients(params[worker], mine)
      norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
      factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
      np.testing.assert_allclose(
        metrics["loss"][worker], toy.judged(params[worker], mine).mean(),
        rtol=1e-5,
      )
      np.testing.assert_allclose(
        metrics["grad_norm"][worker], norm, rtol=1e-5
      )
      for key, grad in grads.items():
        np.testing.assert_allclose(
          metrics[f"grad_norm/{key}"][worker], np.linalg.norm(grad), rtol=1e-5
        )
        speeds[worker][key] = MOMENTUM * speeds[worker][key] + factor * grad
        params[worker][key] -= RATE * speeds[worker][key]
  assert int(state.step) == 2
  stored = jax.device_get(state.params)
  for worker in range(2):
    for key, expected in params[worker].items():
      found = stored[key][worker].reshape(-1)[: expected.size]
      np.testing.assert_allclose(
        found, expected.ravel(), rtol=1e-5, atol=1e-6
      )


class StopAt:
  """Signal that another process receives once a given step is done."""

  exit_code = 0

  def __init__(self, run, step):
    self.run, self.step = run, step

  def requested(self):
    return int(self.run.state.step) >= self.step


def rate_of(step):
  return 0.01 * (1.0 + step)  # differs in every step


def facts(workdir):
  times = ("points_per_second", "model_flops_per_second",
           "fraction_of_matmul_rate")
  return [
    {k: v for k, v in record.items() if k not in times}
    for record in read_metrics(workdir)
  ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Runs six steps; checkpoints at 2, 4 and 6, evaluations at 3 and 6."""
  workdir = tmp_path_factory.mktemp("toy") / "run"
  experiment = toy.make(workers=2, learning_rate=rate_of, eval_every=3)
  return experiment, workdir, loop.train(experiment, workdir, quiet=True)


def by_hand(num_steps):
  """Returns both workers' parameters after each step, and losses before it."""
  experiment = toy.make(workers=2, learning_rate=rate_of)
  state = jax.device_get(experiment.init_state())
  batches = experiment.data.load(experiment.seed).batches
  params = [{k: v[w].astype("f8") for k, v in state.params.items()}
            for w in range(2)]
  speeds = [dict.fromkeys(state.params, 0.0) for _ in range(2)]
  after, losses = [], []
  for step in range(num_steps):
    batch = next(batches)
    losses.append([])
    for worker, half in enumerate((slice(4), slice(4, None))):
      mine = {key: value[half] for key, value in batch.items()}
      losses[-1].append(toy.judged(params[worker], mine).mean())
      for key, grad in toy.gradients(params[worker], mine).items():
        speeds[worker][key] = MOMENTUM * speeds[worker][key] + grad
        params[worker][key] = (
          params[worker][key] - rate_of(step) * speeds[worker][key]
        )
    after.append([dict(p) for p in params])
  return after, np.mean(losses, axis=1)


def test_each_record_belongs_to_the_step_that_it_names(finished):
  """Records the loss before the update, its learning rate and its result."""
  experiment, workdir, result = finished
  after, losses = by_hand(6)
  records = [r for r in read_metrics(workdir) if "loss" in r]
  assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
  np.testing.assert_allclose([r["loss"] for r in records], losses, rtol=1e-5)
  np.testing.assert_allclose(
    [r["learning_rate"] for r in records], [rate_of(s) for s in range(6)],
    rtol=1e-6,
  )
  judged = [r for r in read_metrics(workdir) if "validation_loss" in r]
  assert [r["step"] for r in judged] == [3, 6]
  validation = experiment.data.load(experiment.seed).validation
  for record in judged:
    workers = after[record["step"] - 1]
    mean = {k: (workers[0][k] + workers[1][k]) / 2 for k in workers[0]}
    loss = toy.judged(mean, validation).mean()
    np.testing.assert_allclose(record["validation_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
      record["validation_doubled"], 2 * loss, rtol=1e-5
    )
  assert result.evaluation.loss == judged[-1]["validation_loss"]
  assert result.measures["doubled"] == judged[-1]["validation_doubled"]
  facts = json.loads((workdir / "environment.json").read_text())
  assert facts["parameters"] == toy.INPUTS * toy.TARGETS + toy.TARGETS
  rates = [r for r in records if "points_per_second" in r]
  for record in rates:
    assert record["model_flops_per_second"] == pytest.approx(
      record["points_per_second"] * 6 * toy.INPUTS * toy.TARGETS / 3
    )
    assert record["fraction_of_matmul_rate"] == pytest.approx(
      record["model_flops_per_second"] / facts["matmul_flops_per_second"]
    )
  assert [r["step"] for r in rates] == [3, 4, 5, 6]


def test_stopped_and_resumed_run_equals_an_uninterrupted_one(
  finished, tmp_path
):
  """Compares parameters, momentum and data position for several stops."""
  experiment, workdir, _ = finished
  for last in (3, 5, 6):  # between checkpoints: a stop saves as well
    run = loop.Run(experiment, tmp_path / "run", "", None, True)
    try:
      result = run.loop(StopAt(run, last))
    finally:
      run.close()
    assert (result.step, result.finished) == (last, last == 6)
    assert result.exit_code == (0 if last == 6 else 128 + signal.SIGTERM)
    assert (result.evaluation is not None) == (last == 6)
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()
  assert facts(tmp_path / "run") == facts(workdir)
  # The first two steps of each process are not timed.
  assert [r["step"] for r in read_metrics(tmp_path / "run")
          if "points_per_second" in r] == [3]


def test_extended_run_equals_one_of_the_longer_length(
  finished, tmp_path, capsys
):
  _, workdir, _ = finished
  for num_steps in (3, 6):
    experiment = dataclasses.replace(
      toy.make(workers=2, learning_rate=rate_of, eval_every=3,
               num_steps=num_steps),
      config={"train": {"num_steps": num_steps}},
    )
    result = loop.train(experiment, tmp_path / "run")
    assert (result.step, result.finished) == (num_steps, True)
    said = capsys.readouterr().out.splitlines()
    assert ("resumed   from step 3" in said) == (num_steps == 6)
    longer = [line for line in said if line.startswith("longer ")]
    assert longer == [
      "longer    the learning rate now decays over 6 steps instead of 3; "
      "--config.optimizer.decay_steps=3 would keep the old schedule"
    ] * (num_steps == 6)
  assert facts(tmp_path / "run") == facts(workdir)


def test_throughput_is_that_of_the_last_steps(finished, tmp_path):
  """Reports a tenfold slowdown within 50 steps."""
  experiment, _, _ = finished
  run = loop.Run(experiment, tmp_path / "run", "", None, True)
  run.close()
  for seconds, count in ((0.01, 1000), (0.1, 50)):
    run.seconds.extend([seconds] * count)
    assert run._units_per_second() == pytest.approx(8 * 3 / seconds)
  # The median of 50: steps that wait for a disk do not count.
  run.seconds.extend([0.2] * 26 + [9.0] * 24)
  run.seconds.extend([0.1] * 20)
  assert run._units_per_second() == pytest.approx(8 * 3 / 0.2)


def test_evaluation_reads_the_checkpoint_that_it_names(finished):
  experiment, workdir, _ = finished
  after, _ = by_hand(6)
  program = experiment.program
  abstract = experiment.abstract_state()
  checkpointer = Checkpointer(workdir, program)
  for asked, expected in ((2, 2), (None, 6)):
    params, _, step, _ = checkpointer.restore_params(
      abstract.params, abstract.outer, asked
    )
    assert step == expected
    for worker in range(2):
      for key, value in after[step - 1][worker].items():
        np.testing.assert_allclose(
          np.asarray(params[key])[worker], value, rtol=1e-5, atol=1e-6
        )
  with pytest.raises(FileNotFoundError, match="there are 2, 4, 6"):
    checkpointer.restore_params(abstract.params, abstract.outer, 3)
  checkpointer.close()


def test_diverged_run_names_the_step_and_the_last_good_checkpoint(tmp_path):
  experiment = toy.make(
    learning_rate=lambda step: np.float32(0.01) + 1e38 * (step == 2)
  )
  with pytest.raises(loop.NonFiniteError) as error:
    loop.train(experiment, tmp_path / "run", quiet=True)
  message = str(error.value)
  assert message.startswith("step 4: ")
  assert "non-finite gradients in b, w;" in message
  assert message.endswith("checkpoints/2")


@pytest.mark.parametrize(
  ("rate", "what", "bad"),
  [
    # Parameters after step 3: infinite, or so large that the next loss is.
    (np.inf, "step 3: non-finite parameters in b, w;", False),
    (1e30, "step 4: loss inf", True),
  ],
)
def test_checkpoint_is_good_if_its_loss_is_finite(rate, what, bad, tmp_path):
  experiment = toy.make(
    workers=2, checkpoint_every=1, eval_every=99,
    learning_rate=lambda step: jax.numpy.where(step == 2, rate, 0.01),
  )
  with pytest.raises(loop.NonFiniteError) as error:
    loop.train(experiment, tmp_path / "run", quiet=True)
  checkpoints = tmp_path / "run" / "checkpoints"
  message = str(error.value)
  assert message.startswith(what)
  end = f"; last good checkpoint: {checkpoints / '2'}"
  if bad:
    end += f"; diverged, to be removed: {checkpoints / '3'}"
  assert message.endswith(end)
  assert (checkpoints / "3").exists() == bad


@pytest.mark.parametrize("scheme", ["ddp", "zero3"])
def test_non_finite_value_is_found_on_any_device(scheme):
  """Places it in one element of one worker."""
  experiment = toy.make(workers=2, data=2, devices=(2, 2), scheme=scheme)
  program = experiment.program
  count = make_count_non_finite(program)
  params = experiment.init_state().params
  assert {name: c.tolist() for name, c in count(params).items()} == {
    "b": [0, 0], "w": [0, 0]
  }
  copies = 4 if scheme == "ddp" else 1
  for worker in range(2):
    for place in (0, -1):
      bad = np.array(params["w"])
      bad[worker].reshape(-1)[place] = (np.nan, np.inf)[worker]
      bad = jax.device_put(bad, params["w"].sharding)
      found = count({**params, "w": bad})
      assert 0 < found["w"][worker] <= copies
      assert not found["w"][1 - worker]
      assert not found["b"].any()


def test_non_finite_validation_loss_ends_the_run(tmp_path):
  experiment = toy.make(
    learning_rate=lambda step: np.float32(0.01) + 1e30 * (step == 2),
    eval_every=3,
  )
  with pytest.raises(loop.NonFiniteError, match="step 3: validation loss inf"):
    loop.train(experiment, tmp_path / "run", quiet=True)


def test_workers_that_start_with_different_parameters_are_an_error():
  experiment = toy.make(workers=3, devices=(3, 1))
  params = experiment.init_state().params
  check_equal_start(experiment.program, params)
  other = params["w"].at[2, 1, 1].add(1e-6)
  with pytest.raises(ValueError, match=r"^worker 2 starts from other"):
    check_equal_start(experiment.program, {**params, "w": other})


@pytest.mark.parametrize("scheme", ["zero1", "zero3"])
def test_stored_parameters_are_restored(scheme):
  """Whole in a checkpoint, sharded on devices, also if sizes do not divide."""
  program = toy.make(workers=2, data=4, devices=(2, 2), scheme=scheme).program
  shapes = {"w": (2, toy.INPUTS, toy.TARGETS), "b": (2, toy.TARGETS)}
  whole = {
    key: jax.numpy.asarray(np.random.default_rng(0).normal(size=shape), "f4")
    for key, shape in shapes.items()
  }
  layout = program.layout
  shardings = layout.shardings(layout.add_worker_dim(program.specs))
  stored = to_stored(program, whole, shardings)
  assert stored["w"].shape == (2, 4, 2)  # 6 elements in 4 shards of 2
  np.testing.assert_array_equal(
    np.asarray(stored["w"]).reshape(2, 8)[:, :6],
    np.asarray(whole["w"]).reshape(2, 6),
  )
  for key, value in to_whole(program, stored).items():
    np.testing.assert_array_equal(value, whole[key])


def test_diverged_worker_is_excluded_and_named(tmp_path, capsys):
  """Diverges within a round; recorded losses are those of the others."""
  worker = Axis("worker", 3, 3)
  exchange = Exchange(worker, Wire(), {"w": 0, "b": 0}, rule=ORDERED)
  experiment = toy.make(
    3, devices=(3, 1), batch_size=12,
    outer=DiLoCo(worker, 3, Nesterov(0.7, 0.5), exchange),
    learning_rate=optax.constant_schedule(0.05),
  )
  workdir = tmp_path / "run"
  run = loop.Run(experiment, workdir, "toy", None, False)
  run.loop(StopAt(run, 4))
  run.first_step = 4
  run.state = run.state._replace(
    params={k: v.at[1].set(np.nan) for k, v in run.state.params.items()}
  )
  run.loop(StopAt(run, 6))
  momentum, schedule = jax.device_get(run.state.opt_state)
  assert all((x[1] == 0).all() for x in momentum.trace.values())
  assert all(x[0].all() for x in momentum.trace.values())
  np.testing.assert_array_equal(schedule.count, [6, 6, 6])
  run.close()
  records = read_metrics(workdir)
  for record in (r for r in records if "loss" in r):
    losses = [record[f"loss/worker_{w}"] for w in range(3)]
    sick = record["step"] in (5, 6)
    assert [loss is None for loss in losses] == [False, sick, False]
    assert record["loss"] == pytest.approx(
      np.mean([loss for loss in losses if loss is not None])
    )
    left_out = [record[f"left_out/worker_{w}"] for w in range(3)]
    assert left_out == [0, record["step"] >= 6, 0]
  said = capsys.readouterr().out
  assert said.count("worker 1") == 2
  assert "step 5: worker 1 has diverged, loss nan" in said
  assert "step 6: worker 1 left out of the exchange" in said


def test_run_ends_if_all_workers_diverge(tmp_path):
  worker = Axis("worker", 2)
  exchange = Exchange(worker, Wire(), {"w": 0, "b": 0})
  experiment = toy.make(
    2, outer=DiLoCo(worker, 2, Nesterov(0.7, 0.5), exchange),
    learning_rate=lambda step: np.float32(0.01) + 1e38 * (step == 2),
  )
  with pytest.raises(loop.NonFiniteError, match=r"step 4: .*worker 0, 1 of 2"):
    loop.train(experiment, tmp_path / "run", quiet=True)


def changing(workers, wire=None, **options):
  """Experiment with 12 examples per step and 3 steps per round."""
  worker = Axis("worker", workers, workers)
  exchange = Exchange(
    worker, wire or Wire(), {"w": 0, "b": 0}, rule=ORDERED, **options
  )
  return toy.make(
    workers, devices=(workers, 1), batch_size=12, num_steps=12,
    outer=DiLoCo(worker, 3, Nesterov(0.7, 0.5), exchange),
    learning_rate=lambda step: 0.02 * (1.0 + step), keep_checkpoints=99,
  )


def test_workers_join_and_leave_between_rounds(tmp_path, capsys):
  """Trains with 2, 3 and 2 workers; the outer parameters keep their bits."""
  outer, codec = None, Wire("int8", 2)
  for workers, last in ((2, 3), (3, 6), (2, 8)):
    experiment = changing(workers, codec, error_feedback=True)
    run = loop.Run(experiment, tmp_path / "run", "toy", None, False)
    state = jax.device_get(run.state)
    if outer is not None:
      for key in ("params", "optimizer"):
        assert_equal(state.outer[key], outer[key])
    for key, phi in state.outer["params"].items():
      for worker in range(workers):
        np.testing.assert_array_equal(state.params[key][worker], phi)
    momentum, schedule = state.opt_state
    assert set(schedule.count.tolist()) == {int(state.step)}
    if workers == 3:
      assert all((x[2] == 0).all() for x in momentum.trace.values())
      assert all(x[1].any() for x in momentum.trace.values())
      rest = state.outer["workers"]["residual"]
      assert all((x[2] == 0).all() and x[1].any() for x in rest.values())
    run.loop(StopAt(run, last))
    run.close()
    outer = jax.device_get(run.state.outer)
  said = capsys.readouterr().out
  assert "2 -> 3 at step 3: worker 2 starts from the outer" in said
  assert "3 -> 2 at step 6: worker 2 leaves" in said
  with pytest.raises(ValueError, match=r"worker=3: .*step 8 .* to step 9"):
    loop.Run(changing(3, codec), tmp_path / "run", "toy", None, True)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_dc_s3gd_step_matches_numpy_in_all_three_hooks():
  """Covers begin (sends), correct (gradients) and finish (updates)."""
  worker = Axis("worker", 3, 3)
  exchange = Exchange(worker, Wire(), {"w": 0, "b": 0}, rule=ORDERED)
  outer = DCS3GD(worker, exchange, 0.3)
  experiment = toy.make(
    3, devices=(3, 1), batch_size=12, outer=outer, learning_rate=RATE,
    momentum=MOMENTUM,
  )
  step = experiment.lower_step().compile()
  state = experiment.init_state()
  start = jax.device_get(state.params)
  common = {k: v[0].astype("f8") for k, v in start.items()}
  updates = [dict.fromkeys(common, 0.0) for _ in range(3)]
  speeds = [dict.fromkeys(common, 0.0) for _ in range(3)]

  def norm(tree):
    return np.sqrt(sum(np.square(x).sum() for x in tree.values()))

  for number in range(4):
    batch = toy.draw(12, number)
    plan = jax.tree.map(np.int32, outer.plan(number).numbers)
    state, metrics = step(
      state, put_batch(experiment.program.layout, batch), plan
    )
    mean = {k: sum(u[k] for u in updates) / 3 for k in common}
    new = []
    for m, update in enumerate(updates):
      params = {k: common[k] + update[k] for k in common}
      mine = {k: v[4 * m : 4 * m + 4] for k, v in batch.items()}
      grads = toy.gradients(params, mine)
      term = {k: g * g * (mean[k] - update[k]) for k, g in grads.items()}
      strength = 0.3 * norm(grads) / norm(term) if number else 0.0
      for k, g in grads.items():
        speeds[m][k] = MOMENTUM * speeds[m][k] + g + strength * term[k]
      new.append({k: -RATE * speeds[m][k] for k in common})
      np.testing.assert_allclose(
        metrics["delta_norm"][m], norm(new[m]), rtol=1e-4
      )
    common, updates = {k: common[k] + mean[k] for k in common}, new
    stored = jax.device_get(state.params)
    for m, update in enumerate(updates):
      for k, value in common.items():
        np.testing.assert_allclose(
          stored[k][m], value + update[k], rtol=1e-4, atol=1e-5
        )
