"""Training steps of MaxText, as its `train_compile` builds them."""

# MaxText has no requirements without an extra for TPUs or GPUs. These are the
# packages that `train_compile` imports.
PACKAGES = (
  "maxtext==0.2.5", "jax==0.12.0.1", "flax==0.12.12", "optax==0.2.8",
  "aqtp", "cloud-accelerator-diagnostics", "datasets", "drjax",
  "google-cloud-storage", "google-metrax", "grain", "jinja2", "jsonlines",
  "ml-goodput-measurement", "omegaconf", "orbax-checkpoint", "pathwaysutils",
  "pillow", "qwix", "sentencepiece", "sympy", "tensorboardx", "tiktoken",
  "tokamax", "transformers",
)
LAYERS, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 32, 4, 16, 96, 160
BATCH, LENGTH = 16, 64  # examples of all devices
FSDP, TENSOR = 4, 2  # of the Llama
MOE_FSDP, EXPERT = 2, 4
EXPERTS, CHOSEN = 8, 2


def llama():
  """`train.train_step` of a Llama, cut over both axes.

  Tokens are ``[BATCH, LENGTH]`` int32. Heads, neurons, the vocabulary and the
  width of activations are cut over "tensor"; parameters and examples over
  "fsdp".
  """
  return _step(
    decoder_block="llama2", ici_fsdp_parallelism=FSDP,
    ici_tensor_parallelism=TENSOR,
  )


def mixtral():
  """`train.train_step` of a mixture of experts with a capacity.

  Tokens are ``[BATCH, LENGTH]`` int32. Experts are cut over "expert", examples
  and other parameters over both axes. An expert takes as many tokens of an
  example as are chosen for it on average.
  """
  return _step(
    decoder_block="mixtral", num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
    base_moe_mlp_dim=HIDDEN, sparse_matmul=False, capacity_factor=1.0,
    moe_dispatch_no_expert_sharding=True, ici_fsdp_parallelism=MOE_FSDP,
    ici_expert_parallelism=EXPERT,
  )


def _step(**keys):
  import os

  from flax.core import spmd
  import jax
  import maxtext
  from maxtext.configs import pyconfig
  from maxtext.trainers.pre_train import train, train_compile
  from maxtext.utils import maxtext_utils, sharding

  base = os.path.join(os.path.dirname(maxtext.__file__), "configs/base.yml")
  config = pyconfig.initialize(
    ["", base], run_name="step", hardware="cpu",
    skip_jax_distributed_system=True, enable_checkpointing=False,
    dataset_type="synthetic", attention="dot_product", dtype="float32",
    base_num_decoder_layers=LAYERS, base_emb_dim=WIDTH,
    base_num_query_heads=HEADS, base_num_kv_heads=HEADS, head_dim=HEAD,
    base_mlp_dim=HIDDEN, vocab_size=VOCABULARY, max_target_length=LENGTH,
    per_device_batch_size=BATCH / jax.device_count(),
    remat_policy="save_dot_except_mlpwi", **keys,
  )
  mesh = maxtext_utils.get_mesh_from_config(config)
  # As train_compile.main does, up to its compilation.
  arguments, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
  params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
  step, inputs, outputs, static, donated = (
    maxtext_utils.get_functional_train_with_signature(
      train.train_step, sharding.get_input_data_sharding(config, mesh),
      sharding.build_zero1_input_state_mesh_shardings(config, state, params),
      model, config, params,
    )
  )
  # Of the caller, which lowers the step.
  jax.set_mesh(mesh)
  spmd.set_logical_axis_rules(config.logical_axis_rules)
  return jax.jit(
    step, in_shardings=inputs, out_shardings=outputs, static_argnums=static,
    donate_argnums=donated,
  ), arguments
