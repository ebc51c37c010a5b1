"""Local training: federated rounds equal training on a mesh."""

import functools

import jax
import numpy as np
import pytest

from caatnet.config import experiments, federated
from caatnet.config.override import override
from caatnet.federated import events, server
from caatnet.federated.local import LocalTrainer, proximal
from caatnet.federated.splits import Examples
from caatnet.train.evaluate import put_batch
from configs.federated import tiny
from tests.caatnet.federated import numeric

CLIENTS, BATCH = 4, 8
NUMBERS = (8, 16, 24, 32)  # examples of each client
SMALL = (
  "model.widths=(4,) model.blocks=1 model.groups=2 optimizer.momentum=0.0 "
  "optimizer.clip_norm=0.0 "
  # The rate falls with the steps of all rounds.
  "optimizer.decay_steps=6 optimizer.final_fraction=0.1 "
)


def config(**changes):
  found = override(tiny.get_config("convolutional,test"), SMALL)
  found.data.batch_size = BATCH
  found.federated.update({
    "clients": CLIENTS, "per_round": CLIENTS, "local_steps": 3,
    "validate": False, "test": False, **changes,
  })
  return found


@functools.cache
def federation(local_steps=3):
  return federated.build(config(local_steps=local_steps))


@functools.cache
def examples(client):
  draw = np.random.RandomState(client)
  num = NUMBERS[client]
  found = {
    "image": draw.rand(num, 8, 8, 1).astype(np.float32),
    "label": draw.randint(10, size=num).astype(np.int32),
  }
  return Examples(str(client), found, jax.tree.map(lambda x: x[:0], found))


def trainers(some):
  """Returns trainers of all clients that share their programs."""
  first = LocalTrainer(
    some.experiment, examples(0), 0, some.section.local_steps,
    validate=False, test=False,
  )
  found = [first]
  for client in range(1, CLIENTS):
    other = LocalTrainer(
      some.experiment, examples(client), client, some.section.local_steps,
      validate=False, test=False,
    )
    other._step, other._start = first._step, first._start
    other._vector = first._vector
    found.append(other)
  return found


def run(some, clients, weights, rounds):
  """Returns the parameters after each round."""
  rules = numeric.rules(
    clients=CLIENTS, per_round=CLIENTS, rounds=rounds,
    digest=some.vectors.digest, weights=weights,
  )
  arithmetic = some.arithmetic
  state, found = server.initial_state(some.vectors.initial(), arithmetic), []

  def step(message):
    nonlocal state
    state, _ = server.step(state, message, 0.0, rules, arithmetic)

  for client in range(CLIENTS):
    step(events.Hello(client, NUMBERS[client], digest=rules.digest))
  for round in range(rounds):
    params = state.published
    for client in state.sampled:
      trained = clients[client].train(params, round, lambda: False)
      step(events.Update(
        client, round, state.revision, trained.params - params
      ))
    found.append(state.params)
  return found


def mesh_run(some, clients, outer, rounds, local_steps, **sizes):
  """Trains with ``launch.train``'s step on the clients' batches."""
  found = config()
  with found.unlocked():
    del found.federated
    found.train.num_steps = rounds * local_steps
  found = override(found, outer)
  found.parallel.update(sizes)
  found.data.batch_size = CLIENTS * BATCH
  experiment = experiments.build(found, {})
  state, params, steps = experiment.init_state(), [], {}
  for number in range(rounds * local_steps):
    plan = experiment.outer.plan(number)
    if plan.variant not in steps:
      steps[plan.variant] = experiment.lower_step(plan).compile()
    batch = jax.tree.map(
      lambda *parts: np.concatenate(parts),
      *(c.batch(*divmod(number, local_steps)) for c in clients),
    )
    state, _ = steps[plan.variant](
      state, put_batch(experiment.program.layout, batch), plan.numbers
    )
    if (number + 1) % local_steps == 0:
      params.append(np.asarray(
        some.vectors.vector(jax.tree.map(lambda x: x[0], state.params))
      ))
  return params


def test_one_local_step_is_data_parallel_sgd():
  """Sums of gradients have another order, hence the tolerance."""
  some = federation(local_steps=1)
  clients = trainers(some)
  found = run(some, clients, "equal", 3)
  expected = mesh_run(some, clients, "", 3, 1, data=CLIENTS)
  assert np.abs(expected[2] - expected[0]).max() > 1e-3
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_rounds_equal_fedavg_on_a_mesh():
  """Weights by examples. The mesh averages differences to the old parameters
  with one division by the sum of the weights, the server adds products with
  normalised weights, so the last bits differ.
  """
  some = federation()
  clients = trainers(some)
  found = run(some, clients, "examples", 2)
  weights = ",".join(map(str, map(float, NUMBERS)))
  expected = mesh_run(
    some, clients, "outer.algorithm=fedavg outer.sync_every=3 "
    f"outer.weights=({weights})", 2, 3, worker=CLIENTS,
  )
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
  unweighted = run(some, clients, "equal", 2)
  assert np.abs(unweighted[1] - expected[1]).max() > 1e-4


def test_round_depends_on_its_arguments_only():
  some = federation()
  client, params = trainers(some)[1], some.vectors.initial()
  first = client.train(params, 1, lambda: False)
  client.train(first.params, 0, lambda: False)
  again = client.train(params, 1, lambda: False)
  np.testing.assert_array_equal(first.params, again.params)
  other = client.train(params, 0, lambda: False)
  assert np.abs(first.params - other.params).max() > 1e-5
  assert client.train(params, 1, lambda: True) is None
  # A pass has every example once: 16 examples in two batches of 8.
  labels = [client.batch(0, step)["image"].sum() for step in (0, 1)]
  assert sum(labels) == pytest.approx(examples(1).train["image"].sum())


def test_passes_over_examples_that_no_batch_divides():
  """Batches of 8 of 5 examples; a pass has each once, in an order of its own.
  """
  first = LocalTrainer(federation().experiment, examples(0), 0, 3)

  def drawn(client, round, num=10):
    one = first.for_client(Examples("x", {"n": np.arange(5)}, {}), client)
    assert (one.examples, first.examples) == (5, 8)
    found = [one.batch(round, step)["n"] for step in range(num)]
    assert {len(x) for x in found} == {8}
    return np.concatenate(found)

  passes = drawn(2, 1).reshape(-1, 5)
  np.testing.assert_array_equal(np.sort(passes), [np.arange(5)] * 16)
  assert len(set(map(tuple, passes))) > 8
  np.testing.assert_array_equal(drawn(2, 1, 3), passes.ravel()[:24])
  for client, round in ((1, 1), (2, 0)):
    assert not np.array_equal(drawn(client, round), passes.ravel())


def test_proximal_training_is_pulled_back_and_evaluated_before_and_after():
  """By the weight and the learning rate, to the parameters of the begin."""
  some = federation()
  validation = jax.tree.map(lambda x: x[:5], examples(1).train)
  trainer = LocalTrainer(
    some.experiment, examples(1)._replace(validation=validation), 1, 1, 0.5
  )
  params = some.vectors.initial()
  state = trainer.steps(trainer.begin(params, 0), 0, range(1))
  once = trainer.params(state)
  # The second step of all rounds, from equal parameters.
  pulled, plain = (
    trainer.params(trainer.steps(begin, 1, range(1)))
    for begin in (state, trainer.begin(once, 1))
  )
  (factor,), *_ = np.linalg.lstsq(
    (once - params)[:, None], plain - pulled, rcond=None
  )
  np.testing.assert_allclose(
    plain - pulled, factor * (once - params), atol=1e-6
  )
  rate = config().optimizer.learning_rate
  assert 0.25 * rate < factor < 0.5 * rate * 1.01
  found = trainer.train(params, 0, lambda: False)
  np.testing.assert_array_equal(found.params, once)
  again = trainer.train(once, 0, lambda: False)
  assert found.validated == again.validated == 5
  assert again.loss == pytest.approx(found.test_loss, rel=1e-5)
  assert abs(found.loss - found.test_loss) > 1e-5


def test_proximal_term_is_the_gradient_of_half_the_squared_distance():
  received, now = {"w": np.float32([1, 2])}, {"w": np.float32([2, 0])}
  term = proximal(3.0)
  grads, state = {"w": np.float32([10, 10])}, term.init(received)
  found, state = term.update(grads, state, now)
  expected = jax.grad(
    lambda w: 1.5 * ((w - received["w"]) ** 2).sum()
  )(now["w"])
  np.testing.assert_allclose(found["w"] - grads["w"], expected)
  np.testing.assert_array_equal(state.anchor["w"], received["w"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ("federated.per_round=9", "config.federated.per_round=9 must lie in"),
    ("federated.split=packages", "split='packages' needs config.data.name="),
    ("federated.uplink=sparse federated.top_k=3", "config.federated.top_k=3"),
    ("parallel.worker=2", "clients are set by config.federated.clients"),
    # Sockets have no such timeouts.
  ],
)
def test_mistakes_are_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    federated.build(
      override(tiny.get_config("convolutional,test"), changes)
    ).trainer(0)
  assert "\n" not in str(caught.value)


def test_rounds_after_the_warm_up_compile_nothing(caplog):
  trainer = LocalTrainer(
    federation().experiment, examples(0), 0, 3, validate=False, test=False
  )
  params = trainer.vectors.initial()
  trainer.warm_up()
  with jax.log_compiles():
    found = trainer.train(params, 0, lambda: False)
    assert "Compiling" not in caplog.text
    jax.jit(lambda x: x + 1)(np.ones(3))
    assert "Compiling" in caplog.text
  assert not np.array_equal(found.params, params)
