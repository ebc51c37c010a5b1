"""A Llama-like transformer of Penzai, with heads and neurons over an axis."""

PACKAGES = ("penzai", "jax")
BLOCKS, WIDTH, HEADS, HIDDEN, VOCABULARY = 3, 32, 4, 64, 96
BATCH, LENGTH = 8, 16


def llama():
  """Forward pass of `llamalike_common.build_llamalike_transformer`.

  Tokens are ``[BATCH, LENGTH]`` int32.
  """
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P
  from penzai import pz
  from penzai.models.transformer.variants import llamalike_common as common
  from penzai.toolshed import sharding_util

  mesh = jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  config = common.LlamalikeTransformerConfig(
    num_kv_heads=HEADS, query_head_multiplier=1, embedding_dim=WIDTH,
    projection_dim=WIDTH // HEADS, mlp_hidden_dim=HIDDEN,
    num_decoder_blocks=BLOCKS, vocab_size=VOCABULARY, mlp_variant="swiglu",
    tie_embedder_and_logits=False,
  )
  model = sharding_util.sharded_init(
    common.build_llamalike_transformer, config,
    init_base_rng=jax.random.key(0), mesh=mesh,
    axis_name_to_mesh_name={"heads": "model", "neurons": "model"},
  )
  model, variables = pz.unbind_variables(model, freeze=True)

  def forward(model, variables, tokens):
    tokens = pz.nx.wrap(tokens).tag("batch", "seq")
    bound = pz.bind_variables(model, variables)
    return bound(
      tokens, token_positions=pz.nx.arange("seq", LENGTH)
    ).unwrap("batch", "seq", "vocabulary")

  tokens = jax.ShapeDtypeStruct(
    (BATCH, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("data"))
  )
  return jax.jit(forward), (model, variables, tokens)
