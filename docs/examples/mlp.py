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


def step():
  """Returns the jitted step and its arguments, as shapes without data."""
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
  )

  def array(shape, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

  params = {
    "up": array((LAYERS, WIDTH, HIDDEN), None, "fsdp", "tensor"),
    "down": array((LAYERS, HIDDEN, WIDTH), None, "tensor", "fsdp"),
  }
  x = array((BATCH, WIDTH), "data")
  return jax.jit(update, donate_argnums=0), (params, x)


def layouts(layout, width=64, hidden=128, batch=32):
  """Returns the step on a layout, {axis: devices}, for ``launch.equal``."""
  names = ("data", "fsdp", "tensor")
  data, fsdp, tensor = sizes = [layout.get(name, 1) for name in names]
  mesh = jax.make_mesh(
    sizes, names, axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[: data * fsdp * tensor],
  )

  def array(shape, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  params = {
    "up": array((LAYERS, width, hidden), None, "fsdp", "tensor"),
    "down": array((LAYERS, hidden, width), None, "tensor", "fsdp"),
  }
  x = array((batch, width), "data")
  return jax.jit(update, donate_argnums=0), (params, x)
