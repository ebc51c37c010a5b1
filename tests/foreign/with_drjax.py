"""Federated averaging with DrJAX: clients train, the server averages."""

PACKAGES = ("drjax",)
INPUTS, OUTPUTS, BATCH, STEPS = 96, 32, 16, 4


def round_of_averaging():
  """A round of federated averaging with `drjax.program`, a client per device.

  Weights are ``[INPUTS, OUTPUTS]`` and batches
  ``[devices, STEPS, BATCH, INPUTS]``, float32.
  """
  import drjax
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  count = jax.device_count()
  mesh = jax.make_mesh((count,), ("clients",), axis_types=(AxisType.Auto,))

  def trained(w, batches):
    """Takes steps of SGD on a client's batches."""

    def loss(w, batch):
      x, y = batch
      return jnp.mean((x @ w - y) ** 2)

    def step(w, batch):
      return w - 0.1 * jax.grad(loss)(w, batch), None

    return jax.lax.scan(step, w, batches)[0]

  @drjax.program(placements={"clients": count})
  def average(w, batches):
    local = drjax.map_fn(trained, (drjax.broadcast(w, mesh=mesh), batches),
                         mesh=mesh)
    return drjax.reduce_mean(local)

  def array(shape, *spec):
    return jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec))
    )

  batches = (
    array((count, STEPS, BATCH, INPUTS), "clients"),
    array((count, STEPS, BATCH, OUTPUTS), "clients"),
  )
  return jax.jit(average), (array((INPUTS, OUTPUTS)), batches)
