"""Data-parallel training with Equinox, as its documentation does it."""

PACKAGES = ("equinox", "optax")
BATCH, INPUTS, HIDDEN, OUTPUTS = 32, 24, 64, 8


def data_parallel():
  """A step of Adam on `equinox.nn.MLP` under `eqx.filter_jit`.

  Inputs are ``[8 * BATCH, INPUTS]``, outputs ``[8 * BATCH, OUTPUTS]``, float32.
  """
  import equinox as eqx
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P
  import optax

  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  data, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
  model = eqx.nn.MLP(INPUTS, OUTPUTS, HIDDEN, 1, key=jax.random.key(0))
  optimizer = optax.adam(1e-3)
  state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit(donate="all")
  def step(model, state, x, y):
    model, state = eqx.filter_shard((model, state), whole)
    x, y = eqx.filter_shard((x, y), data)

    def loss(model):
      return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    grads = eqx.filter_grad(loss)(model)
    updates, state = optimizer.update(grads, state)
    return eqx.filter_shard((eqx.apply_updates(model, updates), state), whole)

  x = jnp.ones((8 * BATCH, INPUTS))
  y = jnp.ones((8 * BATCH, OUTPUTS))
  model, state = eqx.filter_shard((model, state), whole)
  return step, (model, state, *eqx.filter_shard((x, y), data))
