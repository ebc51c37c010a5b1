"""Faults that are planted in programs of other projects, one at a time.

A fault changes the text of one module while it is imported; files are
unchanged. Kinds: `dtype`, another dtype is sent; `gather`, an additional
gather; `remat`, a forward collective that the backward repeats; `all_reduce`, a
whole sum instead of a reduce-scatter; `axis`, a sum over one more axis. A
program has the kinds that are possible in it: `remat` needs a derivative of a
function that communicates, `all_reduce` a reduce-scatter, and `axis` a second
axis.

This file needs nothing but Python: environments of other projects run it.
"""

import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
from typing import NamedTuple


class Fault(NamedTuple):
  """Change of a module, and the lines that a reading must name.

  Attributes:
    module: Name of the module.
    old: Text that the module has once.
    new: Text that replaces it.
    named: Module and text of each line of an added collective; the text occurs
      once. If it is empty, the line where ``new`` begins.
  """

  module: str
  old: str
  new: str
  named: tuple[tuple[str, str], ...] = ()


# In the step around models of several projects.
_SHARDED = {
  "dtype": Fault(
    "sharded_step", "lax.all_gather(wire,", "lax.all_gather(shard,"
  ),
  "gather": Fault(
    "sharded_step", "return shard - 0.1 * grads,",
    "grads /= jnp.linalg.norm(lax.all_gather(grads, 'fsdp'))\n"
    "    return shard - 0.1 * grads,",
  ),
  "remat": Fault(
    "sharded_step", "jax.value_and_grad(loss)",
    "jax.value_and_grad(jax.checkpoint(loss))",
    (("sharded_step", "mean = lax.stop_gradient("),),
  ),
  "all_reduce": Fault(
    "sharded_step", 'lax.psum_scatter(grads, "fsdp", tiled=True)',
    'lax.psum(grads, "fsdp").reshape(FSDP, -1)[lax.axis_index("fsdp")]',
  ),
  "axis": Fault(
    "sharded_step", 'lax.psum(grads, "data")',
    'lax.psum(grads, ("data", "fsdp"))',
  ),
}
_REPLICATED = "jax.lax.with_sharding_constraint({}, NamedSharding(mesh, P()))"
# Whole along "model" before, so that a reduction over "data" is enough.
_OVER_BOTH = (
  "jax.lax.with_sharding_constraint("
  'x, NamedSharding(mesh, P(("data", "model"))))'
)
_LINEN = (("flax.linen.linear", "    out = dot_general("),)
_NNX = (("flax.nnx.nn.linear", "    y = self.dot_general("),)
_MATMUL = "keras.src.backend.jax.numpy", "return jnp.matmul(x1, x2, preferred"
_KERAS = {
  "dtype": Fault(
    "with_keras", 'name="up")', 'name="up", dtype="mixed_bfloat16")',
    (_MATMUL, ("keras.src.backend.jax.numpy", "return jnp.add(x1, x2)")),
  ),
  "gather": Fault(
    "keras.src.backend.jax.trainer",
    ") = self.optimizer.stateless_apply(\n"
    "            optimizer_variables, grads, trainable_variables\n        )",
    ") = self.optimizer.stateless_apply(\n"
    "            optimizer_variables, grads, trainable_variables\n        )\n"
    "        whole = jax.sharding.NamedSharding(distribution_lib.distribution()"
    ".device_mesh.backend_mesh, jax.sharding.PartitionSpec())\n"
    "        x_whole = jax.lax.with_sharding_constraint(x, whole)\n"
    "        unscaled_loss += jax.numpy.max(x_whole)",
    (("keras.src.backend.jax.trainer", "jax.numpy.max(x_whole)"),),
  ),
}
_HALIAX = "haliax.quantization", (
  "        return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, "
  "preferred_element_type, **kwargs)\n\n    # not really necessary"
)


def _levanter(axes: str) -> Fault:
  """Returns the fault of a maximum of the tokens, cut over axes."""
  return Fault(
    "with_levanter", "return model.compute_next_token_loss(example, key=key)",
    "return model.compute_next_token_loss(example, key=key) + jax.numpy.max("
    "jax.lax.with_sharding_constraint(example.tokens.array, "
    f"jax.sharding.PartitionSpec({axes})))",
  )


def _maxtext(axes: str, *named: str) -> Fault:
  """Returns the fault of tokens' losses that are cut over axes when summed."""
  old = 'xent * (data["targets_segmentation"] != 0)'
  new = (
    f"jax.lax.with_sharding_constraint({old}, NamedSharding(model.mesh, "
    f"jax.sharding.PartitionSpec({axes})))"
  )
  module = "maxtext.trainers.pre_train.train"
  return Fault(
    module, f"xent = {old}", f"xent = {new}",
    ((module, f"xent = {new}"), *((module, text) for text in named)),
  )


_MAXTEXT_REMAT = 'remat_policy="save_dot_except_mlpwi"', 'remat_policy="full"'
_MAXTEXT_DOT = "maxtext.layers.linears", "  return dot_general(\n      inputs,"
# MaxText replaces `with_sharding_constraint` of jax when it is imported.
_MAXTEXT_SHARD = "maxtext.integration.tunix.tunix_adapter", (
  "    return _orig_wsc(x, shardings)"
)
_MAXTEXT_EXPERTS = "maxtext.layers.moe", (
  "rhs_mesh_axes=wo_kernel_axes, einsum_name=WO)("
)

# (project, program) -> kind -> fault.
FAULTS: dict[tuple[str, str], dict[str, Fault]] = {
  ("brax", "statistics"): {
    "dtype": Fault(
      "brax.training.acme.running_statistics",
      "jax.lax.psum(variance_update, axis_name=pmap_axis_name)",
      "jax.lax.psum(variance_update.astype(jnp.bfloat16), "
      "axis_name=pmap_axis_name)",
    ),
    "gather": Fault(
      "brax.training.acme.running_statistics",
      "diff_to_old_mean = batch - mean",
      "diff_to_old_mean = jax.lax.all_gather(batch, pmap_axis_name)[0] - mean",
    ),
  },
  ("brax", "gradients"): {
    "dtype": Fault(
      "brax.training.gradients", "jax.lax.pmean(grad,",
      "jax.lax.pmean(jax.tree.map(lambda g: g.astype('bfloat16'), grad),",
    ),
    "gather": Fault(
      "brax.training.gradients",
      "return value, jax.lax.pmean(grad, axis_name=pmap_axis_name)",
      "return value, jax.tree.map("
      "lambda g: jax.lax.all_gather(g, pmap_axis_name)[0], "
      "jax.lax.pmean(grad, axis_name=pmap_axis_name))",
    ),
  },
  ("brax", "sharded"): _SHARDED,
  ("drjax", "round_of_averaging"): {
    "dtype": Fault(
      "drjax._src.impls", "return jnp.mean(arg, axis=[placement_idx])",
      "return jax.lax.reduce(arg.astype(jnp.bfloat16), jnp.bfloat16(0), "
      "jax.lax.add, [placement_idx]).astype(arg.dtype) / arg.shape[0]",
      (("drjax._src.primitives", "return agg_p.bind(x)"),),
    ),
    "gather": Fault(
      "with_drjax", "drjax.reduce_mean(local)",
      f"drjax.reduce_mean({_REPLICATED.format('local')})",
      (("drjax._src.impls", "return jax.lax.with_sharding_constraint(\n"
        "      x, jax.sharding.NamedSharding(mesh, pspec)\n  )\n\n\n"
        "class PlacedComputations"),),
    ),
  },
  ("equinox", "data_parallel"): {
    "dtype": Fault(
      "equinox.nn._linear", "x = self.weight @ x",
      "x = (self.weight.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16))"
      ".astype(x.dtype)",
    ),
    "gather": Fault(
      "with_equinox", "jnp.mean((jax.vmap(model)(x) - y) ** 2)",
      "jnp.mean((jax.vmap(model)(x) - "
      "jax.lax.with_sharding_constraint(y, whole)) ** 2)",
      (("equinox._sharding",
        "    dynamic = lax.with_sharding_constraint(dynamic, shardings)"),),
    ),
  },
  ("flax", "batch_norm"): {
    "dtype": Fault(
      "flax.linen.normalization", "jnp.stack(mus, axis=0),",
      "jnp.stack(mus, axis=0).astype(jnp.bfloat16),",
      (("flax.linen.normalization", "reduced_mus = lax.pmean("),),
    ),
    "gather": Fault(
      "flax.linen.normalization",
      "mus = tuple(x.mean(axes, where=mask) for x in xs)",
      "mus = tuple((lax.all_gather(x, axis_name)[0] if axis_name else x)"
      ".mean(axes, where=mask) for x in xs)",
    ),
  },
  ("flax", "attention"): {
    "dtype": Fault(
      "with_flax", "(HEADS, use_bias=False)\n  x =",
      "(HEADS, use_bias=False, dtype=jnp.bfloat16)\n  x =", _LINEN,
    ),
    "gather": Fault(
      "with_flax", "value, grads = jax.value_and_grad(loss)(params)",
      "value, grads = jax.value_and_grad(loss)(params)\n"
      f"    value += jnp.max({_REPLICATED.format('x')})",
      (("with_flax", f"value += jnp.max({_REPLICATED.format('x')})"),),
    ),
    "remat": Fault(
      "with_flax", "jax.value_and_grad(loss)(params)",
      "jax.value_and_grad(jax.checkpoint(loss))(params)", _LINEN,
    ),
    "axis": Fault(
      "with_flax", "value, grads = jax.value_and_grad(loss)(params)",
      "value, grads = jax.value_and_grad(loss)(params)\n"
      f"    value += jnp.max({_OVER_BOTH})",
      (("with_flax", _OVER_BOTH),),
    ),
  },
  ("flax", "nnx_mlp"): {
    "dtype": Fault(
      "with_flax", "WIDTH, HIDDEN, use_bias=False,",
      "WIDTH, HIDDEN, use_bias=False, dtype=jnp.bfloat16,", _NNX,
    ),
    "gather": Fault(
      "with_flax", "value, grads = jax.value_and_grad(loss)(state)",
      "value, grads = jax.value_and_grad(loss)(state)\n"
      f"    value += jnp.max({_REPLICATED.format('x')})",
      (("with_flax", f"value += jnp.max({_REPLICATED.format('x')})"),),
    ),
    "remat": Fault(
      "with_flax", "jax.value_and_grad(loss)(state)",
      "jax.value_and_grad(jax.checkpoint(loss))(state)", _NNX,
    ),
    "axis": Fault(
      "with_flax", "value, grads = jax.value_and_grad(loss)(state)",
      "value, grads = jax.value_and_grad(loss)(state)\n"
      f"    value += jnp.max({_OVER_BOTH})",
      (("with_flax", _OVER_BOTH),),
    ),
  },
  ("flax", "sharded"): _SHARDED,
  ("jraph", "sharded_edges"): {
    "dtype": Fault(
      "jraph.experimental.sharded_graphnet",
      "device_segment_sum, axis_name='i',",
      "device_segment_sum.astype(jnp.bfloat16), axis_name='i',",
      (("jraph.experimental.sharded_graphnet", "return jax.lax.psum("),),
    ),
    "gather": Fault(
      "jraph.experimental.sharded_graphnet",
      "device_segment_sum = utils.segment_sum(data,",
      "device_segment_sum = utils.segment_sum("
      "jax.lax.all_gather(data, 'i')[0],",
    ),
  },
  ("keras", "data_parallel"): _KERAS,
  ("keras", "model_parallel"): _KERAS | {
    "remat": Fault(
      "keras.src.backend.jax.trainer",
      "self.compute_loss_and_updates, has_aux=True",
      "lambda *args, training, **kwargs: jax.checkpoint(partial("
      "self.compute_loss_and_updates, training=training))(*args, **kwargs), "
      "has_aux=True",
      (_MATMUL,),
    ),
    "axis": Fault(
      "keras.src.backend.jax.trainer", _KERAS["gather"].old,
      _KERAS["gather"].new.replace(
        "PartitionSpec()", 'PartitionSpec(("batch", "model"))'
      ),
      _KERAS["gather"].named,
    ),
  },
  ("levanter", "llama"): {
    "dtype": Fault(
      "levanter.models.llama",
      "outputs = self.down_proj(hidden_states, key=k_down)",
      "outputs = jax.tree.map(lambda w: w.astype('bfloat16'), self.down_proj)"
      "(hidden_states.astype('bfloat16'), key=k_down).astype(x.dtype)",
      (_HALIAX,),
    ),
    "gather": _levanter(""),
    "remat": Fault(
      "with_levanter", "gradient_checkpointing=False",
      "gradient_checkpointing=True", (_HALIAX,),
    ),
    "axis": _levanter("('data', 'model')"),
  },
  ("maxtext", "llama"): {
    "dtype": Fault(
      "maxtext.layers.attentions",
      "kernel_axes=out_kernel_axis,  # trade speed with memory\n"
      "        dtype=self.dtype,",
      "kernel_axes=out_kernel_axis,\n        dtype=jnp.bfloat16,",
      (_MAXTEXT_DOT,),
    ),
    "gather": _maxtext(""),
    "remat": Fault(
      "with_maxtext", *_MAXTEXT_REMAT, (_MAXTEXT_DOT, _MAXTEXT_SHARD)
    ),
    "axis": _maxtext("('fsdp', 'tensor')", "xent_sum = jnp.sum(xent)"),
  },
  # Its sums are over both axes, but for those of experts.
  ("maxtext", "mixtral"): {
    "dtype": Fault(
      "maxtext.layers.moe",
      "mlp_down_einsum,\n            layer_multiply,\n            wo_kernel,",
      "mlp_down_einsum,\n            layer_multiply.astype(jnp.bfloat16),\n"
      "            wo_kernel.astype(jnp.bfloat16),",
      (_MAXTEXT_EXPERTS,),
    ),
    "gather": _maxtext(""),
    "remat": Fault(
      "with_maxtext", *_MAXTEXT_REMAT, (_MAXTEXT_EXPERTS, _MAXTEXT_SHARD)
    ),
  },
  ("mctx", "search"): {
    "dtype": Fault(
      "mctx._src.search",
      "lambda x: x[batch_range, parent_index], tree.embeddings",
      "lambda x: x.astype(jnp.bfloat16)[batch_range, parent_index]"
      ".astype(x.dtype), tree.embeddings",
    ),
    "gather": Fault(
      "with_mctx", "prior_logits=embedding[:, :ACTIONS], value=embedding[:, 0]",
      f"prior_logits={_REPLICATED.format('embedding[:, :ACTIONS]')}, "
      "value=embedding[:, 0]",
    ),
  },
  ("penzai", "llama"): {
    "dtype": Fault(
      "with_penzai", "tie_embedder_and_logits=False,",
      "tie_embedder_and_logits=False, parameter_dtype=jnp.bfloat16, "
      "activation_dtype=jnp.bfloat16,",
      (("penzai.core.named_axes", "      return fun(*args, **kwargs)"),),
    ),
    "gather": Fault(
      "with_penzai", "tokens = pz.nx.wrap(tokens)",
      f"tokens += jnp.max({_REPLICATED.format('tokens')})\n"
      "    tokens = pz.nx.wrap(tokens)",
    ),
    "axis": Fault(
      "with_penzai", "tokens = pz.nx.wrap(tokens)",
      f"tokens += jnp.max({_OVER_BOTH.replace('x,', 'tokens,')})\n"
      "    tokens = pz.nx.wrap(tokens)",
    ),
  },
  ("ringattention", "causal"): {
    "dtype": Fault(
      "ringattention.ringattention_jax",
      "k, v = map(lambda x: lax.ppermute(x, axis_name, perm=[(i, (i + 1) % "
      "axis_size) for i in range(axis_size)]), (k, v))",
      "k, v = map(lambda x: lax.ppermute(x.astype(jnp.bfloat16), axis_name, "
      "perm=[(i, (i + 1) % axis_size) for i in range(axis_size)])"
      ".astype(x.dtype), (k, v))",
    ),
    "gather": Fault(
      "ringattention.ringattention_jax", "output = numerator / rearrange(",
      "output = lax.all_gather(numerator, axis_name)[0] / rearrange(",
    ),
    "remat": Fault(
      "with_ringattention", "attention(*qkv,",
      "jax.checkpoint(attention)(*qkv,",
    ),
  },
}


def plant(fault: Fault) -> None:
  """Changes the module of a fault when it is imported."""
  sys.meta_path.insert(0, _Finder(fault))


def lines(fault: Fault) -> list[str]:
  """Returns FILE:LINE of each line to name; its modules are imported."""
  found = []
  for module, text in fault.named or [
    (fault.module, fault.new.partition("\n")[0])
  ]:
    path = importlib.import_module(module).__file__
    source = pathlib.Path(path).read_text()
    if module == fault.module:
      source = _replaced(source, fault)
    before, _ = _around(source, text)
    found.append(f"{path}:{1 + before.count(chr(10))}")
  return found


class _Finder(importlib.abc.MetaPathFinder):
  """Finds the module of a fault."""

  def __init__(self, fault: Fault) -> None:
    self.fault = fault

  def find_spec(self, name, path, target=None):
    if name != self.fault.module:
      return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    spec.loader = _Loader(name, spec.origin)
    spec.loader.fault = self.fault
    return spec


class _Loader(importlib.machinery.SourceFileLoader):
  """Loads a module from its changed text, never from a cache."""

  def get_code(self, name):
    text = _replaced(self.get_source(name), self.fault)
    return compile(text, self.path, "exec")


def _replaced(source: str, fault: Fault) -> str:
  return fault.new.join(_around(source, fault.old))


def _around(source: str, text: str) -> tuple[str, str]:
  """Returns what is before and after the only occurrence of a text."""
  parts = source.split(text)
  if len(parts) != 2:
    raise ValueError(f"{len(parts) - 1} times, not once: {text!r}")
  return parts[0], parts[1]
