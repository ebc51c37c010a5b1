"""Parts of Brax' training: statistics of observations, and a gradient step."""

PACKAGES = ("brax",)
OBSERVATION, BATCH, HIDDEN = 40, 64, 128


def statistics():
  """`running_statistics.update` on observations.

  The batch is ``[devices * BATCH, OBSERVATION]``, float32.
  """
  from brax.training.acme import running_statistics, specs
  import jax
  import jax.numpy as jnp

  state = jax.eval_shape(lambda: running_statistics.init_state(
    specs.Array((OBSERVATION,), jnp.dtype("float32"))
  ))

  def update(state, batch):
    return running_statistics.update(state, batch, pmap_axis_name="i")

  return _sharded(update), (state, _batch())


def gradients():
  """`gradients.gradient_update_fn` on a value network, with Adam.

  The batch is ``[devices * BATCH, OBSERVATION]``, float32.
  """
  from brax.training import gradients, networks
  import jax
  import jax.numpy as jnp
  import optax

  network = networks.make_value_network(
    OBSERVATION, hidden_layer_sizes=(HIDDEN, HIDDEN)
  )
  optimizer = optax.adam(1e-3)

  def loss(params, batch):
    return jnp.mean(network.apply(None, params, batch) ** 2)

  step = gradients.gradient_update_fn(loss, optimizer, pmap_axis_name="i")
  params = jax.eval_shape(network.init, jax.random.key(0))
  state = jax.eval_shape(optimizer.init, params)

  def update(arguments, batch):
    params, state = arguments
    _, *new = step(params, batch, optimizer_state=state)
    return new

  return _sharded(update), ((params, state), _batch())


def sharded():
  """A value network with its parameters cut over an axis.

  The batch is ``[devices * BATCH, OBSERVATION]``, float32.
  """
  from brax.training import networks
  import jax
  import sharded_step

  network = networks.make_value_network(
    OBSERVATION, hidden_layer_sizes=(HIDDEN, HIDDEN)
  )
  return sharded_step.sharded(
    lambda: network.init(jax.random.key(0)),
    lambda params, batch: network.apply(None, params, batch)[:, None],
    jax.ShapeDtypeStruct(
      (jax.device_count() * BATCH, OBSERVATION), "float32"
    ),
  )


def _sharded(update):
  import jax
  from jax.sharding import PartitionSpec as P

  mesh = jax.make_mesh((jax.device_count(),), ("i",))
  return jax.jit(jax.shard_map(
    update, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False
  ))


def _batch():
  import jax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  mesh = jax.make_mesh((jax.device_count(),), ("i",))
  return jax.ShapeDtypeStruct(
    (mesh.size * BATCH, OBSERVATION), "float32",
    sharding=NamedSharding(mesh, P("i")),
  )
