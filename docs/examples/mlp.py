"""A training step with automatic partitioning, as any user of jax writes it.

  python -m launch.sends docs/examples/mlp.py:step --devices=8
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, BATCH = 4, 1024, 4096, 256


def loss(params, x):
  def layer(x, w):
    hidden = jax.nn.relu(x @ w["up"])
    return x + hidden @ w["down"], None

  x, _ = lax.scan(layer, x, params)
  return jnp.mean(x.astype(jnp.float32) ** 2)


def update(params, x):
  grads = jax.grad(loss)(params, x)
  return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def arguments(mesh, width, hidden, batch, dtype):
  """Returns shapes of the parameters and of a batch, without data."""
  def array(shape, *spec):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, P(*spec))
    )

  params = {
    "up": array((LAYERS, width, hidden), None, "fsdp", "tensor"),
    "down": array((LAYERS, hidden, width), None, "tensor", "fsdp"),
  }
  return params, array((batch, width), "data")


def step():
  """Returns the jitted step and its arguments."""
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
  )
  args = arguments(mesh, WIDTH, HIDDEN, BATCH, jnp.bfloat16)
  return jax.jit(update, donate_argnums=0), args


def layouts(layout):
  """Returns a small step on a layout, {axis: devices}, for ``launch.equal``."""
  names = ("data", "fsdp", "tensor")
  data, fsdp, tensor = sizes = [layout.get(name, 1) for name in names]
  mesh = jax.make_mesh(
    sizes, names, axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[: data * fsdp * tensor],
  )
  args = arguments(mesh, 64, 128, 32, jnp.float32)
  return jax.jit(update, donate_argnums=0), args
