"""Ring attention, forward and backward, with the sequence over all devices."""

PACKAGES = ("ringattention==0.1.2", "jax==0.6.2")  # its import needs jax < 0.8
MESH = {"sp": 8}  # the text does not name it
BATCH, LENGTH, HEADS, WIDTH = 2, 64, 4, 16  # length on one device


def causal():
  """Gradient of `ringattention.ringattention` with a causal mask.

  Queries, keys and values are ``[BATCH, 8 * LENGTH, HEADS, WIDTH]``, float32.
  """
  import functools

  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P
  from ringattention import ringattention

  mesh = jax.make_mesh((8,), ("sp",), axis_types=(AxisType.Auto,))
  attention = jax.shard_map(
    functools.partial(
      ringattention, axis_name="sp", float32_logits=True,
      blockwise_kwargs=dict(
        causal_block_size=1, deterministic=True, dropout_rng=None,
        attn_pdrop=0.0, query_chunk_size=32, key_chunk_size=32,
        dtype=jnp.float32, policy=jax.checkpoint_policies.nothing_saveable,
        precision=None, prevent_cse=False,
      ),
    ),
    mesh=mesh,
    in_specs=(*(P(None, "sp", None, None),) * 3, P(), P(), None),
    out_specs=P(None, "sp", None, None), check_vma=False,
  )

  def loss(qkv, bias, segments):
    return jnp.sum(attention(*qkv, bias, segments, None) ** 2)

  x = jax.ShapeDtypeStruct(
    (BATCH, 8 * LENGTH, HEADS, WIDTH), jnp.float32,
    sharding=NamedSharding(mesh, P(None, "sp")),
  )
  bias = jax.ShapeDtypeStruct((BATCH, 1, 1, 8 * LENGTH), jnp.float32)
  segments = jax.ShapeDtypeStruct((BATCH, 8 * LENGTH), jnp.int32)
  return jax.jit(jax.grad(loss)), ((x, x, x), bias, segments)
