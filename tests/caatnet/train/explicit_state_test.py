"""Sums with counts, explicit training state, and moments by row, on layouts.

A linear model has examples with different numbers of elements, counts them in
explicit state, and is compared with NumPy in float64.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.federated.local import ParamsFlattener
from caatnet.models.access import DEFAULT_ACCESS
from caatnet.models.protocol import Parameter, WeightedScore
from caatnet.models.training_state import report
from caatnet.models.transformer.model import TransformerModel
from caatnet.train import host_moments, loop
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.elastic.membership import init_new_states
from caatnet.train.evaluate import make_evaluate, put_batch
from caatnet.train.explicit_state import mean_of_finite
from caatnet.train.state import init_state, state_shardings, state_specs
from caatnet.train.update import HostUpdate
from configs.pipeline import tiny as pipeline
from parallel.axes import Axis, make_mesh
from parallel.memory.host_optimizer import AdamW
from parallel.outer.data_parallel import DataParallel
from parallel.outer.diloco import DiLoCo
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import Nesterov
from parallel.wire import Wire
from tests.caatnet.train import linear_model as toy

RATE, MOMENTUM = 0.1, 0.9


def elements(x):
  """Returns the number of elements of each example: 0, 1 or 4."""
  return (x[:, 0] > 0) * (1 + 3 * (x[:, 1] > 0.5))


@dataclasses.dataclass(frozen=True)
class Counting(toy.Deep):
  """Model whose examples have weights, which it counts per layer and in all."""

  @property
  def parameters(self):
    found = super().parameters
    counter = Parameter(
      P(), 0, "float32", update=lambda value, statistic: value + statistic
    )
    blocks = {
      "w": Parameter(P(), 1, "float32", form="rows"),
      "seen": dataclasses.replace(counter, num_lead=1),
    }
    w = Parameter(P(), 0, "float32", form="rows")
    return found | {"blocks": blocks, "seen": counter, "w": w}

  def init(self, key):
    found = super().init(key)
    blocks = found["blocks"] | {"seen": jnp.zeros((2, 1))}
    return found | {"blocks": blocks, "seen": jnp.zeros(2)}

  def scores(self, params, batch, access=DEFAULT_ACCESS):
    x = lax.pcast(batch["x"], "tensor", to="varying")

    def count(params, x):
      number = jnp.sum(elements(x).astype("float32"))
      # One per microbatch, and the number of elements.
      statistic = jnp.stack([jnp.ones_like(number), number])
      return report(x, params["seen"], statistic)

    def layer(params, x):
      y = x + x @ params["w"]
      return report(y, params["seen"], jnp.full((1,), x.shape[0], "float32"))

    x = access.apply(count, {"seen": params["seen"]}, x)
    x = access.scan(
      layer, params["blocks"], x, 1, jax.checkpoint_policies.nothing_saveable
    )
    head = {key: params[key] for key in ("w", "b")}
    losses = access.apply(
      lambda p, x, y: jnp.square(x @ p["w"] + p["b"][None] - y),
      head, x, batch["y"],
    )

    def weighted(_, x, losses):
      each = jnp.broadcast_to(elements(x)[:, None], losses.shape)
      return WeightedScore(losses * each, each.astype("float32"))

    total, each = access.apply(weighted, None, batch["x"], losses)
    return {"loss": WeightedScore(lax.pmean(total, "tensor"), each)}


def by_hand(params, batch):
  """Returns loss and gradients of trained parameters in float64."""
  with jax.enable_x64(True):
    x, y = (jnp.asarray(batch[key], "float64") for key in ("x", "y"))

    def loss(params):
      z = x
      for w in params["blocks"]["w"]:
        z = z + z @ w
      losses = jnp.square(z @ params["w"] + params["b"][None] - y)
      each = elements(batch["x"])[:, None]
      return jnp.sum(losses * each) / (each.sum() * losses.shape[1])

    found = jax.value_and_grad(loss)(
      jax.tree.map(lambda x: jnp.asarray(x, "float64"), params)
    )
    return jax.tree.map(np.asarray, found)


def trained(params):
  return {
    "w": params["w"], "b": params["b"], "blocks": {"w": params["blocks"]["w"]}
  }


LAYOUTS = {
  "one rank": dict(),
  "microbatches of unequal counts": dict(accumulation=4),
  "ranks of unequal counts": dict(data=4, devices=(1, 2)),
  "tensor ranks that report equally": dict(tensor=2),
  "ranks and microbatches, zero3": dict(
    data=2, devices=(1, 2), scheme="zero3", accumulation=2
  ),
  "an axis of 3 replicas": dict(
    levels=(Axis("node", 2, 2), Axis("replica", 3)), scheme="zero1",
  ),
  "3 devices, cut inside": dict(
    levels=(Axis("node", 2), Axis("replica", 3, 3)), scheme="hsdp",
  ),
}


@pytest.mark.rotated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mean_is_over_all_elements_and_state_counts_each_once(layout):
  options = LAYOUTS[layout]
  experiment = toy.make(
    model=Counting(), batch_size=24, learning_rate=RATE, momentum=MOMENTUM,
    **options,
  )
  program, step = experiment.program, experiment.lower_step().compile()
  state = experiment.init_state()
  params = jax.device_get(
    jax.tree.map(lambda x: x[0], trained(to_whole(program, state).params))
  )
  speed, total = jax.tree.map(np.zeros_like, params), 0
  for number in range(2):
    batch = toy.draw(24, number)
    state, metrics = step(state, put_batch(program.layout, batch), ())
    loss, grads = by_hand(params, batch)
    np.testing.assert_allclose(metrics["loss"][0], loss, rtol=1e-5)
    speed = jax.tree.map(lambda v, g: MOMENTUM * v + g, speed, grads)
    params = jax.tree.map(lambda x, v: x - RATE * v, params, speed)
    total += elements(batch["x"]).sum()
  whole = jax.device_get(to_whole(program, state))
  found = jax.tree.map(lambda x: x[0], whole.params)
  chex.assert_trees_all_close(trained(found), params, rtol=2e-5, atol=2e-6)
  parts = program.layout.num_data_ranks * experiment.train.accumulation
  assert found["seen"].tolist() == [2 * parts, total]
  assert found["blocks"]["seen"].tolist() == [[48], [48]]
  # No gradient, moment or norm belongs to the state.
  assert not any("seen" in name for name in metrics)
  assert jax.tree.structure(whole.opt_state[0].trace) == jax.tree.structure(
    params
  )


@pytest.mark.parametrize("scheme", ["ddp", "zero3"])
def test_evaluation_divides_sums_by_counts(scheme):
  experiment = toy.make(
    model=Counting(), data=2, devices=(1, 2), scheme=scheme
  )
  state = experiment.init_state()
  params = experiment.make_export_params()(state.params, state.outer)
  examples = toy.draw(13, 1)
  found = make_evaluate(experiment.program, 8)(params, examples)
  whole = to_whole(experiment.program, state).params
  whole = jax.device_get(jax.tree.map(lambda x: x[0], trained(whole)))
  loss, _ = by_hand(whole, examples)
  np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
  np.testing.assert_allclose(found.per_place["loss"].mean(), loss, rtol=1e-6)


def make_diloco(worker):
  dims = {"w": 0, "b": 0, "blocks": {"w": 1}}
  exchange = Exchange(worker, Wire("none"), dims)
  return DiLoCo(worker, 2, Nesterov(0.7, 0.9), exchange)


@pytest.mark.parametrize(
  ("outer", "exchanged"), [(DataParallel, (1, 2, 3)), (make_diloco, (2,))]
)
def test_outer_loops_average_state_when_they_exchange(outer, exchanged):
  experiment = toy.make(
    2, model=Counting(), devices=(2, 1), outer=outer(Axis("worker", 2, 2)),
    batch_size=16,
  )
  state, programs, mine = experiment.init_state(), {}, np.zeros(2)
  for number in (1, 2, 3):
    plan = experiment.outer.plan(number - 1)
    if plan.variant not in programs:
      programs[plan.variant] = experiment.lower_step(plan).compile()
    batch = toy.draw(16, number)
    numbers = jax.tree.map(np.int32, plan.numbers)
    state, _ = programs[plan.variant](
      state, put_batch(experiment.program.layout, batch), numbers
    )
    mine = mine + elements(batch["x"]).reshape(2, 8).sum(axis=1)
    if number in exchanged:
      mine = np.full(2, mine.mean())
    np.testing.assert_allclose(state.params["seen"][:, 1], mine)
  export = experiment.make_export_params()(state.params, state.outer)
  np.testing.assert_allclose(export["seen"][1], mine.mean())


def test_run_resumes_on_another_layout(tmp_path):
  """Checkpoints hold the state once, whatever the axes and the partition."""

  def run(folder, num_steps, **options):
    experiment = toy.make(
      model=Counting(), num_steps=num_steps, batch_size=12, eval_every=6,
      **options,
    )
    result = loop.train(experiment, tmp_path / folder, quiet=True)
    return result.evaluation

  levels = Axis("node", 2, 2), Axis("replica", 3, 3)
  run("moved", 4, levels=levels, scheme="zero1")
  moved = run("moved", 6, data=2, scheme="zero3")
  whole = run("whole", 6)
  np.testing.assert_allclose(moved.loss, whole.loss, rtol=1e-5)


def test_diverged_worker_does_not_change_the_mean():
  worker = Axis("worker", 3)
  x = jnp.array([[1.0, jnp.nan], [jnp.inf, jnp.nan], [3.0, jnp.nan]])
  found = jax.jit(jax.shard_map(
    lambda x: mean_of_finite(x, worker), mesh=make_mesh({"worker": worker}),
    in_specs=P("worker"), out_specs=P(),
  ))(x)
  np.testing.assert_array_equal(found, [2.0, np.nan])


def test_new_workers_begin_with_the_state_of_the_first():
  experiment = toy.make(
    3, model=Counting(), outer=DataParallel(Axis("worker", 3)), batch_size=12
  )
  state = experiment.init_state()
  state.params["seen"] = jnp.array([[1.0, 2], [3, 4], [0, 0]])
  found = init_new_states(experiment, state, before=2).params["seen"]
  assert found.tolist() == [[1, 2], [3, 4], [1, 2]]


def test_state_is_refused_where_an_optimizer_would_train_it():
  experiment = toy.make(model=Counting())
  with pytest.raises(ValueError, match="server's optimizer would train the"):
    ParamsFlattener(experiment)
  update = HostUpdate(AdamW(), {})
  with pytest.raises(ValueError, match=r"optimizer='host' cannot update the"):
    update.open(experiment.program, experiment.learning_rate)


class RowState(NamedTuple):
  squares: Any
  largest: Any
  factor: Any
  count: jax.Array


def row_scaled(program):
  """Divides gradients by the root mean square of their row, over all steps.

  It has a value per row of a matrix, and one per column.
  """

  def matrices(tree):
    return {"blocks": {"w": tree["blocks"]["w"]}, "w": tree["w"]}

  tensors = matrices(program.tensors)
  partitioned = program.layout.shards is not None

  def rows(tensor, x):  # [..., rows of this device's shards, columns]
    if not partitioned:
      return x
    return x.reshape(*x.shape[:-1], -1, tensor.shape[1])

  def init(params):
    squares = jax.tree.map(
      lambda t, x: jnp.zeros(rows(t, x).shape[:-1]), tensors, matrices(params)
    )
    columns = {
      "blocks": {"w": jnp.zeros((2, toy.INPUTS))}, "w": jnp.zeros(toy.TARGETS)
    }
    factor = jax.tree.map(lambda x: x[..., None], columns)
    return RowState(squares, columns, factor, jnp.zeros((), "int32"))

  def update(grads, state, params=None):
    def new(tensor, square, g):
      if g is None:  # of a part of an update that has no matrix
        return square
      return square + jnp.mean(jnp.square(rows(tensor, g)), axis=-1)

    squares = jax.tree.map(new, tensors, state.squares, matrices(grads))

    def scaled(tensor, g, square):
      if g is None:
        return g
      found = rows(tensor, g) / (1e-3 + jnp.sqrt(square))[..., None]
      return found.reshape(g.shape)

    found = jax.tree.map(scaled, tensors, matrices(grads), squares)
    updates = jax.tree.map(lambda g: -0.01 * g, grads | found)
    largest = jax.tree.map(lambda x: x + 1, state.largest)
    return updates, RowState(
      squares, largest, state.factor, state.count + 1
    )

  return optax.GradientTransformation(init, update)


ROWS = (("squares", "row"), ("largest", "column"), ("factor", "low_rank"))


def after_steps(**options):
  """Returns whole state after three steps with `row_scaled`, and the program.

  ``options`` are those of `linear_model.make`.
  """
  made = toy.make(model=Counting(), arrays=ROWS, batch_size=12, **options)
  made = dataclasses.replace(made, optimizer=row_scaled(made.program))
  state, step = made.init_state(), made.lower_step().compile()
  for number in range(3):
    batch = put_batch(made.program.layout, toy.draw(12, number))
    state, _ = step(state, batch, ())
  whole = to_whole(made.program, state)
  shardings = state_shardings(made.program, made.optimizer, made.outer)
  again = to_stored(made.program, whole, shardings)
  chex.assert_trees_all_equal(*map(jax.device_get, (again, state)))
  return jax.device_get(whole), state


@pytest.mark.parametrize("options", [
  dict(data=2, devices=(1, 2), scheme="zero3"),
  dict(levels=(Axis("a", 2, 2), Axis("b", 2)), scheme="hsdp"),
])
def test_moments_by_row_are_cut_with_the_rows_of_their_matrix(options):
  whole, stored = after_steps(**options)
  alone, _ = after_steps()
  parts = [x._replace(params=trained(x.params)) for x in (whole, alone)]
  chex.assert_trees_all_close(*parts, rtol=1e-5, atol=1e-6)
  assert whole.opt_state.squares["blocks"]["w"].shape == (1, 2, 3)
  # 3 rows on 2 ranks: two rows each, of three elements; one is padding.
  assert stored.params["blocks"]["w"].shape[-2:] == (2, 6)
  assert stored.opt_state.squares["blocks"]["w"].shape[-2:] == (2, 2)
  assert stored.opt_state.largest["blocks"]["w"].shape == (1, 2, 3)
  assert stored.opt_state.factor["blocks"]["w"].shape == (1, 2, 3, 1)


def test_moments_by_row_are_updated_in_parts_as_at_once():
  experiment = toy.make(model=Counting(), arrays=ROWS)
  program, outer = experiment.program, experiment.outer
  optimizer = row_scaled(program)
  state = init_state(program, optimizer, outer, 0)
  trained_params = program.split(state.params).trained
  specs = state_specs(program, optimizer, outer).opt_state
  of_params = program.layout.add_worker_dim(program.specs)
  of_params = program.split(of_params).trained

  def updated(way):
    return jax.jit(jax.shard_map(
      lambda changed, params: way(
        program, lambda x, params: jax.vmap(optimizer.update)(*x, params),
        changed, params,
      ), mesh=program.layout.mesh, in_specs=((of_params, specs), of_params),
      out_specs=(of_params, specs),
    ))((trained_params, state.opt_state), trained_params)

  in_parts = functools.partial(host_moments.apply_in_parts, piece=4)
  chex.assert_trees_all_close(
    *map(updated, (in_parts, host_moments.apply)), rtol=1e-6
  )


class Packed(TransformerModel):
  """Transformer of which some tokens count less, as between documents."""

  def scores(self, params, batch, access=DEFAULT_ACCESS):
    return packed(super().scores(params, batch, access), batch, access)

  def parts(self):
    found = super().parts()
    return found._replace(judge=lambda params, x, batch, access: packed(
      found.judge(params, x, batch, access), batch, access
    ))


def packed(scores, batch, access):
  def weighted(_, losses, batch):
    each = (batch[..., 1:] % 3).astype("float32")
    return WeightedScore(losses * each, each)

  return {"loss": access.apply(weighted, None, scores["loss"], batch)}


def losses_of_packed(overrides, mesh):
  """Returns losses and parameters after two steps, and the evaluated loss."""
  experiment = experiments.build(override(
    pipeline.get_config("test"), "model.width=8 model.num_heads=2 "
    "model.num_kv_heads=2 model.ffn_width=8 model.vocab_size=18 "
    "model.num_layers=2 data.seq_len=4 data.batch_size=8 parallel.tensor=1 "
    f"train.accumulation=2 {overrides}"
  ), mesh)
  program, model = experiment.program, experiment.program.model
  program = dataclasses.replace(program, model=Packed(**{
    f.name: getattr(model, f.name) for f in dataclasses.fields(model)
  }))
  experiment = dataclasses.replace(experiment, program=program)
  state, step = experiment.init_state(), experiment.lower_step().compile()
  losses, draw = [], np.random.default_rng(0)
  for _ in range(2):
    examples = draw.integers(18, size=(8, 5))
    state, metrics = step(state, put_batch(program.layout, examples), ())
    losses.append(metrics["loss"])
  params = experiment.make_export_params()(state.params, state.outer)
  found = make_evaluate(program, 8)(params, examples)
  whole = to_whole(program, state).params
  return jax.device_get((losses, found.means, whole))


@pytest.mark.rotated(2)
@pytest.mark.parametrize(("overrides", "mesh"), [
  ("parallel.stage=2", {"stage": 2}),
  ("parallel.stage=2 parallel.data=2 zero.scheme=zero3", {"data": 2}),
])
def test_stages_and_partitions_divide_by_the_counts_of_all(overrides, mesh):
  alone = losses_of_packed("parallel.stage=1 train.accumulation=1", {})
  chex.assert_trees_all_close(
    losses_of_packed(overrides, mesh), alone, rtol=3e-5, atol=5e-6
  )
