"""Layers of Flax: synchronised statistics, attention over heads, an NNX MLP."""

PACKAGES = ("flax", "optax")
# BATCH on eight devices; it grows with them.
BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 16, 32, 64, 256, 8


def batch_norm():
  """`linen.BatchNorm` in training, with statistics over all devices.

  The input is ``[devices * BATCH, WIDTH]``, float32.
  """
  from flax import linen as nn
  import jax
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P

  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  norm = nn.BatchNorm(use_running_average=False, axis_name="data")
  x = jax.ShapeDtypeStruct((mesh.size * BATCH, WIDTH), jnp.float32)
  variables = jax.eval_shape(
    lambda: nn.BatchNorm(use_running_average=False).init(
      jax.random.key(0), jnp.ones((BATCH, WIDTH))
    )
  )

  def apply(variables, x):
    return norm.apply(variables, x, mutable=["batch_stats"])

  shaped = jax.shard_map(
    apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P()),
    check_vma=False,
  )
  return jax.jit(shaped), (variables, _like(x, mesh, "data"))


def attention():
  """A step on `linen.MultiHeadDotProductAttention` without biases.

  The input is ``[BATCH, LENGTH, WIDTH]``, float32; heads are cut over the axis
  "model", the batch over "data".
  """
  from flax import linen as nn
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P
  import optax
  from sharded_step import mesh_of

  mesh = mesh_of("model", 4)
  layer = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
  x = jax.ShapeDtypeStruct(
    (mesh.size // 8 * BATCH, LENGTH, WIDTH), jnp.float32,
    sharding=NamedSharding(mesh, P("data")),
  )
  params = jax.eval_shape(layer.init, jax.random.key(0), x)

  def place(path, leaf):  # [width, heads, head] or [heads, head, width]
    out = "out" in jax.tree_util.keystr(path)
    spec = P("model") if out else P(None, "model")
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )

  params = jax.tree_util.tree_map_with_path(place, params)
  optimizer = optax.sgd(0.1)

  def step(params, x):
    def loss(params):
      return jnp.mean(layer.apply(params, x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params))
    return value, optax.apply_updates(params, updates)

  return jax.jit(step), (params, x)


def nnx_mlp():
  """A step of Adam on an NNX module of two `nnx.Linear` without biases.

  The input is ``[BATCH, WIDTH]``, float32; hidden channels are cut over the
  axis "model", the batch over "data".
  """
  from flax import nnx
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P
  import optax
  from sharded_step import mesh_of

  mesh = mesh_of("model", 2)

  class MLP(nnx.Module):

    def __init__(self, rngs):
      self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
      self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
      return self.down(nnx.relu(self.up(x)))

  model = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
  graph, state = nnx.split(model)
  specs = {"up": P(None, "model"), "down": P("model", None)}

  def place(path, leaf):
    spec = next(s for n, s in specs.items() if n in jax.tree_util.keystr(path))
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )

  state = jax.tree_util.tree_map_with_path(place, state)
  optimizer = optax.adam(1e-3)

  def step(state, x):
    def loss(state):
      return jnp.sum(nnx.merge(graph, state)(x) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    updates, _ = optimizer.update(grads, optimizer.init(state), state)
    return value, optax.apply_updates(state, updates)

  x = jax.ShapeDtypeStruct(
    (mesh.size // 8 * BATCH, WIDTH), jnp.float32,
    sharding=NamedSharding(mesh, P("data")),
  )
  return jax.jit(step), (state, x)


def sharded():
  """`linen.MultiHeadDotProductAttention` with its parameters cut over an axis.

  The input is ``[BATCH, LENGTH, WIDTH]``, float32.
  """
  from flax import linen as nn
  import jax
  import jax.numpy as jnp
  import sharded_step

  layer = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
  example = jnp.zeros((1, LENGTH, WIDTH))
  return sharded_step.sharded(
    lambda: layer.init(jax.random.key(0), example),
    lambda params, x: layer.apply(params, x).reshape(-1, WIDTH),
    jax.ShapeDtypeStruct(
      (jax.device_count() // 8 * BATCH, LENGTH, WIDTH), "float32"
    ),
  )


def _like(x, mesh, axis):
  import jax
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec as P

  return jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=NamedSharding(mesh, P(axis))
  )
