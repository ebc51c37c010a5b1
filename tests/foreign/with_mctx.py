"""Monte Carlo tree search of mctx with a batch over all devices."""

PACKAGES = ("mctx",)
BATCH, ACTIONS, WIDTH, SIMULATIONS = 4, 6, 8, 16


def search():
  """`mctx.muzero_policy` on roots ``[devices * BATCH, WIDTH]``, float32."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P
  import mctx

  mesh = jax.make_mesh(
    (jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,)
  )

  def model(params, key, action, embedding):
    embedding = jnp.tanh(embedding @ params + action[:, None])
    return mctx.RecurrentFnOutput(
      reward=embedding[:, 0], discount=jnp.ones(len(action)),
      prior_logits=embedding[:, :ACTIONS], value=embedding[:, 1],
    ), embedding

  def policy(params, key, embedding):
    root = mctx.RootFnOutput(
      prior_logits=embedding[:, :ACTIONS], value=embedding[:, 0],
      embedding=embedding,
    )
    return mctx.muzero_policy(
      params, key, root, model, num_simulations=SIMULATIONS
    ).action

  embedding = jax.ShapeDtypeStruct(
    (mesh.size * BATCH, WIDTH), jnp.float32,
    sharding=NamedSharding(mesh, P("batch")),
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
  return jax.jit(policy), (params, key, embedding)
